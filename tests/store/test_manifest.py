import json

import msgspec
import pytest

from overwinter.core.errors import CallerError
from overwinter.core.function import Settings
from overwinter.core.tensor import ELEMENTS_MAX, RANK_MAX, TENSORS_MAX, TensorSpec
from overwinter.store.manifest import (
    ALL_SAMPLES_BYTES_MAX,
    SAMPLES_MAX,
    Blob,
    Block,
    Handler,
    Piece,
    SampleTensor,
    decode_manifest,
    encode_manifest,
)
from tests.store.family import assemble, base, shapes, values

A, B = "a" * 64, "b" * 64


def changed(**fields):
    return msgspec.structs.replace(base().manifest, **fields)


def refused(manifest):
    with pytest.raises(CallerError) as caught:
        decode_manifest(encode_manifest(manifest))
    return str(caught.value)


def test_a_manifest_survives_its_encoding():
    weights = shapes()
    manifest = assemble("a.b_c-1", weights, values(weights, 3), handler=b"def preprocess(x, state): return x").manifest
    given = SampleTensor("x", "FP32", (1, 2), b"\0\0\x80?\0\0\xc0\x7f")
    settings = Settings(slo_ms=80, threads=2)
    takes = (TensorSpec("x", "FP32", ("batch", 2)),)
    manifest = msgspec.structs.replace(manifest, settings=settings, inputs=takes, samples=((given,),))
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_manifest_lists_each_blob_that_it_needs_once():
    source, asset = Blob(A, 3), Blob(B, 4)
    model = base()
    twice = model.manifest.blocks[0]
    again = Block(twice.address, twice.nbytes, ())
    manifest = changed(blocks=(*model.manifest.blocks, again), handler=Handler(source, {"vocab.txt": asset}))
    addresses = [blob.address for blob in manifest.blobs()]
    assert len(addresses) == len(set(addresses))
    assert set(addresses) == {*model.files, A, B}
    assert sum(blob.nbytes for blob in manifest.blobs()) == sum(map(len, model.files.values())) + 7


def test_a_manifest_without_a_comparison_is_read():
    fields = json.loads(encode_manifest(base().manifest))
    del fields["agreement"]
    assert decode_manifest(json.dumps(fields).encode()).agreement is None


@pytest.mark.parametrize("name", ["", "Aa", "-a", ".a", "a/b", "a" * 129, "a\n", "a b", "ä"])
@pytest.mark.parametrize("field", ["name", "tenant"])
def test_a_bad_name_is_refused(field, name):
    assert field in refused(changed(**{field: name}))


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\0", "x" * 129])
def test_a_bad_asset_name_is_refused(name):
    assert "assets" in refused(changed(handler=Handler(Blob(A, 1), {name: Blob(B, 1)})))


@pytest.mark.parametrize("address", ["", "a" * 63, "A" * 64, "a" * 64 + "\n", "../../etc/passwd"])
def test_a_bad_address_is_refused(address):
    assert "program" in refused(changed(program=Blob(address, 1)))
    assert "blocks" in refused(changed(blocks=(Block(address, 1, ()),)))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ((Piece(0, 0, 101),), "outside the block's 100 bytes"),
        ((Piece(0, 128, 0),), "outside the block's 100 bytes"),
        ((Piece(0, 8, 4),), "not aligned"),
        ((Piece(0, 0, 65), Piece(1, 64, 4)), "overlaps"),
        ((Piece(0, 64, 4), Piece(1, 0, 4)), "overlaps"),
        ((Piece(0, 0, 4), Piece(0, 64, 4)), "weight 0 lies in 2 places"),
        ((Piece(0, 0, 4), Piece(2, 64, 4)), "only 2 weights"),
        ((Piece(-1, 0, 4),), ">= 0"),
        ((Piece(0, -64, 4),), ">= 0"),
        ((Piece(0, 0, -4),), ">= 0"),
        ((Piece(0, 0, 1 << 60),), "<="),
    ],
)
def test_bad_pieces_are_refused(pieces, said):
    assert said in refused(changed(blocks=(Block(A, 100, pieces),)))


