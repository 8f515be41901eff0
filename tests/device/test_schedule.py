"""Whatever is brought, evicted and moved, answers are plain PyTorch's, and no tenant gets another one's bytes."""

import os
from contextlib import ExitStack, closing
from random import Random

import pytest
import torch

from overwinter.core.errors import NoSpaceError
from overwinter.device.partitioned import PartitionedAllocator
from overwinter.device.peer import PeerMemory
from overwinter.device.shared import shared_memory
from overwinter.device.swap import Route
from overwinter.device.virtual import VirtualDevice
from tests.device.test_swap import KIB, SWAPPINGS, VARIANTS, Stored, fast

PARTITION = 64 * KIB
MEMORY = 24 * PARTITION
"""Enough for some of the functions, and with few large free ranges."""
STEPS = 200
OTHERS = 8
BOBS = 7
"""Every byte of the other tenant."""


class Watched(VirtualDevice):
    """A device that counts how often it moved blocks."""

    consolidations = 0

    def _carry_out(self, moves):
        self.consolidations += 1
        super()._carry_out(moves)


class Schedule:
    """Two devices, each a peer of the other, with variants of two models of one tenant and with blocks of another."""

    def __init__(self, seed, stack):
        self.random = Random(seed)
        self.models = [Stored(name, torch.device("cpu")) for name in ("resnet50", "minilm")]
        self.devices, self.memories = [], []
        self.bobs = [{}, {}]
        self.peer_bytes = self.runs = 0
        for name in "ab":
            fd = shared_memory(MEMORY)
            device = Watched(name, PartitionedAllocator(MEMORY, PARTITION), fd)
            self.devices.append(stack.enter_context(closing(device)))
            self.memories.append(PeerMemory(fd))
            os.close(fd)

    def step(self, number):
        which, model = self.random.randrange(2), self.random.choice(self.models)
        variant, other = self.random.randrange(VARIANTS), f"bob-{self.random.randrange(OTHERS)}"
        match self.random.choices(("run", "evict", "hold of bob", "evict of bob"), (4, 2, 3, 1))[0]:
            case "run":
                self.run(which, model, variant)
            case "evict":
                self.devices[which].evict(model.functions[variant].name)
            case "hold of bob":
                self.evict_of_bob(which, other)
                self.hold_of_bob(which, other, number)
            case "evict of bob":
                self.evict_of_bob(which, other)

    def run(self, which, model, variant):
        try:
            routes = [Route(self.memories[1 - which], fast()), model.route]
            model.check(self.devices[which], variant, routes, self.random.choice(SWAPPINGS))
        except NoSpaceError:
            return
        self.runs += 1
        self.peer_bytes += model.moved[0]

    def hold_of_bob(self, which, other, number):
        sizes = [self.random.choice((4, 12, 20, 40)) * KIB for _ in range(self.random.randrange(1, 5))]
        blocks = {f"{other} {number} {at}": size for at, size in enumerate(sizes)}
        if self.devices[which].hold(other, "bob", blocks) is None:
            return
        self.bobs[which][other] = blocks
        for address in blocks:
            content = self.content(which, address)
            assert ((content == 0) | (content == BOBS)).all()
            content.fill_(BOBS)

    def evict_of_bob(self, which, other):
        self.devices[which].evict(other)
        self.bobs[which].pop(other, None)

    def check_bobs(self):
        for which, held in enumerate(self.bobs):
            for blocks in held.values():
                assert all(self.content(which, address).eq(BOBS).all() for address in blocks)

    def content(self, which, address):
        return torch.empty(0, dtype=torch.uint8).set_(self.devices[which].storage(address))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_stay_right_and_tenants_apart_whatever_is_brought_moved_and_evicted(seed):
    with ExitStack() as stack:
        schedule = Schedule(seed, stack)
        for number in range(STEPS):
            schedule.step(number)
            schedule.check_bobs()
        assert schedule.runs > STEPS // 8
        assert schedule.peer_bytes > 0
        assert any(device.consolidations for device in schedule.devices)
