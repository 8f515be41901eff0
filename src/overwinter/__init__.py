"""Overwinter: serverless inference for many models on one machine.

import overwinter

overwinter.deploy(model, example_inputs, name="classifier", slo="80ms")
overwinter.Client().infer("classifier", {"image": image})
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overwinter.api.client import Client
    from overwinter.api.deployer import deploy
    from overwinter.api.directories import deploy_directory
    from overwinter.core.pipeline import Pipeline, Stage

__all__ = ["Client", "Pipeline", "Stage", "deploy", "deploy_directory"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    # Late, so that a worker that imports one module of this package does not load an HTTP client.
    if name == "Client":
        from overwinter.api.client import Client

        return Client
    if name == "deploy":
        from overwinter.api.deployer import deploy

        return deploy
    if name == "deploy_directory":
        from overwinter.api.directories import deploy_directory

        return deploy_directory
    if name in ("Pipeline", "Stage"):
        from overwinter.core import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'overwinter' has no attribute {name!r}")
