"""An unmodified Triton client works with this node."""

from collections.abc import Iterator

import numpy
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.api.fake_node import Served

A = numpy.array([[1, 2, 3], [4, 5, 6]], dtype=numpy.int32)
B = numpy.array([[10, 20, 30], [40, 50, 60]], dtype=numpy.int32)


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        yield client


def infer_input(name: str, datatype: str, array: numpy.ndarray, binary: bool) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def add_inputs(first: bool, second: bool) -> list[triton.InferInput]:
    return [infer_input("a", "INT32", A, first), infer_input("b", "INT32", B, second)]


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add")
    assert client.is_model_ready("add", "1")
    assert not client.is_model_ready("add", "7")
    assert not client.is_model_ready("absent")


def test_metadata(client: triton.InferenceServerClient) -> None:
    server = client.get_server_metadata()
    assert "binary_tensor_data" in server["extensions"]
    model = client.get_model_metadata("add", "2")
    assert model["versions"] == ["1", "2"]
    assert model["inputs"][0] == {"name": "a", "datatype": "INT32", "shape": [-1, 3]}
    assert client.get_model_config("add")["input"][0]["data_type"] == "TYPE_INT32"


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, True), (True, False), (False, True)])
def test_inputs_in_json_and_binary(client: triton.InferenceServerClient, first: bool, second: bool) -> None:
    result = client.infer("add", add_inputs(first, second), request_id="r1")
    assert (result.as_numpy("sum") == A + B).all()
    assert (result.as_numpy("difference") == A - B).all()
    assert (result.get_response()["id"], result.get_response()["model_version"]) == ("r1", "2")


def test_numbers_that_json_cannot_represent_are_sent_as_binary_or_refused(
    client: triton.InferenceServerClient,
) -> None:
    odd = numpy.array([[numpy.nan, numpy.inf, -numpy.inf, 1.0]], dtype=numpy.float32)
    [input_name] = [each["name"] for each in client.get_model_metadata("echo-fp32")["inputs"]]
    [output_name] = [each["name"] for each in client.get_model_metadata("echo-fp32")["outputs"]]
    binary, listed = (infer_input(input_name, "FP32", odd, binary) for binary in (True, False))
    answer = client.infer("echo-fp32", [binary]).as_numpy(output_name)
    assert answer.tobytes() == odd.tobytes()
    with pytest.raises(InferenceServerException, match="binary tensor extension"):
        client.infer("echo-fp32", [listed])
    with pytest.raises(InferenceServerException, match="binary_data"):
        client.infer("echo-fp32", [binary], outputs=[triton.InferRequestedOutput(output_name, binary_data=False)])


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, True), (True, False), (False, True)])
def test_outputs_in_json_and_binary(client: triton.InferenceServerClient, first: bool, second: bool) -> None:
    wanted = [
        triton.InferRequestedOutput("difference", binary_data=first),
        triton.InferRequestedOutput("sum", binary_data=second),
    ]
    result = client.infer("add", add_inputs(False, True), model_version="1", outputs=wanted)
    assert (result.as_numpy("sum") == A + B).all()
    assert (result.as_numpy("difference") == A - B).all()
    assert result.get_response()["model_version"] == "1"
    assert ("data" in result.get_output("difference"), "data" in result.get_output("sum")) == (not first, not second)


@pytest.mark.parametrize("binary_out", [False, True])
@pytest.mark.parametrize("binary_in", [False, True])
def test_bytes(client: triton.InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    text = numpy.array(["stone", "", "ab"], dtype=object)
    wanted = [triton.InferRequestedOutput("reversed", binary_data=binary_out)]
    result = client.infer("reverse", [infer_input("text", "BYTES", text, binary_in)], outputs=wanted)
    expected = [b"enots", b"", b"ba"]
    assert result.as_numpy("reversed").tolist() == (expected if binary_out else [item.decode() for item in expected])


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "uint32", "int64", "uint64", "float32", "float64"])
def test_datatypes(client: triton.InferenceServerClient, dtype: str, binary: bool) -> None:
    kind = {"float32": "FP32", "float64": "FP64"}.get(dtype, dtype.upper())
    given = numpy.array([[0, 1, 100]], dtype=dtype)
    result = client.infer(
        f"echo-{kind.lower()}",
        [infer_input("x", kind, given, binary)],
        outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
    )
    assert result.as_numpy("y").dtype == given.dtype
    assert (result.as_numpy("y") == given).all()


def test_floats_of_16_bits_are_sent_as_binary_only(client: triton.InferenceServerClient) -> None:
    given = numpy.array([[0.5, -2.0]], dtype=numpy.float16)
    result = client.infer("echo-fp16", [infer_input("x", "FP16", given, True)])
    assert (result.as_numpy("y") == given).all()
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    with pytest.raises(InferenceServerException, match="no JSON form"):
        client.infer("echo-fp16", [infer_input("x", "FP16", given, True)], outputs=wanted)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: triton.InferenceServerClient, algorithm: str) -> None:
    result = client.infer(
        "add",
        add_inputs(True, False),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert (result.as_numpy("sum") == A + B).all()


def test_timeout_and_priority(client: triton.InferenceServerClient, served: Served) -> None:
    client.infer("add", add_inputs(True, True), timeout=2_000_000, priority=1)
    assert served.node.calls[-1] == ("add", None, 2.0, 1)


def test_concurrent_requests_are_all_answered(client: triton.InferenceServerClient) -> None:
    waiting = [client.async_infer("add", add_inputs(True, True)) for _ in range(8)]
    assert all((each.get_result().as_numpy("sum") == A + B).all() for each in waiting)


def test_repository(client: triton.InferenceServerClient) -> None:
    client.unload_model("echo-uint8")
    assert not client.is_model_ready("echo-uint8")
    index = {(entry["name"], entry["version"]): entry["state"] for entry in client.get_model_repository_index()}
    assert index["echo-uint8", "1"] == "UNAVAILABLE"
    assert index["add", "2"] == "READY"
    client.load_model("echo-uint8")
    assert client.is_model_ready("echo-uint8")


def test_errors_have_a_status_and_a_text(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="unknown function 'absent'") as unknown:
        client.infer("absent", add_inputs(True, True))
    assert unknown.value.status() == "404"
    with pytest.raises(InferenceServerException, match="'b' is missing") as missing:
        client.infer("add", add_inputs(True, True)[:1])
    assert missing.value.status() == "400"
    with pytest.raises(InferenceServerException, match="sequences are not supported"):
        client.infer("add", add_inputs(True, True), sequence_id=3, sequence_start=True)
    with pytest.raises(InferenceServerException, match="512 requests waiting") as full:
        client.infer("busy", [infer_input("x", "FP32", numpy.zeros(1, dtype=numpy.float32), True)])
    assert full.value.status() == "503"
    with pytest.raises(InferenceServerException, match="unknown function 'absent'"):
        client.load_model("absent")
