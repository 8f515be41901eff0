"""The comparison of schedulers detects every difference between decisions, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.decisions import BOUNDS, Saved, compare, read, run_random, save, scenarios, simulate
from overwinter.core.policies import POLICIES

ROOT = Path(__file__).parents[2]
SMALL = dict(scenarios(0.2))["small"]


def test_the_same_decisions_give_the_same_hash_in_another_process():
    run = [sys.executable, "-m", "benchmarks.decisions", "--longer", "0.1", "--only", "small overwinter all"]
    results = {
        subprocess.run(run, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    hashes = {line.split()[3] for output in results for line in output.splitlines() if line.startswith(b"small ")}
    assert len(hashes) == 1


def test_other_decisions_give_another_hash():
    runs = [simulate(SMALL, policy, bounds, 2, Path()) for policy, bounds in (("overwinter", "none"), ("mls", "none"))]
    runs += [
        simulate(SMALL, "overwinter", "all", 2, Path()),
        run_random(1, "overwinter", "none"),
        run_random(2, "overwinter", "none"),
    ]
    assert len({run.hash for run in runs}) == len(runs)


def test_what_was_saved_is_compared(tmp_path, capsys):
    file = tmp_path / "runs.json"
    outcome = run_random(1, "overwinter", "all")
    runs = {f"random/1 {policy} {bounds}": outcome for policy in list(POLICIES)[:2] for bounds in BOUNDS}
    save(file, runs)
    save(file, {"random/1 overwinter all": outcome})
    assert read(file).runs == runs
    assert compare(read(file), runs) == 0
    changed = msgspec.structs.replace(outcome, hash="other", wakes=outcome.wakes + 1)
    assert compare(Saved("old", runs), runs | {"random/1 overwinter all": changed}) == 1
    assert "13 of 14 the same" in capsys.readouterr().out
