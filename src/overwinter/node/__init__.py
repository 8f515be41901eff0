"""The hall: one task-owned loop that feeds the scheduler and carries out what it asks for."""
