"""Counts the requests of live pipelines."""

from typing import NamedTuple

import msgspec

from overwinter.core.ids import FunctionName
from overwinter.telemetry.histogram import Histogram


class PipelineRequests(msgspec.Struct):
    """The outcomes of a pipeline's requests since the node started or the pipeline was deployed."""

    running: int = 0
    answered: int = 0
    in_slo: int = 0
    """The answered requests within the SLO; without an SLO, all."""
    failed: int = 0
    """The requests that failed after their start, for example because a stage was refused, or that the caller
    cancelled.
    """


class PipelineStatistics(NamedTuple):
    """The statistics of a live pipeline."""

    name: FunctionName
    slo_ms: float | None
    requests: PipelineRequests
    durations: Histogram
    """The durations of answered requests."""
