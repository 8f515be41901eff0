"""Compares answers of a node with PyTorch's for many architectures: `python -m benchmarks.fidelity`."""
