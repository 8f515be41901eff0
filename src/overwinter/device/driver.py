"""The functions of NVIDIA's driver that PyTorch does not offer, or only more slowly.

PyTorch's own copy takes about 8 µs for each block, and it reports the error of a failed call of the CUDA runtime at a
later launch of a kernel.
"""

import ctypes
from functools import cache

_PORTABLE, _READ_ONLY = 0x01, 0x08
"""The flags of cuMemHostRegister for memory that all contexts use, and that is mapped read-only."""
_SYMBOLS = {
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemcpyHtoDAsync_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SYMBOLS.items():
        getattr(library, name).argtypes = arguments
    return library


def register(pointer: int, nbytes: int) -> bool:
    """Let the GPU copy this memory directly, even if it is mapped read-only; return whether the system accepts that."""
    return int(_driver().cuMemHostRegister_v2(pointer, nbytes, _PORTABLE | _READ_ONLY)) == 0


def unregister(pointer: int) -> None:
    """End the registration of memory, which must still be mapped."""
    _driver().cuMemHostUnregister(pointer)


def copy_to_gpu(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy of host memory; the call blocks if the memory is not registered. Raises RuntimeError."""
    code = int(_driver().cuMemcpyHtoDAsync_v2(target, source, nbytes, stream))
    if code:
        raise RuntimeError(f"{nbytes} bytes could not be copied to the GPU: {_reason(code)}")


def _reason(code: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return (text.value or f"error {code}".encode()).decode(errors="replace")
