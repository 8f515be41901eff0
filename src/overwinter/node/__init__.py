"""The node of one machine: an event loop that drives the scheduler and carries out its actions."""
