"""Runs the command `overwinter`, as `python -m overwinter`."""

from overwinter.cli.main import main

main()
