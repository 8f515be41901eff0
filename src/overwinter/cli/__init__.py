"""The command line: arguments in, tables out. The only place that prints or reads the environment."""
