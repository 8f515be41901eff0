"""The result of comparing a program with its model at a deploy."""

import msgspec


class Closeness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The difference between one output and its reference, over all runs."""

    exact: bool
    """Whether the outputs are equal bit for bit in every run."""
    difference: float
    """The largest relative difference of an element: the absolute difference, divided by the larger of two magnitudes.
    One is that of the reference's element, the other the largest in the reference below 10,000, as larger numbers often
    mark masked elements.
    """


class Batching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether requests may share a run: only where each then gets the answer that it gets alone."""

    obstacle: str
    """Why requests may not share runs; empty if they may."""
    rows: tuple[tuple[int, ...], ...] = ()
    """The rows of each request of each shared run that was compared."""
    outputs: dict[str, Closeness] = {}
    """How each output of a shared run compares with separate runs."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison of a program with its model on random inputs."""

    sizes: tuple[dict[str, int], ...]
    """The dynamic sizes of each compared run."""
    bound: float
    """The largest relative difference that is accepted."""
    outputs: dict[str, Closeness]
    batching: Batching
    notes: tuple[str, ...] = ()
    """What the comparison changed or could not compare."""
