"""`overwinter simulate`: a table for people, JSON and figures in files, clear errors."""

import json

import pytest

from overwinter.core.journal import read_journal
from tests.cli.conftest import Run

SCENARIO = """
duration_s = 30
[node]
cores = 2
[[functions]]
name = "f"
variants = 2
blocks = [{ mib = 1, shared = "f" }]
latency_ms = { 1 = 20 }
settings = { slo_ms = 100 }
workload = { kind = "poisson", rate = 4 }
"""


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SCENARIO)
    return "s.toml"


def test_a_simulation_prints_a_table_and_writes_a_report(local: Run, scenario, tmp_path) -> None:
    done = local("simulate", scenario, "--no-figures")
    assert "f-0000" in done.stdout
    assert "total" in done.stdout
    report = json.loads((tmp_path / "simulated" / "s" / "report.json").read_text())
    assert report["total"]["lost"] == 0
    assert report["total"]["answered"] == report["total"]["requests"] > 100
    assert list((tmp_path / "simulated" / "s").glob("*.png")) == []


def test_figures_are_written(local: Run, scenario, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    local("simulate", scenario, "--out", "there")
    assert len(list((tmp_path / "there").glob("*.png"))) == 3


def test_figures_need_matplotlib(local: Run, scenario, monkeypatch) -> None:
    monkeypatch.setattr("overwinter.cli.simulate.find_spec", lambda name: None)
    failed = local("simulate", scenario, exit_code=2)
    assert "pip install matplotlib" in failed.stderr
    assert "--no-figures" in failed.stderr


def test_the_seed_determines_the_journal_that_is_written(local: Run, scenario, tmp_path) -> None:
    journals = []
    for seed, name in (("1", "a"), ("1", "b"), ("2", "c")):
        local("simulate", scenario, "--no-figures", "--seed", seed, "--seconds", "5", "--journal", name, "--json")
        journals.append((tmp_path / name).read_bytes())
    assert journals[0] == journals[1] != journals[2]
    with (tmp_path / "a").open("rb") as file:
        assert sum(1 for _ in read_journal(file)[1]) > 20


def test_checks_of_invariants_run_on_request_and_change_nothing(local: Run, scenario, monkeypatch, tmp_path) -> None:
    def check(cycle) -> None:
        raise AssertionError("too many cores")

    for name, options in (("checked", ("--check",)), ("unchecked", ())):
        local("simulate", scenario, "--no-figures", "--seconds", "10", "--journal", name, *options)
    assert (tmp_path / "checked").read_bytes() == (tmp_path / "unchecked").read_bytes()
    monkeypatch.setattr("overwinter.simulation.world.check", check)
    local("simulate", scenario, "--no-figures", "--seconds", "10")
    failed = local("simulate", scenario, "--no-figures", "--seconds", "10", "--check", exit_code=1)
    assert "too many cores" in failed.stderr
    assert "Traceback" not in failed.stderr
    both = local("simulate", scenario, "--no-figures", "--capacity", "0.9", "--check", exit_code=2)
    assert "--check" in both.stderr


def test_one_command_finds_the_capacity(local: Run, scenario) -> None:
    done = local("simulate", scenario, "--no-figures", "--seconds", "10", "--capacity", "0.9", "--json")
    found = json.loads(done.stdout)
    assert found["copies"] >= 2
    assert found["functions"] == 2 * found["copies"]
    assert "does not fit" in done.stderr
    assert f"{found['copies']} copies" in local(
        "simulate", scenario, "--no-figures", "--seconds", "10", "--capacity", "0.9"
    ).stdout  # fmt: skip


def test_a_wrong_scenario_is_reported_with_its_file_and_key(local: Run, scenario, tmp_path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO.replace("cores", "coers"))
    failed = local("simulate", scenario, "--no-figures", exit_code=1)
    assert failed.stderr.startswith("error: s.toml: ")
    assert "coers" in failed.stderr


def test_a_trace_that_is_not_there_is_named_in_the_error(local: Run, scenario, tmp_path) -> None:
    text = SCENARIO.replace('kind = "poisson", rate = 4', 'kind = "minute-counts", path = "none.npy"')
    (tmp_path / "s.toml").write_text(text)
    failed = local("simulate", scenario, "--no-figures", exit_code=1)
    assert "none.npy" in failed.stderr


def test_the_devices_are_shown_if_there_are_any(local: Run, scenario, tmp_path) -> None:
    assert "DEVICE" not in local("simulate", scenario, "--no-figures").stdout
    pooled = SCENARIO.replace("slo_ms = 100", 'slo_ms = 100, device = "pool"')
    (tmp_path / "p.toml").write_text(pooled + '[[devices]]\nname = "a"\nmemory_bytes = 4_000_000\n')
    shown = local("simulate", "p.toml", "--no-figures").stdout
    report = json.loads((tmp_path / "simulated" / "p" / "report.json").read_bytes())["devices"]["a"]
    row = next(line.split() for line in shown.splitlines() if line.startswith("a "))
    assert row[:3] == ["a", str(report["runs"]), f"{report['busy_share']:.1%}"]


def test_an_output_directory_that_cannot_be_made_is_reported_before_the_simulation(local: Run, scenario, tmp_path):
    failed = local("simulate", scenario, "--no-figures", "--out", "s.toml/there", "--journal", "j", exit_code=1)
    assert "s.toml/there" in failed.stderr
    assert not (tmp_path / "j").exists()


def test_applications_have_their_own_table(local: Run, scenario, tmp_path) -> None:
    (tmp_path / "a.toml").write_text(
        SCENARIO.replace('name = "f"', 'name = "g"').replace("variants = 2\n", "").split("workload")[0]
        + """
[[applications]]
name = "shop"
slo_ms = 200
stages.first = { function = "g", inputs = { x = "input:x" } }
workload = { kind = "poisson", rate = 4 }
"""
    )
    done = local("simulate", "a.toml", "--no-figures")
    report = json.loads((tmp_path / "simulated" / "a" / "report.json").read_text())
    [line] = [line.split() for line in done.stdout.splitlines() if line.startswith("shop")]
    figures = report["applications"]["shop"]
    assert (line[1], line[5]) == (str(figures["requests"]), f"{figures['attainment']:.2%}")


def test_a_duration_that_is_no_number_of_seconds_is_a_usage_error(local: Run, scenario) -> None:
    assert "--seconds" in local("simulate", scenario, "--no-figures", "--seconds", "inf", exit_code=2).stderr
