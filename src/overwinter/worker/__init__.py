"""Workers and executors: the zygotes that fork them, the processes themselves, and their messages with the node."""
