"""Kind 8: handlers that try every known way out of their sandbox, and tenants that try to access others' data.

Reads are detected by canaries, writes by checking their target. A successful access that affected no canary is a
failure if its target is never the worker's own (`READS`, `WRITES`). An open way into the kernel (`SURFACE`) is only
noted.
"""

import json
import os
import time
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks.fuzz.kind import ignoring_errors, judged
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.canaries import OutsideObjects, Victim, canary, canary_in
from benchmarks.hostile.exchange import Reply, ask, connect, exchange
from benchmarks.hostile.functions import (
    Functions,
    infer_request,
    order,
    order_request,
    register,
    right,
    source,
    upload_blobs,
)
from benchmarks.nodes import parents_of_all
from overwinter.store.manifest import encode_manifest

READS = (
    *("files", "blocks", "data", "stat", "listing", "environ", "cmdline", "maps", "stats", "proc_mem", "proc_fd"),
    *("vm_readv", "ptrace", "sysv_read", "own_memory", "own_descriptors"),
)
"""Attempts to read; a success reads something outside."""
WRITES = (*("kill", "prlimit", "priority", "affinity", "node", "write_blocks", "become_root"),)
"""Attempts to change something outside, where success alone is a failure."""
EFFECTS = (
    *("write", "make", "link", "pipe", "tcp", "udp", "unix_path", "unix_abstract", "sysv_segment", "sysv_queue"),
    "log_pipe",
)
"""Attempts whose effect shows outside; within the sandbox's own namespaces they are harmless."""
SURFACE = (
    *("io_uring", "userfaultfd", "perf_event_open", "bpf", "add_key", "keyctl", "kexec_load", "init_module", "mount"),
    *("pivot_root", "setns", "name_to_handle_at", "open_by_handle_at", "process_madvise", "pidfd_open", "swapon"),
    *("fanotify_init", "memfd_secret", "modify_ldt", "personality", "quotactl", "reboot", "netlink", "vsock", "packet"),
    *("raw", "crypto", "key_write", "devices", "threads", "fork", "execute", "user_namespace", "mount_namespace"),
)
"""Ways into the kernel that no function needs."""
KERNEL = (*SURFACE, "sysv_segment", "sysv_queue", "become_root")
"""The attempts of the handler `kernel`; the others are the spy's."""
SPIES = ("spy", "kernel")
OTHERS_DATA = (
    "another's name",
    "another's asset",
    "another's block",
    "another's pipeline",
    "outliving the daemon",
    "left over",
)
SPY_S = 30.0
STAYS_S = 20.0
TALKER = "import sys\ndef preprocess(inputs, state):\n    print('{word}', flush=True)\n    return dict(inputs)\n"


