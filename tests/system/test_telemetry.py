"""The telemetry of a real node: metrics, activity, explanations, usage, and bytes that agree with the kernel's."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from overwinter.api.client import Client
from overwinter.cli.main import main
from overwinter.core.errors import DeadlineError, NotFoundError
from tests.system.nodes import NodeProcess, Scale, ask, deploy, wait_until

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    options = "--accounting-s", "0.05", "--devices", "1", "--device-memory", "1MiB"
    node = NodeProcess(tmp_path_factory.mktemp("seen"), *options)
    try:
        deploy(node, "one", Scale(2.0), slo_ms=60_000, keep_alive_s=600)
        deploy(node, "twin", Scale(2.0), tenant="other", keep_alive_s=600)
        for _ in range(3):
            assert ask(node, "one", 3.0) == [7.0] * 4
        yield node
    finally:
        node.clean()


class Samples(dict):
    """Every sample by its name and its labels."""

    def __init__(self, node: NodeProcess) -> None:
        for family in text_string_to_metric_families(node.client.metrics()):
            self |= {(sample.name, frozenset(sample.labels.items())): sample.value for sample in family.samples}

    def of(self, name: str, **labels: str) -> float:
        return self[f"overwinter_{name}", frozenset(labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of that name with at least these labels."""
        wanted = set(labels.items())
        return sum(value for (its, has), value in self.items() if its == f"overwinter_{name}" and wanted <= has)


def after_passes(node: NodeProcess, count: int) -> Samples:
    """Wait until the bytes were compared this many more times."""
    goal = Samples(node).of("accounting_passes_total") + count
    return wait_until(lambda: (seen := Samples(node)).of("accounting_passes_total") >= goal and seen)


def test_metrics_count_requests(node):
    seen = Samples(node)
    assert seen.of("requests_total", function="one", outcome="answered", error="") == 3
    assert seen.of("slo_requests_total", function="one") == seen.of("slo_met_total", function="one") == 3
    assert seen.of("runs_total", function="one") == 3
    assert seen.sum("request_duration_seconds_count", function="one") == 3
    assert seen.of("queue_wait_seconds_count") == seen.of("run_duration_seconds_count") == 3
    assert seen.of("wakes_total", function="one", start="disk") == 1
    assert seen.of("requests_running", function="one") == 0
    assert seen.of("cores") == len(os.sched_getaffinity(0))
    assert seen.of("function_bytes", function="one", version="1", tier="host", sharing="shared") > 65536
    assert seen.of("tier_bytes", tier="host") == node.stored_bytes()
    assert seen.sum("requests_total", function="") == 0


def test_every_metric_is_documented_and_every_documented_metric_exists(node):
    result = {line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")}
    lines = node.client.metrics().splitlines()
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {name for name in named if name.startswith("overwinter_")} == result


def test_the_nodes_counts_of_bytes_agree_with_the_kernels(node):
    seen = after_passes(node, 4)
    assert seen.sum("accounting_mismatch_total") == 0
    stored = seen.of("memory_bytes", source="store_table")
    assert stored == seen.of("memory_bytes", source="store_scheduler") == node.stored_bytes()
    assert stored == seen.of("memory_bytes", source="store_kernel")
    private, pss = (seen.of("memory_bytes", source=f"worker_{kind}") for kind in ("private", "pss"))
    assert 0 < private < pss


def test_top_shows_active_functions_first(node):
    activity = node.client.activity()
    first = activity["functions"][0]
    assert (first["name"], first["state"], first["requests"], first["attainment"]) == ("one", "awake", 3, 1.0)
    assert first["p50_ms"] <= first["p99_ms"]
    assert activity["host_bytes"] == node.stored_bytes()
    shown = CliRunner().invoke(main, ["top", "--once", "--url", node.url])
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines() if line[:3] in ("one", "twi")] == ["one", "twin"]
    shown = CliRunner().invoke(main, ["top", "--json", "--url", node.url])
    assert json.loads(shown.stdout)["functions"][0]["name"] == "one"


