"""The names of a tenant's functions, for the tenant and inside the node."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from overwinter.api.tenancy import TenantNames, TenantNode
from overwinter.core.call import Call
from overwinter.core.errors import CallerError, NotFoundError, WorkerError
from overwinter.core.ids import NAME_MAX
from overwinter.core.profiling import ProfileOptions, Progress, ReportProgress
from overwinter.store.blocks import address_of
from overwinter.store.tokens import Quota
from tests.api.fake_node import FakeNode, manifest_of, spec

PROGRAM = b"a program"
TAKES = (spec("x", "FP32", "n"),)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    node = FakeNode(tmp_path)
    yield node
    node.repository.close()


def put(node: FakeNode, tenant: str) -> None:
    node.repository.put(tenant, address_of(PROGRAM), PROGRAM, 0.0)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("no function 'acme..f@3' here", "no function 'f@3' here"),
        ("no function 'acme..F' here", "no function 'F' here"),
        ('["acme..f","acme..g"]', '["f","g"]'),
        ("of the company acme... and so on", "of the company acme... and so on"),
        ("xacme..f is another's, and other.acme..f", "xacme..f is another's, and other.acme..f"),
        ("acmexxf", "acmexxf"),
    ],
)
def test_names_in_texts_for_a_tenant_lose_the_tenant_s_prefix(text: str, result: str) -> None:
    names = TenantNames("acme")
    assert names.translated(text) == result
    assert names.translated_bytes(text.encode()) == result.encode()


@pytest.mark.parametrize("tenant", ["n", "u0001", "acme"])
def test_names_beside_escapes_in_json_are_converted_and_the_escapes_stay(tenant: str) -> None:
    names = TenantNames(tenant)
    own = f"{tenant}..f"
    for text in (
        "\n..f",
        "\x01..f",
        f"\n{own}",
        f"\x01{own}",
        f"\\{own}",
        f'"{own}"',
        f"\\\n{own}\t{own}@1",
        f"x{own}",
    ):
        assert msgspec.json.decode(names.translated_json([text])) == [names.translated(text)]
    assert names.translated("\n..f") == "\n..f"


@pytest.mark.parametrize("text", ["\\" * 1000, "\n" * 1000, "\x01" * 1000, "acme." * 1000])
def test_text_without_names_is_not_searched_character_by_character(text: str) -> None:
    names = TenantNames("acme")
    found = names._escaped.findall(msgspec.json.encode([text, "acme..f"]))
    assert found == [b"acme.."]


def test_a_tenant_does_not_reach_another_s_function_whose_name_begins_with_its_prefix(node: FakeNode) -> None:
    """Such a name exists where a function with dots in its name was deployed before there were tokens."""
    put(node, "squatter")
    squatted = msgspec.structs.replace(manifest_of("acme..f", PROGRAM, TAKES, TAKES), tenant="squatter")
    asyncio.run(node.deploy(squatted))
    acme = TenantNode(node, "acme", Quota())
    for refused in (lambda: acme.view("f", None), lambda: acme.view("f", 1), lambda: acme.owner("f")):
        with pytest.raises(NotFoundError) as result:
            refused()
        assert "squatter" not in str(result.value)
    with pytest.raises(NotFoundError):
        asyncio.run(acme.infer(Call("f", None, [])))
    assert (list(acme.functions()), acme.versions("f")) == ([], ())
    assert list(acme.functions("squatter")) == []
    assert [view.name for view in TenantNode(node, "squatter", Quota()).functions()] == ["acme..f"]


def test_a_name_may_be_as_long_as_the_node_can_keep(node: FakeNode) -> None:
    put(node, "acme")
    acme = TenantNode(node, "acme", Quota())
    most = NAME_MAX - len("acme..")
    asyncio.run(acme.deploy(manifest_of("f" * most, PROGRAM, TAKES, TAKES)))
    assert acme.view("f" * most, None).version == 1
    with pytest.raises(CallerError, match=f"at most {most}"):
        asyncio.run(acme.deploy(manifest_of("f" * (most + 1), PROGRAM, TAKES, TAKES)))


def test_progress_and_errors_of_a_measurement_have_the_tenant_s_names(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def profile(name: str, version: int | None, options: ProfileOptions, report: ReportProgress) -> None:
        report(Progress(done=1, total=2, what=f"layers, batch 1: function {name}@1 failed", pid=7))
        raise WorkerError(f"function {name}@1 failed")

    monkeypatch.setattr(node, "profile", profile, raising=False)
    put(node, "acme")
    acme = TenantNode(node, "acme", Quota())
    asyncio.run(acme.deploy(manifest_of("f", PROGRAM, TAKES, TAKES)))
    reported: list[Progress] = []
    with pytest.raises(WorkerError, match="function f@1 failed"):
        asyncio.run(acme.profile("f", 1, ProfileOptions(), reported.append))
    assert reported == [Progress(done=1, total=2, what="layers, batch 1: function f@1 failed", pid=7)]
