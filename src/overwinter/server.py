"""Runs a node together with its API, until a signal stops it or the node fails. `bootstrap.py` constructs the node."""

import asyncio
import errno
import gc
import resource
import signal
import site
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from overwinter.api.access import Access
from overwinter.api.app import create_app, serve
from overwinter.api.audit import Audit
from overwinter.api.budget import budget_of
from overwinter.api.connections import connections_most
from overwinter.api.draining import Drain
from overwinter.api.sites import Sites
from overwinter.bootstrap import running
from overwinter.core.config import NodeConfig
from overwinter.core.devices import DeviceConfig, gpus_of
from overwinter.core.errors import ConflictError
from overwinter.node.kernel_time_slice import shorten_kernel_time_slice
from overwinter.node.log import Log
from overwinter.node.node import Node
from overwinter.node.pressure import available_bytes
from overwinter.store.tokens import TokenFile

ZYGOTE_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/nonexistent",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    # Use huge pages for the heap: a fork copies the page tables, which then have 512 times fewer entries.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""The environment of zygotes and workers."""
GPU_ENVIRONMENT = {
    # Where containers with GPUs have the driver's libraries.
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
    # GPUs have the numbers that nvidia-smi shows.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # A library that asks for GPUs while a zygote imports it must not initialize the driver, which forks could not use.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # An executor writes no files.
    "CUDA_CACHE_DISABLE": "1",
}
"""What the zygotes of a node with GPUs get in addition."""

NO_THREAD = "can't start new thread"
"""Python's message when a thread cannot be started."""

SWITCH_S = 0.0005
"""How long a Python thread may keep the event loop waiting. Python's default of 5 ms exceeds the time of a whole
request.
"""


def zygote_environment(devices: Sequence[DeviceConfig]) -> dict[str, str]:
    """Return the environment of zygotes and workers on a node with these devices."""
    # Packages that pip installed for this user alone are found through HOME, which differs there.
    own = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {**ZYGOTE_ENVIRONMENT, **own, **(GPU_ENVIRONMENT if gpus_of(devices) else {})}


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 chooses a free one. Raises ConflictError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            remedy = "give an address of this machine with --host"
        else:
            remedy = "choose another --port, and for a second node another --data"
        raise ConflictError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener


async def serve_node(config: NodeConfig, listener: socket.socket, log: Log, ready: Callable[[], None]) -> None:
    """Run a node and its API until SIGTERM, SIGINT or SIGHUP, and then for at most `drain_s` until the open requests
    are answered; a second signal ends that wait. `ready` is called once, when workers can be forked. If the node fails,
    also during that wait, its error is raised.
    """
    stop, drain = asyncio.Event(), Drain(config.drain_s)
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        if stop.is_set():
            drain.end_now()
        elif drain.in_progress:
            bound = f"up to {config.drain_s:g} s"
            log(f"stopping: waiting {bound} for {drain.in_progress} requests in progress", level="info")
        stop.set()

    async def until_broken(node: Node) -> None:
        with suppress(Exception):
            await node.until_broken()
        # No request is answered any more: open connections would only delay the next start.
        drain.end_now()

    async def report_ready(node: Node) -> None:
        await node.until_ready()
        ready()

    # The process gets SIGHUP when its terminal closes; under `nohup` it ignores it.
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for signal_ in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(signal_, request_stop)
    # Python's garbage collector stops the event loop while it traverses all objects. It does not traverse frozen ones,
    # and never frees them. So the objects that exist now are frozen, before the functions of the catalog are restored.
    gc.collect()
    gc.freeze()
    async with running(config, zygote_environment(config.scheduler.devices), log) as node:
        audit, sites = Audit(Path(config.data), log), Sites(listener.getsockname()[0])
        access = Access(node, TokenFile(Path(config.data)), audit, sites)
        wanted, most = config.requests.connections_max, connections_most(config.requests)
        if wanted > most:
            log(f"{wanted} connections are not possible: descriptors (ulimit -Hn) allow {most}")
        app = create_app(access, config.requests, budget_of(config.requests, available_bytes()), drain)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, config.requests, drain))
            broken = tasks.create_task(until_broken(node))
            readiness = tasks.create_task(report_ready(node))
            stop_requested = tasks.create_task(stop.wait())
            await asyncio.wait([stop_requested, broken], return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, stop_requested, readiness):
                task.cancel()
            # The node may also fail during the drain.
            await asyncio.wait([serving])
            if broken.done():
                await node.until_broken()
            broken.cancel()


def run(config: NodeConfig, listener: socket.socket, log: Log, ready: Callable[[], None]) -> None:
    """Run a node in this process until it gets a signal to stop; if the node fails, its error is raised."""
    # The event loop shares the interpreter with computing threads, such as those that check programs, and waits for
    # each of them.
    sys.setswitchinterval(SWITCH_S)
    # Before anything is forked, so that workers inherit it.
    shorten_kernel_time_slice()
    # Every worker needs some descriptors (node/limits.py).
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stopped = False

    async def serve_to_the_end() -> None:
        nonlocal stopped
        await serve_node(config, listener, log, ready)
        stopped = True

    try:
        uvloop.run(serve_to_the_end())
    except RuntimeError as error:
        # The end of the loop needs a thread, which the system may refuse; everything else has ended by then.
        if not stopped or str(error) != NO_THREAD:
            raise
