"""Promotion and split from the command line."""

import json

import pytest

from .conftest import Run


def deploy_twice(run: Run, name: str) -> None:
    for _ in range(2):
        run("deploy", "cli_scale:model", "--name", name)


def shown(run: Run, name: str) -> dict[int, tuple[int, bool]]:
    """Return the percentage of the traffic of each version of a function, and whether the version is promoted."""
    listed = json.loads(run("ps", "--json").output)
    return {each["version"]: (each["traffic"], each["promoted"]) for each in listed if each["name"] == name}


def test_requests_can_be_rolled_back_split_and_given_to_the_newest_version_again(run: Run) -> None:
    deploy_twice(run, two := "two")
    assert "two@1" in run("promote", f"{two}@1").output
    assert shown(run, two) == {1: (100, True), 2: (0, True)}
    assert "promote this one" in run("deploy", "cli_scale:model", "--name", two).output
    result = json.loads(run("split", two, "1=90", "3=10", "--json").output)
    assert result == {"name": two, "shares": [{"version": 1, "percent": 90}, {"version": 3, "percent": 10}]}
    assert shown(run, two) == {1: (90, True), 2: (0, True), 3: (10, True)}
    rows = [line.split()[:3] for line in run("ps").output.splitlines() if line.startswith(two)]
    assert rows == [[two, str(version), percent] for version, percent in ((1, "(90%)"), (2, "(0%)"), (3, "(10%)"))]
    assert "10% of the requests that name no version (as promoted or split)" in run("show", f"{two}@3").output
    assert "90% of the requests that name no version (as promoted or split)" in run("explain", f"{two}@1").output
    assert "newest" in run("promote", two, "newest").output
    assert shown(run, two) == {1: (0, False), 2: (0, False), 3: (100, False)}
    run("rm", two, "--yes")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("promote", "two", "first"), "newest"),
        (("promote", "two"), "newest"),
        (("promote", "two", "0"), "newest"),
        (("split", "two", "1=90", "2=20"), "110 per cent"),
        (("split", "two", "1=50", "1=50"), "two shares"),
        (("split", "two", "1=x", "2=20"), "2=10"),
        (("split", "two", "1", "2"), "NAME=VALUE"),
        (("split", "two"), "Missing argument"),
    ],
)
def test_a_mistake_is_reported_before_a_node_is_called(local: Run, arguments: tuple[str, ...], said: str) -> None:
    assert said in local(*arguments, exit_code=2).output


def test_a_refusal_of_the_node_is_reported(run: Run) -> None:
    deploy_twice(run, two := "refused")
    assert "no function 'refused@7'" in run("promote", two, "7", exit_code=1).output
    assert "no function 'absent'" in run("promote", "absent", "1", exit_code=1).output
    run("split", two, "1=90", "2=10")
    assert "promote another version first" in run("rm", f"{two}@2", "--yes", exit_code=1).output
    run("rm", two, "--yes")
