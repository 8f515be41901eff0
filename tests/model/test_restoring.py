"""After an export a module is as it was, whatever its code keeps while it is traced."""

from collections import deque

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from overwinter.core.errors import ProgramError
from overwinter.model.export import export
from overwinter.model.restoring import restored

X = torch.arange(12.0).reshape(2, 6)


class Attribute(nn.Module):
    cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(x.shape[1])
        return x + self.cache


class Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None)

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(x.shape[1])
        return x + self.cache


class NewBuffer(nn.Module):
    def forward(self, x):
        if "cache" not in self._buffers:
            self.register_buffer("cache", torch.arange(x.shape[1]), persistent=False)
        return x + self.cache


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.caches = {"kept": [torch.zeros(1)]}

    def forward(self, x):
        if "arange" not in self.caches:
            self.caches["arange"] = torch.arange(x.shape[1])
            self.caches["kept"].append(self.caches["arange"])
        return x + self.caches["arange"]


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = (deque(maxlen=2), set())

    def forward(self, x):
        if not self.seen[0]:
            self.seen[0].append(torch.arange(x.shape[1]))
            self.seen[1].add(x.dim())
        return x + self.seen[0][0]


class Store:
    """A plain object with a tensor in it."""

    def __init__(self):
        self.tensor = None


class InAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.store = Store()

    def forward(self, x):
        if self.store.tensor is None:
            self.store.tensor = torch.arange(x.shape[1])
        return x + self.store.tensor


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attribute(), InAnObject()])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


class Failing(Buffer):
    def forward(self, x):
        super().forward(x)
        raise KeyError("after caching")


def fakes(module):
    """The tracer's tensors that a module reaches."""
    found, waiting, seen = [], [module], set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, FakeTensor):
            found.append(thing)
        elif isinstance(thing, nn.Module | Store):
            waiting.append(vars(thing))
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple | set | deque):
            waiting.extend(thing)
    return found


@pytest.mark.parametrize("kind", [Buffer, NewBuffer])
def test_a_buffer_that_a_module_creates_while_it_runs_is_refused_and_removed(kind):
    module = kind()
    before = kind()(X)
    with pytest.raises(ProgramError, match="buffer 'cache' while it runs"):
        export(module, (X,))
    assert not fakes(module)
    assert torch.equal(module(X), before)


@pytest.mark.parametrize("kind", [Attribute, Dictionary, Queue, InAnObject, Nested])
def test_module_works_after_its_export(kind):
    module = kind()
    before = kind()(X)
    export(module, (X,), {"x": {0: "batch", 1: "n"}})
    assert not fakes(module)
    assert torch.equal(module(X), before)


def test_module_is_restored_when_its_export_fails():
    module = Failing()
    with pytest.raises(ProgramError, match="after caching"):
        export(module, (X,))
    assert not fakes(module)
    assert module.cache is None


def test_what_a_module_cached_before_its_export_stays():
    module = Dictionary()
    module(X)
    cached = module.caches["arange"]
    export(module, (X,))
    assert module.caches["arange"] is cached
    assert len(module.caches["kept"]) == 2


def test_every_container_gets_its_content_back_in_the_same_order():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.listed, module.named = [1, 2], {"b": 1, "a": 2}
    parameters, listed = list(module.parameters()), module.listed
    with restored(module):
        module.listed.append(3)
        module.listed = None
        module.named.pop("b")
        module.named["b"] = 1
        module[0].weight = nn.Parameter(torch.zeros(2, 2))
        module.append(nn.Tanh())
        del module[0].bias
    assert module.listed is listed
    assert listed == [1, 2]
    assert list(module.named) == ["b", "a"]
    assert len(module) == 2
    assert [id(each) for each in module.parameters()] == [id(each) for each in parameters]
