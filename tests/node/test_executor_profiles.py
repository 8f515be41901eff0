"""An executor learns from a profile that is measured after a function was handed over."""

import torch

from overwinter.core.profile import Point, Profile

from .rig import Function
from .test_executors import SMALL, Scaled, pool, variant

__all__ = ["pool"]


def measured(*points: Point) -> Profile:
    return Profile(weight_bytes=1, macs=1, points=points)


def test_a_profile_that_is_measured_later_decides_which_inputs_are_admitted(rig, pool):
    function = Function(Scaled(), {"x": torch.zeros(2, 1 << 16)})
    pool.deploy(function)
    # Inputs and outputs of two rows have a MiB, which is what the device has for them.
    two = {"x": torch.ones(2, 1 << 16)}

    async def scene():
        executor = await pool.start(SMALL)
        assert [each.error for each in (await pool.run(executor, function, two)).failures] == ["ActivationsError"]
        function.deployed.profile = measured(Point(1, 0, 1, 1, 0.1), Point(1, 63 << 19, 64, 1, 0.1))
        assert (await pool.run(executor, function, two)).failures == ()

    rig.run(scene())


def test_a_profile_is_sent_once(rig, pool, monkeypatch):
    function, sent = variant("minilm", 0), []
    pool.deploy(function)
    send = rig.processes.forks.send

    def noted(process, message, fds=()):
        sent.append(type(message).__name__)
        send(process, message, fds)

    monkeypatch.setattr(rig.processes.forks, "send", noted)

    async def scene():
        executor = await pool.start()
        for _ in range(2):
            await pool.run(executor, function)
        function.deployed.profile = measured(Point(1, 0, 1, 1, 0.1))
        try:
            for _ in range(2):
                await pool.run(executor, function)
            pool.unbind(executor, function)
            await pool.run(executor, function)
        finally:
            function.deployed.profile = None

    rig.run(scene())
    assert sent == [
        "HandOver",
        "RunBatch",
        "RunBatch",
        "Learn",
        "RunBatch",
        "RunBatch",
        "Unbind",
        "HandOver",
        "RunBatch",
    ]
