"""Which processes hold data of a tenant, and the effects of a hanging zygote, seen from outside in real processes."""

import concurrent.futures
import errno
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.nodes import parents_of_all
from overwinter.api.client import Client
from overwinter.api.deployer import package
from overwinter.core.errors import OverwinterError
from overwinter.model.export import export

from .nodes import NodeProcess, Scale, ask, deploy, exported, wait_gone, wait_until

TENANTS = ("ada", "bob")
HANDLER = "def preprocess(inputs, state):\n    return inputs\n"


class Shift(torch.nn.Module):
    """A function whose program contains a unique name, with a weight in a separate block."""

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self.tenant = tenant
        self.shift = torch.nn.Parameter(torch.full((16384,), 2.0 + len(tenant)), requires_grad=False)

    def forward(self, x):
        return {marker(self.tenant): x + self.shift[:4]}


def marker(tenant: str) -> str:
    """Return the name of the output of a tenant's programs, which is found in memory wherever such a program is."""
    return f"quokka_of_{tenant}_7f3a91"


def deploy_marked(node: NodeProcess, name: str, tenant: str, handler: str | None = None) -> None:
    made = export(Shift(tenant), {"x": torch.zeros(2, 4)})
    packed = package(name, made.program, made.weights, handler=handler, tenant=tenant)
    with Client(node.url, tenant=tenant) as client:
        packed.upload(client)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, value in (line.split(":", 1) for line in lines)}


def found_in(pid: int, words: list[bytes]) -> list[bytes]:
    """Return which words are in memory that the process may write; raise PermissionError if it may not be inspected."""
    found = set()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if bounds is None or "[vvar]" in line:
                continue
            at, stop = (int(bound, 16) for bound in bounds.groups())
            while at < stop:
                memory.seek(at)
                try:
                    part = memory.read(min(stop - at, 16 << 20))
                except OSError as error:
                    # The process has unmapped it meanwhile.
                    if error.errno != errno.EIO:
                        raise
                    break
                if not part:
                    break
                found |= {word for word in words if word in part}
                at += len(part)
    return sorted(found)


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    """A node without functions of other tenants, whose zygotes could start at any time."""
    node = NodeProcess(tmp_path_factory.mktemp("zygotes"))
    yield node
    node.clean()


@pytest.fixture(scope="module")
def zygotes(node: NodeProcess) -> list[int]:
    """Return the zygotes of a node that answered requests for two functions of each tenant, one with a handler."""
    for tenant in TENANTS:
        deploy_marked(node, f"{tenant}-plain", tenant)
        deploy_marked(node, f"{tenant}-handled", tenant, HANDLER)
        for name in (f"{tenant}-plain", f"{tenant}-handled"):
            [answer] = node.client.infer(name, {"x": torch.ones(1, 4)}).values()
            assert answer.tolist() == [[6.0] * 4]
    return wait_until(lambda: warmed_up(pids := node.zygotes()) and pids)


def warmed_up(zygotes: list[int]) -> bool:
    """Whether the tenants' zygotes hold a program each; where memory may not be inspected, whether they are in a
    sandbox.
    """
    _, *new = zygotes
    if len(new) != len(TENANTS):
        return False
    try:
        return all(found_in(pid, words()) for pid in new)
    except PermissionError:
        return all(status(pid)["Seccomp"] == "2" for pid in new)


def words() -> list[bytes]:
    return [marker(tenant).encode() for tenant in TENANTS]


def test_the_base_zygote_is_not_sandboxed_and_holds_no_program_or_weight(node: NodeProcess, zygotes):
    uncontained = [pid for pid in (node.process.pid, *zygotes) if status(pid)["Seccomp"] == "0"]
    assert uncontained == [node.process.pid, zygotes[0]]
    base = zygotes[0]
    assert found_in(base, words()) == []
    assert str(node.shm) not in Path(f"/proc/{base}/maps").read_text()
    links = [os.readlink(entry) for entry in Path(f"/proc/{base}/fd").iterdir()]
    assert [link for link in links if "memfd" in link or str(node.shm) in link] == []


def test_each_tenants_zygote_is_sandboxed_and_has_a_separate_user(node: NodeProcess, zygotes):
    for pid in zygotes[1:]:
        its = status(pid)
        assert (its["Seccomp"], its["NoNewPrivs"]) == ("2", "1")
        assert int(its["CapEff"], 16) == 0 or os.geteuid() != 0
        assert int(its["Uid"].split()[0]) >= 0x70000000 or os.geteuid() != 0
    owners = {status(pid)["Uid"].split()[0] for pid in zygotes}
    assert len(owners) == len(zygotes) or os.geteuid() != 0


