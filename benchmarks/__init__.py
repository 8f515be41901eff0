"""Measures the speed, memory and correctness of Overwinter. A benchmark measures one claim and prints a RESULT line."""
