"""The bounds of settings, with their reasons.

A `Bound` gives a number a minimum and a maximum: a value outside is a mistake, a wrong unit, or an attack. NaN and
infinity are outside every bound; a bool is not a number, and a float is not a count.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class Bound(msgspec.Struct, frozen=True):
    """The least and the most of one number, both allowed."""

    least: float
    most: float
    unit: str
    """Empty for a number without a unit."""
    why: str
    """The reason for both bounds, for the error message."""
    whole: bool = True
    """Whether the value is a count, and so an int."""

    def fault(self, name: str, value: object) -> str | None:
        """The error in the value of `name`, or None."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            unit = self.unit and f" of {self.unit}"
            return f"{name} must be a {'whole number' if self.whole else 'number'}{unit}, got {value!r}"
        if self.least <= value <= self.most:
            return None
        unit = self.unit and f" {self.unit}"
        return f"{name} must be from {self.least:,} to {self.most:,}{unit}, got {value}: {self.why}"

    def nearest(self, value: float) -> float:
        """Return the value limited to the bounds, and rounded toward zero if it must be whole; the maximum for NaN."""
        kept = min(max(value, self.least), self.most) if value == value else self.most
        return int(kept) if self.whole else kept


def seconds(least: float, most: float, why: str) -> Bound:
    """Create a bound for a time in seconds."""
    return Bound(least, most, "seconds", why, whole=False)


Bounds = Mapping[str, Bound]


def check_bounds(holder: object, bounds: Bounds) -> None:
    """Raise ValueError unless these numbers of the holder are within their bounds; None is allowed."""
    for name, bound in bounds.items():
        value = getattr(holder, name)
        fault = None if value is None else bound.fault(name, value)
        if fault is not None:
            raise ValueError(fault)


def brought_within(given: Mapping[str, Any], bounds: Bounds) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return stored values with each number that is not allowed replaced by the nearest one that is, and a message for
    each such number: a bound may be newer than the value.
    """
    within, messages = dict(given), []
    for name, bound in bounds.items():
        value = given.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and bound.fault(name, value) is not None:
            within[name] = bound.nearest(value)
            messages.append(f"{name} {value} counts as {within[name]}: {bound.why}")
    return within, tuple(messages)
