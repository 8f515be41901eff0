"""Pipelines with real processes, real HTTP and the reference client."""

import concurrent.futures
import os
import signal

import msgspec
import numpy
import pytest
from tritonclient import http
from tritonclient.utils import InferenceServerException

from overwinter import Client, Pipeline, Stage
from overwinter.core.errors import CallerError, ConflictError, DeadlineError, NotFoundError, OverwinterError

from .nodes import NodeProcess, Scale, ask, deploy

# Return the numbers of the rows of x that are above 0 in their first column.
DETECT = """
INPUTS = [{"name": "x", "datatype": "FP32", "shape": ["batch", 4]}]
OUTPUTS = [{"name": "rows", "datatype": "INT64", "shape": ["found"]}]


def postprocess(outputs, inputs, state):
    return {"rows": (inputs["x"][:, 0] > 0).nonzero()[:, 0]}
"""
# Select the rows from x, and pass only those to the program.
CLASSIFY = """
INPUTS = [
    {"name": "x", "datatype": "FP32", "shape": ["batch", 4]},
    {"name": "rows", "datatype": "INT64", "shape": ["found"]},
]
OUTPUTS = [{"name": "label", "datatype": "BYTES", "shape": ["found"]}]


def preprocess(inputs, state):
    return {"x": inputs["x"][inputs["rows"]]}


def postprocess(outputs, inputs, state):
    return {"label": [b"%d" % int(row[0]) for row in outputs["y"]]}
"""
# Wait as long as x says.
SLOW = """
import time


def preprocess(inputs, state):
    time.sleep(float(inputs["x"][0, 1]))
    return inputs
"""
STREET = Pipeline(
    name="street",
    inputs=("picture",),
    stages={
        "detect": Stage(function="p-detect", inputs={"x": "input:picture"}),
        "cars": Stage(function="p-cars", inputs={"x": "input:picture", "rows": "detect:rows"}),
        "people": Stage(function="p-people", inputs={"x": "input:picture", "rows": "detect:rows"}),
    },
    outputs={"cars": "cars:label", "people": "people:label", "found": "detect:rows"},
    slo_ms=60_000,
)
PICTURE = numpy.array([[1, 0, 0, 0], [-1, 0, 0, 0], [3, 0, 0, 0]], dtype=numpy.float32)
CHAIN = Pipeline(
    name="chain",
    inputs=("x",),
    stages={
        "first": Stage(function="p-slow", inputs={"x": "input:x"}),
        "second": Stage(function="p-double", inputs={"x": "first:y"}),
    },
    outputs={"y": "second:y"},
)


@pytest.fixture(scope="module")
def street(node: NodeProcess) -> NodeProcess:
    deploy(node, "p-detect", handler=DETECT)
    deploy(node, "p-cars", Scale(2.0), handler=CLASSIFY)
    deploy(node, "p-people", Scale(10.0), handler=CLASSIFY)
    deploy(node, "p-double", Scale(2.0))
    deploy(node, "p-slow", Scale(3.0), handler=SLOW)
    node.client.deploy_pipeline(STREET)
    node.client.deploy_pipeline(CHAIN)
    return node


@pytest.fixture
def triton(street: NodeProcess):
    with http.InferenceServerClient(street.url.removeprefix("http://"), concurrency=2) as client:
        yield client


def arrived(node: NodeProcess, name: str) -> int:
    return sum(is_arrival(step, name) for step in node.steps())


def is_arrival(step: list, name: str) -> bool:
    return step[1]["type"] == "Arrived" and step[1]["name"] == name


def test_the_reference_client_uses_a_pipeline_as_a_function(triton):
    assert triton.is_model_ready("street")
    metadata = triton.get_model_metadata("street")
    version = metadata["versions"][0]
    assert metadata["platform"] == "overwinter_pipeline"
    assert metadata["inputs"] == [{"name": "picture", "datatype": "FP32", "shape": [-1, 4]}]
    assert [output["name"] for output in metadata["outputs"]] == ["cars", "people", "found"]
    assert triton.get_model_config("street")["input"][0]["dims"] == [-1, 4]
    assert "street" in [entry["name"] for entry in triton.get_model_repository_index()]
    tensor = http.InferInput("picture", PICTURE.shape, "FP32")
    tensor.set_data_from_numpy(PICTURE)
    answer = triton.infer("street", [tensor], model_version=version, request_id="r1")
    assert answer.as_numpy("cars").tolist() == [b"3", b"7"]
    assert answer.as_numpy("people").tolist() == [b"11", b"31"]
    assert answer.as_numpy("found").tolist() == [0, 2]
    assert (answer.get_response()["id"], answer.get_response()["model_version"]) == ("r1", version)
    wanted = [http.InferRequestedOutput("found", binary_data=False)]
    assert triton.infer("street", [tensor], outputs=wanted).as_numpy("cars") is None
    wrong = http.InferInput("picture", [1, 5], "FP32")
    wrong.set_data_from_numpy(numpy.zeros((1, 5), dtype=numpy.float32))
    with pytest.raises(InferenceServerException, match=r"'picture' has shape \[1, 5\]"):
        triton.infer("street", [wrong])


def test_loading_a_pipeline_wakes_all_its_functions(street, triton):
    triton.load_model("street")
    lives = {street.client.function(f"p-{name}")["lifecycle"] for name in ("detect", "cars", "people")}
    assert lives == {"awake"}
    with pytest.raises(InferenceServerException, match="unload its functions"):
        triton.unload_model("street")


def test_explain_refers_to_the_functions_of_the_pipeline(street):
    with pytest.raises(NotFoundError, match="'street' is a pipeline, .* its functions: p-cars, p-detect, p-people"):
        street.client.explain("street")


