"""Functions of several families under requests, changes and kills for a long time; see `__main__`."""
