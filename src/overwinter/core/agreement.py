"""The result of comparing a program with its model at a deploy."""

import msgspec


class Closeness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The difference between one output and its reference, over all runs."""

    exact: bool
    """Equal bit for bit in every run."""
    difference: float
    """Largest difference of an element, relative to the output's largest magnitude."""


class Batching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether requests may share a run: only where each then gets the answer that it gets alone."""

    obstacle: str
    """Why they may not; empty if they may."""
    rows: tuple[tuple[int, ...], ...] = ()
    """The rows of each request of each run that was shared to find out."""
    outputs: dict[str, Closeness] = {}
    """Each output of a shared run against a run alone."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison of a program with its model on random inputs."""

    sizes: tuple[dict[str, int], ...]
    """The dynamic sizes of each run in which both answered."""
    bound: float
    """Largest relative difference that passes."""
    outputs: dict[str, Closeness]
    batching: Batching
    notes: tuple[str, ...] = ()
    """What the comparison changed or had to leave aside."""
