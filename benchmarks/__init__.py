"""How fast, how small and how right is Overwinter? Each file measures one promise and prints a RESULT line."""
