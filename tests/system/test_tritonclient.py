"""The reference client, unmodified, against a real node."""

import numpy
import pytest
from tritonclient import http
from tritonclient.utils import InferenceServerException

from .nodes import NodeProcess, Scale, deploy

TEXTS = """
import torch

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]
OUTPUTS = [{"name": "length", "datatype": "BYTES", "shape": ["batch"]}]


def preprocess(inputs, state):
    return {"x": torch.tensor([[float(len(text))] * 4 for text in inputs["text"]])}


def postprocess(outputs, inputs, state):
    return {"length": [str(int(row[0])).encode() for row in outputs["y"]]}
"""


@pytest.fixture(scope="module")
def triton(node: NodeProcess):
    deploy(node, "triton-plain", Scale(2.0))
    deploy(node, "triton-texts", Scale(1.0), handler=TEXTS)
    with http.InferenceServerClient(node.url.removeprefix("http://"), concurrency=2) as client:
        yield client


def test_the_reference_client_reads_health_and_metadata(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("triton-plain")
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]
    metadata = triton.get_model_metadata("triton-plain")
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert triton.get_model_config("triton-plain")["name"] == "triton-plain"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_the_reference_client_infers_in_json_and_binary(triton, binary_in, binary_out):
    x = numpy.arange(8, dtype=numpy.float32).reshape(2, 4)
    tensor = http.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary_in)
    wanted = [http.InferRequestedOutput("y", binary_data=binary_out)]
    answer = triton.infer("triton-plain", [tensor], outputs=wanted, request_id="r1")
    assert numpy.array_equal(answer.as_numpy("y"), x * 2 + 1)
    assert answer.get_response()["id"] == "r1"


def test_the_reference_client_sends_texts_to_a_handler(triton):
    texts = numpy.array([b"four", b"sieben"], dtype=object)
    tensor = http.InferInput("text", texts.shape, "BYTES")
    tensor.set_data_from_numpy(texts)
    assert triton.infer("triton-texts", [tensor]).as_numpy("length").tolist() == [b"5", b"7"]


def test_the_reference_client_lists_unloads_and_loads_functions(triton):
    def states():
        return {entry["name"]: entry["state"] for entry in triton.get_model_repository_index()}

    assert states()["triton-plain"] == "READY"
    triton.unload_model("triton-plain")
    assert states()["triton-plain"] == "UNAVAILABLE"
    assert not triton.is_model_ready("triton-plain")
    triton.load_model("triton-plain")
    assert states()["triton-plain"] == "READY"


def test_errors_have_the_nodes_message(triton):
    tensor = http.InferInput("x", [1, 5], "FP32")
    tensor.set_data_from_numpy(numpy.zeros((1, 5), dtype=numpy.float32))
    with pytest.raises(InferenceServerException, match=r"shape \[1, 5\]"):
        triton.infer("triton-plain", [tensor])
    with pytest.raises(InferenceServerException, match="absent"):
        triton.infer("absent", [tensor])
