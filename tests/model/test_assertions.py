"""The author's own checks of values are kept, with the author's messages, and do not prevent an export."""

import pytest
import torch
from torch import nn

from overwinter.model.compile import compile_program, compile_timed
from overwinter.model.export import export, export_saved
from overwinter.model.liveness import live_in, live_out
from overwinter.model.program import decode_program, encode_program, validate
from overwinter.worker.messages import Failure
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner
from tests.model.test_checks import Served

X = torch.arange(1.0, 25.0).reshape(4, 6)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def asserted(self, x):
    torch._assert_async(x.amin() > 0, "only what is above zero")
    return self.layer(x)


def checked(self, x):
    torch._check((x.amin() > 0).item(), lambda: "only what is above zero")
    return self.layer(x)


def read(self, x):
    count = x.min().to(torch.int64).item()
    torch._check(count > 0, lambda: "only what is above zero")
    torch._check(count < 1000)
    return self.layer(x) * count


def inside(self, x):
    with torch.no_grad():
        y = self.layer(x)
        torch._assert_async(x.amin() > 0, "only what is above zero")
    return y.relu()


CHECKS = {function.__name__: function for function in (asserted, checked, read, inside)}


@pytest.fixture(params=CHECKS)
def module(request):
    torch.manual_seed(0)
    return Net(CHECKS[request.param]).eval()


def test_request_that_fails_a_check_gets_the_authors_message(module):
    served = Served(export(module, (X,)))
    failure = served(-X)
    assert isinstance(failure, Failure)
    assert failure.error == "CallerError"
    assert "only what is above zero" in failure.message
    with torch.inference_mode():
        assert torch.equal(served(X), module(X))


def test_a_request_that_fails_a_check_does_not_affect_another_request(module):
    served = Served(export(module, (X,)))
    good, bad = served.runner.answer([{"x": X[:2]}, {"x": -X[:2]}])
    assert isinstance(bad, Failure)
    with torch.inference_mode():
        assert torch.equal(good["output"], module(X[:2]))


def test_checks_survive_encoding_and_are_covered_by_the_layers(module):
    program, _ = export(module, (X,))
    again = decode_program(encode_program(program))
    validate(again)
    assert again == program
    assert program.layers[-1].stop == len(program.calls)


def test_a_program_with_checks_answers_the_same_wherever_it_is_cut(module):
    program, weights = export(module, (X,))
    with torch.inference_mode():
        for cut in range(1, len(program.calls)):
            held = dict(zip(live_in(program), (X,), strict=True))
            for start, stop in [(0, cut), (cut, len(program.calls))]:
                taken = [held[slot] for slot in live_in(program, start, stop)]
                given = compile_program(program, start, stop)(weights, taken)
                held.update(zip(live_out(program, stop, start), given, strict=True))
            assert torch.equal(held[program.output_slots[0]], module(X))


def test_runs_for_timing_and_warm_up_on_inputs_of_zeros_skip_the_checks(module):
    exported = export(module, (X,))
    zeros = [torch.zeros(4, 6)]
    marks: list[float] = []
    with torch.inference_mode():
        compile_timed(exported.program, lambda: 0.0)(exported.weights, zeros, marks)
        compile_program(exported.program, checks_values=False)(exported.weights, zeros)
    assert len(marks) == len(exported.program.layers)
    prepared = Prepared(encode_program(exported.program))
    Runner("f@1", prepared, exported.weights, None).warm_up()
    (answered,) = Runner("f@1", prepared, exported.weights, None, run=prepared.unchecked()).answer([{"x": zeros[0]}])
    assert not isinstance(answered, Failure)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_saved_export_keeps_its_checks(module, tmp_path):
    saved = torch.export.export(module, (X,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}, strict=False)
    for at, form in enumerate((saved, saved.run_decompositions())):
        torch.export.save(form, tmp_path / f"{at}.pt2")
        served = Served(export_saved(tmp_path / f"{at}.pt2"))
        assert isinstance(served(-X), Failure)
        with torch.inference_mode():
            assert torch.allclose(served(X), module(X))


def test_a_failed_check_without_a_message_names_its_source_file():
    def unsaid(self, x):
        torch._check(x.sum().to(torch.int64).item() > 0)
        return self.layer(x)

    failure = Served(export(Net(unsaid), (X,)))(-X)
    assert "test_assertions.py" in failure.message
