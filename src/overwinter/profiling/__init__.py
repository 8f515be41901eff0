"""Measures functions on this machine, in workers of the node."""
