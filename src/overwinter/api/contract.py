"""Checks the outputs that a request wants, and its raw input, against the function's declaration."""

from collections.abc import Mapping, Sequence
from math import prod

from overwinter.api.reading import as_element
from overwinter.core.datatypes import DATATYPE_BYTES, FORMATS
from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, Buffer, Tensor, TensorSpec, check_size


def check_outputs(wanted: Mapping[str, bool], binary: bool, specs: Sequence[TensorSpec]) -> None:
    """Raise CallerError unless the function has the `wanted` outputs, and JSON can represent those that are not binary.

    `wanted` says for each whether it is binary; if empty, all outputs are wanted, in the form that `binary` says.
    """
    datatypes = {spec.name: spec.datatype for spec in specs}
    for name, as_binary in (wanted or dict.fromkeys(datatypes, binary)).items():
        datatype = datatypes.get(name)
        if datatype is None:
            raise CallerError(f"unknown output {name!r}; the outputs are {', '.join(map(repr, datatypes))}")
        if not as_binary and datatype not in FORMATS and datatype != BYTES:
            raise CallerError(f'output {name!r} is {datatype}, which has no JSON form: ask for it with "binary_data"')


def raw_input(body: Buffer, specs: Sequence[TensorSpec]) -> Tensor:
    """Return the only input of a function from a body that contains only its bytes.

    At most one size can be computed from the length; if the first (the batch) and another one are unknown, the batch is
    1. A BYTES body is one element, without a length before it.
    """
    if len(specs) != 1:
        raise CallerError(f"a raw body can only be the input of a function with one input; this one has {len(specs)}")
    spec = specs[0]
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    if spec.datatype == BYTES:
        if any(size not in (-1, 1) for size in shape):
            raise CallerError(
                f"a raw body is one BYTES element, and input {spec.name!r} takes shape {list(spec.shape)}"
            )
        return Tensor(spec.name, BYTES, (1,) * len(shape), as_element(body))
    if shape.count(-1) > 1 and shape[0] == -1:
        shape[0] = 1
    if shape.count(-1) > 1:
        raise CallerError(
            f"a raw body does not determine the sizes {list(spec.shape)} of input {spec.name!r}: send JSON"
        )
    if -1 in shape:
        item = DATATYPE_BYTES[spec.datatype] * prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = len(body) // item if item else 0
    tensor = Tensor(spec.name, spec.datatype, tuple(shape), body)
    check_size(tensor)
    return tensor
