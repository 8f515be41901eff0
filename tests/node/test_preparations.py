"""A run ends the preparation that is in progress in its executor."""

import os
import signal

from overwinter.core.actions import RunOnDevice
from overwinter.core.ids import RequestId, RunId

from .rig import until
from .test_executors import LARGE, pool, variant

__all__ = ["pool"]


def test_a_run_that_waits_for_a_verification_interrupts_a_warm_up_immediately(rig, pool, monkeypatch):
    prepared, runs = variant("resnet50", 0), variant("minilm", 0)
    pool.deploy(prepared, runs)
    waiting = []

    def when_verified(process, function, host, then):
        if function is prepared.deployed:
            then()
        else:
            waiting.append(then)

    async def scene():
        executor = await pool.start()
        monkeypatch.setattr(pool.effects.executors, "_when_verified", when_verified)
        # It does not warm up before the run is ordered too.
        pid = pool.effects.executors.process(LARGE).pid
        os.kill(pid, signal.SIGSTOP)
        operation, run, request = pool.order(executor, prepared), RunId(rig.number()), RequestId(rig.number())
        rig._ask(request, runs.inputs)
        pool.effects.carry_out(RunOnDevice(executor, LARGE, run, runs.deployed.id, (request,)))
        os.kill(pid, signal.SIGCONT)
        await until(lambda: pool.prepared(operation))
        assert pool.prepared(operation)[0].interrupted
        assert not rig.ends()
        [go_on] = waiting
        go_on()
        await rig.ended(run)
        assert rig.failures(run) == []

    rig.run(scene())
