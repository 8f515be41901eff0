"""Measures the speed, memory and correctness of Overwinter. Each file measures one claim and prints a RESULT line."""
