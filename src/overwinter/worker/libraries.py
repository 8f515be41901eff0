"""What does the base zygote import beside PyTorch? Libraries that handlers use, so that no wake has to.

They are the operator's, as PyTorch is: no tenant chooses them, and nothing of a tenant's is read for them. What the
base imports is in every fork, and its pages are shared.
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
    """Import these modules, and Overwinter's own as far as they are installed; yields what was wrong with one."""
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
