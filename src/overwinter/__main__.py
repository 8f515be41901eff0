"""`python -m overwinter` is the command `overwinter`."""

from overwinter.cli.main import main

main()
