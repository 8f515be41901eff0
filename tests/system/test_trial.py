"""A deploy reports the errors that requests would have."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.nodes import parents_of_all
from overwinter.api.deployer import package
from overwinter.core.errors import CallerError, NotFoundError
from overwinter.core.function import Settings
from overwinter.model.export import export

from .nodes import NodeProcess, Scale, ask, stopped_workers, wait_until

READS = """
import torch

INPUTS = [{"name": "row", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "sum", "datatype": "FP32", "shape": [1]}]

def preprocess(inputs, state):
    return {"x": torch.tensor([[float(item) for item in inputs["row"][0].split(b",")]])}

def postprocess(outputs, inputs, state):
    return {"sum": outputs["y"].sum(dim=1)}
"""


def deploy(node: NodeProcess, name: str, handler: str, *samples):
    made = export(Scale(2.0), {"x": torch.zeros(2, 4)})
    return package(name, made.program, made.weights, handler=handler, samples=samples).upload(node.client)


def is_gone(node: NodeProcess, name: str) -> bool:
    with pytest.raises(NotFoundError):
        node.client.function(name)
    return True


def test_a_handler_that_cannot_be_called_is_refused(node: NodeProcess):
    with pytest.raises(CallerError, match=r"preprocess\(inputs, state\)"):
        deploy(node, "uncallable", "def preprocess(inputs):\n    return inputs\n")
    assert is_gone(node, "uncallable")


def test_a_handler_that_fails_on_a_generated_request_is_deployed_with_a_warning(node: NodeProcess):
    made = deploy(node, "doubted", READS)
    assert "could not convert" in made.warning
    assert "--sample" in made.warning
    assert node.client.infer("doubted", {"row": ["1,2,3,4"]})["sum"].tolist() == [24.0]


def test_a_sample_replaces_the_generated_request(node: NodeProcess):
    assert deploy(node, "proved", READS, {"row": ["1,2,3,4"]}, {"row": [b"0,0,0,0"]}).warning == ""
    assert node.client.infer("proved", {"row": ["1,2,3,4"]})["sum"].tolist() == [24.0]


def test_a_new_version_without_a_setting_of_the_newest_is_deployed_with_a_warning(node: NodeProcess):
    made = export(Scale(2.0), {"x": torch.zeros(2, 4)})
    warnings = [
        package("tuned", made.program, made.weights, settings=settings).upload(node.client).warning
        for settings in (Settings(slo_ms=50.0, queue_limit=9), Settings(queue_limit=8, max_workers=2), Settings())
    ]
    reset = [{word for word in ("slo_ms", "queue_limit", "max_workers") if word in warning} for warning in warnings]
    assert reset == [set(), {"slo_ms"}, {"queue_limit", "max_workers"}]
    assert ["version 1" in warnings[1], "version 2" in warnings[2]] == [True, True]


def test_a_deploy_with_a_sample_that_is_not_answered_is_refused(node: NodeProcess):
    with pytest.raises(CallerError, match="sample 2.*must be 4"):
        deploy(node, "refused", READS, {"row": ["1,2,3,4"]}, {"row": ["1,2,3"]})
    assert is_gone(node, "refused")
    broken = READS.replace('"sum": outputs', '"total": outputs')
    with pytest.raises(CallerError, match="sample 1.*OUTPUTS.*has"):
        deploy(node, "refused", broken, {"row": ["1,2,3,4"]})


def test_a_sample_is_accepted_for_a_function_without_a_handler(node: NodeProcess):
    made = export(Scale(2.0), {"x": torch.zeros(2, 4)})
    packed = package("sampled", made.program, made.weights, samples=[{"x": torch.ones(3, 4)}])
    assert packed.upload(node.client).warning == ""
    assert ask(node, "sampled") == [3.0] * 4


class Wide(torch.nn.Module):
    def forward(self, x):
        return {"y": x.expand(x.shape[0], 1 << 25)}


def test_a_program_whose_every_answer_is_too_large_is_refused(node: NodeProcess):
    example = {"x": torch.zeros(2, 1)}
    made = export(Wide(), example, {"x": {0: "batch"}})
    with pytest.raises(CallerError, match=f"{4 << 25} bytes for one request"):
        package("wide", made.program, made.weights).upload(node.client)
    assert is_gone(node, "wide")
    reduces = 'OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": ["batch", 2]}]\n'
    reduces += "def postprocess(outputs, inputs, state):\n    return {'y': outputs['y'][:, :2]}\n"
    package("narrow", made.program, made.weights, handler=reduces).upload(node.client)
    assert node.client.infer("narrow", {"x": [[3.0]]})["y"].tolist() == [[3.0, 3.0]]


SELF_ENDING = {
    "leaves when asked": "def preprocess(inputs, state):\n    os._exit(3)\n",
    "leaves well": "def preprocess(inputs, state):\n    os._exit(0)\n",
    "leaves when loaded": "os._exit(0)\n",
    "kills itself": "def preprocess(inputs, state):\n    os.kill(os.getpid(), 9)\n",
    "breaks": "def preprocess(inputs, state):\n    import ctypes\n    ctypes.string_at(8)\n",
}


@pytest.mark.parametrize("kind", SELF_ENDING)
def test_a_deploy_whose_handler_ends_its_process_on_trial_is_refused_as_the_callers_error(node: NodeProcess, kind: str):
    with pytest.raises(CallerError, match="--sample"):
        deploy(node, "ending", f"import os\n{SELF_ENDING[kind]}")
    assert is_gone(node, "ending")


def test_the_end_of_a_process_on_trial_is_noticed_even_if_its_zygote_reports_it_late(make_node):
    node = make_node("--zygote-timeout-s", "60")
    stops = "import os, signal\ndef preprocess(inputs, state):\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(deploy, node, "ending", f"{stops}    os._exit(3)\n")
        [worker] = wait_until(lambda: stopped_workers(node))
        zygote = parents_of_all()[worker]
        os.kill(zygote, signal.SIGSTOP)
        os.kill(worker, signal.SIGCONT)
        with pytest.raises(CallerError, match="its process ended.*--sample"):
            trial.result(60)
        os.kill(zygote, signal.SIGCONT)
    assert is_gone(node, "ending")
