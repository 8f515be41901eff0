"""Measures the pool of devices on real nodes (`python -m benchmarks.pool --help`)."""
