"""A tenant that recently used much of the cores has less weight while they are scarce."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overwinter.node import clock
from overwinter.node.cgroups import LOWERED_DIVISOR
from overwinter.node.core_shares import OUTSIDE_RUNS_S, CoreShares, tenants_to_lower

from .rig import AddOne, Function, until
from .test_executors import DEVICES, pool_of

X = {"x": torch.zeros(2, 4)}
BETWEEN_CALLS = """
import threading

computes = threading.Event()

def work():
    while computes.is_set():
        pass

def preprocess(inputs, state):
    if computes.is_set():
        computes.clear()
    else:
        computes.set()
        threading.Thread(target=work, daemon=True).start()
    return inputs
"""
"""A thread of it computes from the first call to the second."""
FOR_EVER = """
def preprocess(inputs, state):
    while True:
        pass
"""
USED = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.02, 8), min_size=1)


def test_tenants_that_used_much_are_lowered_below_those_that_used_little():
    used = {"often": 0.44, "long": 0.44, "now and then": 0.25, "also": 0.44}
    assert tenants_to_lower(used, {}, 2) == {"often", "long", "also"}


def test_no_tenant_is_lowered_while_cores_are_left():
    assert tenants_to_lower({"one": 0.9, "other": 0.1}, {}, 2) == set()


@given(USED, st.integers(1, 8))
def test_a_tenant_that_used_more_never_has_priority_over_one_that_used_less(used, cores):
    lowered = tenants_to_lower(used, {}, cores)
    assert not lowered or min(used[tenant] for tenant in lowered) > max(
        (each for tenant, each in used.items() if tenant not in lowered), default=0.0
    )


def test_runs_that_can_meet_an_slo_come_before_others():
    used = {"served": 0.6, "hog": 0.5, "other hog": 0.5, "new hog": 0.1}
    assert tenants_to_lower(used, {"served": 0.5}, 2) == {"hog", "other hog"}


def test_a_tenant_with_an_slo_that_used_much_is_lowered_for_one_that_used_little():
    used = {"served": 0.6, "now and then": 0.1, "hog": 0.9}
    assert tenants_to_lower(used, {"served": 0.6, "now and then": 0.1}, 2) == {"served", "hog"}


@given(USED, st.integers(1, 8))
def test_if_all_use_is_for_an_slo_only_its_amount_counts(used, cores):
    lowered = tenants_to_lower(used, {}, cores)
    assert tenants_to_lower(used, used, cores) == (lowered if lowered < used.keys() else set())


def weights(groups, *tenants):
    return [
        int(file.read_text())
        for tenant in tenants
        for name in ("cpu.shares", "cpu.weight")
        for file in groups._tenants[tenant].glob(name)
    ]


@pytest.fixture
def rig(rig):
    if not rig.processes.zygotes.groups.shares_cores:
        pytest.skip("the system gives no control groups")
    return rig


def test_a_tenant_that_computes_outside_runs_has_less_weight_for_some_seconds(rig):
    groups = rig.processes.zygotes.groups
    ada = Function(AddOne(), X, BETWEEN_CALLS, name="ada", tenant="ada")
    rig.deploy(ada)
    # So many cores that ada's use of them is little.
    shares = CoreShares(rig.processes, 64)

    async def scene():
        works = await rig.start_worker(ada)
        [usual] = weights(groups, "ada")
        await rig.ended(rig.begin(works, **X))
        await until(lambda: works.cpu_time_outside_runs_s() > 0.1)
        # Whatever share of a core it had, it used at least one core in this time.
        shares.check(0.1)
        await rig.ended(rig.begin(works, **X))
        shares.check(now := 0.2)
        while "ada" in shares._used:
            now += 0.1
            await asyncio.sleep(0.1)
            shares.check(now)
        found = weights(groups, "ada")
        shares.check(now + OUTSIDE_RUNS_S)
        return usual, found, weights(groups, "ada")

    usual, found, later = rig.run(scene())
    assert found == [usual // LOWERED_DIVISOR]
    assert later == [usual]


def test_a_tenant_that_uses_all_cores_has_less_weight_until_it_stops(rig):
    ada, bob = (
        Function(AddOne(), X, handler, name=name, tenant=name) for name, handler in (("ada", FOR_EVER), ("bob", None))
    )
    rig.deploy(ada, bob)
    # A fifth of a core, because the machine may do other work.
    shares = CoreShares(rig.processes, 0.2)
    groups = rig.processes.zygotes.groups

    async def scene():
        spins = await rig.start_worker(ada)
        # The group exists as long as one of ada's processes exists.
        for rests in (ada, bob):
            await rig.start_worker(rests)
        rig.begin(spins, **X)
        usual = weights(groups, "ada", "bob")
        now = 0.0

        async def lowered():
            nonlocal now
            now += 0.1
            await asyncio.sleep(0.1)
            shares.check(now)
            return weights(groups, "ada", "bob")

        while (found := await lowered()) == usual:
            pass
        rig.processes.stop(spins.worker, kill=True)
        await until(lambda: rig.exits(spins.worker))
        while (back := await lowered()) != usual:
            pass
        return usual, found, back

    usual, found, back = rig.run(scene())
    assert usual[0] == usual[1]
    assert found == [usual[0] // LOWERED_DIVISOR, usual[1]]
    assert back == usual


def test_a_run_can_meet_its_slo_until_it_has_computed_for_longer(rig):
    ada, bob = (
        Function(AddOne(), X, FOR_EVER, slo_ms=10_000.0, tenant="ada"),
        Function(AddOne(), X, name="g", tenant="bob"),
    )
    rig.deploy(ada, bob)
    shares = CoreShares(rig.processes, 0.2)

    async def scene():
        spins, rests = await rig.start_worker(ada), await rig.start_worker(bob)
        before = [spins.can_meet_slo(cpu_time_s(spins)), rests.can_meet_slo(cpu_time_s(rests))]
        rig.begin(spins, **X)
        after = [spins.can_meet_slo(cpu_time_s(spins) + longer) for longer in (5.0, 15.0)]
        now = 0.01
        shares.check(now)
        while not shares._used_for_slo:
            now += 0.01
            await asyncio.sleep(0.01)
            shares.check(now)
        rig.processes.stop(spins.worker, kill=True)
        return before, after, shares._used_for_slo, shares._used

    before, after, for_slo, used = rig.run(scene())
    assert before == [True, False]
    assert after == [True, False]
    assert for_slo.keys() == {"ada"}
    assert for_slo["ada"] <= used["ada"]


def test_the_cpu_time_of_an_executor_counts_for_its_tenant(rig, tmp_path):
    function = Function(AddOne(), X, tenant="ada")
    shares = CoreShares(rig.processes, 2)
    with pool_of(rig, DEVICES, tmp_path) as pool:
        pool.deploy(function)

        async def scene():
            executor = await pool.start(tenant="ada")
            shares._spent(rig.processes)
            await pool.run(executor, function, X)
            return shares._spent(rig.processes)

        spent, for_slo = rig.run(scene())
    assert spent["ada"] > 0
    assert not for_slo


def cpu_time_s(process):
    return clock.cpu_time_s(process.pid)
