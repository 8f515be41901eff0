"""Torpor's evaluation of a node and of a cluster: its policies, their baselines and ours, with its latencies."""
