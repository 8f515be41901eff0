"""Supervises the zygotes: one base zygote, and those of some tenants.

A zygote must answer each request in time, unless the CPU weight of its tenant is lowered. One that takes too long is
killed with all its children, and replaced: the base zygote at once, or after a pause if it had failed to start; a
tenant's when a program is to be prepared again. A zygote that sends an unexpected message is killed too.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Protocol

from overwinter.core.errors import MESSAGE_MAX
from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.cgroups import Groups
from overwinter.node.output import Outputs
from overwinter.node.process_identity import is_smaps_of, open_child
from overwinter.node.zygote_process import ForkLimits, Pending, ZygoteProcess, ZygoteSettings
from overwinter.worker.channel import ChannelClosedError, close_all
from overwinter.worker.messages import (
    Exited,
    Forked,
    ForkFailed,
    ForkZygote,
    FromZygote,
    KillZygote,
    Ping,
    Pong,
    PreparationEnded,
    Prepare,
    Up,
)
from overwinter.worker.sandbox import zygote_uid_of

BASE_EXIT_S = 5.0
"""How long a close waits for the end of the base zygote's launcher (`ZygoteProcess.process`) before killing it."""
RESTART_FIRST_S = 0.2
RESTART_MAX_S = 10.0
CHECKS_PER_TIMEOUT = 4
"""The number of checks within the time in which a zygote must answer."""
UNUSED_CHECKS = 2 * CHECKS_PER_TIMEOUT
"""The checks after which a tenant's unused zygote may be stopped for another tenant."""
DECODE_ERRORS = (ValueError, TypeError)
"""What a decoder raises on an invalid message; msgspec's errors are ValueErrors."""


class ZygoteListener(Protocol):
    """Receives the events of zygotes: `Processes`."""

    def worker_forked(self, zygote: ZygoteProcess, message: Forked, pidfd: int | None, smaps: int | None) -> None:
        """A requested process is running; without `pidfd` it has ended already."""
        ...

    def worker_ended(self, zygote: ZygoteProcess, worker: WorkerId, status: int | None, reason: str = "") -> None:
        """A process ended, or could not be forked."""
        ...

    def zygote_can_fork(self, zygote: ZygoteProcess) -> None:
        """A zygote is ready, or has finished a preparation."""
        ...

    def zygote_lost(self, zygote: ZygoteProcess, in_preparation: bool) -> None:
        """The zygote and its programs are lost; its workers are dead, and still to be reported."""
        ...

    def checked(self) -> None:
        """All zygotes were checked."""
        ...