def test_two_tenants_never_share_a_zygote_that_holds_programs(node: NodeProcess, zygotes):
    try:
        held = [found_in(pid, words()) for pid in zygotes]
    except PermissionError:
        pytest.skip("only root may inspect a sandboxed zygote")
    assert sorted(each for each in held if each) == [[word] for word in words()]


def test_workers_with_and_without_a_handler_are_forked_by_tenants_zygotes(node: NodeProcess, zygotes):
    for tenant in TENANTS:
        for name in (f"{tenant}-again", f"{tenant}-again-handled"):
            before = set(node.worker_pids())
            deploy_marked(node, name, tenant, HANDLER if "handled" in name else None)
            node.client.infer(name, {"x": torch.ones(1, 4)})
            new = set(node.worker_pids()) - before
            assert new
            table = parents_of_all()
            assert {table[pid] for pid in new} <= set(zygotes[1:])


@pytest.mark.parametrize("which", [0, 1])
def test_a_zygote_that_hangs_is_replaced_and_requests_are_answered(shared_node, which):
    node = shared_node("--zygote-timeout-s", "1.5")
    deploy(node, "plain", keep_alive_s=0.0)
    assert ask(node, "plain") == [3.0] * 4
    wait_until(lambda: len(node.zygotes()) == 2)
    zygotes = node.zygotes()
    os.kill(zygotes[which], signal.SIGSTOP)
    assert ask(node, "plain", 2.0) == [5.0] * 4
    wait_until(lambda: zygotes[which] not in parents_of_all())
    wait_until(node.client.ready)
    assert ask(node, "plain", 3.0) == [7.0] * 4
    wait_until(lambda: any("lost" in line for line in node.said))


def test_a_node_is_not_ready_while_its_base_zygote_hangs(shared_node):
    node = shared_node("--zygote-timeout-s", "1.5")
    wait_until(node.client.ready)

    def seen(base: int) -> str:
        is_gone = base not in parents_of_all()
        return "not ready" if not node.client.ready() else "ready again" if is_gone else ""

    def seen_first() -> str:
        base = node.zygotes()[0]
        os.kill(base, signal.SIGSTOP)
        first = wait_until(lambda: seen(base))
        wait_until(node.client.ready)
        assert base not in node.zygotes()
        return first

    # A test that stands still until there is another base zygote does not see that the node was not ready.
    assert "not ready" in (seen_first() for _ in range(3))


HANGS = (
    "import threading\nthreading.Event().wait()\n",
    "import ctypes\ndef preprocess(inputs, state):\n    ctypes.PyDLL(None).sleep(10**6)\n",
)
"""Handlers that hang in their module and in native code."""


@pytest.mark.slow
def test_trials_that_hang_end_and_others_deploy_and_wake_meanwhile(make_node):
    node = make_node("--start-timeout-s", "12", "--cores", "4")
    deploy(node, "calm", tenant="ada", keep_alive_s=0.0)
    wait_until(lambda: not node.worker_pids())
    # The trials end after the start timeout, and an export may take long.
    exported(Scale(4.0))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        trials = [
            pool.submit(deploy, node, f"hanging-{number}", handler=handler, tenant="bob")
            for number, handler in enumerate(HANGS)
        ]
        hung = wait_until(lambda: len(pids := node.worker_pids()) == len(HANGS) and pids)
        assert ask(node, "calm") == [3.0] * 4
        deploy(node, "another", Scale(4.0), tenant="ada")
        assert ask(node, "another") == [5.0] * 4
        assert not any(trial.done() for trial in trials)
        for number, trial in enumerate(trials):
            with pytest.raises(OverwinterError, match=f"hanging-{number}"):
                trial.result()
    wait_gone(hung)
    assert [function["name"] for function in node.client.functions()] == ["another", "calm"]


def test_removing_a_function_ends_its_trial(shared_node):
    node = shared_node()
    deploy(node, "f", Scale(3.0), keep_alive_s=0.0)
    wait_until(lambda: not node.worker_pids())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        trial = pool.submit(deploy, node, "f", handler=HANGS[0])
        wait_until(lambda: len(node.worker_pids()) == 1 and len(node.client.functions()) == 2)
        [hung] = node.worker_pids()
        node.client.remove("f")
        with pytest.raises(OverwinterError):
            trial.result()
    wait_until(lambda: hung not in parents_of_all())
    assert node.client.functions() == []
