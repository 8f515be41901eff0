"""Imports libraries that handlers use in the base zygote, so that wakes need not import them.

The operator chooses these libraries, as PyTorch: tenants do not choose them, and importing them reads nothing of a
tenant. Every fork has them, and their pages are shared.
"""

import importlib
import os
import sys
from collections.abc import Collection, Iterator

OWN = (
    "tokenizers",
    "torch.nn.utils.rnn",
    "PIL.ImageOps",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.PpmImagePlugin",
)
"""Of the handlers that Overwinter makes (`tasks`). Pillow's plugins are those that it imports for the first image."""


def import_ahead(names: Collection[str]) -> Iterator[str]:
    """Import these modules, and Overwinter's own if they are installed; yields an error for each that fails."""
    for name in (*OWN, *names):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the border to a library: workers import what they need themselves
            if name in names or not isinstance(error, ImportError):
                yield f"{name} could not be imported ahead: {type(error).__name__}: {error}"
    generator = sys.modules.get("numpy.random")
    if generator is not None:
        # Python seeds its own anew in each fork. This one would give every tenant the same numbers.
        os.register_at_fork(after_in_child=generator.seed)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        yield f"{len(threads)} threads run after the imports, of which workers have one: import less ahead (--imports)"
