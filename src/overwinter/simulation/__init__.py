"""Runs the scheduler of a node on a simulated machine in virtual time: workloads, faults and reports."""
