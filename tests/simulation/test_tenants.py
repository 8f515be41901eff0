"""The simulated node has the bounds of a real one: a tenant whose runs do not end does not exclude others."""

from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene
from tests.simulation.test_world import journal_of

LONG_MS = 600_000
"""The time of a run that does not end while there are requests."""


def shared(tenants: tuple[str, str], duration_s=120, **scheduler):
    # A simulated run takes a core also while its handler sleeps, so the other tenant is slower than it is alone.
    sleepers = function(
        "sleeper",
        tenant=tenants[0],
        variants=40,
        rate=0.2,
        has_handler=True,
        latency_ms={"1": LONG_MS},
        settings={"timeout_s": 86_400, "max_workers": 1},
    )
    well = function("well", rate=1.0, tenant=tenants[1], settings={"slo_ms": 2000, "keep_alive_s": 5})
    return scene(sleepers, well, duration_s=duration_s, seed=3, scheduler={"workers_max": 16, **scheduler})


def test_a_tenant_is_answered_in_time_beside_another_s_runs_that_do_not_end():
    report = World(shared(("asleep", "well")), checked=True).run()
    well = report.functions["well"]
    assert well.requests > 80
    assert well.attainment > 0.95
    assert well.lost == 0


def test_the_same_seed_gives_the_same_journal_among_tenants():
    made = shared(("asleep", "well"), duration_s=20, drain_timeout_s=3.0)
    assert journal_of(made) == journal_of(made)
