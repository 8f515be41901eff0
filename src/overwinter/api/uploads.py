"""Receives uploaded blocks without a thread that waits for a sender.

Received bytes are collected on the event loop, and a disk thread writes them in pieces. So a slow sender takes an
upload slot and no thread. `connections.py` enforces the minimum rate.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from overwinter.api.exchange import Request
from overwinter.api.node_interface import Blocks, Upload
from overwinter.api.reading import BodyLimits, announced_length, body_of
from overwinter.api.slots import FairSlots
from overwinter.core.config import RequestLimits
from overwinter.core.errors import OverloadedError
from overwinter.core.ids import Address, TenantId
from overwinter.node import clock

PIECE_BYTES = 1 << 20
"""A piece is written as soon as it has this many bytes."""

T = TypeVar("T")


class Uploads:
    """All uploads in progress."""

    def __init__(self, disk: Executor, limits: RequestLimits) -> None:
        """`disk`: the threads that write the blocks."""
        self._disk = disk
        self._limits = BodyLimits(limits.block_bytes_max)
        self._slots = FairSlots(limits.uploads_max)

    async def receive(self, request: Request, blocks: Blocks, tenant: TenantId, address: Address) -> bool:
        """Store the body of a request; return False if the node held this block for the tenant before.

        Raises CallerError when the bytes do not match the address, TooLargeError when there are too many, NoSpaceError
        when the disk is full or the tenant at its limit, and OverloadedError when too many uploads are in progress or
        memory is lacking.
        """
        announced_length(request.fields, self._limits)
        with self._slot(request.reservation.caller):
            await request.reserve(2 * PIECE_BYTES)
            opened = ExitStack()
            try:
                # Enter the context in the thread: if this task is cancelled meanwhile, the upload is still closed
                # below.
                upload = await self._on_disk(lambda: opened.enter_context(blocks.upload(tenant, address)))
                await self._fill(upload, request)
                return await self._on_disk(partial(upload.commit, clock.wall()))
            finally:
                await self._on_disk(opened.close)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Run disk work in a thread. It has ended when this returns or raises, even after a cancellation."""
        doing = asyncio.get_running_loop().run_in_executor(self._disk, work)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.wait([doing])
            raise

    async def _fill(self, upload: Upload, request: Request) -> None:
        size = 0
        more = True
        while more:
            piece = bytearray()
            while more and len(piece) < PIECE_BYTES:
                message = await request.receive()
                piece += body_of(message)
                more = message.get("more_body", False)
            size += len(piece)
            if size > self._limits.bytes_max:
                raise self._limits.error()
            await self._on_disk(partial(upload.write, piece))

    @contextmanager
    def _slot(self, caller: str) -> Iterator[None]:
        """Take a slot for an upload, and release it at the end; raise OverloadedError if the caller may take none."""
        slots = self._slots
        if not slots.take(caller):
            raise OverloadedError(
                f"too many uploads are in progress, {slots.by_caller[caller]} of them yours: try again when one has "
                "ended, or start the node with a higher --uploads-max"
            )
        try:
            yield
        finally:
            slots.release(caller)
