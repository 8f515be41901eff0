"""Small scenarios for the tests of the simulator."""

from overwinter.simulation.scenario import Scenario, scenario_of


def function(name="f", rate=2.0, **changes) -> dict:
    return {
        "name": name,
        "blocks": [{"mib": 10, "count": 3, "shared": "base"}, {"mib": 1}],
        "latency_ms": {"1": 50, "4": 110},
        "settings": {"slo_ms": 400, "max_batch": 4, "keep_alive_s": 5},
        "workload": {"kind": "poisson", "rate": rate},
    } | changes


def scene(*functions: dict, **changes) -> Scenario:
    table = {"duration_s": 60, "node": {"cores": 4}, "functions": list(functions) or [function()]}
    return scenario_of(table | changes)
