"""Handlers of tasks, sent to the node as source: one part reads a request, one part writes the answer.

A handler is the text of two of these files. They import nothing of this package: what was deployed is not to change
with the node's version. `state` is what task.json says, and what `setup` made of the other assets.
"""
