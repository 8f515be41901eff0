"""Forks workers and executors from the zygotes, receives their messages, and reports how they end.

Everything here except `close` runs in callbacks of the event loop and never blocks. The tenants take turns: when many
processes have sent messages, each iteration of the event loop reads some of them. A zygote gets few requests at a time,
because a request that was sent cannot be taken back. The others wait, and the tenants take turns. All wait until the
base zygote is ready, so that its death before that causes no retry. The end of a process is reported once: when its
zygote reports it, when that zygote is lost, or when the kernel reports the end and the zygote does not.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.contained import ContainedProcess, ending
from overwinter.node.fair_queue import FairQueue
from overwinter.node.memory import anonymous_bytes
from overwinter.node.packed_answers import PackedAnswer
from overwinter.node.process_identity import wait_until_ended
from overwinter.node.zygote_process import ZygoteProcess
from overwinter.node.zygotes import DECODE_ERRORS, Zygotes
from overwinter.worker.channel import PACKET_BYTES_MAX, ChannelClosedError, close_all
from overwinter.worker.executor_messages import ToExecutor
from overwinter.worker.messages import (
    Answer,
    Failure,
    Forked,
    ForkWorker,
    FromWorker,
    LoadFailed,
    Stop,
    ToWorker,
    Trying,
)

GONE_S = 5.0
"""The longest that a close waits for the end of each killed process."""
LINGER_S = 1.0
"""How long a zygote may take to report the end of a process, and a process that closed its channel to exit."""
SMALL_MESSAGE_BYTES = 2 << 10
"""Reading this many bytes of a large message takes about as long as reading one small message."""
LAST_BYTES_MAX = 16 << 10
"""The size of the largest message that is read after the end of its process: many may end at the same time."""
REQUEST_ERRORS = (ChannelClosedError, OSError, OverflowError)
"""What a request for a process may raise."""


class Forks:
    """All workers and executors of a node, which are in sandboxes."""

    def __init__(self, zygotes: Zygotes, queue: FairQueue) -> None:
        self._zygotes = zygotes
        self._queue = queue
        self._unread: set[ContainedProcess] = set()
        """The processes that have sent a message, and wait for their turn."""
        self._loop = asyncio.get_running_loop()
        self.closing = False
        """Whether all processes are being ended, and no other may be forked."""
        self._living: dict[WorkerId, ContainedProcess] = {}
        self._waiting: dict[TenantId | None, dict[WorkerId, ForkWorker]] = {}
        """The processes that wait for a zygote, by tenant; the tenant that has waited longest for its turn first."""

    def tenants(self) -> set[TenantId]:
        """Return the tenants that have workers or executors of their own."""
        return {process.tenant for process in self._living.values() if process.tenant is not None}

    def living(self) -> list[ContainedProcess]:
        """Return all workers, executors and processes forked ahead that have not ended; some are not forked yet."""
        return list(self._living.values())

    # Requests

    def request(self, process: ContainedProcess, order: ForkWorker) -> None:
        """Ask a zygote for a process, now or when one can fork it; raises one of REQUEST_ERRORS."""
        zygote = None if process.tenant in self._waiting else self._zygote_for(process, order)
        if zygote is None:
            self._waiting.setdefault(process.tenant, {})[process.forked_as] = order
        else:
            self.ask(zygote, process, order)

    def ask_waiting(self) -> None:
        """Ask for the processes that wait, as far as zygotes can fork them now; the tenants take turns."""
        asked = True
        while asked:
            asked = any(self._ask_next(tenant) for tenant in list(self._waiting))

    def _ask_next(self, tenant: TenantId | None) -> bool:
        """Ask for the longest waiting process of a tenant; return False if none waits or no zygote can be asked."""
        if tenant not in self._waiting:
            return False
        forked_as, order = next(iter(self._waiting[tenant].items()))
        process = self._living[forked_as]
        zygote = self._zygote_for(process, order)
        if zygote is None:
            return False
        self._stop_waiting(process)
        if tenant in self._waiting:
            self._waiting[tenant] = self._waiting.pop(tenant)
        try:
            self.ask(zygote, process, order)
        except REQUEST_ERRORS as error:
            self.end(process, f"it could not be forked: {error}")
        return True

    def _stop_waiting(self, process: ContainedProcess) -> None:
        """Remove a process from those that wait, if it is one of them."""
        waiting = self._waiting.get(process.tenant)
        if waiting is not None and waiting.pop(process.forked_as, None) is not None and not waiting:
            del self._waiting[process.tenant]

    def _zygote_for(self, process: ContainedProcess, order: ForkWorker) -> ZygoteProcess | None:
        """Return the tenant's zygote if it can fork this process, otherwise the base zygote; None: that zygote has to
        start or to answer other requests first.
        """
        own = None if process.tenant is None else self._zygotes.tenants.get(process.tenant)
        if own is not None and own.can_fork and own.limits is not None and order.device is None:
            if own.limits.allow(order):
                self._zygotes.mark_used(own)
                return None if own.is_busy(process.tenant) else own
            own.too_small = True
        base = self._zygotes.base
        return None if base is None or "up" in base.pending or base.is_busy(process.tenant) else base

    def ask(self, zygote: ZygoteProcess, process: ContainedProcess, order: ForkWorker) -> None:
        """Ask a zygote for a process; raises one of REQUEST_ERRORS."""
        # Only the base zygote can give a process its own user.
        sent = order if zygote.tenant is None else msgspec.structs.replace(order, uid=None)
        # A process that a tenant's zygote forks is in the zygote's groups from the start.
        tenant = process.tenant if zygote.tenant is None else None
        with self._zygotes.groups.entry(tenant, counts_memory=order.device is None) as groups:
            sent = msgspec.structs.replace(sent, groups=len(groups))
            own = [process.far_end.fileno(), process.output.far_end, *process.buffer_fds()]
            zygote.channel.send(sent, [*own, *groups])
        process.asked = True
        process.close_far_end()
        zygote.pending[order.worker] = 0
        zygote.workers[order.worker] = process

    def listen(
        self, process: ContainedProcess, on_message: Callable[[FromWorker], None], on_end: Callable[[str], None]
    ) -> None:
        """Call `on_message` with each message of a process from now on, and `on_end` with the reason of its end."""
        process.on_message, process.on_end = on_message, on_end
        self._living[process.forked_as] = process
        self._loop.add_reader(process.channel.fileno(), self._readable, process)

    # What zygotes report

    def forked(self, zygote: ZygoteProcess, message: Forked, pidfd: int | None, smaps: int | None) -> None:
        """A requested process is running; without `pidfd` it has ended already."""
        process = zygote.workers.get(message.worker)
        if process is None or pidfd is None:
            close_all([fd for fd in (pidfd, smaps) if fd is not None])
            self._end_soon(zygote, process)
            return
        process.forked(zygote.channel.sender, pidfd, smaps)
        if smaps is not None or zygote.tenant is None:
            # Without smaps the node cannot measure which inherited pages the process has copied. Those of the base
            # zygote, which is trusted, are deducted even so.
            process.inherited_bytes = process.inherited_at_fork_bytes = anonymous_bytes(zygote.pid or 0) or 0
        self._loop.add_reader(pidfd, self._process_exited, zygote, process)

    def ended(self, zygote: ZygoteProcess, worker: WorkerId, status: int | None, reason: str = "") -> None:
        """Handle the end of a process, or a failed fork."""
        self._end(zygote, worker, ending(status) if status is not None else f"it could not be forked: {reason}")

    def lost(self, zygote: ZygoteProcess) -> None:
        """The zygote has ended, and with it the processes that it forked."""
        for worker, process in list(zygote.workers.items()):
            process.dismissed = True
            self._end(zygote, worker, ending(-signal.SIGKILL))

    def _process_exited(self, zygote: ZygoteProcess, process: ContainedProcess) -> None:
        """Handle the kernel's report that a process has ended."""
        assert process.pidfd is not None, "what does not run cannot end"
        self._loop.remove_reader(process.pidfd)
        self._end_soon(zygote, process)

    def _end_soon(self, zygote: ZygoteProcess, process: ContainedProcess | None) -> None:
        """Report the end of a process that has ended, unless its zygote reports it, with the cause, within LINGER_S."""
        if process is not None:
            process.has_exited = True
            self._loop.call_later(LINGER_S, self._end, zygote, process.forked_as, "its process ended", process)

    def _end(self, zygote: ZygoteProcess, worker: WorkerId, reason: str, this: ContainedProcess | None = None) -> None:
        """Report the end of a process once, and make sure that it has ended. `this`: do it only if the id still stands
        for this process.
        """
        process = zygote.workers.get(worker)
        if process is None or this not in (None, process):
            return
        del zygote.workers[worker]
        if this is not None:
            zygote.unreported_exits.add(worker)
        self.end(process, reason)

    # Messages

    def send(self, process: ContainedProcess, message: ToWorker | ToExecutor, fds: Sequence[int] = ()) -> None:
        """Send a message after all earlier ones. A process that cannot receive it is killed, and its end is reported
        with the reason.
        """
        self._send(process, partial(process.outbox.send, message, fds))
        if not process.outbox.is_empty:
            self._loop.add_writer(process.channel.fileno(), self._writable, process)

    def _writable(self, process: ContainedProcess) -> None:
        """The process has read messages, so that its socket has room for others."""
        self._send(process, process.outbox.send_kept)
        if process.outbox.is_empty:
            self._loop.remove_writer(process.channel.fileno())

    def _send(self, process: ContainedProcess, step: Callable[[], None]) -> None:
        try:
            step()
        except ChannelClosedError:
            self._channel_closed(process)
        except OSError as error:
            if not process.over:
                process.outbox.clear()
                process.failure = process.failure or Failure("WorkerError", f"a message could not be sent: {error}")
                self.kill(process)

    def _readable(self, process: ContainedProcess) -> None:
        """The process has sent a message, or has closed its channel."""
        if process not in self._unread:
            self._unread.add(process)
            self._queue.add(process.client, partial(self._take_turn, process))

    def _take_turn(self, process: ContainedProcess) -> None:
        if process in self._unread:
            self._unread.discard(process)
            self._receive(process)
            self._queue.spend(process.channel.received_bytes // SMALL_MESSAGE_BYTES)

    def _stop_listening(self, process: ContainedProcess) -> None:
        """Receive nothing more from a process, and send it nothing that it did not get yet."""
        self._unread.discard(process)
        self._loop.remove_reader(process.channel.fileno())
        self._loop.remove_writer(process.channel.fileno())
        process.outbox.clear()

    def _receive(self, process: ContainedProcess) -> None:
        try:
            process.on_message(_next_message(process))
        except BlockingIOError:
            return
        except ChannelClosedError:
            # No further message will come.
            self._stop_listening(process)
            self._channel_closed(process)
        except DECODE_ERRORS as error:
            self.give_up(process, f"it sent an invalid message: {error}")

    def _channel_closed(self, process: ContainedProcess) -> None:
        """The zygote reports the exit of a process, unless the process only closed its channel."""
        process.outbox.clear()
        self._loop.call_later(LINGER_S, self._kill_without_channel, process)

    def _kill_without_channel(self, process: ContainedProcess) -> None:
        """Kill a process that has closed its channel, if it still runs."""
        if process.has_exited:
            # Its end is about to be reported.
            return
        if not (process.dismissed or process.over):
            process.fail("WorkerError", "it closed its channel to the node")
        self.kill(process)

    def _read_last_messages(self, process: ContainedProcess) -> None:
        """Read what a process sent before its end, such as why it could not load. A large answer is lost."""
        try:
            while process.failure is None:
                message = _next_message(process, LAST_BYTES_MAX)
                if isinstance(message, LoadFailed | Trying | Answer):
                    process.on_message(message)
        except (BlockingIOError, ChannelClosedError, OSError, *DECODE_ERRORS):
            return

    # Ends

    def stop(self, process: ContainedProcess, kill: bool) -> None:
        """Stop a process; its end is reported when it has ended."""
        # A demoted process may take long to stop by itself, and has its memory until then.
        if kill or process.is_demoted or not process.asked:
            self.kill(process)
        else:
            process.dismissed = True
            self.send(process, Stop())

    def kill(self, process: ContainedProcess) -> None:
        """Kill a process, if it still runs."""
        process.dismissed = True
        if not (process.asked or process.over):
            self.end(process, "it was stopped before it was forked")
        elif not process.over:
            process.kill()

    def give_up(self, process: ContainedProcess, reason: str, error: str = "WorkerError") -> None:
        """Stop listening to a process and kill it; its end is reported with this reason."""
        process.fail(error, reason)
        self._stop_listening(process)
        self.kill(process)

    def end(self, process: ContainedProcess, reason: str) -> None:
        """Report the end of a process that is not in the `workers` of any zygote."""
        self._living.pop(process.forked_as, None)
        self._stop_waiting(process)
        process.kill()
        process.over = True
        self._read_last_messages(process)
        self._stop_listening(process)
        if process.pidfd is not None:
            self._loop.remove_reader(process.pidfd)
        process.close()
        process.on_end(reason)

    async def close(self) -> None:
        """Kill all processes, zygotes included, and wait until they have ended, at most GONE_S for each; no other is
        forked after that.
        """
        self.closing = True
        for process in self._living.values():
            process.kill()
        for zygote in self._zygotes.every():
            zygote.workers.clear()
        await self._zygotes.close()
        pidfds = [os.dup(process.pidfd) for process in self._living.values() if process.pidfd is not None]
        await asyncio.to_thread(wait_until_ended, pidfds, GONE_S)
        # Those that were stopped meanwhile, before they were forked, are closed already and not in `_living`.
        for process in self._living.values():
            self._stop_listening(process)
            if process.pidfd is not None:
                self._loop.remove_reader(process.pidfd)
            process.close()


def _next_message(process: ContainedProcess, bytes_max: int = PACKET_BYTES_MAX) -> FromWorker:
    """Receive a message, and decode it. Raises what `Channel.receive` raises, or ValueError for an answer that does not
    fit its run.
    """
    message, _ = process.channel.receive(bytes_max)
    return process.unpacked(message) if isinstance(message, PackedAnswer) else message