def test_the_metrics_include_pipelines(street):
    street.client.infer("street", {"picture": PICTURE})
    assert 'pipeline_requests_total{outcome="answered",pipeline="street"}' in street.client.metrics()


def test_both_classifiers_are_called_before_either_answers(street):
    before = len(street.steps())
    street.client.infer("street", {"picture": PICTURE})
    results = [step[1] for step in street.steps()[before:]]
    kinds = [
        event["name"] if event["type"] == "Arrived" else event["type"]
        for event in results
        if event["type"] in ("Arrived", "RunEnded")
    ]
    assert kinds == ["p-detect", "RunEnded", "p-cars", "p-people", "RunEnded", "RunEnded"]


def test_concurrent_calls_get_their_own_answers(street):
    def call(number: int) -> list[bytes]:
        with Client(street.url) as client:
            return client.infer("street", {"picture": numpy.full((2, 4), number, numpy.float32)})["cars"].tolist()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, range(1, 33)))
    assert answers == [[b"%d" % (2 * number + 1)] * 2 for number in range(1, 33)]


def test_one_deadline_applies_to_all_stages(street):
    def call(wait_s: float, timeout_s: float):
        x = [[1.0, wait_s, 1.0, 1.0]]
        return street.client.infer("chain", {"x": x}, timeout_s=timeout_s, wait_s=60.0)["y"].tolist()

    before, failed = len(street.steps()), street.client.function("chain")["requests"]["failed"]
    assert call(0.5, 20.0)[0][0] == 9.0
    # The second stage got the time that the first had left of 20 seconds.
    steps = street.steps()[before:]
    [left] = [step[1]["deadline"] - step[0] for step in steps if is_arrival(step, "p-double")]
    assert left <= 20.0 - 0.5
    # The first stage does not end within the timeout, so the second one gets no request.
    before = arrived(street, "p-double")
    [worker] = street.client.explain("p-slow")["workers"]
    os.kill(worker["pid"], signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="stage 'first' of pipeline 'chain'"):
        call(0.0, 0.1)
    os.kill(worker["pid"], signal.SIGCONT)
    assert arrived(street, "p-double") == before
    assert street.client.function("chain")["requests"]["failed"] == failed + 1


def test_an_error_of_a_stage_is_an_error_of_the_pipeline(street):
    with pytest.raises(
        OverwinterError, match="stage 'first' of pipeline 'chain': .*sleep length must be non-neg"
    ) as result:
        street.client.infer("chain", {"x": [[1.0, -1.0, 1.0, 1.0]]})
    with pytest.raises(type(result.value), match="sleep length"):
        street.client.infer("p-slow", {"x": [[1.0, -1.0, 1.0, 1.0]]})


def test_a_pipeline_with_an_unknown_function_mismatched_tensors_or_a_taken_name_is_refused(street):
    def changed(**changes):
        return msgspec.structs.replace(CHAIN, name="never", **changes)

    stage = Stage(function="absent", inputs={"x": "first:y"})
    with pytest.raises(NotFoundError, match="stage 'second' of pipeline 'never': no function 'absent' here"):
        street.client.deploy_pipeline(changed(stages=CHAIN.stages | {"second": stage}))
    stage = Stage(function="p-cars", inputs={"x": "first:y", "rows": "first:y"})
    with pytest.raises(CallerError, match=r"'first:y' is FP32 .*, and input 'rows' takes INT64"):
        street.client.deploy_pipeline(changed(stages=CHAIN.stages | {"second": stage}, outputs={"l": "second:label"}))
    stage = Stage(function="chain", inputs={"x": "first:y"})
    with pytest.raises(NotFoundError, match="'chain' is a pipeline, not a function"):
        street.client.deploy_pipeline(changed(stages=CHAIN.stages | {"second": stage}))
    with pytest.raises(ConflictError, match="'p-double' is a function"):
        street.client.deploy_pipeline(msgspec.structs.replace(CHAIN, name="p-double"))
    with pytest.raises(NotFoundError):
        street.client.function("never")


def test_a_removal_or_deploy_that_would_break_a_pipeline_is_refused(street):
    with pytest.raises(ConflictError, match="stage 'detect' of pipeline 'street': .*remove pipeline 'street' first"):
        street.client.remove("p-detect")
    with pytest.raises(ConflictError, match="'detect:rows'.*remove pipeline 'street' first"):
        deploy(street, "p-detect", handler=DETECT.replace("INT64", "INT32"))
    with pytest.raises(ConflictError, match="'street' is a pipeline"):
        deploy(street, "street")
    deploy(street, "p-cars", Scale(4.0), handler=CLASSIFY)
    assert street.client.infer("street", {"picture": PICTURE})["cars"].tolist() == [b"5", b"13"]
    street.client.remove("p-cars", 2)
    assert street.client.infer("street", {"picture": PICTURE})["cars"].tolist() == [b"3", b"7"]
    street.client.unload("p-people")
    assert not street.client.ready("street")
    assert "unloaded" in street.client.function("street")["reason"]
    street.client.load("street")
    assert street.client.ready("street")


def test_pipelines_survive_a_restart_until_they_are_removed(shared_node):
    node = shared_node()
    deploy(node, "p-slow", Scale(3.0), handler=SLOW)
    deploy(node, "p-double", Scale(2.0))
    assert node.client.deploy_pipeline(CHAIN).version == 1
    assert node.client.deploy_pipeline(CHAIN).version == 2
    node.kill()
    node.start()
    assert ask(node, "chain", 0.0) == [3.0] * 4
    assert [each["version"] for each in node.client.pipelines()] == [2]
    node.client.remove("chain")
    node.client.remove("p-double")
    with pytest.raises(NotFoundError, match="'chain'"):
        ask(node, "chain", 0.0)
    assert node.client.pipelines() == []
