"""Profiling of real workers on real nodes, over HTTP."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest
import torch

from benchmarks.zoo import build
from overwinter.api.client import Client
from overwinter.api.deployer import package
from overwinter.core.errors import CallerError, ConflictError, NotFoundError, OverloadedError
from overwinter.core.function import Settings
from overwinter.core.profiling import ProfileOptions
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.profiling.machine import fingerprint
from overwinter.profiling.observer import RUNS_MIN
from overwinter.store.repository import Repository
from tests.system.nodes import NodeProcess, ask, deploy, wait_until


def exported_model(name: str, seed: int = 0):
    model = build(name.split("-")[0], small=True, seed=seed)
    return export(model.module, model.example_inputs, model.dynamic)


def upload(client: Client, name: str, seed: int = 0, handler: str | None = None, **settings):
    agreed = agree(exported_model(name, seed))
    made = package(name, *agreed, handler=handler, tenant=client.tenant, settings=Settings(**settings))
    made.upload(client)
    return made.manifest.program.address


def configurations(profile):
    return [(point.cores, point.batch, point.concurrency) for point in profile.points]


def started(node: NodeProcess) -> set[int]:
    """Return the workers that the scheduler has started."""
    return {action["worker"] for step in node.steps() for action in step[2] if action["type"] == "StartWorker"}


# Profiles belong to a tenant and a program, and nothing was measured for a tenant that no other test uses.
def test_each_configuration_is_measured_in_a_separate_process_and_reported(shared_node):
    node = shared_node()
    client = node.client.for_tenant("reported")
    upload(client, "mlp", max_batch=4, concurrency=2)
    results = []
    profile = client.profile("mlp", progress=results.append)
    wanted = [(1, b, p) for p in (1, 2) for b in (1, 2, 4)]
    assert configurations(profile) == wanted
    assert [(p.point.cores, p.point.batch, p.point.concurrency) for p in results if p.point] == wanted
    assert all(point.latency_s > 0 and point.memory_bytes > 1 << 20 for point in profile.points)
    pids = [each.pid for each in results if each.pid]
    assert len(pids) == len(set(pids)) == len(wanted) + 3
    assert node.process.pid not in pids
    assert [each.done for each in results] == sorted(each.done for each in results)
    assert results[-1].done == results[-1].total == len(pids)
    exported = exported_model("mlp")
    layers = exported.program.layers
    assert [layer.path for layer in profile.layers] == [layer.path for layer in layers]
    assert [(i.macs, i.weight_bytes, i.output_bytes) for i in profile.layers] == [
        (i.macs, i.weight_bytes, i.output_bytes) for i in layers
    ]
    assert all(sorted(layer.latency_s) == [1, 2, 4] for layer in profile.layers)
    assert profile.macs == sum(layer.macs for layer in layers) > 0
    assert profile.weight_bytes == sum(weight.nbytes for weight in exported.weights)
    assert profile.wake_s > 0
    # Nothing of it remains, and the scheduler, which received the result, knows none of those workers.
    node.wait_for("Profiled")
    assert len(started(node)) <= 2
    assert not set(pids) & set(node.children())


def test_a_profile_is_used_for_every_variant_also_after_a_restart(shared_node):
    node = shared_node()
    client = node.client.for_tenant("restarted")
    program = upload(client, "mlp-a", max_batch=2)
    with pytest.raises(NotFoundError, match="overwinter profile mlp-a"):
        client.known_profile("mlp-a")
    options = ProfileOptions(layers=False)
    measured = client.profile("mlp-a", options=options)
    assert configurations(measured) == [(1, 1, 1), (1, 2, 1)]
    assert measured.layers == ()
    node.stop()
    node.start()
    client = node.client.for_tenant("restarted")
    assert client.known_profile("mlp-a") == measured
    assert upload(client, "mlp-b", seed=1, max_batch=2) == program
    assert client.known_profile("mlp-b") == measured
    restored = [step[1] for step in node.steps() if step[1]["type"] == "Deployed"]
    assert [event["function"]["profile"]["points"] for event in restored[-2:]] == 2 * [
        [[p.cores, p.memory_bytes, p.batch, p.concurrency, p.latency_s] for p in measured.points]
    ]
    results = []
    assert client.profile("mlp-b", options=options, progress=results.append) == measured
    assert [each.pid for each in results] == [None] * len(results)
    # A variant with a handler uses the program's profile until its own is measured; further measurements count for all.
    upload(client, "mlp-c", seed=2, handler="def preprocess(inputs, state):\n    return inputs\n", max_batch=4)
    assert client.known_profile("mlp-c") == measured
    more = client.profile("mlp-c", options=options)
    assert configurations(more) == [(1, 1, 1), (1, 2, 1), (1, 4, 1)]
    assert more.points[:2] == measured.points
    assert client.known_profile("mlp-a").points == more.points
    results.clear()
    again = client.profile(
        "mlp-a", options=ProfileOptions(layers=False, batches=(2,), again=True), progress=results.append
    )
    assert len([each for each in results if each.pid]) == 1
    assert configurations(again) == configurations(more)


def test_requests_during_a_measurement_are_all_answered(make_node):
    node = make_node("--profile-share", "0.5")
    deploy(node, "served", max_batch=4, max_workers=1)
    upload(node.client, "vgg16")
    over = threading.Event()

    def ask_on() -> int:
        answered = 0
        while not over.is_set() or answered < 20:
            assert ask(node, "served", float(answered)) == [2.0 * answered + 1.0] * 4
            answered += 1
            over.wait(0.05)
        return answered

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_on)
        try:
            profile = node.client.profile("vgg16")
        finally:
            over.set()
        assert asking.result() >= 20
    assert configurations(profile) == [(1, 1, 1)]
    assert all(sorted(layer.latency_s) == [1] for layer in profile.layers)


def test_a_client_that_disconnects_ends_the_measurement_and_its_results_are_kept(shared_node):
    node = shared_node()
    own = node.client.for_tenant("leaving")
    upload(own, "mlp", max_batch=64, concurrency=8)

    class LeftError(Exception):
        pass

    def leave(progress) -> None:
        if progress.point is not None and progress.done == 2:
            raise LeftError

    with Client(node.url, tenant=own.tenant) as client, pytest.raises(LeftError):
        client.profile("mlp", progress=leave)
    node.wait_for("Profiled")
    assert 2 <= len(own.known_profile("mlp").points) < 20
    assert output_shape(node) == (1, 16)
    assert configurations(own.profile("mlp", options=ProfileOptions(batches=(1,), layers=False)))[0] == (1, 1, 1)


def test_a_client_that_measures_is_told_that_the_node_stops(make_node):
    node = make_node("--drain-s", "0.2")
    upload(node.client, "mlp", max_batch=64, concurrency=8)

    def stop(progress) -> None:
        if progress.point is not None and progress.done == 1:
            node.process.send_signal(signal.SIGTERM)

    with Client(node.url) as client, pytest.raises(OverloadedError, match="the node is stopping"):
        client.profile("mlp", progress=stop)
    assert node.process.wait(30) == 0
    node.client.close()


def output_shape(node: NodeProcess) -> tuple[int, ...]:
    inputs = {spec["name"]: torch.zeros(1, *spec["shape"][1:]) for spec in node.client.function("mlp")["inputs"]}
    [output] = node.client.infer("mlp", inputs).values()
    return output.shape


def test_a_measurement_on_deploy_runs_in_the_background(shared_node):
    node = shared_node("--profile-on-deploy")
    upload(node.client, "mlp", max_batch=2)
    node.wait_for("Profiled")
    profile = node.client.known_profile("mlp")
    assert configurations(profile) == [(1, 1, 1), (1, 2, 1)]
    assert len(profile.layers) == 5


def test_a_node_that_stops_ends_its_measurements(shared_node):
    node = shared_node("--profile-on-deploy")
    upload(node.client, "mlp", max_batch=64, concurrency=16)
    zygotes = set(node.zygotes())
    wait_until(lambda: set(node.worker_pids()) - zygotes)
    node.stop()
    assert not any("was not measured" in line for line in node.said)


def test_service_times_correct_the_profile(shared_node):
    node = shared_node()
    client = node.client.for_tenant("corrected")
    program = upload(client, "mlp")
    measured = client.profile("mlp", options=ProfileOptions(layers=False))
    node.stop()
    [point] = measured.points
    wrong = msgspec.structs.replace(measured, points=(msgspec.structs.replace(point, latency_s=8e4),))
    with closing(Repository(node.data)) as repository:
        repository.put_profile(fingerprint(), f"corrected/{program}", wrong, 0.0)
    node.start()
    assert node.client.known_profile("mlp") == wrong
    for _ in range(2 * RUNS_MIN):
        output_shape(node)
    node.wait_for("Profiled")
    corrected = node.client.known_profile("mlp")
    [now] = corrected.points
    assert (now.configuration, now.memory_bytes) == (point.configuration, point.memory_bytes)
    assert 0 < now.latency_s < 1e3
    node.stop()
    with closing(Repository(node.data)) as repository:
        assert repository.profile(fingerprint(), f"corrected/{program}").points == corrected.points
    node.start()


def test_an_impossible_measurement_is_refused_with_the_reason(shared_node):
    node = shared_node()
    upload(node.client, "mlp")
    with pytest.raises(NotFoundError, match="nothing"):
        node.client.profile("nothing")
    with pytest.raises(CallerError, match="batch must be from 1 to"):
        node.client.profile("mlp", options=ProfileOptions(batches=(1 << 40,)))
    with pytest.raises(CallerError, match="the body is not valid"):
        node.client._send("POST", "/overwinter/v1/functions/mlp/profile", content=b'{"colours": 3}')
    node.client.unload("mlp")
    with pytest.raises(ConflictError, match="load it first"):
        node.client.profile("mlp")
