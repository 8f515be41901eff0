"""What a worker measures of itself: its memory and the time of each layer."""

import time

import torch

from overwinter.model.export import export
from overwinter.model.program import encode_program
from overwinter.worker.measure import SelfMeasurement, kibibytes
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner

SMAPS = """\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0                          [heap]
Size:               1024 kB
Rss:                 900 kB
Shared_Dirty:        300 kB
Private_Clean:        40 kB
Private_Dirty:       560 kB
7f0000200000-7f0004200000 r--s 00000000 00:19 77                         /dev/shm/store/block
Rss:               65536 kB
Private_Clean:         0 kB
Private_Dirty:     65536 kB
7f0005000000-7f0005100000 rw-s 00000000 00:01 78                         /memfd:overwinter-in-1 (deleted)
Rss:                  64 kB
Private_Dirty:        64 kB
7f0006000000-7f0006100000 r-xp 00000000 08:01 79                         /usr/lib/libtorch_cpu.so
Rss:                 500 kB
Private_Clean:       500 kB
VmFlags: rd ex mr mw me
"""


def test_only_private_writable_mappings_count_as_private_memory():
    assert kibibytes(SMAPS.splitlines()) == (600, 900 + 65536 + 64 + 500)


class Clock:
    """A clock whose intervals between two readings grow by one second each."""

    def __init__(self):
        self.now, self.step = 0.0, 0.0

    def __call__(self) -> float:
        self.step += 1.0
        self.now += self.step
        return self.now


def test_each_layer_is_timed_in_one_run(monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).eval()
    exported = export(module, {"input": torch.zeros(2, 8)})
    prepared = Prepared(encode_program(exported.program))
    runner = Runner("f@1", prepared, list(exported.weights), None)
    monkeypatch.setattr(time, "perf_counter", Clock())
    measurement = SelfMeasurement.__new__(SelfMeasurement)
    measurement._timed = None
    assert len(prepared.program.layers) == 3
    # One reading before the first layer and one after each: a missing or additional reading changes the times.
    assert measurement.layer_seconds(runner, 4) == (2.0, 3.0, 4.0)
    assert measurement.layer_seconds(runner, 4) == (6.0, 7.0, 8.0)


def test_layers_are_timed_over_a_batch_of_the_size_asked_for():
    exported = export(torch.nn.Linear(8, 2).eval(), {"input": torch.zeros(2, 8)})
    runner = Runner("f@1", Prepared(encode_program(exported.program)), list(exported.weights), None)
    ran = []
    measurement = SelfMeasurement.__new__(SelfMeasurement)
    measurement._timed = lambda weights, inputs, marks: ran.append(inputs[0].shape)
    assert measurement.layer_seconds(runner, 4) == ()
    assert ran == [(4, 8)]
