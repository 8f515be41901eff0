"""No listed operator accesses memory outside its tensors, returns uninitialized memory or ends its process, and the
fuzzer would detect it.
"""

import ctypes
import faulthandler
import os
import signal

import pytest
import torch

from benchmarks.guard_pages import GuardedMemory
from benchmarks.operator_calls import OperatorCall, Tensor, valid_calls
from benchmarks.operator_fuzz import attempt, fuzz, operators
from overwinter.model import guards


def test_each_operator_has_a_call_that_succeeds():
    calls = valid_calls()
    assert sorted(calls) == operators()
    # The test program declares a random number of results for an operator that returns a list, so its call needs
    # several tries.
    tries = {name: (attempt(call, str(chance)) for call in calls[name] for chance in range(40)) for name in calls}
    assert [name for name, outcomes in tries.items() if "ok" not in outcomes] == []


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_extreme_arguments_do_no_harm(seed):
    outcome = fuzz(seed, 3)
    assert outcome.findings == ()
    assert outcome.tries == 3 * len(operators())
    assert outcome.counts["ok"] > outcome.counts["refused"] > 0


@pytest.mark.parametrize(
    ("operator", "tries", "kinds"),
    [
        ("aten._native_batch_norm_legit_no_training.default", 60, {"outside", "unwritten"}),
        ("aten._weight_norm.default", 60, {"outside", "unwritten"}),
        ("aten.grid_sampler_2d.default", 20, {"unwritten"}),
        ("aten.lstm.input", 60, {"outside", "crash"}),
    ],
)
def test_without_the_guards_the_fuzzer_finds_what_they_prevent(monkeypatch, operator, tries, kinds):
    assert not fuzz(1, tries, [operator]).findings
    monkeypatch.setattr(guards, "_GUARDS", {})
    assert kinds & {finding.kind for finding in fuzz(1, tries, [operator]).findings}


QUERY = Tensor("float32", (2, 4, 4, 8), layout="overlapping")
KEYS = Tensor("float32", (2, 2, 4, 8))
NO_GROUPS = (Tensor("float32", (6, 16)), Tensor("float32", (0, 16, 16)), Tensor("int32", (0,)))


@pytest.mark.parametrize(
    "call",
    [
        OperatorCall("aten.scaled_dot_product_attention.default", (QUERY, KEYS, KEYS), {"enable_gqa": True}),
        OperatorCall("aten._grouped_mm.default", NO_GROUPS, {}),
    ],
)
def test_with_the_guards_no_result_is_left_unwritten(call):
    assert attempt(call, "0") == "ok"


@pytest.mark.parametrize(("at_end", "place"), [(True, 400), (False, -1)])
def test_what_is_beside_a_tensor_cannot_be_read(at_end, place):
    with GuardedMemory(0x5A, at_end=at_end) as memory:
        tensor = memory.flat(torch.zeros(100), writable=False)
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            ctypes.string_at(tensor.data_ptr() + place, 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


@pytest.mark.parametrize(("at_end", "place"), [(True, -1), (False, 400)])
def test_a_write_beside_a_tensor_within_its_pages_is_seen(at_end, place):
    with GuardedMemory(0x5A, at_end=at_end) as memory:
        tensor = memory.flat(torch.zeros(100), writable=True)
        tensor.fill_(1)
        assert memory.is_whole()
        ctypes.memset(tensor.data_ptr() + place, 0, 1)
        assert not memory.is_whole()
