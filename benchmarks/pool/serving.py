"""Runs nodes with devices that the command line cannot describe: slow links, and a baseline's policies.

`python -m benchmarks.pool.serving CONFIG PORT_FILE` runs a node of that configuration (JSON) until it is terminated.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.nodes import Node, started
from overwinter.cli.log_format import log, logging_to_stderr
from overwinter.cli.serve import write_port
from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import DeviceId
from overwinter.core.policies import Policy
from overwinter.server import open_listener, run

LINK_BYTES_PER_S, LINK_LATENCY_S = 1e9, 1e-4
"""The links, so slow that a transfer takes about as long as a run on one core, as in `benchmarks.swap`."""


def devices(count: int, memory_bytes: int, peer_bytes_per_s: float | None = None) -> tuple[DeviceConfig, ...]:
    """Describe equal virtual devices, each behind a slow link of its own. `peer_bytes_per_s`: the bandwidth of the
    links from each to each other one; None: there are none.
    """
    names = [DeviceId(f"virtual:{number}") for number in range(count)]
    return tuple(
        DeviceConfig(
            name=name,
            memory_bytes=memory_bytes,
            bytes_per_s=LINK_BYTES_PER_S,
            latency_s=LINK_LATENCY_S,
            peers={peer: peer_bytes_per_s for peer in names if peer_bytes_per_s and peer != name},
        )
        for name in names
    )


def scheduling(pool: tuple[DeviceConfig, ...], policy: Policy | None = None, **settings: Any) -> SchedulerConfig:
    """Return the configuration of a scheduler with these devices."""
    return SchedulerConfig(devices=pool, policy=policy or Policy(), **settings)


class PoolNode(Node):
    """A node with devices. Its journal is kept as long as its directory."""

    def __init__(self, root: Path, host_store: Path, scheduler: SchedulerConfig, settings: dict[str, Any]) -> None:
        super().__init__(root / "data", host_store, (), root / "log")
        self.journal = root / "journal"
        config = NodeConfig(
            port=0,
            data=str(self.data),
            host_store=str(host_store),
            journal=str(self.journal),
            profile_on_deploy=False,
            scheduler=scheduler,
            **settings,
        )
        file = root / "config"
        file.write_bytes(msgspec.json.encode(config))
        self._command = [sys.executable, "-m", "benchmarks.pool.serving", str(file), str(self.port_file)]

    def executor_pids(self) -> list[int]:
        """Return the pids of the executors."""
        found = []
        for pid in self.worker_pids():
            try:
                name = Path(f"/proc/{pid}/comm").read_text()
            except OSError:
                continue
            if name == "ow-executor\n":
                found.append(pid)
        return found


@contextmanager
def pool_node(scheduler: SchedulerConfig, **settings: Any) -> Iterator[PoolNode]:
    """A started node on an empty repository; all its files are removed afterwards."""
    with started(lambda root, host_store: PoolNode(root, host_store, scheduler, settings)) as node:
        yield node


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=NodeConfig)
    with logging_to_stderr("text"), open_listener(config.host, config.port) as listener:
        port: int = listener.getsockname()[1]
        run(config, listener, log, partial(write_port, Path(sys.argv[2]), port))


if __name__ == "__main__":
    main()
