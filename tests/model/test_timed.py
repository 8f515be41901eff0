import itertools

import torch

from overwinter.model.compile import compile_program, compile_timed
from overwinter.model.export import export


class Residual(torch.nn.Module):
    """Writes in place to a value that crosses layers, so that its layers cannot run separately."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        kept = self.one(x)
        changed = self.two(kept)
        kept += changed
        return {"y": kept * 2, "z": changed}


def test_a_timed_run_gives_what_a_plain_run_gives_and_marks_each_layer():
    exported = export(Residual().eval(), {"x": torch.zeros(2, 8)})
    ticks = itertools.count()
    timed = compile_timed(exported.program, lambda: float(next(ticks)))
    plain = compile_program(exported.program)
    marks: list[float] = []
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = plain(list(exported.weights), [x])
        given = timed(list(exported.weights), [x], marks)
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))
    assert marks == [float(number) for number in range(len(exported.program.layers))]
    assert len(marks) > 2
