"""Imports, in the base zygote, libraries that handlers use, so that wakes need not import them.

They are a fixed list and those that the administrator adds. Tenants choose none, and importing them reads no data of a
tenant. Every fork has them, and their pages are shared.
"""

import importlib
import os
import sys
from collections.abc import Collection, Iterator

import torch

HANDLER_LIBRARIES = (
    "tokenizers",
    "torch.nn.utils.rnn",
    "PIL.ImageOps",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.PpmImagePlugin",
)
"""The imports of Overwinter's own handlers (`tasks`), with the plugins that Pillow imports for its first image."""


def import_ahead(names: Collection[str]) -> Iterator[str]:
    """Import these modules, and those of HANDLER_LIBRARIES that are installed. Yields a message for each import that
    fails, but none for an ImportError of HANDLER_LIBRARIES, and one if the imports left threads running.
    """
    for name in (*HANDLER_LIBRARIES, *names):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything; workers import what they need themselves
            if name in names or not isinstance(error, ImportError):
                yield f"{name} could not be imported in advance: {type(error).__name__}: {error}"
    # Python reseeds its own generator in each fork. Those of PyTorch and NumPy would give every fork the same numbers.
    os.register_at_fork(after_in_child=torch.default_generator.seed)
    generator = sys.modules.get("numpy.random")
    if generator is not None:
        os.register_at_fork(after_in_child=generator.seed)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        yield f"{len(threads)} threads run after the imports, and forks keep only one: import fewer modules (--imports)"
