"""Tokens are created, listed, limited and revoked on the node's machine, and a command uses one."""

import json
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from overwinter.api.client import Client
from overwinter.cli.main import main
from overwinter.core.errors import RateError
from overwinter.store.tokens import FILE, TokenFile
from tests.cli.conftest import Run, serving


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OVERWINTER_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_token_is_printed_once_and_only_on_standard_output(local: Run, data: Path) -> None:
    created = local("token", "create", "--tenant", "acme", "--scope", "deploy", "--scope", "infer", "--label", "ci")
    text = created.stdout.strip()
    [known] = TokenFile(data).read().tokens.values()
    assert TokenFile(data).read().find(text.encode()) == known
    assert text not in created.stderr
    listed = local("token", "list").output
    assert all(each in listed for each in (known.id, "acme", "infer, deploy", "ci"))
    result = local("token", "list", "--json").output
    assert text not in listed + result
    assert known.digest not in result


def test_a_token_is_printed_although_the_audit_log_cannot_be_written(local: Run, data: Path) -> None:
    (data / "audit.jsonl").mkdir(parents=True)
    created = local("token", "create", "--tenant", "acme", "--scope", "infer", exit_code=1)
    assert TokenFile(data).read().find(created.stdout.strip().encode()) is not None
    assert "audit" in created.stderr


def test_a_token_is_revoked_by_its_id_alone(local: Run, data: Path) -> None:
    made = [json.loads(local("token", "create", "--tenant", "acme", "--scope", "infer", "--json").output) for _ in "ab"]
    local("token", "revoke", made[0]["id"])
    assert list(TokenFile(data).read().tokens) == [made[1]["id"]]
    assert made[0]["id"] in local("token", "revoke", made[0]["id"], exit_code=1).stderr
    lines = [json.loads(line) for line in (data / "audit.jsonl").read_text().splitlines()]
    assert [(line["method"], line["path"]) for line in lines] == [
        ("token create", made[0]["id"]),
        ("token create", made[1]["id"]),
        ("token revoke", made[0]["id"]),
    ]


def test_the_quota_of_a_tenant_is_set_listed_and_removed(local: Run, data: Path) -> None:
    local("token", "create", "--tenant", "acme", "--scope", "infer")
    local("token", "limit", "acme", "--functions", "3", "--bytes", "8GiB", "--requests-per-s", "50")
    assert json.loads(local("token", "list", "--json").output)["quotas"] == {
        "acme": {"functions": 3, "nbytes": 8 << 30, "requests_per_s": 50.0}
    }
    local("token", "limit", "other", "--functions", "4")
    listed = local("token", "list").output
    assert "3 versions" in listed
    assert "4 versions" in listed
    local("token", "limit", "acme")
    assert json.loads(local("token", "list", "--json").output)["quotas"]["acme"] == {}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("create", "--tenant", "acme"), 2),
        (("create", "--tenant", "acme", "--scope", "root"), 2),
        (("create", "--tenant", "Acme", "--scope", "infer"), 1),
        (("limit", "acme", "--requests-per-s", "0"), 2),
    ],
)
def test_an_invalid_command_changes_nothing(local: Run, data: Path, arguments: tuple[str, ...], code: int) -> None:
    local("token", *arguments, exit_code=code)
    assert not (data / FILE).exists()


def test_commands_use_a_token_and_a_node_asks_for_it(tmp_path: Path, deployer_dir: Path, local: Run) -> None:
    with serving(tmp_path) as node:
        where = ("--url", node.url)
        local("ps", *where)
        create = ("token", "create", "--data", node.data, "--tenant", "acme", "--scope")
        infer, deploy = (local(*create, scope).stdout.strip() for scope in ("infer", "deploy"))
        assert "token" in local("ps", *where, exit_code=1).stderr
        local("deploy", "cli_scale:model", "--name", "scale", *where, "--token", deploy)
        named = json.loads(local("show", "scale", "--json", *where, "--token", infer).output)["inputs"][0]["name"]
        asked = ("infer", "scale", "--input", f"{named}=[[1, 2]]", "--json", *where)
        assert local(*asked, "--token", deploy, exit_code=1).stderr.startswith(
            "error: this token has the scopes deploy"
        )
        environment = {"OVERWINTER_TOKEN": infer, "OVERWINTER_URL": node.url}
        for command in (asked, ("usage",), ("top", "--once"), ("explain", "scale"), ("ps",)):
            done = CliRunner().invoke(main, command, env=environment, prog_name="overwinter")
            assert done.exit_code == 0, done.output
        admin = ("--token", local(*create[:-2], "ops", "--scope", "admin").stdout.strip())
        for command in (asked, ("show", "scale", *where), ("explain", "scale", *where)):
            local(*command, *admin, exit_code=1)
            local(*command, *admin, "--tenant", "acme")
        local("token", "limit", "acme", "--data", node.data, "--requests-per-s", "1")
        with Client(node.url, token=infer) as client:
            array, refused = numpy.ones((1, 2), dtype="float32"), False
            while not refused:
                try:
                    client.infer("scale", {named: array})
                except RateError:
                    refused = True
            # For lists the client asks for the datatype of the input first.
            assert client.infer("scale", {named: [[1.0, 2.0]]})
        # The command's first request, for the function's description, may use up the rate; then the second one waits.
        local(*asked, "--token", infer)
        listed = local("ps", "--json", *where, *admin, "--tenant", "acme").stdout
        assert [each["name"] for each in json.loads(listed)] == ["scale"]
        assert infer not in CliRunner().invoke(main, ("ps", "--help"), env=environment, prog_name="overwinter").output