class Outside:
    """A spy, and an intruder into another tenant's data."""

    name = "outside"
    cases = (*READS, *WRITES, *EFFECTS, *SURFACE, *OTHERS_DATA)

    def __init__(self, attacked: AttackedNode, functions: Functions, victim: Victim, machine: OutsideObjects) -> None:
        self._attacked = attacked
        self._functions = functions
        self._victim = victim
        self._machine = machine
        self._pids: set[int] = set()
        """The workers that existed."""

    def prepare(self) -> None:
        settings = {"memory_mib": 1024, "timeout_s": SPY_S, "keep_alive_s": 600.0}
        for name in SPIES:
            handler = source(name, "named")
            self._functions.deploy(self._attacked.node.client, name, handler=handler, tenant="spies", **settings)
        for name in (self._victim.PLAIN, self._victim.HANDLED):
            self._attacked.node.client.for_tenant(self._victim.TENANT).load(name)

    def run(self, case: str, rng: Random) -> None:
        if case in OTHERS_DATA:
            getattr(self, "_" + case.replace(" ", "_").replace("'", ""))()
        else:
            self._spy(case)
            self._check_outside(case)

    def _spy(self, way: str) -> None:
        """Send an order to the spy, and count the canaries in its answer."""
        tally = self._attacked.tally
        if way.startswith("own_"):
            # The memory of its worker contains what earlier attempts found, so end it.
            self._attacked.node.client.for_tenant("spies").unload("spy")
            self._attacked.node.client.for_tenant("spies").load("spy")
        name = "kernel" if way in KERNEL else "spy"
        reply = judged(
            self._attacked, order(self._attacked.port, name, json.dumps({"way": way, **self._outside()}), SPY_S)
        )
        if reply is None or reply.status != 200:
            tally.note("the spy did not answer" if reply is None else f"the spy failed: {reply.said[:60]}")
            return
        found = json.loads(reply.body)["outputs"][0]["data"][0]
        if not found.startswith("did: "):
            return
        if way in READS and not canary_in(reply.body):
            tally.add("outside_reads", f"{way}: {found}")
        elif way in WRITES:
            tally.add("outside_writes", f"{way}: {found}")
        elif way in SURFACE:
            tally.note(f"this way into the kernel is open: {found[:60]}")
        elif way == "log_pipe":
            self._check_log()

    def _outside(self) -> dict[str, Any]:
        """Return what exists outside."""
        node, machine = self._attacked.node, self._machine
        daemon, *below = node.pids()
        workers = node.worker_pids()
        self._pids.update(workers)
        [store] = list(node.host_store.iterdir())[:1] or [node.host_store]
        return {
            "daemon": daemon,
            "zygotes": [pid for pid in below if pid not in workers],
            "workers": workers,
            "process": machine.process.pid,
            "file": str(machine.file),
            "writable": str(machine.writable),
            "open": str(machine.open_directory),
            "socket": machine.path,
            "abstract": machine.abstract,
            "tcp": machine.tcp_port,
            "udp": machine.udp_port,
            "port": node.port,
            "store": str(store),
            "host": str(node.host_store),
            "data": str(node.data),
            "shm": machine.segment,
        }

    def _check_outside(self, way: str) -> None:
        """Check whether anything outside has changed."""
        time.sleep(0.02)
        for change in self._machine.changed(self._pids):
            self._attacked.tally.add("outside_writes", f"{way}: {change}")
        reply = judged(self._attacked, exchange(self._attacked.port, infer_request(self._victim.PLAIN)))
        if reply is not None and reply.status == 200 and reply.tensors != right(7.0):
            self._attacked.tally.add("outside_writes", f"{way}: the victim now answers {reply.tensors.hex()}")

    def _check_log(self) -> None:
        """Check whether another function's output still reaches the log."""
        word = canary("word")
        with suppress(OSError):
            self._functions.deploy(
                self._attacked.node.client, "talker", handler=TALKER.format(word=word), tenant="talkers"
            )
            judged(self._attacked, exchange(self._attacked.port, infer_request("talker")))
            time.sleep(0.2)
            self._attacked.examine()
            if not any(word.encode() in line for line in self._attacked.said):
                self._attacked.tally.add(
                    "outside_writes", "log_pipe: another handler's output no longer reaches the log"
                )
            ignoring_errors(lambda: self._attacked.node.client.for_tenant("talkers").remove("talker"))

    # Data of another tenant

    def _sent(self, path: str, body: bytes) -> Reply | None:
        return judged(self._attacked, ask(self._attacked.port, "POST", path, body, SPY_S, "intruder"))

    def _anothers_name(self) -> None:
        """Deploy a next version of the victim's function as another tenant."""
        made = self._functions.package(self._victim.PLAIN, 99.0, tenant="intruder")
        upload_blobs(self._attacked.port, made)
        reply = judged(self._attacked, register(self._attacked.port, made))
        if reply is not None and reply.status == 201:
            self._attacked.tally.add("outside_writes", "another tenant's version answers for the victim's function")
            version = json.loads(reply.body)["version"]
            ignoring_errors(
                lambda: self._attacked.node.client.for_tenant("intruder").remove(self._victim.PLAIN, version)
            )

    def _anothers_asset(self) -> None:
        """Use a blob of the victim as an asset of a handler that returns its content."""
        self._read_as_assets(1)

    def _anothers_block(self) -> None:
        """Do the same for every blob of the victim, including its weights' blocks."""
        self._read_as_assets(len(self._victim.blobs))

    def _read_as_assets(self, count: int) -> None:
        handler = (
            "INPUTS = [{'name': 'what', 'datatype': 'BYTES', 'shape': [1]}]\n"
            "OUTPUTS = [{'name': 'found', 'datatype': 'BYTES', 'shape': ['count']}]\n"
            "import torch\n"
            "def setup(assets):\n    return assets\n"
            "def preprocess(inputs, state):\n    return {'x': torch.zeros(1, 4)}\n"
            "def postprocess(outputs, inputs, state):\n    return {'found': list(state.values())}\n"
        )
        made = self._functions.package("taker", 1.0, handler=handler, tenant="intruder")
        upload_blobs(self._attacked.port, made)
        manifest = json.loads(encode_manifest(made.manifest))
        # Both have the same program, and the intruder may read what it sent itself.
        own = {blob.address for blob in made.manifest.blobs()}
        theirs = [blob for blob in self._victim.blobs if blob[0] not in own]
        manifest["handler"]["assets"] = {f"a{at}": blob for at, blob in enumerate(theirs[:count])}
        reply = self._sent("/overwinter/v1/functions", json.dumps(manifest).encode())
        if reply is None or reply.status != 201:
            return
        self._attacked.tally.add("outside_reads", "blobs of the victim were taken as assets by their addresses")
        given = {"name": "what", "datatype": "BYTES", "shape": [1], "data": ["x"]}
        body = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
        self._sent("/v2/models/taker/infer", body)
        ignoring_errors(lambda: self._attacked.node.client.for_tenant("intruder").remove("taker"))

    def _anothers_pipeline(self) -> None:
        """Deploy a pipeline over the victim's function, which its owner could then no longer remove."""
        pipeline = {
            "name": "intruder-pipe",
            "inputs": ["x"],
            "stages": {"a": {"function": self._victim.PLAIN, "inputs": {"x": "input:x"}}},
            "outputs": {"y": "a:y"},
        }
        reply = self._sent("/overwinter/v1/pipelines", json.dumps(pipeline).encode())
        if reply is not None and reply.status == 201:
            self._attacked.tally.note("a pipeline may be made over another tenant's function")
            ignoring_errors(lambda: self._attacked.node.client.for_tenant("intruder").remove("intruder-pipe"))

    def _outliving_the_daemon(self) -> None:
        """Kill the daemon; no process of the node may stay, whatever its workers did before."""
        what = json.dumps({"way": "outlive", "seconds": STAYS_S, **self._outside()})
        with connect(self._attacked.port) as end:
            end.sendall(order_request("spy", what))
            time.sleep(0.3)
            self._kill_daemon()

    def _kill_daemon(self) -> None:
        below = self._attacked.node.pids()[1:]
        process = self._attacked.node.process
        if process is None:
            return
        self._attacked.expects_death = True
        process.kill()
        process.wait()
        until = time.monotonic() + 5.0
        while (left := [pid for pid in below if pid in parents_of_all()]) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self._attacked.tally.add("outside_writes", f"{len(left)} processes still run after the daemon was killed")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._attacked.restart()

    def _left_over(self) -> None:
        """Check that the worker of a removed function ends."""
        node, client = self._attacked.node, self._attacked.node.client
        others = set(node.worker_pids())
        self._functions.deploy(
            client, "guest", handler=source("kernel", "named"), tenant="guests", memory_mib=512, keep_alive_s=600.0
        )
        order(self._attacked.port, "guest", json.dumps({"way": "threads", **self._outside()}), SPY_S)
        guests = set(node.worker_pids()) - others
        client.for_tenant("guests").remove("guest")
        until = time.monotonic() + 10.0
        while guests.intersection(node.worker_pids()) and time.monotonic() < until:
            time.sleep(0.05)
        if guests.intersection(node.worker_pids()):
            self._attacked.tally.add("outside_writes", "the worker of a removed function stays")
