"""Selects the configurations of a function to measure, and describes the progress of a measurement."""

from collections.abc import Callable, Sequence

import msgspec

from overwinter.core.errors import CallerError
from overwinter.core.function import SETTINGS_BOUNDS, Settings
from overwinter.core.profile import Configuration, Point, Profile

CONFIGURATIONS_MAX = 1024
"""The most configurations of one measurement."""


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to measure. None: the powers of two below the function's setting, or below what the machine and the program
    allow if that is less, and that number itself.
    """

    cores: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    concurrency: tuple[int, ...] | None = None
    layers: bool = True
    """Whether to measure the layers of the program too."""
    again: bool = False
    """Whether to measure again what is already known."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a measurement."""

    done: int
    total: int
    what: str
    """The step that is in progress or just completed."""
    pid: int | None = None
    """The process that measured; each configuration has its own."""
    point: Point | None = None
    """The result when a configuration is complete."""


ReportProgress = Callable[[Progress], None]
"""Receives the progress of a measurement."""


class ProfileLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the answer of a measurement: the progress, and at the end the profile or the error."""

    progress: Progress | None = None
    profile: Profile | None = None
    error: str | None = None
    status: int | None = None
    """The HTTP status of an error, which says whose fault it is."""


class ConfigurationLimits(msgspec.Struct, frozen=True):
    """The most that a machine and a program allow."""

    cores: int
    batch: int


def values_to_measure(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def batches_to_measure(options: ProfileOptions, settings: Settings, limits: ConfigurationLimits) -> tuple[int, ...]:
    """The batch sizes to measure, ascending; raises CallerError for one that the program does not accept."""
    return _chosen("batch", options.batches, min(settings.max_batch, limits.batch), limits.batch)


def configurations_to_measure(
    options: ProfileOptions, settings: Settings, limits: ConfigurationLimits
) -> tuple[Configuration, ...]:
    """Return the configurations to measure: for each number of cores and each concurrency, batches in ascending order.

    Raise CallerError for impossible configurations, or too many.
    """
    cores = _chosen("cores", options.cores, min(settings.threads, limits.cores), limits.cores)
    batches = batches_to_measure(options, settings, limits)
    concurrency = _chosen(
        "concurrency", options.concurrency, settings.concurrency, int(SETTINGS_BOUNDS["concurrency"].most)
    )
    count = len(cores) * len(batches) * len(concurrency)
    if count > CONFIGURATIONS_MAX:
        raise CallerError(f"{count} configurations are more than {CONFIGURATIONS_MAX}: ask for fewer")
    return tuple(Configuration(c, b, p) for c in cores for p in concurrency for b in batches)


def _chosen(what: str, asked: Sequence[int] | None, usual: int, most: int) -> tuple[int, ...]:
    if asked is None:
        return values_to_measure(usual)
    wrong = [number for number in asked if not 1 <= number <= most]
    if wrong or not asked:
        raise CallerError(f"{what} must be from 1 to {most} here, not {wrong[0] if wrong else 'none'}")
    return tuple(sorted(set(asked)))


def with_points(profile: Profile, points: Sequence[Point], wake_s: float | None = None) -> Profile:
    """The profile, with these points replacing earlier ones of the same configurations."""
    merged = {point.configuration: point for point in (*profile.points, *points)}
    ordered = sorted(merged.values(), key=lambda point: (point.cores, point.concurrency, point.batch))
    return msgspec.structs.replace(profile, points=tuple(ordered), wake_s=profile.wake_s if wake_s is None else wake_s)
