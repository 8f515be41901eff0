"""Does a node answer as the author's own PyTorch would? `python -m benchmarks.fidelity` asks many architectures."""
