"""The scheduler of a node in a modelled world: workloads, faults, time that costs nothing."""
