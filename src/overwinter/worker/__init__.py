"""Worker processes: the zygote that forks them, the worker itself, and their messages with the node."""
