"""Worker processes: the zygote that forks them, what a worker does, and how the node speaks with both."""
