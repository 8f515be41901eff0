"""How fast, how small and how right is Overwinter? Each file measures one claim and prints a RESULT line."""
