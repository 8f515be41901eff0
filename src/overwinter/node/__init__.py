"""The hall: one task-owned loop that feeds the mind and carries out what it asks for."""
