"""Weights are read-only views of their blocks; nothing else of a block can be accessed through them."""

import faulthandler
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from overwinter.core.errors import StoreError
from overwinter.model.program import Weight
from overwinter.store.blocks import address_of, build_block
from overwinter.store.packing import pack
from overwinter.worker.weights import MappedBlock, differing_weights, read_all, read_program, weight_tensors


@pytest.fixture
def mapped(tmp_path):
    tensors = [
        torch.arange(12, dtype=torch.float32).reshape(3, 4),
        torch.tensor([7], dtype=torch.int64),
        torch.tensor([1 + 2j, -3j], dtype=torch.complex64),
    ]
    weights = [
        *(Weight("a", "float32", (3, 4)), Weight("b", "int64", (1,)), Weight("c", "complex64", (2,))),
        Weight("none", "float32", (0, 4)),
    ]
    [plan] = pack(weights)
    path = tmp_path / "block"
    path.write_bytes(build_block(plan, [*(tensor.numpy().view("u1").data for tensor in tensors), b""]))
    fd = os.open(path, os.O_RDONLY)
    block = MappedBlock(fd, path.stat().st_size)
    os.close(fd)
    return tensors, weight_tensors(weights, [(0, piece.offset) for piece in plan.pieces], [block]), block


def test_weights_are_what_was_packed(mapped):
    tensors, found, _ = mapped
    assert all(torch.equal(one, other) for one, other in zip(tensors, found, strict=False))
    assert found[3].shape == (0, 4)


def test_a_weight_cannot_be_stretched_over_its_neighbour(mapped):
    _, (first, *_), block = mapped
    assert first.untyped_storage().nbytes() == first.nbytes < block.nbytes
    with pytest.raises(RuntimeError, match="out of bounds"):
        first.as_strided((100,), (1,))


@pytest.mark.parametrize(("shape", "offset"), [((1 << 20,), 0), ((4,), 1 << 20), ((4,), -16), ((1 << 40,), 0)])
def test_a_weight_outside_its_block_is_refused(mapped, shape, offset):
    _, _, block = mapped
    with pytest.raises(ValueError, match=r"buffer|offset"):
        weight_tensors([Weight("w", "float32", shape)], [(0, offset)], [block])


def test_a_weight_with_reordered_dimensions_stays_within_its_own_bytes(mapped):
    _, _, block = mapped
    [turned] = weight_tensors([Weight("a", "float32", (4, 3), (1, 0))], [(0, 0)], [block])
    assert turned.stride() == (1, 4)
    assert turned.untyped_storage().nbytes() == turned.nbytes
    assert turned[3, 2] == 11


def test_a_write_to_a_weight_crashes_the_process_and_changes_nothing(mapped):
    _, (first, *_), _ = mapped
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        first.zero_()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11
    assert first[2, 3] == 11


def test_a_block_cut_short_is_not_mapped(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"123")
    with path.open("rb") as file:
        with pytest.raises(StoreError, match="has only 3"):
            MappedBlock(file.fileno(), 4096)
        with pytest.raises(StoreError, match="has only 3"):
            read_all(file.fileno(), 4)


def test_an_asset_is_read_whole_although_one_call_reads_a_part(tmp_path, monkeypatch):
    path, pread = tmp_path / "asset", os.pread
    path.write_bytes(b"more than one call reads")
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 5), at))
    with path.open("rb") as file:
        assert read_all(file.fileno(), 24) == b"more than one call reads"
        with pytest.raises(StoreError, match="25 bytes has only 24"):
            read_all(file.fileno(), 25)


def test_a_program_that_changed_in_memory_is_not_read(tmp_path):
    path, content = tmp_path / "program", b"content"
    path.write_bytes(content)
    with path.open("rb") as file:
        assert read_program(file.fileno(), len(content), address_of(content)) == content
        path.write_bytes(b"Content")
        with pytest.raises(StoreError, match="changed in memory"):
            read_program(file.fileno(), len(content), address_of(content))


def test_two_binds_at_the_same_time_share_their_weights(tmp_path):
    weights = [Weight(f"w{number}", "float32", (128, 128)) for number in range(40)]
    nbytes = 128 * 128 * 4
    path = tmp_path / "block"
    path.write_bytes(os.urandom(nbytes * len(weights)))
    with path.open("rb") as file:
        for _ in range(20):
            block, both = MappedBlock(file.fileno(), nbytes * len(weights)), threading.Barrier(2)

            def bind(block=block, both=both):
                both.wait()
                return weight_tensors(weights, [(0, nbytes * at) for at in range(len(weights))], [block])

            with ThreadPoolExecutor(2) as pool:
                first, second = (each.result() for each in [pool.submit(bind) for _ in range(2)])
            assert differing_weights(first, second) == frozenset()
