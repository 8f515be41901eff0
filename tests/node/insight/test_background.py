"""What a worker computes while nothing runs is billed, and one that does not end is stopped."""

import torch

from overwinter.core.actions import StartBody
from overwinter.core.events import BodyReady, Deployed
from overwinter.node import clock
from overwinter.node.insight.background import Background
from overwinter.node.insight.metering import Meter
from overwinter.node.insight.statistics import Statistics
from overwinter.store.ledger import Ledger
from tests.node.rig import Function, Same, until
from tests.policy.world import spec

SPINS = """
import threading

def spin():
    while True:
        pass

def setup(assets):
    threading.Thread(target=spin, daemon=True).start()
"""
BOUND_S = 0.1


def test_threads_that_a_handler_leaves_behind_are_billed_and_end_their_worker(rig, tmp_path):
    statistics, said = Statistics(), []
    background = Background(statistics, lambda: rig.processes, said.append, BOUND_S)

    async def scene(handler):
        body = await rig.start_body(Function(Same(), {"x": torch.zeros(2, 4)}, handler))
        name = "spins" if handler else "rests"
        start = StartBody(body.worker, f"{name}@1", False, 1, 1)
        statistics.observe(0.0, Deployed(spec(name), resident=True), [start])
        statistics.observe(0.0, BodyReady(body.worker), [])
        return body

    async def both():
        rests, spins = await scene(None), await scene(SPINS)
        background.look(1.0)
        before = clock.computed_s(spins.pid)
        await until(lambda: clock.computed_s(spins.pid) > before + 3 * BOUND_S)
        background.look(1.0 + BOUND_S)
        await until(lambda: rig.exits(spins.worker))
        return rests, spins

    rests, spins = rig.run(both())
    assert "beyond its runs" in rig.exits(spins.worker)[0].reason
    assert not rig.exits(rests.worker)
    assert any("spins@1 is stopped" in line for line in said)
    assert [told.what for told in statistics.tallies["spins"].decisions] == ["stop"]
    ledger = Ledger(tmp_path / "usage.sqlite")
    rested, spun = Meter(statistics, ledger, said.append).usage(None, 2.0, 2.0)
    ledger.close()
    assert (rested.function, spun.function) == ("rests", "spins")
    assert spun.core_ms >= 2 * BOUND_S * 1e3
    assert rested.core_ms == 0.0
