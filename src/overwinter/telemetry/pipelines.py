"""Counts the requests of pipelines, live and simulated."""

from typing import NamedTuple

import msgspec

from overwinter.core.ids import FunctionName
from overwinter.telemetry.histogram import Histogram


class PipelineRequests(msgspec.Struct):
    """What became of a pipeline's requests since the node started or it was deployed."""

    running: int = 0
    answered: int = 0
    in_slo: int = 0
    """Of the answered; without an SLO, all."""
    failed: int = 0
    """Refused, failed, or given up by the caller."""


class PipelineStatistics(NamedTuple):
    """The statistics of a live pipeline."""

    name: FunctionName
    slo_ms: float | None
    requests: PipelineRequests
    durations: Histogram
    """Of answered requests."""


class ApplicationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one application's requests."""

    requests: int
    answered: int
    refused: dict[str, int]
    """By the error's name of the first stage that was refused."""
    lost: int
    attainment: float | None
    """Share of the requests whose last stage was answered within the SLO of the whole."""
    p50_ms: float | None
    p99_ms: float | None
