"""Functions of the pool on a real node with an NVIDIA GPU."""

import concurrent.futures
import os
import signal
from pathlib import Path

import pytest
import torch

from overwinter.core.errors import OverwinterError
from overwinter.worker.gpu_files import gpus

from .nodes import ask, deploy, wait_gone
from .test_pool import COUNT, MODELS, SIZE, ended_runs, executors, put, right

pytestmark = pytest.mark.gpu
GPUS = ("--devices", "1", "--device-kind", "cuda", "--device-activations", "64MiB")


@pytest.fixture
def gpu_node(make_node):
    if not gpus():
        pytest.skip("this machine has no NVIDIA GPU")
    return lambda *options: make_node(*GPUS, *options)


class Chosen(torch.nn.Module):
    """A model that reads the elements of a table at the places that its input names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(float(SIZE)), requires_grad=False)

    def forward(self, x):
        return {"y": self.table[x.long()]}


def test_functions_run_on_a_gpu_that_holds_some_of_them(gpu_node):
    node = gpu_node("--device-memory", "2MiB")
    put(node)
    names = [f"f{number % COUNT}" for number in range(60)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda at: right(node, names[at], float(at)), range(len(names))))
    assert all(answers)
    assert len(executors(node)) == 1
    moved = [run.get("moved_bytes", 0) for run in ended_runs(node)]
    assert sum(moved) > 0
    assert 0 in moved


def test_a_variant_brings_only_the_weight_that_it_does_not_share(gpu_node):
    node = gpu_node("--device-memory", "8MiB")
    put(node)
    assert all(right(node, name, 1.0) for name in ("f1", "f3", "f5", "f1"))
    assert [run.get("moved_bytes", 0) for run in ended_runs(node)] == [8 * SIZE, 4 * SIZE, 4 * SIZE, 0]


def test_the_executor_of_a_gpu_is_contained(gpu_node):
    node = gpu_node("--device-memory", "8MiB")
    put(node)
    assert right(node, "f1", 1.0)
    [pid] = executors(node)
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["Seccomp"] == "2"
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) == 0
    assert int(status["Uid"].split()[0]) != 0 or os.geteuid() != 0
    assert not any("not filtered" in line or "Landlock" in line for line in node.said)


def test_a_gpu_whose_kernel_failed_gets_another_executor(gpu_node):
    node = gpu_node("--device-memory", "8MiB")
    deploy(node, "chosen", Chosen(), device="pool")
    assert ask(node, "chosen", 7.0) == [7.0] * 4
    [before] = executors(node)
    with pytest.raises(OverwinterError, match=r"cuda:0 failed while it ran .*chosen"):
        ask(node, "chosen", 10.0 * SIZE)
    wait_gone([before])
    assert ask(node, "chosen", 8.0) == [8.0] * 4


def test_a_killed_executor_of_a_gpu_costs_no_answer(gpu_node):
    node = gpu_node("--device-memory", "8MiB")
    put(node)
    assert all(right(node, name, 1.0) for name in MODELS)
    [pid] = executors(node)
    os.kill(pid, signal.SIGKILL)
    wait_gone([pid])
    assert all(right(node, name, 2.0) for name in MODELS)
