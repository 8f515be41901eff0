"""Who used much of the cores lately has less weight while they are scarce."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overwinter.node.cgroups import LOWERED
from overwinter.node.shares import CoreShares, above_their_share

from .rig import Function, Rig, Same, until

X = {"x": torch.zeros(2, 4)}
SPINS = """
import threading

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()
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


def test_a_tenant_that_takes_all_has_less_weight_until_it_stops():
    rig = Rig()
    if not rig.processes.zygotes.groups.shares_cores:
        rig.close()
        pytest.skip("the system gives no control groups")
    ada, bob = (
        Function(Same(), X, handler, name=name, tenant=name) for name, handler in (("ada", SPINS), ("bob", None))
    )
    rig.deploy(ada, bob)
    # Of a machine that may be busy with other things.
    shares = CoreShares(lambda: rig.processes, 0.2)
    groups = rig.processes.zygotes.groups

    def weights():
        return [
            int(file.read_text())
            for tenant in ("ada", "bob")
            for name in ("cpu.shares", "cpu.weight")
            for file in groups._tenants[tenant].glob(name)
        ]

    async def scene():
        spins = await rig.start_body(ada)
        await rig.start_body(bob)
        usual = weights()
        now = 0.0

        async def lowered():
            nonlocal now
            now += 0.1
            await asyncio.sleep(0.1)
            shares.look(now)
            return weights()

        while (found := await lowered()) == usual:
            pass
        rig.processes.stop(spins.worker, kill=True)
        await until(lambda: rig.exits(spins.worker))
        while (back := await lowered()) != usual:
            pass
        return usual, found, back

    usual, found, back = rig.run(scene())
    rig.close()
    assert usual[0] == usual[1]
    assert found == [usual[0] // LOWERED, usual[1]]
    assert back == usual