def test_explain_shows_where_the_blocks_are_and_how_many_functions_share_them(node):
    explained = wait_until(lambda: (it := node.client.explain("one"))["workers"][0]["private_bytes"] and it)
    disk, host, private = explained["tiers"]
    assert disk["resident"] == host["resident"] == disk["shared"] + disk["exclusive"]
    # Blocks of another tenant are not reported, even if they are equal.
    assert (host["missing"], host["sharers"], host["exclusive"]) == (0, 0, host["resident"])
    deploy(node, "again", Scale(2.0), tenant="other")
    for tier in node.client.explain("twin")["tiers"][:2]:
        assert (tier["sharers"], tier["shared"], tier["exclusive"]) == (1, tier["resident"], 0)
    with Client(node.url, tenant="other") as other:
        other.remove("again")
    assert private["resident"] > 0
    assert explained["state"] == "awake"
    assert [worker["state"] for worker in explained["workers"]] == ["idle"]
    assert explained["workers"][0]["pid"] in node.worker_pids()
    shown = CliRunner().invoke(main, ["explain", "one", "--url", node.url])
    assert shown.exit_code == 0
    assert "one@1" in shown.stdout
    with pytest.raises(NotFoundError, match="no function 'none'"):
        node.client.explain("none")


def test_explain_shows_refusals(node):
    deploy(node, "slow")
    with pytest.raises(DeadlineError) as refused:
        ask(node, "slow", timeout_s=1e-6)
    explained = node.client.explain("slow")
    assert [(each["what"], each["why"]) for each in explained["refusals"]] == [("DeadlineError", str(refused.value))]
    assert Samples(node).of("requests_total", function="slow", outcome="refused", error="DeadlineError") == 1
    node.client.remove("slow")
    # Its worker ends a moment later.
    wait_until(lambda: not any(("function", "slow") in labels for _, labels in Samples(node)))


def test_usage_is_recorded_by_tenant_and_survives_a_restart(shared_node):
    node = shared_node()
    deploy(node, "one", Scale(2.0))
    deploy(node, "twin", Scale(2.0), tenant="paying")
    ask(node, "one")
    before = {each["function"]: each for each in node.client.usage()}
    assert before["one"]["requests"] == 1
    assert 0 < before["one"]["core_ms"] < before["one"]["billed_core_ms"]
    assert before["one"]["disk_byte_s"] > 0
    assert before["twin"]["tenant"] == "paying"
    assert [each["function"] for each in node.client.usage("paying")] == ["twin"]
    node.stop()
    node.start()
    after = {each["function"]: each for each in node.client.usage()}
    assert after["one"]["requests"] == 1
    assert after["one"]["core_ms"] == pytest.approx(before["one"]["core_ms"])
    assert after["one"]["disk_byte_s"] > before["one"]["disk_byte_s"]
    shown = CliRunner().invoke(main, ["usage", "--tenant", "paying", "--url", node.url])
    assert "twin" in shown.stdout
    assert "one" not in shown.stdout


def test_a_truncated_block_is_reported_once_and_counted(tmp_path):
    # With verification, the block would be replaced before two checks have seen that it was truncated.
    node = NodeProcess(tmp_path / "cut", "--accounting-s", "0.05", "--verify-share", "0")
    try:
        deploy(node, "one", Scale(2.0))
        victim = max(node.store().iterdir(), key=lambda path: path.stat().st_size)
        victim.chmod(0o600)
        os.truncate(victim, 4096)
        stray = node.store() / ("0" * 64)
        stray.write_bytes(b"x" * 5000)
        wait_until(lambda: Samples(node).of("accounting_mismatch_total", kind="files") == 2)
        assert after_passes(node, 3).of("accounting_mismatch_total", kind="files") == 2
        said = wait_until(lambda: [line for line in node.said if "do not agree" in line])
        # A check between the two changes reports the first alone.
        assert 1 <= len(said) == len(set(said)) <= 2
        assert "4096 bytes" in said[0] or "does not know" in said[0]
        stray.unlink()
    finally:
        node.clean()


def test_an_unloaded_function_does_not_reveal_that_another_tenant_has_its_blocks_in_memory(node):
    deploy(node, "copied", Scale(2.0), tenant="copier")
    with Client(node.url, tenant="copier") as copier:
        copier.unload("copied")
        described = wait_until(lambda: (it := copier.function("copied"))["lifecycle"] == "unloaded" and it)
        assert described["missing_bytes"] == described["nbytes"]
        assert copier.explain("copied")["tiers"][1]["resident"] == 0
        copier.remove("copied")
