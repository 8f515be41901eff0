"""For any order of binds and unbinds the node and the worker agree on the mapped blocks."""

import os

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.errors import OverwinterError
from overwinter.core.ids import SHARED, StoreName
from overwinter.node.bindings import Bindings
from overwinter.worker.channel import close_all
from overwinter.worker.family import Family

from .rig import Function

SETUP = "def setup(assets):\n    assert not assets['fails'], 'this one fails'\n"


class Stack(torch.nn.Module):
    """Three matrices of which each variant shares some with others."""

    def __init__(self, *seeds: int):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for seed in seeds:
            torch.manual_seed(seed)
            self.layers.append(torch.nn.Linear(96, 96))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"y": x}


SEEDS = ((1, 2, 3), (1, 2, 4), (1, 5, 3), (1, 2, 3), (6, 2, 6))
MODULES = [Stack(*seeds).eval() for seeds in SEEDS]
FAILS = 3


@pytest.fixture(scope="module")
def functions():
    return [
        Function(module, {"x": torch.zeros(2, 96)}, SETUP, name=f"f{n}", assets={"fails": b"1" if n == FAILS else b""})
        for n, module in enumerate(MODULES)
    ]


def stored(addresses, store=SHARED) -> frozenset[tuple[str, str]]:
    return frozenset((store, address) for address in addresses)


def mapped() -> set[int]:
    """Return the inodes of the mapped blocks."""
    with open("/proc/self/maps") as maps:
        return {int(line.split()[4]) for line in maps if "/memfd:test" in line}


def bind(node: Bindings, family: Family, function: Function) -> bool:
    """Bind as the node and the worker do; return whether it failed."""
    asked = function.deployed.bind_message()
    handed = node.lacking(asked, SHARED)
    addresses = [asked.blocks[number][0] for number in handed] + function.deployed.assets()
    results, fds = [], [function.open_blob(address) for address in addresses]
    node.begin(function.deployed, asked, results.append, fds)
    finish = family.take(msgspec.structs.replace(asked, handed=tuple(handed)), fds)
    try:
        finish()
    except OverwinterError:
        results.append(True)
    node.answered(asked.function)
    return bool(results)


def test_the_files_of_blocks_are_known_while_a_bound_function_uses_them(functions):
    first, second = (functions[number].deployed for number in (0, 1))
    node, fds = Bindings(), {}

    def opened(function, addresses) -> list[int]:
        fds.update({address: function.open_blob(address) for address in addresses})
        return [fds[address] for address in addresses]

    def files(function) -> set[int]:
        return {os.fstat(fds[address]).st_ino for address, _ in function.bind_message().blocks}

    try:
        bind = first.bind_message()
        node.begin_first(first, bind, opened(functions[0], [*dict(bind.blocks), *first.assets()]))
        bind = second.bind_message()
        lacking = [bind.blocks[number][0] for number in node.lacking(bind, SHARED)]
        assert 0 < len(lacking) < len(bind.blocks)
        node.begin(second, bind, lambda failure: None, opened(functions[1], lacking))
        assert node.inodes == files(first) | files(second)
        assert node.pending_binds == {first.id, second.id}
        node.answered(first.id)
        node.answered(second.id)
        assert node.pending_binds == set()
        assert not node.has_unbound
        node.end(first.id)
        assert node.has_unbound
        assert node.inodes == files(second) != files(first)
        node.end(second.id)
        assert node.inodes == set()
    finally:
        close_all(fds.values())


def test_a_block_whose_file_was_dropped_is_handed_over_again(functions):
    first, second, third = (functions[number].deployed for number in (0, 1, 3))
    node = Bindings()
    node.begin_first(first, first.bind_message())
    node.answered(first.id)
    shared = {address for address, _ in first.bind_message().blocks} & set(second.files())
    before = node.lacking(second.bind_message(), SHARED)
    node.mark_dropped(stored(shared))
    asked = second.bind_message()
    assert {asked.blocks[number][0] for number in set(node.lacking(asked, SHARED)) - set(before)} == shared
    node.begin(second, asked, lambda failure: None)
    node.answered(second.id)
    bind = third.bind_message()
    assert not {bind.blocks[number][0] for number in node.lacking(bind, SHARED)} & shared
    node.mark_dropped(stored(shared))
    node.end(first.id)
    node.end(second.id)
    node.begin(first, first.bind_message(), lambda failure: None)
    assert node.lacking(first.bind_message(), SHARED) == []