def test_two_sizes_of_one_blob_are_refused():
    program = base().manifest.program
    assert "two sizes" in refused(changed(handler=Handler(Blob(program.address, program.nbytes + 1))))


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ((TensorSpec("x", "FP32", ()), TensorSpec("x", "FP32", ())), "given 2 times"),
        ((TensorSpec("x", "FP33", ()),), "unknown datatype 'FP33'"),
        ((TensorSpec("x", "FP32", (-1,)),), "negative size"),
    ],
)
def test_bad_tensors_are_refused(specs, said):
    assert said in refused(changed(inputs=specs))
    assert said in refused(changed(outputs=specs))


def test_an_unknown_field_a_bad_setting_and_broken_text_are_refused():
    fields = json.loads(encode_manifest(base().manifest))
    for data in (
        json.dumps(fields | {"color": "red"}).encode(),
        json.dumps(fields | {"settings": {"max_batch": 0}}).encode(),
        json.dumps({key: value for key, value in fields.items() if key != "program"}).encode(),
        b"{",
        b"\xff\xfe",
        b'{"name": "\xff"}',
        b"",
        b"null",
    ):
        with pytest.raises(CallerError, match="manifest is not valid"):
            decode_manifest(data)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((SampleTensor("y", "FP32", (1, 2), bytes(8)),), "sample 2: unknown or repeated input 'y'"),
        ((), "sample 2: input 'x' is missing"),
        ((SampleTensor("x", "FP64", (1, 2), bytes(16)),), "sample 2: input 'x' is FP32, not FP64"),
        ((SampleTensor("x", "FP32", (1, 3), bytes(12)),), "sample 2: input 'x' has shape [1, 3]"),
        ((SampleTensor("x", "FP32", (1, 2), bytes(7)),), "sample 2: tensor 'x' of FP32 [1, 2] needs 8 bytes"),
    ],
)
def test_a_sample_that_is_not_a_valid_request_is_refused(sample, said):
    good = (SampleTensor("x", "FP32", (1, 2), bytes(8)),)
    assert said in refused(changed(inputs=(TensorSpec("x", "FP32", ("batch", 2)),), samples=(good, sample)))


def test_samples_are_bounded_in_count_and_bytes():
    takes = (TensorSpec("x", "UINT8", ("n",)),)
    one, half = SampleTensor("x", "UINT8", (1,), b"1"), ALL_SAMPLES_BYTES_MAX // 2
    most = changed(inputs=takes, samples=((one,),) * SAMPLES_MAX)
    assert decode_manifest(encode_manifest(most)) == most
    assert f"{SAMPLES_MAX + 1} samples" in refused(changed(inputs=takes, samples=((one,),) * (SAMPLES_MAX + 1)))
    large = SampleTensor("x", "UINT8", (half + 1,), bytes(half + 1))
    assert f"{ALL_SAMPLES_BYTES_MAX + 2} bytes" in refused(changed(inputs=takes, samples=((large,), (large,))))


def test_the_error_of_a_sample_with_too_many_elements_suggests_a_smaller_sample():
    takes = (TensorSpec("x", "BYTES", ("n",)),)
    most, more = (SampleTensor("x", "BYTES", (n,), bytes(4 * n)) for n in (ELEMENTS_MAX, ELEMENTS_MAX + 1))
    assert decode_manifest(encode_manifest(changed(inputs=takes, samples=((most,),)))).samples == ((most,),)
    said = refused(changed(inputs=takes, samples=((most,), (more,))))
    assert said.startswith(f"sample 2: BYTES tensor 'x' has {ELEMENTS_MAX + 1} elements")
    assert "smaller sample" in said
    assert "elements-max" not in said


def test_tensors_are_bounded_in_rank_and_number():
    deep = TensorSpec("x", "FP32", (1,) * (RANK_MAX + 1))
    assert "length" in refused(changed(inputs=(deep,)))
    assert "length" in refused(changed(outputs=tuple(TensorSpec(f"y{n}", "FP32", ()) for n in range(TENSORS_MAX + 1))))
    sample = SampleTensor("x", "FP32", (1 << 50,) * (RANK_MAX + 1), b"")
    assert "length" in refused(changed(samples=((sample,),)))
