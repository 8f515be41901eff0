"""Computes when each stage of a pipeline is due, so that the pipeline meets its SLO.

A stage is due when the remaining time equals the time that the following stages may take: the sum of their functions'
SLOs on the longest path to the end, scaled so that the longest path of the pipeline takes exactly its SLO. If a
function has no SLO, all stages count the same.
"""

from collections.abc import Mapping
from graphlib import TopologicalSorter

from overwinter.core.ids import Seconds
from overwinter.core.pipeline import Stage, needs


def due_times(
    stages: Mapping[str, Stage], slo_ms: float | None, slos: Mapping[str, float | None], begun: Seconds
) -> dict[str, Seconds]:
    """Return the due time of each stage of a request that began at `begun`; empty if the pipeline has no SLO.

    `slos` contains the SLO of each stage's function, in ms.
    """
    if slo_ms is None:
        return {}
    known = [slo for name in stages if (slo := slos.get(name)) is not None]
    takes = {name: slos[name] or 0.0 for name in stages} if len(known) == len(stages) else dict.fromkeys(stages, 1.0)
    waits_for = {name: needs(stage) for name, stage in stages.items()}
    following = dict.fromkeys(stages, 0.0)
    for name in reversed(tuple(TopologicalSorter(waits_for).static_order())):
        for before in waits_for[name]:
            following[before] = max(following[before], takes[name] + following[name])
    whole = max(takes[name] + following[name] for name in stages)
    return {name: Seconds(begun + slo_ms / 1000 * (1 - following[name] / whole)) for name in stages}
