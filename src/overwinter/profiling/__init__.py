"""Measures functions on this machine, in processes of the node."""
