"""The element types of programs, their sizes, and their names on the wire."""

from overwinter.core.tensor import DATATYPES as NAMED_DATATYPES

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element of each type that a weight or a value inside a program may have."""

DATATYPES: dict[str, str] = {name: datatype for name, datatype in NAMED_DATATYPES.items() if name in ITEM_BYTES}
"""PyTorch's name of an element type that a program may take or give, to its Open Inference Protocol datatype."""

DTYPES: dict[str, str] = {datatype: dtype for dtype, datatype in DATATYPES.items()}
"""Open Inference Protocol datatype to PyTorch's name."""

SYMBOLIC_KINDS = frozenset({"symint", "symfloat", "symbool"})
"""What a value is that is no tensor but a Python number worked out from sizes."""

MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})