def test_each_host_store_has_its_own_files_of_a_block(functions):
    function = functions[0].deployed
    node, bind = Bindings(), function.bind_message()
    every = list(range(len(bind.blocks)))
    node.add(function, bind)
    assert node.lacking(bind, SHARED) == []
    assert node.lacking(bind, StoreName("ada")) == every
    addresses = frozenset(address for address, _ in bind.blocks)
    node.mark_dropped(stored(addresses, StoreName("ada")))
    assert node.lacking(bind, SHARED) == []
    node.mark_dropped(stored(addresses))
    assert node.lacking(bind, SHARED) == every


@settings(max_examples=40, deadline=None)
@example(orders=[("bind", 0), *(3 * [("drop", 1), ("bind", 1), ("unbind", 1)])])
@given(orders=st.lists(st.tuples(st.sampled_from(("bind", "unbind", "run", "drop")), st.integers(0, len(SEEDS) - 1))))
def test_the_node_and_the_worker_agree_after_any_order_of_messages(functions, orders):
    before = len(os.listdir("/proc/self/fd"))
    first = functions[0]
    load = first.deployed.load_message()
    node = Bindings()
    family = Family(load, [first.open_blob(address) for address in first.deployed.files()[:2]], {})
    bound: set[int] = set()
    dropped: set[str] = set()
    x = torch.randn(2, 96)
    for order, number in orders:
        function = functions[number]
        name = function.deployed.id
        if order == "bind" and number not in bound:
            failed = bind(node, family, function)
            dropped.difference_update(function.deployed.files())
            assert failed == (number == FAILS)
            if failed:
                node.end(name)
                family.drop(name)
            else:
                bound.add(number)
        elif order == "unbind" and number in bound:
            node.end(name)
            family.drop(name)
            bound.remove(number)
        elif order == "run" and number in bound:
            [outcome] = family.runner(name).answer([{"x": x}])
            with torch.inference_mode():
                assert torch.equal(outcome["y"], MODULES[number](x)["y"])
        elif order == "run":
            assert family.runner(name) is None
        elif order == "drop":
            node.mark_dropped(stored(function.deployed.files()))
            dropped.update(function.deployed.files())
        held = {address for other in bound for address, _ in functions[other].deployed.bind_message().blocks}
        dropped &= held
        everything = functions[number].deployed.bind_message()
        lacking = {everything.blocks[place][0] for place in node.lacking(everything, SHARED)}
        assert lacking == {address for address, _ in everything.blocks} - (held - dropped)
        assert mapped() == node.inodes
    assert {each.id for each in node.functions()} == {functions[number].deployed.id for number in bound}
    del family
    assert mapped() == set()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_former_file_of_a_block_belongs_to_the_functions_that_were_bound_before_it_was_dropped(functions, tmp_path):
    first, second = (functions[number].deployed for number in (0, 3))
    node = Bindings()
    asked = [each.bind_message() for each in (first, second)]
    paths = [tmp_path / str(number) for number in range(2)]
    for path in paths:
        path.touch()
    for path, function, bind in zip(paths, (first, second), asked, strict=True):
        with path.open() as file:
            node.begin_first(function, bind, [file.fileno()])
        node.answered(function.id)
        node.mark_dropped(stored(bind.blocks[0][:1]))
    assert node.inodes == {path.stat().st_ino for path in paths}
    node.end(first.id)
    assert node.inodes == {paths[1].stat().st_ino}
    node.end(second.id)
    assert node.inodes == set()
