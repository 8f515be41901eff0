"""The node's side of its processes: two zygotes and the bodies they fork.

Everything here runs in callbacks of the event loop and never waits. A body's end is told once, by its
zygote or by that zygote's own end.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from overwinter.core.errors import WorkerError
from overwinter.core.ids import Address, WorkerId
from overwinter.core.tensor import Tensor
from overwinter.node.answers import failed
from overwinter.node.bodies import GONE_S, BodyProcess, wait_gone
from overwinter.node.cgroups import Groups
from overwinter.node.words import Words
from overwinter.node.zygotes import ZygoteProcess
from overwinter.worker.channel import ChannelClosedError
from overwinter.worker.messages import (
    Answer,
    Exited,
    Failure,
    ForkBody,
    Forked,
    ForkZygote,
    Kill,
    Load,
    LoadFailed,
    Measured,
    Prepare,
    Ready,
    Stop,
    ToBody,
    Trying,
    Up,
)

RESTART_FIRST_S = 0.1
RESTART_MAX_S = 10.0
LINGER_S = 1.0
UNREADABLE = (ValueError, TypeError)
"""What a decoder raises on a message that is none: msgspec's errors are ValueErrors."""


class BodyStaff(Protocol):
    """Who hears of a body: the effects, or whoever measures it."""

    def body_ready(self, body: BodyProcess, ready: Ready) -> None:
        """The body is loaded."""
        ...

    def body_answered(self, body: BodyProcess, answer: Answer) -> None:
        """The body ran something; ValueError if the answer cannot be true."""
        ...

    def body_measured(self, body: BodyProcess, measured: Measured) -> None:
        """The body told of itself; ValueError if nobody asked."""
        ...

    def body_exited(self, worker: WorkerId, error: str, reason: str) -> None:
        """The body is gone."""
        ...


class Staff(BodyStaff, Protocol):
    """Who hears of all the processes: the effects."""

    def zygote_lost(self) -> None:
        """What the zygote had prepared is gone."""
        ...


