"""Handlers of tasks, sent to the node as source: one part reads a request, one part writes the answer.

A handler is the text of two of these files. Of Overwinter they import only CallerError, so that a deployed function
does not change with the node's version. `state` is the content of task.json, and for texts also the tokenizer.
"""
