"""The element types of tensors: their names in PyTorch, NumPy, the protocol and `struct`, and their sizes."""

from typing import NamedTuple


class ElementType(NamedTuple):
    """One element type."""

    dtype: str
    """Its name in PyTorch, and in NumPy, which lacks bfloat16."""
    datatype: str
    """Its Open Inference Protocol datatype; empty: it has none, so no request or answer can contain it."""
    nbytes: int
    """Bytes of one element."""
    code: str
    """Its character in `struct`; empty: it has no JSON form."""
    in_programs: bool
    """Whether a weight or a value inside a program may have it."""


TYPES = (
    ElementType("bool", "BOOL", 1, "?", True),
    ElementType("uint8", "UINT8", 1, "B", True),
    ElementType("uint16", "UINT16", 2, "H", False),
    ElementType("uint32", "UINT32", 4, "I", False),
    ElementType("uint64", "UINT64", 8, "Q", False),
    ElementType("int8", "INT8", 1, "b", True),
    ElementType("int16", "INT16", 2, "h", True),
    ElementType("int32", "INT32", 4, "i", True),
    ElementType("int64", "INT64", 8, "q", True),
    ElementType("float16", "FP16", 2, "", True),
    ElementType("bfloat16", "BF16", 2, "", True),
    ElementType("float32", "FP32", 4, "f", True),
    ElementType("float64", "FP64", 8, "d", True),
    ElementType("complex64", "", 8, "", True),
    ElementType("complex128", "", 16, "", True),
)

DATATYPES = {each.dtype: each.datatype for each in TYPES if each.datatype}
"""The protocol's datatype of each element type, by its name in PyTorch and NumPy."""

DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
"""The name in PyTorch and NumPy of each datatype."""

DATATYPE_BYTES = {each.datatype: each.nbytes for each in TYPES if each.datatype}
"""Bytes of one element of each datatype of fixed size."""

DTYPE_BYTES = {each.dtype: each.nbytes for each in TYPES if each.in_programs}
"""Bytes of one element of each type that a weight or a value inside a program may have."""

FORMATS = {each.datatype: each.code for each in TYPES if each.code}
"""The struct character of each datatype that has a JSON form."""
