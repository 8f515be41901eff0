"""What becomes a package, and what is refused before anything is sent."""

import pytest
import torch
from torch import nn

from overwinter.api.deployer import package
from overwinter.core.errors import ProgramError
from overwinter.core.function import Settings
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.store.manifest import decode_manifest, encode_manifest


class Centred(nn.Module):
    """A model in which each answer depends on all rows."""

    def forward(self, x):
        return x - x.mean(0)


class Doubled(nn.Module):
    """A model in which each answer depends on its own row."""

    def forward(self, x):
        return x * 2


def agreed(module):
    return agree(export(module, (torch.randn(2, 3),)))


def test_requests_that_would_mix_may_not_share_a_run():
    with pytest.raises(ProgramError, match=r"max_batch is 4.*'output'.*leave max_batch at 1"):
        package("f", *agreed(Centred()), settings=Settings(max_batch=4))


def test_a_run_that_was_not_compared_is_not_shared():
    exported = export(Doubled(), (torch.randn(2, 3),))
    with pytest.raises(ProgramError, match="max_batch is 2"):
        package("f", *exported, settings=Settings(max_batch=2))
    assert package("f", *exported).manifest.agreement is None


def test_what_was_compared_stands_in_the_manifest():
    manifest = package("f", *agreed(Doubled()), settings=Settings(max_batch=4)).manifest
    assert manifest.settings.max_batch == 4
    assert manifest.agreement.outputs["output"].exact
    assert manifest.agreement.batching.obstacle == ""
    assert decode_manifest(encode_manifest(manifest)) == manifest
    alone = package("f", *agreed(Centred())).manifest
    assert alone.settings.max_batch == 1
    assert "'output'" in alone.agreement.batching.obstacle
