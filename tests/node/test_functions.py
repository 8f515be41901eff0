"""The node's record of a deployed function, and the messages about it."""

import gc

import msgspec
import pytest
import torch

from overwinter.core.errors import TooLargeError
from overwinter.core.function import Settings
from overwinter.core.tensor import TensorSpec
from overwinter.node.functions import DeployedFunction
from overwinter.store.host import PAGE_BYTES, page_bytes
from overwinter.store.manifest import (
    Blob,
    Block,
    Deployment,
    Manifest,
    Piece,
    SampleTensor,
    decode_manifest,
    encode_manifest,
)
from overwinter.worker.channel import packet_bytes_max
from tests.node.rig import AddOne, Function

HANDLER = "def preprocess(inputs, state):\n    return inputs\n"


@pytest.mark.parametrize("fits", [True, False])
def test_a_function_whose_messages_are_too_large_is_refused_with_an_error_that_names_it(fits):
    # Each asset takes its name and an address of 64 characters.
    count = packet_bytes_max() // (200 if fits else 180)
    assets = {f"{number:06}{'a' * 120}": b"same" for number in range(count)}
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}, HANDLER, name="many", assets=assets).deployed
    if fits:
        function.check_messages()
    else:
        with pytest.raises(TooLargeError, match="'many'"):
            function.check_messages()


def test_the_garbage_collector_does_not_traverse_blocks():
    """It stops the event loop for 0.2 s per million objects."""

    def tracked(count):
        blocks = tuple(Block(f"{number:064x}", 4096, (Piece(number, 0, 4096),)) for number in range(count))
        made = Manifest(name="f", tenant="t", program=Blob("a" * 64, 1), blocks=blocks, inputs=(), outputs=())
        encoded = encode_manifest(made)
        gc.collect()
        before = len(gc.get_objects())
        function = DeployedFunction(Deployment("f", 1, decode_manifest(encoded), 0.0))
        spec = function.spec()
        gc.collect()
        assert len(spec.blobs) == 1 + count
        return len(gc.get_objects()) - before

    tracked(1)
    assert tracked(1000) < tracked(1) + 100


@pytest.mark.parametrize("fits", [True, False])
def test_a_function_whose_runs_are_too_large_for_a_message_is_refused_with_the_batch_that_fits(fits):
    specs = tuple(TensorSpec(f"{letter * 250}", "FP32", ("batch", 4)) for letter in "xyz")
    most = packet_bytes_max() // (3 * 300)
    settings = Settings(max_batch=most if fits else 2 * most)
    made = Manifest(
        name="f", tenant="t", program=Blob("a" * 64, 1), blocks=(), inputs=specs, outputs=(), settings=settings
    )
    function = DeployedFunction(Deployment("f", 1, made, 0.0))
    if fits:
        function.check_messages()
    else:
        with pytest.raises(TooLargeError, match="'f'.*max_batch"):
            function.check_messages()


@pytest.mark.parametrize(
    ("device", "handler", "warns"), [("pool", None, True), ("cpu", None, False), ("pool", HANDLER, False)]
)
def test_the_author_is_told_of_samples_that_no_trial_runs(device, handler, warns):
    deployed = Function(AddOne(), {"x": torch.zeros(2, 4)}, handler).deployed
    sample = (SampleTensor("x", "FP32", (1, 4), Blob("a" * 64, 16)),)
    manifest = msgspec.structs.replace(deployed.manifest, samples=(sample,), settings=Settings(device=device))
    function = DeployedFunction(Deployment("f", 1, manifest, 0.0))
    assert ("samples were not tried" in function.warning()) == warns


def test_a_host_store_keeps_whole_pages_and_a_device_gets_only_the_weights():
    assets = {str(number): str(number).encode() for number in range(500)}
    function = Function(torch.nn.Linear(4, 4), {"input": torch.zeros(2, 4)}, HANDLER, assets=assets).deployed
    spec = function.spec()
    assert [each.nbytes for each in spec.blobs] == [page_bytes(each.nbytes) for each in function.blobs]
    assert sum(each.nbytes for each in spec.blobs) >= 500 * PAGE_BYTES
    sizes = {each.address: each.weights_end for each in function.manifest.blocks}
    assert sizes
    assert {address: spec.weights[address] for address in sizes} == sizes
