"""A simulated program that no device can hold runs in slices, whose requests pass from one to the next."""

import pytest

from overwinter.core.actions import Reply, Run, RunOnDevice
from overwinter.core.ids import whole_id
from overwinter.simulation.models import MIB
from overwinter.simulation.world import World
from tests.replay.replayed import replayed
from tests.simulation.scenes import function, scene
from tests.simulation.test_handlers import HANDLER, calls_of, of, recorded
from tests.simulation.test_pool import FAULTS, runs_of

ONE = {"memory_bytes": 40 * MIB, "bytes_per_s": 2e9}
SLICES = ["f@1", "f:2@1", "f:3@1"]


def large(settings=None, **changes):
    """Return a function of 100 MiB, which devices of 40 MiB hold in three slices."""
    settings = {"device": "pool", "timeout_s": 20} | (settings or {})
    blocks = [{"mib": 10, "count": 10}]
    return function(**({"settings": settings, "latency_ms": {"1": 30}, "blocks": blocks} | changes))


def scenario(*functions, devices=3, **changes):
    many = [{"name": f"d{number}", **ONE} for number in range(devices)]
    return scene(*functions, **({"devices": many, "duration_s": 20.0, "seed": 3} | changes))


def test_the_slices_are_the_fewest_that_fit_and_divide_the_program_s_bytes_and_time():
    parts = {each.spec.id: each.spec for each in scenario(large()).simulated_functions()}
    assert list(parts) == ["f:3@1", "f:2@1", "f@1"]
    first, second, last = (parts[id_] for id_ in SLICES)
    assert [first.following, second.following, last.following] == ["f:2@1", "f:3@1", None]
    mib = [sum(each.weights.values()) // MIB for each in (first, second, last)]
    assert sorted(mib) == [20, 40, 40]
    assert [each.profile.run_s(1, 1)[1] for each in (first, second, last)] == pytest.approx([0.0003 * m for m in mib])
    assert len({each.family for each in parts.values()}) == 3


def test_the_time_is_divided_among_the_slices_by_the_work_of_their_blocks():
    blocks = [{"mib": 10, "work": 5}, {"mib": 10, "count": 6, "work": 0.5}, {"mib": 10, "count": 3, "work": 0.5}]
    parts = {each.spec.id: each.spec.profile for each in scenario(large(blocks=blocks)).simulated_functions()}
    assert [parts[id_].run_s(1, 1)[1] for id_ in SLICES] == pytest.approx([0.03 * part / 9.5 for part in (6.5, 2, 1)])


def test_a_request_runs_through_all_slices_and_with_a_device_for_each_slice_no_block_is_copied_twice():
    report, steps = recorded(scenario(large(rate=0.5), duration_s=120.0))
    assert report.total.answered == report.total.requests > 20
    assert report.total.moved_bytes == 100 * MIB
    assert list(report.functions) == ["f"]
    assert report.total.p50_ms == pytest.approx(30, rel=0.05)
    runs = [each for each in of(steps, RunOnDevice) if each.requests]
    for reply in of(steps, Reply):
        assert [run.function for run in runs if reply.request in run.requests] == SLICES


def test_with_fewer_devices_than_slices_blocks_are_copied_again():
    report, _ = recorded(scenario(large(), devices=2))
    assert report.total.answered == report.total.requests
    assert report.total.moved_bytes > 10 * report.total.requests * MIB


def test_siblings_share_the_blocks_of_their_slices():
    base = [{"mib": 10, "count": 9, "shared": "base"}, {"mib": 10}]
    report, _ = recorded(scenario(large(variants=3, blocks=base, rate=0.3), duration_s=60.0))
    assert report.total.answered == report.total.requests > 40
    # Alone, each would bring 100 MiB.
    assert report.total.moved_bytes < 2 * 100 * MIB


def test_a_program_that_a_handler_calls_is_cut_into_slices_too():
    report, steps = recorded(scenario(large({"max_batch": 4}, handler=HANDLER, rate=10.0)))
    assert report.total.answered == report.total.requests
    calls = calls_of(steps)
    assert calls
    runs = [each for each in of(steps, RunOnDevice) if each.requests]
    for call in calls:
        assert [run.function for run in runs if call.request in run.requests] == ["f:program@1", *SLICES[1:]]


def test_with_device_any_a_request_runs_through_all_slices_or_in_a_worker():
    report, steps = recorded(scenario(large({"device": "any"}, rate=40.0), node={"cores": 2}))
    assert report.total.answered == report.total.requests
    assert list(report.functions) == ["f"]
    in_workers = {request for run in of(steps, Run) for request in run.requests}
    runs = [each for each in of(steps, RunOnDevice) if each.requests]
    replies = of(steps, Reply)
    assert in_workers
    assert len(in_workers) < 0.9 * len(replies)
    for reply in replies:
        if reply.request not in in_workers:
            on_devices = [run.function for run in runs if reply.request in run.requests]
            assert on_devices == ["f:program@1", *SLICES[1:]]


def test_with_device_any_a_program_that_cannot_be_cut_runs_in_workers():
    report, in_workers, on_devices = runs_of(scenario(large({"device": "any"}, blocks=[{"mib": 100}])))
    assert report.total.answered == report.total.requests == in_workers
    assert not on_devices


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["sound", "faults"])
@pytest.mark.parametrize("policy", ["overwinter", {"device_binding": "torpor", "device_ahead": "programs"}])
def test_no_request_is_lost_and_the_journal_replays(tmp_path, faults, policy):
    models = large(variants=2, rate=6.0, jitter=0.1), function("small", settings={"device": "pool"}, rate=10.0)
    path = tmp_path / "journal"
    made = scenario(*models, devices=4, faults=faults or {}, scheduler={"policy": policy})
    with path.open("wb") as file:
        report = World(made, journal=file, checked=True).run()
    assert report.total.lost == 0
    assert report.total.answered > 0.9 * report.total.requests
    steps = replayed(path)
    assert {whole_id(each.function) for each in of(steps, RunOnDevice)} == {"f-0000@1", "f-0001@1", "small@1"}


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([{"mib": 41}], "the 41 MiB of function 'f', on devices of 40 MiB, have a block of 41 MiB"),
        ([{"mib": 30, "count": 17}], "the 510 MiB of function 'f', on devices of 40 MiB, need more than 16 slices"),
    ],
)
def test_errors_name_what_cannot_be_cut(blocks, said):
    with pytest.raises(ValueError, match=said):
        scenario(large(blocks=blocks))
    with pytest.raises(ValueError, match="work of all blocks or of none"):
        scenario(large(blocks=[{"mib": 1}, {"mib": 1, "work": 1}]))
