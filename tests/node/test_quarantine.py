"""What a node does at its start with a function on which it failed before."""

import asyncio

import pytest
import torch

from overwinter.api.deployer import package
from overwinter.bootstrap import running
from overwinter.core.call import Call
from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import OverwinterError, QuarantineError
from overwinter.core.function import Settings
from overwinter.core.tensor import Tensor
from overwinter.model.export import export
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler import families
from overwinter.scheduler.ledger import LedgerError
from overwinter.scheduler.policies import queueing
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.repository import Repository
from tests.node.log_lines import LogLines

ONE = torch.ones(1)
INPUT = Tensor("x", "FP32", (1,), ONE.numpy().tobytes())


class Doubled(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 2}


def deploy(data, *names: str, device: str = "cpu") -> None:
    repository = Repository(data)
    for name in names:
        made = export(Doubled(), {"x": ONE}, {})
        packed = package(name, made.program, made.weights, settings=Settings(device=device))
        for address, content in packed.contents.items():
            repository.put(packed.manifest.tenant, address, bytes(content()), 0.0)
        repository.register(packed.manifest, 0.0)
    repository.close()


def test_a_function_that_ended_the_node_does_not_end_it_again(tmp_path, monkeypatch):
    """This was observed with `slo_ms = 5e-324`: the daemon ended, and ended again at each start."""
    deploy(tmp_path / "data", "bad", "good")
    said = LogLines()
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), profile_on_deploy=False)
    insert = queueing.insert

    def failing(queue, request, requests):
        if request.function == "bad@1":
            raise LedgerError("a failure that no boundary contains")
        insert(queue, request, requests)

    async def first() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:
            with pytest.raises(OverwinterError):
                await node.infer(Call("bad", None, [INPUT]))
            with pytest.raises(LedgerError):
                await node.until_broken()

    async def again() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:
            with pytest.raises(QuarantineError, match="a failure that no boundary contains"):
                await node.infer(Call("bad", None, [INPUT]))
            assert node.live()
            assert node.view("bad", None).state == "UNAVAILABLE"
            assert "a failure that no boundary contains" in node.view("bad", None).reason
            assert (await node.infer(Call("good", None, [INPUT]))).outputs[0].data == (2 * ONE).numpy().tobytes()
            monkeypatch.setattr(queueing, "insert", insert)
            await node.load("bad", None)
            assert (await node.infer(Call("bad", None, [INPUT]))).outputs[0].data == (2 * ONE).numpy().tobytes()

    with monkeypatch.context() as patch:
        patch.setattr(queueing, "insert", failing)
        asyncio.run(first())
    monkeypatch.setattr(queueing, "insert", failing)
    asyncio.run(again())
    assert Quarantine(tmp_path / "data" / "quarantine.json").reason("bad@1") == ""


def test_the_log_names_the_function_whose_load_ends_the_quarantine_of_a_part(tmp_path):
    data, said = tmp_path / "data", LogLines()
    deploy(data, "split", device="any")
    Quarantine(data / "quarantine.json").add("split:program@1", KeyError("its own"))
    devices = (DeviceConfig(name="virtual:0", memory_bytes=1 << 20),)
    config = NodeConfig(
        data=str(data),
        host_store=str(tmp_path),
        profile_on_deploy=False,
        scheduler=SchedulerConfig(devices=devices),
    )

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:
            await node.load("split", 1)

    asyncio.run(scene())
    [at] = [number for number, line in enumerate(said) if "is out of service" in line]
    assert "a part of function split@1 on the pool is out of service until split@1 is loaded" in said[at]
    assert said.functions[at] == "split@1"
    assert Quarantine(data / "quarantine.json").reason("split:program@1") == ""


def test_an_unreadable_record_quarantines_no_function(tmp_path):
    path = tmp_path / "quarantine.json"
    path.write_bytes(b'{"f@1": 3}')
    quarantine = Quarantine(path)
    assert quarantine.reason("f@1") == ""
    quarantine.add("g@1", OSError("the machine's"))
    quarantine.add("f@1", KeyError("its own"))
    assert [Quarantine(path).reason(name) for name in ("f@1", "g@1")] == ["KeyError: 'its own'", ""]


def test_a_failure_at_the_start_names_its_cause(tmp_path, monkeypatch):
    deploy(tmp_path / "data", "bad", "good")
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), profile_on_deploy=False)

    def failing(*of):
        raise LedgerError("a failure that no boundary contains")

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()):
            raise AssertionError("it has started")

    monkeypatch.setattr(families, "join", failing)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(scene())
    assert raised.value.subgroup(LedgerError) is not None
