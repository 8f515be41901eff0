"""Runs the scheduler of a node in a modelled world in virtual time: workloads, faults and reports."""
