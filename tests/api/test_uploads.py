"""An upload that is cancelled while it is opened leaves nothing behind."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from overwinter.api.uploads import Uploads
from overwinter.core.config import RequestLimits
from overwinter.core.ids import Address, TenantId
from overwinter.store.blocks import address_of
from overwinter.store.repository import Repository
from overwinter.store.uploads import Upload


class Slow:
    """A repository that opens drafts slowly."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.begun, self.go_on = threading.Event(), threading.Event()

    def upload(self, tenant: TenantId, address: Address, most_bytes: int | None = None) -> Upload:
        self.begun.set()
        self.go_on.wait(10)
        return self._repository.upload(tenant, address)


async def _immediately(nbytes: int) -> None:
    pass


def test_an_upload_that_is_cancelled_while_it_is_opened_leaves_no_draft(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    blocks = Slow(repository)
    request = SimpleNamespace(fields={}, reservation=SimpleNamespace(caller="caller"), reserve=_immediately)

    async def scene(disk: ThreadPoolExecutor) -> None:
        uploads = Uploads(disk, RequestLimits())
        receiving = asyncio.create_task(uploads.receive(request, blocks, TenantId("t"), address_of(b"never comes")))
        await asyncio.to_thread(blocks.begun.wait)
        held = len(os.listdir("/proc/self/fd"))
        receiving.cancel()
        await asyncio.sleep(0)
        blocks.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert len(os.listdir("/proc/self/fd")) == held

    with ThreadPoolExecutor(1) as disk:
        asyncio.run(scene(disk))
    assert list((tmp_path / "incoming").iterdir()) == []
    repository.close()