class Processes:
    """Starts zygotes, restarts them when they die, and forks bodies from them."""

    def __init__(self, staff: Staff, environment: Mapping[str, str], log: Callable[[str], None]) -> None:
        self._staff = staff
        self._environment = dict(environment)
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._first: ZygoteProcess | None = None
        self._second: ZygoteProcess | None = None
        self._failures = 0
        self._closing = False
        self._bodies: dict[WorkerId, BodyProcess] = {}
        self._measurers: dict[WorkerId, BodyStaff] = {}
        """Who hears of a body in place of the staff."""
        self._told: set[str] = set()
        self.on_ready: Callable[[], None] | None = None
        self._words = Words("zygote", log)
        self._groups = Groups()

    # Zygotes

    def start(self) -> None:
        """Start both zygotes; `is_up` tells when they can fork. Messages sent before wait for them."""
        zygote = ZygoteProcess(None)
        command = [sys.executable, "-m", "overwinter.worker.launch", str(zygote.there.fileno()), str(os.getpid())]
        command += self._groups.make()
        self._tell_lacks(self._groups.missing)
        zygote.process = subprocess.Popen(
            command,
            pass_fds=[zygote.there.fileno()],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._words.there,
            stderr=self._words.there,
            cwd=Path(sys.prefix),
            # No terminal: what a function's code prints reaches it through the node's log alone.
            start_new_session=True,
        )
        zygote.there.close()
        self._first = zygote
        self._listen_to(zygote)
        self._start_second()

    def _start_second(self) -> None:
        assert self._first is not None
        zygote = ZygoteProcess(None)
        self._second = zygote
        self._first.channel.send(ForkZygote(), [zygote.there.fileno()])
        zygote.there.close()
        self._listen_to(zygote)

    def _listen_to(self, zygote: ZygoteProcess) -> None:
        self._loop.add_reader(zygote.channel.fileno(), self._hear_zygote, zygote)

    def is_up(self) -> bool:
        """Whether both zygotes can fork."""
        return all(zygote is not None and zygote.up is not None for zygote in (self._first, self._second))

    def zygote_smaps(self) -> list[int]:
        """The files in which the kernel counts the zygotes' memory."""
        zygotes = (self._first, self._second)
        return [zygote.smaps for zygote in zygotes if zygote is not None and zygote.smaps is not None]

    def body_smaps(self) -> dict[WorkerId, int]:
        """The files in which the kernel counts the bodies' memory; each is closed when its body ends."""
        return {worker: body.smaps for worker, body in self._bodies.items() if body.smaps is not None}

    def body_pids(self) -> dict[WorkerId, int]:
        """The bodies' process ids."""
        return {worker: body.pid for worker, body in self._bodies.items() if body.pid is not None}

    def _hear_zygote(self, zygote: ZygoteProcess) -> None:
        try:
            message, fds = zygote.channel.receive()
        except BlockingIOError:
            return
        except (ChannelClosedError, *UNREADABLE):
            self._lose_zygote(zygote)
            return
        match message:
            case Up():
                zygote.up = message
                # None when the node had no room for a descriptor: what is not seen does not count.
                zygote.smaps = next(iter(fds), None)
                self._tell_lacks(message.uncontained)
                if self.is_up() and self.on_ready is not None:
                    self._failures = 0
                    self.on_ready()
            case Forked(worker):
                smaps, body = next(iter(fds), None), zygote.bodies.get(worker)
                if body is not None:
                    body.pid, body.smaps = zygote.channel.sender, smaps
                elif smaps is not None:
                    # What it should load could not be sent.
                    os.close(smaps)
            case Exited(worker, status):
                self._end_body(zygote, worker, status)

    def _tell_lacks(self, lacks: Iterable[str]) -> None:
        for lack in set(lacks) - self._told:
            self._told.add(lack)
            self._log(f"bodies are not fully contained here: {lack}")

    def _lose_zygote(self, zygote: ZygoteProcess) -> None:
        """A zygote is gone, and its bodies with it: they die with their parent."""
        self._loop.remove_reader(zygote.channel.fileno())
        zygote.close()
        if zygote.process is not None:
            zygote.process.kill()
            zygote.process.wait()
        first, second = zygote is self._first, zygote is self._second
        if first:
            self._first = None
        elif second:
            self._second = None
        if not self._closing:
            self._log("a zygote died and is started again")
            if zygote.up is None:
                self._failures += 1
            if first and self._second is not None:
                # It dies with its parent; who forks from it now would wait for nothing.
                self._lose_zygote(self._second)
            if first or second:
                self._restart(self._restart_first if first else self._restart_second)
            self._staff.zygote_lost()
        for worker, body in list(zygote.bodies.items()):
            body.trying = False
            self._end_body(zygote, worker, -signal.SIGKILL)

    def _restart(self, again: Callable[[], None]) -> None:
        """At once, so that bodies can be asked for without a gap; later and later if it fails to come up."""
        if self._failures == 0:
            again()
        else:
            self._loop.call_later(min(RESTART_FIRST_S * 2.0**self._failures, RESTART_MAX_S), again)

    def _restart_first(self) -> None:
        if self._first is None and not self._closing:
            self.start()

    def _restart_second(self) -> None:
        if self._first is not None and self._second is None and not self._closing:
            try:
                self._start_second()
            except ChannelClosedError:
                self._second = None

    # Bodies

    def fork(
        self,
        order: ForkBody,
        load: Load,
        fds: Sequence[int],
        measurer: BodyStaff | None = None,
        samples: Sequence[Tensor] = (),
    ) -> None:
        """Fork a body and hand it what to load; WorkerError when there is no zygote to fork it.

        A measurer hears of the body in place of the staff. `samples` are the tensors of the requests that `load` names.
        """
        worker = order.worker
        zygote = self._first if load.source_bytes is not None else self._second
        if zygote is None:
            raise WorkerError("the zygote is being started again")
        try:
            body = BodyProcess(worker, load, zygote.channel, self._log)
        except OSError as error:
            raise WorkerError(f"a body could not be forked: {error}") from error
        try:
            body.lay(0, samples)
            zygote.channel.send(order, [body.there.fileno(), body.words.there, *body.tray_fds()])
            body.there.close()
            body.words.close_there()
            body.channel.send(load, fds)
        except (ChannelClosedError, OSError, OverflowError) as error:
            body.there.close()
            body.close()
            raise WorkerError(f"a body could not be forked: {error}") from error
        zygote.bodies[worker] = self._bodies[worker] = body
        if measurer is not None:
            self._measurers[worker] = measurer
        self._loop.add_reader(body.channel.fileno(), self._hear_body, body)

    def prepare(self, load: Load, fds: Sequence[int], forget: Address | None = None) -> None:
        """Let the second zygote prepare a program, and forget another; nothing happens when there is none."""
        if self._second is not None:
            try:
                self._second.channel.send(Prepare(load, forget), fds)
            except (ChannelClosedError, BlockingIOError) as error:
                self._log(f"{load.function} is not prepared in the zygote: {error}")

    def body(self, worker: WorkerId) -> BodyProcess | None:
        """The body, if it lives."""
        return self._bodies.get(worker)

    def send(self, body: BodyProcess, message: ToBody) -> None:
        """Tell a body something; one that does not listen is killed, and its end is told as any other."""
        try:
            body.channel.send(message)
        except (ChannelClosedError, OSError):
            self.kill(body)

    def stop(self, worker: WorkerId, kill: bool) -> None:
        """End a body; its end is told when it is gone."""
        body = self._bodies.get(worker)
        if body is not None and kill:
            self.kill(body)
        elif body is not None:
            self.send(body, Stop())

    def kill(self, body: BodyProcess) -> None:
        """Kill a body, if it still lives, through its zygote, which knows whether the process id is its own."""
        body.trying = False
        if self._bodies.get(body.worker) is not body:
            return
        try:
            body.zygote.send(Kill(body.worker))
        except (ChannelClosedError, OSError):
            self._log(f"body {body.worker} is left to die with its zygote")

    def _staff_of(self, worker: WorkerId) -> BodyStaff:
        return self._measurers.get(worker, self._staff)

    def _hear_body(self, body: BodyProcess) -> None:
        try:
            message, _ = body.channel.receive()
            match message:
                case Answer():
                    self._staff_of(body.worker).body_answered(body, message)
                case Trying():
                    _require(not body.ready, "it was tried before")
                    body.trying = True
                case Ready():
                    _require(not body.ready, "it was ready before")
                    body.ready = True
                    self._staff_of(body.worker).body_ready(body, message)
                case Measured():
                    self._staff_of(body.worker).body_measured(body, message)
                case LoadFailed():
                    _require(not body.ready, "it was loaded before")
                    body.failure = failed(message)
        except BlockingIOError:
            return
        except ChannelClosedError:
            # Nothing more will come. Its zygote will tell its end; one that only closed its channel must not linger.
            self._loop.remove_reader(body.channel.fileno())
            self._loop.call_later(LINGER_S, self.kill, body)
        except UNREADABLE as error:
            self.give_up(body, f"it answered nonsense: {error}")

    def give_up(self, body: BodyProcess, reason: str) -> None:
        """Hear no more of a body that cannot be trusted, and kill it; its end is told with this reason."""
        body.failure = Failure("WorkerError", reason)
        self._loop.remove_reader(body.channel.fileno())
        self.kill(body)

    def _end_body(self, zygote: ZygoteProcess, worker: WorkerId, status: int) -> None:
        body = zygote.bodies.pop(worker, None)
        if body is None:
            return
        self._bodies.pop(worker, None)
        self._take_last_words(body)
        self._loop.remove_reader(body.channel.fileno())
        body.close()
        failure = body.failure or body.ended(status)
        self._staff_of(worker).body_exited(worker, failure.error, failure.message)
        self._measurers.pop(worker, None)

    def _take_last_words(self, body: BodyProcess) -> None:
        """A body that could not load says why before it exits, and may exit before it is heard."""
        try:
            while body.failure is None:
                message, _ = body.channel.receive()
                if isinstance(message, LoadFailed):
                    body.failure = failed(message)
                elif isinstance(message, Trying):
                    body.trying = True
                elif isinstance(message, Answer):
                    self._staff_of(body.worker).body_answered(body, message)
        except (BlockingIOError, ChannelClosedError, OSError, *UNREADABLE):
            return

    async def close(self) -> None:
        """Kill everything, bodies first, and wait until the first zygote is gone."""
        self._closing = True
        for body in list(self._bodies.values()):
            self.kill(body)
        for zygote in (self._second, self._first):
            if zygote is not None:
                self._loop.remove_reader(zygote.channel.fileno())
                # It ends when it sees that, and whoever waits for it when all that it forked has ended.
                zygote.close()
                if zygote.process is not None:
                    await asyncio.to_thread(_wait_or_kill, zygote.process)
        await asyncio.to_thread(wait_gone, list(self.body_pids().values()))
        for body in self._bodies.values():
            self._loop.remove_reader(body.channel.fileno())
            body.close()
        self._words.close()
        self._groups.close()


def _require(truth: bool, complaint: str) -> None:
    """A body may be in the hands of its function's code, and say anything at any time."""
    if not truth:
        raise ValueError(complaint)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
