"""A tenant that recently used much of the cores has less weight while they are scarce."""

import asyncio
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overwinter.node.cgroups import LOWERED
from overwinter.node.shares import ALONE_S, CoreShares, above_their_share

from .rig import Function, Rig, Same, until

X = {"x": torch.zeros(2, 4)}
FOR_A_WHILE = """
import threading
import time

def work():
    while time.thread_time() < 0.3:
        pass

def preprocess(inputs, state):
    threading.Thread(target=work, daemon=True).start()
    return inputs
"""
FOR_EVER = """
def preprocess(inputs, state):
    while True:
        pass
"""
USED = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.02, 8), min_size=1)


def test_who_used_much_goes_behind_who_used_little():
    assert above_their_share({"often": 0.44, "long": 0.44, "now and then": 0.25, "also": 0.44}, 2) == {
        "often",
        "long",
        "also",
    }


def test_nobody_goes_behind_while_cores_are_left():
    assert above_their_share({"one": 0.9, "other": 0.1}, 2) == set()


@given(USED, st.integers(1, 8))
def test_who_used_more_is_never_before_who_used_less(used, cores):
    behind = above_their_share(used, cores)
    assert not behind or min(used[tenant] for tenant in behind) > max(
        (each for tenant, each in used.items() if tenant not in behind), default=0.0
    )


def weights(groups, *tenants):
    return [
        int(file.read_text())
        for tenant in tenants
        for name in ("cpu.shares", "cpu.weight")
        for file in groups._tenants[tenant].glob(name)
    ]


@pytest.fixture
def rig():
    with closing(Rig()) as made:
        if not made.processes.zygotes.groups.shares_cores:
            pytest.skip("the system gives no control groups")
        yield made


def test_a_tenant_that_computes_while_nothing_runs_has_less_weight_for_some_seconds(rig):
    groups = rig.processes.zygotes.groups
    ada = Function(Same(), X, FOR_A_WHILE, name="ada", tenant="ada")
    rig.deploy(ada)
    # So many that what it uses of them is little.
    shares = CoreShares(rig.processes, 64)

    async def scene():
        works = await rig.start_worker(ada)
        [usual] = weights(groups, "ada")
        await rig.ended(rig.begin(works, **X))
        now = 0.0
        while "ada" in shares._used or works.computed_alone_s() < 0.1:
            now += 0.1
            await asyncio.sleep(0.1)
            shares.look(now)
        found = weights(groups, "ada")
        shares.look(now + ALONE_S)
        return usual, found, weights(groups, "ada")

    usual, found, later = rig.run(scene())
    assert found == [usual // LOWERED]
    assert later == [usual]


def test_a_tenant_that_takes_all_has_less_weight_until_it_stops(rig):
    ada, bob = (
        Function(Same(), X, handler, name=name, tenant=name) for name, handler in (("ada", FOR_EVER), ("bob", None))
    )
    rig.deploy(ada, bob)
    # Of a machine that may be busy with other things.
    shares = CoreShares(rig.processes, 0.2)
    groups = rig.processes.zygotes.groups

    async def scene():
        spins = await rig.start_worker(ada)
        # The group exists as long as one of ada's processes.
        for rests in (ada, bob):
            await rig.start_worker(rests)
        rig.begin(spins, **X)
        usual = weights(groups, "ada", "bob")
        now = 0.0

        async def lowered():
            nonlocal now
            now += 0.1
            await asyncio.sleep(0.1)
            shares.look(now)
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
    assert found == [usual[0] // LOWERED, usual[1]]
    assert back == usual
