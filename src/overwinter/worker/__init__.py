"""Worker processes: the zygote that forks them, what a body does, and how the node speaks with both."""
