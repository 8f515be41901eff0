import httpx
import msgspec
import pytest

from overwinter.api.deployments import LISTS_MAX, MARKS_MAX, read_manifest
from overwinter.api.floats import SLOW_MAX, check_floats
from overwinter.core.agreement import Agreement, Batching, Closeness
from overwinter.core.errors import CallerError, TooLargeError
from overwinter.store.manifest import Block, Piece
from tests.api.fake_node import manifest_of, spec

SLOW = [
    b"1e308",
    b"-5e-324",
    b"1.5E+0300",
    b" \n 1e-0000000310",
    b"0." + b"0" * 320 + b"1",
    b"0." + b"0" * 220 + b"1e-99",
]
USUAL = [b"1", b"-0.25", b"1e99", b"1.2345678901234567E-99", b'"1e308"', b"[1e308]"]


def document(value: bytes, count: int) -> bytes:
    return b"{%s}" % b",".join([b'"slo_ms" :%s' % value] * count)


@pytest.mark.parametrize("value", SLOW)
def test_slow_numbers_of_a_document_are_counted(value: bytes) -> None:
    check_floats(document(value, SLOW_MAX))
    with pytest.raises(CallerError, match=str(SLOW_MAX)):
        check_floats(document(value, SLOW_MAX + 1))


@pytest.mark.parametrize("value", USUAL)
def test_usual_numbers_are_not_counted(value: bytes) -> None:
    check_floats(document(value, 10 * SLOW_MAX))


def test_slow_numbers_are_refused_before_a_manifest_or_a_pipeline_is_decoded(http: httpx.Client) -> None:
    text = document(b"1e308", SLOW_MAX + 1)
    for path in ("functions", "pipelines"):
        answer = http.post(f"/overwinter/v1/{path}", content=text)
        assert (answer.status_code, "exponents" in answer.json()["error"]) == (400, True)


def test_slow_numbers_of_a_manifest_as_msgpack_are_counted() -> None:
    manifest = manifest_of("small", b"program", (spec("x", "FP32", "batch"),), (spec("y", "FP32", "batch"),))
    outputs = {str(number): Closeness(exact=False, difference=1e308) for number in range(SLOW_MAX + 1)}
    agreement = Agreement(sizes=(), bound=0.1, outputs=outputs, batching=Batching(obstacle=""))
    packed = msgspec.msgpack.encode(msgspec.structs.replace(manifest, agreement=agreement))
    with pytest.raises(CallerError, match="exponents"):
        read_manifest("application/msgpack", packed)


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_the_parameters_of_a_load_are_not_decoded(http: httpx.Client, verb: str) -> None:
    text = b'{"parameters":%s}' % document(b"1e308", 10 * SLOW_MAX)
    answer = http.post(f"/v2/repository/models/none/{verb}", content=text)
    assert answer.status_code == (400 if verb == "load" else 404)


def test_a_manifest_of_thousands_of_blocks_and_weights_is_accepted() -> None:
    manifest = manifest_of("large", b"program", (spec("x", "FP32", "batch"),), (spec("y", "FP32", "batch"),))
    count = LISTS_MAX // 2 - 100
    blocks = tuple(Block(f"{number:064x}", 64, (Piece(number, 0, 64),)) for number in range(count // 2))
    manifest = msgspec.structs.replace(manifest, blocks=blocks)
    text = msgspec.json.encode(manifest)
    assert read_manifest(None, text) == manifest
    assert all(4 * text.count(mark) < most for mark, most in MARKS_MAX.items() if mark != b"[")


@pytest.mark.parametrize("mark", MARKS_MAX)
def test_the_brackets_braces_colons_and_commas_of_a_manifest_are_counted(mark: bytes) -> None:
    with pytest.raises(TooLargeError, match=str(MARKS_MAX[mark])):
        read_manifest(None, mark * (MARKS_MAX[mark] + 1))
