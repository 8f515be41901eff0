"""Deploys a directory of `transformers` from Python."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from overwinter.api.contained import open_contained, open_here
from overwinter.api.deployer import DEFAULT_URL, Uploaded, deploy_agreed, settings_of


def deploy_directory(  # noqa: PLR0913 - the options of a deploy
    path: str | Path,
    *,
    name: str,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
    slo: str | float | None = None,
    tenant: str = "default",
    url: str = DEFAULT_URL,
    token: str | None = None,
    trust: bool = False,
    **settings: Any,
) -> Uploaded:
    """Deploy a directory that `save_pretrained` of `transformers` wrote, and wait until its trial has passed.

    With a `task`, such as "text-classification", the function takes texts, images or audio and returns labels,
    entities, features or texts; its handler is one of Overwinter's, with assets made from the directory. `options` are
    sizes of dimensions, such as `{"sequence": 128}`, the `part` of the model to deploy, or options of the task. The
    directory is opened in a sandbox; with `trust`, it is opened in this process, where code in it may run. The rest is
    as in `deploy`. ProgramError names what the directory lacks.
    """
    chosen = settings_of(slo, settings)
    opening = partial(open_here, trusted=True) if trust else open_contained
    opened = opening(Path(path), chosen.max_batch, task, options)
    return deploy_agreed(
        opened.agreed,
        url,
        token=token,
        name=name,
        handler=opened.handler,
        assets=opened.assets,
        samples=opened.samples,
        tenant=tenant,
        settings=chosen,
    )