class Zygotes:
    """Starts, checks and ends the zygotes."""

    def __init__(
        self, listener: ZygoteListener, environment: Mapping[str, str], outputs: Outputs, settings: ZygoteSettings
    ) -> None:
        """Create it. `environment` contains all variables that zygotes and workers get."""
        self._listener = listener
        self._environment = dict(environment)
        self._log = outputs.log
        self._output = outputs.open("zygote")
        self.groups = Groups()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._failures = 0
        self._closing = False
        self._last = 0
        self._reported: set[str] = set()
        self._next_check: asyncio.TimerHandle | None = None
        self.base: ZygoteProcess | None = None
        self.tenants: dict[TenantId, ZygoteProcess] = {}
        """The tenants' zygotes, the least recently used first."""
        self.up = asyncio.Event()
        """Set once workers can be forked for the first time."""

    def every(self) -> list[ZygoteProcess]:
        """Return the base zygote and the tenants'."""
        return [zygote for zygote in (self.base, *self.tenants.values()) if zygote is not None]

    def is_up(self) -> bool:
        """Whether workers can be forked, as far as is known."""
        return self.base is not None and self.base.can_fork

    # Start

    def start(self) -> None:
        """Start the base zygote and the supervision; `is_up` reports when it can fork. Raises OSError."""
        zygote = ZygoteProcess(None, None)
        end, settings = zygote.far_end.fileno(), self._settings
        words = (end, os.getpid(), settings.imports, int(settings.uses_gpus))
        arguments = [*map(str, words), *self.groups.make()]
        self._report_lacks(self.groups.missing)
        try:
            zygote.process = subprocess.Popen(
                [sys.executable, "-m", "overwinter.worker.launch", *arguments],
                pass_fds=[end],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output.far_end,
                stderr=self._output.far_end,
                cwd=Path(sys.prefix),
                # Without a terminal: the output of a function reaches one only through the node's log.
                start_new_session=True,
            )
        except OSError as error:
            zygote.close()
            raise OSError(error.errno, f"no process for the base zygote: {error.strerror}") from error
        zygote.pending["up"] = 0
        self.base = zygote
        self.listen(zygote)
        if self._next_check is None:
            self._check_later()

    def can_begin(self) -> bool:
        """Whether one more tenant can have a zygote."""
        return self.is_up() and (len(self.tenants) < self._settings.zygotes_max or self._unused() is not None)

    def _unused(self) -> ZygoteProcess | None:
        """Return a zygote that may be stopped for another, the least recently used."""
        return next((one for one in self.tenants.values() if one.is_idle and one.unused_checks >= UNUSED_CHECKS), None)

    def begin(self, tenant: TenantId, limits: ForkLimits) -> ZygoteProcess | None:
        """Start a tenant's zygote; at the limit, first stop an unused one. None: it cannot be requested."""
        unused = self._unused()
        if len(self.tenants) >= self._settings.zygotes_max and unused is not None:
            self.end(unused)
        if self.base is None:
            return None
        self._last += 1
        try:
            zygote = ZygoteProcess(tenant, limits)
        except OSError as error:
            self._log(f"no zygote for {tenant}: {error}")
            return None
        zygote.pending["up"] = 0
        zygote.number = self._last
        order = ForkZygote(zygote.number, zygote_uid_of(zygote.number), limits.memory_bytes, limits.mapped_bytes)
        try:
            with self.groups.entry(tenant) as groups:
                self.base.channel.send(order, [zygote.far_end.fileno(), *groups])
        except (ChannelClosedError, OSError):
            zygote.close()
            return None
        self.tenants[tenant] = zygote
        self.listen(zygote)
        return zygote

    def listen(self, zygote: ZygoteProcess) -> None:
        """Receive the zygote's messages from now on, and close the other end of its channel here."""
        zygote.far_end.close()
        self._loop.add_reader(zygote.channel.fileno(), self._receive, zygote)

    def mark_used(self, zygote: ZygoteProcess) -> None:
        """Mark this zygote as recently used."""
        zygote.unused_checks = 0
        if zygote.tenant is not None:
            self.tenants[zygote.tenant] = self.tenants.pop(zygote.tenant)

    # Checks

    def _check_later(self) -> None:
        pause_s = self._settings.zygote_timeout_s / CHECKS_PER_TIMEOUT
        self._next_check = self._loop.call_later(pause_s, self._check_all)

    def _check_all(self) -> None:
        """Check all zygotes. Checks are counted, not seconds, so that a pause of the node itself kills no zygote."""
        self._check_later()
        for zygote in self.every():
            zygote.unused_checks = zygote.unused_checks + 1 if zygote.is_idle else 0
            answer = next(iter(zygote.pending), None)
            if answer is None:
                self._ask(zygote, Ping(), "pong")
                continue
            if zygote.tenant in self.groups.lowered:
                # It may get hardly any CPU time.
                continue
            zygote.pending[answer] += 1
            if zygote.pending[answer] > self._checks_allowed(zygote, answer):
                zygote.preparation_timed_out = answer == "program"
                self.lose(zygote, f"it did not answer in time ({answer})")
        self._listener.checked()

    def _checks_allowed(self, zygote: ZygoteProcess, answer: Pending) -> int:
        """Return the number of checks without an answer that are allowed."""
        allowed_s = self._settings.zygote_timeout_s
        if answer == "program":
            allowed_s = self._settings.warm_up_timeout_s
        elif answer == "up" and zygote is self.base:
            # The base zygote still imports modules.
            allowed_s = self._settings.start_timeout_s
        return ceil(CHECKS_PER_TIMEOUT * allowed_s / self._settings.zygote_timeout_s)

    def prepare(self, zygote: ZygoteProcess, order: Prepare, fds: list[int]) -> None:
        """Let a tenant's zygote compile a program and run it once; it cannot fork meanwhile."""
        self.mark_used(zygote)
        self._ask(zygote, order, "program", fds)

    def _ask(
        self,
        zygote: ZygoteProcess,
        order: Ping | Prepare | KillZygote,
        answer: Pending | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        if answer is not None:
            zygote.pending[answer] = 0
        try:
            zygote.channel.send(order, fds)
        except ChannelClosedError:
            pass  # Its exit is about to arrive.
        except OSError as error:
            self.lose(zygote, f"it cannot receive messages: {error}")

    # Messages of zygotes

    def _receive(self, zygote: ZygoteProcess) -> None:
        """Read one message, which must be expected: a zygote cannot block the event loop with messages."""
        try:
            message, fds = zygote.channel.receive()
        except BlockingIOError:
            return
        except ChannelClosedError:
            self.lose(zygote, "it died")
            return
        except DECODE_ERRORS as error:
            self.lose(zygote, f"it sent an invalid message: {error}")
            return
        try:
            self._handle(zygote, message, fds)
        except (ValueError, OSError) as error:
            self.lose(zygote, f"it sent an impossible message: {error}")
        finally:
            # The needed descriptors were removed from the list.
            close_all(fds)

    def _handle(self, zygote: ZygoteProcess, message: FromZygote, fds: list[int]) -> None:
        """Handle a message; raises ValueError or OSError if it is unexpected or impossible."""
        match message:
            case Up():
                self._settle(zygote, "up")
                self._came_up(zygote, message, fds)
            case Pong():
                self._settle(zygote, "pong")
            case PreparationEnded():
                self._settle(zygote, "program")
                self._listener.zygote_can_fork(zygote)
            case Forked(worker):
                self._settle(zygote, worker)
                pid = zygote.channel.sender
                pidfd = open_child(zygote.pid or 0, pid)
                self._listener.worker_forked(zygote, message, pidfd, _take_smaps(fds, pid))
            case ForkFailed(worker, reason):
                self._settle(zygote, worker)
                zygote.fork_failed = zygote.tenant is not None
                self._listener.worker_ended(zygote, worker, None, reason[:MESSAGE_MAX])
            case Exited(worker, status):
                zygote.pending.pop(worker, None)
                zygote.fork_failed = False
                if worker not in zygote.workers.keys() | zygote.unreported_exits:
                    raise ValueError(f"worker {worker} is not its own")
                zygote.unreported_exits.discard(worker)
                self._listener.worker_ended(zygote, worker, status)

    def _settle(self, zygote: ZygoteProcess, answer: Pending) -> None:
        if zygote.pending.pop(answer, None) is None:
            raise ValueError(f"it was not asked for that ({answer})")
        for oldest in zygote.pending:
            # The answer shows that the zygote works, so the wait for the oldest begins anew. Answers come in any order.
            zygote.pending[oldest] = 0
            break

    def _came_up(self, zygote: ZygoteProcess, message: Up, fds: list[int]) -> None:
        zygote.pid = zygote.channel.sender
        if zygote.process is None:
            base = self.base.pid if self.base is not None else None
            zygote.pidfd = open_child(base or 0, zygote.pid)
        else:
            # If it has namespaces of its own, its parent is the process that waits for it.
            zygote.pidfd = os.pidfd_open(zygote.pid)
        # None if the node had no free descriptor, or another file was sent; its memory is then not counted.
        zygote.smaps = _take_smaps(fds, zygote.pid)
        if zygote.tenant is None:
            self._report_lacks(message.lacking)
            self._failures = 0
            self.up.set()
        self._listener.zygote_can_fork(zygote)

    def _report_lacks(self, lacks: Iterable[str]) -> None:
        for lack in set(lacks) - self._reported:
            self._reported.add(lack)
            self._log(f"workers are not fully contained here: {lack}")

    # Shutdown

    def end(self, zygote: ZygoteProcess) -> None:
        """Stop a tenant's zygote that is not needed any more."""
        self._drop(zygote)
        self._listener.zygote_lost(zygote, in_preparation=False)

    def lose(self, zygote: ZygoteProcess, why: str) -> None:
        """Kill a zygote and its workers if they still run; with the base zygote all others end too."""
        if zygote not in self.every():
            return
        whose = "the base zygote" if zygote is self.base else f"the zygote of {zygote.tenant}"
        self._log(f"{whose} is lost: {why}")
        others = list(self.tenants.values()) if zygote is self.base else []
        for each in (zygote, *others):
            self._drop(each)
        if zygote.tenant is None:
            self._failures += "up" in zygote.pending
            # Restart first, because the callbacks may ask the new base zygote to fork workers again.
            self._restart()
        self._listener.zygote_lost(zygote, in_preparation="program" in zygote.pending)
        for other in others:
            self._listener.zygote_lost(other, in_preparation=False)

    def _drop(self, zygote: ZygoteProcess) -> None:
        self._loop.remove_reader(zygote.channel.fileno())
        zygote.kill()
        if zygote.process is not None:
            # The zygote ends with the process that waits for it.
            zygote.process.kill()
            zygote.process.wait()
        if zygote.tenant is None:
            self.base = None
        else:
            del self.tenants[zygote.tenant]
            if zygote.pidfd is None and self.base is not None:
                self._ask(self.base, KillZygote(zygote.number))
        zygote.close()

    def _restart(self) -> None:
        """Restart at once, so that workers can be requested; with increasing delays if it fails to start."""
        if self._failures == 0:
            self._start_again()
        else:
            delay = min(RESTART_FIRST_S * 2.0 ** (self._failures - 1), RESTART_MAX_S)
            self._loop.call_later(delay, self._start_again)

    def _start_again(self) -> None:
        try:
            if not self._closing and self.base is None:
                self.start()
        except OSError as error:
            self._log(f"the base zygote could not be started, and the node tries again: {error}")
            self._failures += 1
            self._restart()

    async def close(self) -> None:
        """Kill all zygotes, and wait until the base zygote has ended."""
        self._closing = True
        if self._next_check is not None:
            self._next_check.cancel()
        processes = [zygote.process for zygote in self.every() if zygote.process is not None]
        for zygote in self.every():
            self._loop.remove_reader(zygote.channel.fileno())
            zygote.kill()
            zygote.close()
        for process in processes:
            await asyncio.to_thread(_wait_or_kill, process)
        self._output.close()
        await asyncio.to_thread(self.groups.close)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Wait until this process has ended; kill it after BASE_EXIT_S."""
    try:
        process.wait(BASE_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _take_smaps(fds: list[int], pid: int) -> int | None:
    """Take the smaps descriptor of the process out of the list, if it was received."""
    return fds.pop() if fds and is_smaps_of(fds[0], pid) else None
