"""What a package contains, what is refused before anything is sent, and uploads that take long."""

from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from overwinter.api.client import RegisteredVersion
from overwinter.api.deployer import Package, deploy, package, read_source
from overwinter.api.directories import deploy_directory
from overwinter.core.errors import CallerError, ConflictError, HandlerError, MachineError, ProgramError
from overwinter.core.function import Settings
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.store.blocks import address_of
from overwinter.store.manifest import Blob, Block, Manifest, decode_manifest, encode_manifest
from overwinter.store.repository import Repository


class Centred(nn.Module):
    """A model in which each answer depends on all rows."""

    def forward(self, x):
        return x - x.mean(0)


class Doubled(nn.Module):
    """A model in which each answer depends on its own row."""

    def forward(self, x):
        return x * 2


KEEP_S = 600.0


class SlowClient:
    """Sends blobs to a repository, each in `step_s`, where what is not needed is removed after KEEP_S."""

    def __init__(self, repository, step_s):
        self.repository, self.step_s = repository, step_s
        self.now = 0.0

    def for_tenant(self, tenant):
        return self

    def missing(self, addresses):
        return self.repository.missing("default", addresses, self.now)

    def put_block(self, address, content):
        self.now += self.step_s
        self.repository.collect(self.now, KEEP_S)
        self.repository.put("default", address, content, self.now)

    def register(self, manifest):
        deployment = self.repository.register(manifest, self.now)
        return RegisteredVersion(deployment.name, deployment.version)


def agreed(module):
    return agree(export(module, (torch.randn(2, 3),)))


@pytest.mark.parametrize(("step_s", "count"), [(30.0, 60), (400.0, 5), (700.0, 3)])
def test_a_long_upload_loses_no_blob_unless_a_single_one_takes_longer_than_blobs_are_kept(tmp_path, step_s, count):
    contents = {address_of(data): partial(bytes, data) for data in (bytes([number]) for number in range(count))}
    program, *blocks = (Blob(address, 1) for address in contents)
    manifest = Manifest(
        name="f", tenant="default", program=program, inputs=(), outputs=(),
        blocks=tuple(Block(blob.address, 1, ()) for blob in blocks),
    )  # fmt: skip
    client = SlowClient(Repository(tmp_path), step_s)
    package = Package(manifest, contents)
    if step_s > KEEP_S:
        # Each blob is removed while the next one is sent.
        with pytest.raises(ConflictError, match="upload them"):
            package.upload(client, now=lambda: client.now)
        assert client.now <= 3 * count * step_s
    else:
        uploaded = package.upload(client, now=lambda: client.now)
        assert (uploaded.version, uploaded.added_bytes, client.now) == (1, count, count * step_s)
    client.repository.close()


def test_requests_that_would_mix_may_not_share_a_run():
    with pytest.raises(ProgramError, match=r"max_batch is 4.*'output'.*leave max_batch at 1"):
        package("f", *agreed(Centred()), settings=Settings(max_batch=4))


def test_shared_runs_that_were_not_compared_are_refused():
    exported = export(Doubled(), (torch.randn(2, 3),))
    with pytest.raises(ProgramError, match="max_batch is 2"):
        package("f", *exported, settings=Settings(max_batch=2))
    assert package("f", *exported).manifest.agreement is None


def test_the_comparison_is_recorded_in_the_manifest():
    manifest = package("f", *agreed(Doubled()), settings=Settings(max_batch=4)).manifest
    assert manifest.settings.max_batch == 4
    assert manifest.agreement.outputs["output"].exact
    assert manifest.agreement.batching.obstacle == ""
    assert decode_manifest(encode_manifest(manifest)) == manifest
    alone = package("f", *agreed(Centred())).manifest
    assert alone.settings.max_batch == 1
    assert "'output'" in alone.agreement.batching.obstacle


def test_a_note_of_the_comparison_is_a_warning_at_the_line_of_the_deploy(tmp_path, monkeypatch):
    whole = agreed(Doubled())
    noted = whole._replace(agreement=msgspec.structs.replace(whole.agreement, notes=("a size is restricted",)))
    monkeypatch.setattr("overwinter.model.agreement.agree", lambda *_: noted)
    opened = SimpleNamespace(agreed=noted, handler=None, assets=None, samples=())
    monkeypatch.setattr("overwinter.api.directories.open_contained", lambda *_: opened)
    for call in (partial(deploy, Doubled(), (torch.zeros(2, 2),)), partial(deploy_directory, tmp_path)):
        with pytest.warns(UserWarning, match="a size is restricted") as warned, pytest.raises(MachineError):
            call(name="f", url="http://127.0.0.1:9")
        assert [each.filename for each in warned] == [__file__]


def test_a_handler_that_is_not_utf_8_is_refused_by_name(tmp_path):
    (tmp_path / "handler.py").write_bytes(b"# \xff")
    with pytest.raises(CallerError, match=r"handler\.py"):
        deploy(Doubled(), (torch.zeros(2, 2),), name="f", handler=tmp_path / "handler.py")


def test_a_handler_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "handler.py").write_bytes("INPUTS = []  # é\n".encode("utf-8-sig"))
    source = read_source(tmp_path / "handler.py")
    assert source == "INPUTS = []  # é\n"
    assert packed_with(source).inputs == ()


def packed_with(handler):
    made = export(Doubled().eval(), {"x": torch.zeros(2, 3)}, {"x": {0: "batch"}})
    return package("f", made.program, made.weights, handler=handler).manifest


def test_a_handler_may_list_no_inputs():
    assert packed_with("INPUTS = []").inputs == ()
    assert [spec.name for spec in packed_with("").inputs] == ["x"]


def test_assets_without_a_handler_are_refused():
    with pytest.raises(CallerError, match=r"the assets 'words', 'more\.txt': give the handler"):
        deploy(Doubled(), (torch.zeros(2, 3),), name="f", assets={"words": b"a b", "more.txt": b""})


@pytest.mark.parametrize("listed", ["[{[]: 1}]", "[" * 150 + "]" * 150, "x", "[{'name': 3}]"])
def test_a_list_of_a_handler_that_is_no_list_of_literals_is_refused(listed):
    with pytest.raises(HandlerError, match="INPUTS of the handler"):
        packed_with(f"INPUTS = {listed}")


@pytest.mark.parametrize("listed", ["[" + "1+" * 20_000 + "1]", "-" * 100_000 + "1"])
def test_a_handler_that_python_cannot_parse_is_refused(listed):
    with pytest.raises(HandlerError, match="not valid Python"):
        packed_with(f"INPUTS = {listed}")


def test_an_object_that_is_no_module_is_refused_with_its_type():
    with pytest.raises(CallerError, match=r"torch\.nn\.Module, not int"):
        deploy(1, (torch.zeros(1),), name="f")
