"""Tetris's experiments: live on real processes, and simulated."""
