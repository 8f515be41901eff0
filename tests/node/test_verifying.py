"""While a core is idle, the blocks that an earlier run of the node left in memory are hashed at full speed. Otherwise,
blocks in memory are hashed with a share of a core.
"""

import asyncio
import threading

import pytest

from overwinter.node.faults import Faults
from overwinter.node.verifying import Verifier
from overwinter.store.blocks import address_of
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Blob
from overwinter.store.sealing import CHUNK_BYTES
from tests.node.log_lines import LogLines
from tests.node.rig import until
from tests.store.source import Source

SHARE = 1e-9
"""With this share the pause after the first chunk of a block is many times as long as a test."""
CONTENTS = {address_of(data): data for data in (bytes([number]) * (4 << 20) for number in range(4))}
BLOBS = [Blob(address, len(data)) for address, data in CONTENTS.items()]
NBYTES = sum(map(len, CONTENTS.values()))


class Left:
    """The blocks that a node left in memory, and the verifier of the next node."""

    def __init__(self, root) -> None:
        HostStores(root, Source(CONTENTS)).store("").load(BLOBS)
        self.hosts = HostStores(root, Source(CONTENTS))
        self.hosts.sweep({"": BLOBS})
        self.host = self.hosts.store("")
        self.has_spare_core, self.lost, self.said = True, [], LogLines()
        self.core_checks = self.pauses = 0
        self.verifier = Verifier(self.hosts, SHARE, self._check_cores, self._lose, self.said)
        self._pause, self.verifier._pause = self.verifier._pause, self._count_and_pause

    def _check_cores(self):
        self.core_checks += 1
        return self.has_spare_core

    def _count_and_pause(self):
        """Pause after a chunk of a block that was verified before."""
        self.pauses += 1
        self._pause()

    def _lose(self, name, address):
        self.lost.append((name, address))
        return []

    def verify(self, scene) -> None:
        """Run the verifier until the scene has ended."""

        async def both() -> None:
            verifying = asyncio.create_task(self.verifier.run(Faults(self.said)))
            try:
                await scene()
            finally:
                verifying.cancel()

        asyncio.run(both())


@pytest.fixture
def left(tmp_path):
    return Left(tmp_path / "store")


def test_blocks_of_an_earlier_node_are_verified_at_full_speed_while_cores_are_idle(left):
    async def scene():
        assert len(left.host.unverified()) == len(BLOBS)
        await until(lambda: not left.host.unverified())

    left.verify(scene)
    assert left.lost == []


def test_verification_uses_its_share_while_cores_are_busy_and_full_speed_when_idle(left):
    left.has_spare_core = False

    async def scene():
        await until(lambda: left.core_checks > 2)
        assert left.host.verification.verified_bytes == CHUNK_BYTES
        left.has_spare_core = True
        await until(lambda: not left.host.unverified())

    left.verify(scene)


def test_verified_blocks_are_verified_again_with_the_share_only(left):
    async def scene():
        await until(lambda: left.pauses)
        # Nothing happens in the pause for which a test could wait.
        await asyncio.sleep(0.05)
        assert left.host.verification.verified_bytes == NBYTES + CHUNK_BYTES

    left.verify(scene)


def test_blocks_verified_meanwhile_have_no_priority(left):
    left.has_spare_core = False

    async def scene():
        await until(lambda: left.host.verification.verified_bytes)
        _, *others = left.host.unverified()
        for address in others:
            assert left.host.verify(address)
        left.has_spare_core = True
        await until(lambda: left.pauses)
        assert left.host.unverified() == []
        assert left.host.verification.verified_bytes == NBYTES + CHUNK_BYTES

    left.verify(scene)


def test_a_stopping_node_does_not_wait_for_a_verification(left):
    left.has_spare_core = False
    before = threading.enumerate()
    left.verify(lambda: until(lambda: left.host.verification.verified_bytes))
    for thread in [each for each in threading.enumerate() if each.name.startswith("verifier") and each not in before]:
        thread.join()
    assert left.host.verification.verified_bytes < BLOBS[0].nbytes
    assert sorted(left.host.unverified()) == sorted(left.host.resident()) == sorted(CONTENTS)


def test_a_block_that_changed_while_no_node_ran_is_removed_and_reported(left):
    victim = BLOBS[2].address
    path = left.host.root / victim
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"x")
    left.verify(lambda: until(lambda: left.lost and not left.host.unverified()))
    assert left.lost == [("", victim)]
    assert [victim in line for line in left.said] == [True]
    assert sorted(left.host.resident()) == sorted(CONTENTS.keys() - {victim})
