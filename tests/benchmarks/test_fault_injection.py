"""The benchmark of faults changes files as it says."""

from pathlib import Path
from random import Random

from benchmarks.fault_injection import Span, flip


def test_one_bit_is_flipped_and_the_metadata_of_the_file_is_unchanged(tmp_path: Path) -> None:
    block = tmp_path / "block"
    block.write_bytes(bytes(1000))
    block.chmod(0o400)
    before = block.stat()
    flip(block, Random(1))
    after = block.stat()
    assert sum(byte.bit_count() for byte in block.read_bytes()) == 1
    assert (after.st_mode, after.st_size, after.st_mtime_ns) == (before.st_mode, 1000, before.st_mtime_ns)
    assert after.st_ino == before.st_ino


def test_spans_overlap_if_they_have_a_moment_in_common() -> None:
    assert Span(0, 2).overlaps(Span(2, 3))
    assert Span(1, float("inf")).overlaps(Span(5, 6))
    assert not Span(0, 1).overlaps(Span(2, 3))
