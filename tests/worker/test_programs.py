"""What the preparation of a program leaves behind: memory, descriptors and the compiled program."""

import os
import subprocess
import sys
from itertools import pairwise

import msgspec
import torch

from overwinter.worker.messages import Prepare
from overwinter.worker.programs import Programs
from tests.node.rig import Function

PREPARES = """
import ctypes, os, sys
import msgspec
from overwinter.worker.messages import Prepare
from overwinter.worker.programs import Programs

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (*"1234567", "used", "free", "end")]

def holes():
    heap = mallinfo()
    return heap.free - heap.end

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Heap
wanted = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Prepare)
programs = Programs()
before = holes()
programs.prepare(wanted, [int(fd) for fd in sys.argv[1:]])
print(len(programs), holes() - before)
"""
"""Prints how many programs are ready, and how much free memory the warm-up has left within the heap."""


class Layers(torch.nn.Module):
    """Convolutions, whose primitives are kept, between temporary tensors."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 64, 48, 64, 32, 64, 96, 64, 48, 4)
        self.layers = torch.nn.Sequential(*(torch.nn.Conv2d(of, to, 3, padding=1) for of, to in pairwise(sizes)))

    def forward(self, x):
        return {"y": self.layers(x).mean((2, 3))}


def test_a_warm_up_leaves_no_holes_in_the_heap_that_is_forked():
    function = Function(Layers(), {"x": torch.zeros(2, 3, 112, 112)})
    deployed, fds = function.deployed, function.open(bare=True)
    wanted = msgspec.msgpack.encode(Prepare(deployed.load_message(bare=True), deployed.bind_message(bare=True)))
    for fd in fds:
        os.lseek(fd, 0, os.SEEK_SET)
    result = subprocess.run(
        [sys.executable, "-c", PREPARES, *map(str, fds)], input=wanted, pass_fds=fds, capture_output=True, check=True
    )
    ready, holes = map(int, result.stdout.split())
    assert ready == 1, result.stderr
    assert holes < 1 << 20


def test_a_program_that_cannot_be_prepared_leaves_no_descriptor_open():
    function = Function(Layers(), {"x": torch.zeros(2, 3, 16, 16)})
    own, *blocks = function.open(bare=True)
    os.close(own)
    changed = os.memfd_create("changed")
    os.write(changed, b"no program")
    given = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in (changed, *blocks)}
    programs = Programs()
    wanted = Prepare(function.deployed.load_message(bare=True), function.deployed.bind_message(bare=True))
    programs.prepare(wanted, [changed, *blocks])
    assert len(programs) == 0
    assert not [fd for fd in given if os.path.lexists(f"/proc/self/fd/{fd}")]


class Inverse(torch.nn.Module):
    def forward(self, x):
        return {"y": torch.linalg.inv(x)}


def test_a_program_that_fails_on_zeros_stays_compiled():
    function = Function(Inverse(), {"x": torch.eye(3).repeat(2, 1, 1)})
    programs = Programs()
    wanted = Prepare(function.deployed.load_message(bare=True), function.deployed.bind_message(bare=True))
    programs.prepare(wanted, function.open(bare=True))
    assert list(programs) == [function.deployed.manifest.program.address]
