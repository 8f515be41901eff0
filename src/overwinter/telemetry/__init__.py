"""Reads the steps of a scheduler, live or simulated: metrics, usage, explanations and reports."""
