"""The memory of a process is what the kernel reports, and shared memory does not count as private."""

import mmap
import subprocess
import sys
from pathlib import Path

from overwinter.node.memory import directory_memory, process_memory
from overwinter.telemetry.accounts import ProcessMemory

MIB = 1 << 20
GROW = f"""
import mmap, os, sys
def held(): print("held", flush=True), sys.stdin.readline()
held()
own = bytearray(os.urandom(1)) * (24 * {MIB})
held()
fd = os.memfd_create("shared"); os.ftruncate(fd, 16 * {MIB})
shared = mmap.mmap(fd, 16 * {MIB})
shared[:] = b"x" * (16 * {MIB})
held()
"""


def measured(code: str, times: int, mappings_max: int | None = None, forks: bool = False) -> list[ProcessMemory]:
    """Run this code in a process, and return the memory of that process each time that "held" is printed; with
    `forks`, that of its child.
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        seen = []
        for _ in range(times):
            assert process.stdout.readline() == b"held\n"
            [pid] = (
                Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if forks else [process.pid]
            )
            with open(f"/proc/{pid}/smaps", "rb", buffering=0) as smaps:
                seen.append(process_memory(smaps, mappings_max))
            process.stdin.write(b"\n")
            process.stdin.flush()
    return seen


def test_private_memory_grows_by_private_pages_only():
    first, grown, sharing = measured(GROW, 3)
    assert 24 * MIB <= grown.private - first.private < 28 * MIB
    assert first.inherited == first.others == grown.inherited == 0
    assert grown.shared - first.shared < MIB
    # The kernel also counts these as private, because no other process maps them.
    assert 16 * MIB <= sharing.shared - grown.shared < 17 * MIB
    assert abs(sharing.private - grown.private) < MIB
    assert sharing.pss >= sharing.private + sharing.shared


PROTECT = f"""
import ctypes, mmap, sys
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
own = mmap.mmap(-1, 24 * {MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
own[:] = b"x" * (24 * {MIB})
address = ctypes.addressof(ctypes.c_char.from_buffer(own))
for allowed in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_WRITE, mmap.PROT_READ, 0):
    assert libc.mprotect(address, 24 * {MIB}, allowed) == 0
    print("held", flush=True), sys.stdin.readline()
"""


def test_pages_that_were_written_are_private_whatever_access_to_them_is_allowed_later():
    seen = [memory.private for memory in measured(PROTECT, 4)]
    assert min(seen) > 24 * MIB
    assert max(seen) - min(seen) < MIB


SHARE = f"""
import mmap, os, sys
own = mmap.mmap(-1, 24 * {MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
own[:] = b"x" * (24 * {MIB})
if os.fork():
    os.wait()
else:
    print("held", flush=True), sys.stdin.readline()
    for at in range(0, 24 * {MIB}, 4096):
        own[at] = 1
    print("held", flush=True), sys.stdin.readline()
"""


def test_pages_are_inherited_until_the_process_has_written_to_them():
    first, copied = measured(SHARE, 2, forks=True)
    assert 24 * MIB < first.inherited < 40 * MIB
    # Two processes share these pages.
    assert abs(first.others - first.inherited / 2) < MIB
    assert abs(first.inherited - copied.inherited - 24 * MIB) < MIB
    assert abs(copied.private - first.private - 24 * MIB) < MIB


MAP = """
import mmap, sys
own = [mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=1 + number % 2) for number in range(2000)]
print("held", flush=True), sys.stdin.readline()
"""


def test_mappings_are_counted_and_reading_ends_beyond_the_limit():
    [every] = measured(MAP, 1)
    assert 2000 < every.mappings < 2300
    [few] = measured(MAP, 1, mappings_max=100)
    assert 100 < few.mappings < 500


def test_the_sum_of_all_mappings_equals_the_kernels_sum():
    # Another process, because this one's threads may take and free memory between the two readings.
    with subprocess.Popen([sys.executable, "-c", MAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        with open(f"/proc/{process.pid}/smaps", "rb", buffering=0) as smaps:
            seen = process_memory(smaps)
        process.stdin.close()
    fields = dict(line.split()[:2] for line in rollup.splitlines()[1:])
    # The kernel rounds each mapping down to a KiB, and libraries are shared with processes that come and go.
    assert abs(seen.pss - int(fields["Pss:"]) * 1024) < 4 * MIB


def test_an_ended_process_has_no_memory():
    process = subprocess.Popen([sys.executable, "-c", GROW], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with open(f"/proc/{process.pid}/smaps", "rb", buffering=0) as smaps:
        with process:
            process.kill()
        assert process_memory(smaps) is None


def test_files_of_a_store_are_measured_with_their_allocated_memory(tmp_path):
    (tmp_path / "whole").write_bytes(b"x" * 5000)
    (tmp_path / "draft.1").write_bytes(b"x")
    (tmp_path / "tenant.t").mkdir()
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(9 * mmap.PAGESIZE)
    found = directory_memory(tmp_path)
    assert set(found) == {"whole", "holes"}
    assert (found["whole"].nbytes, found["holes"].nbytes, found["holes"].allocated) == (5000, 9 * mmap.PAGESIZE, 0)
    assert found["whole"].allocated >= 5000
