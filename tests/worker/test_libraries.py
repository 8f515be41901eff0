"""Libraries imported in advance may be missing or broken, and forks draw different random numbers."""

import subprocess
import sys

import pytest

from overwinter.worker import libraries

DRAWS = """
import os
from overwinter.worker import libraries

libraries.HANDLER_LIBRARIES = ()
list(libraries.import_ahead(["numpy.random"]))
import numpy, random, torch
for _ in range(2):
    pid = os.fork()
    if not pid:
        print(random.random(), numpy.random.random(), torch.rand(1).item(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_broken_library_is_reported_and_a_missing_one_only_if_the_administrator_chose_it(tmp_path, monkeypatch):
    (tmp_path / "broken_ahead.py").write_text("raise ValueError('made for another version')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "HANDLER_LIBRARIES", ("broken_ahead", "not_installed_ahead"))
    results = [each for each in libraries.import_ahead(["no_such_ahead"]) if "threads" not in each]
    assert ["made for another version" in each for each in results] == [True, False]
    assert "no_such_ahead" in results[1]


@pytest.mark.parametrize("error", ["SystemExit(1)", "RuntimeError('no')"])
def test_the_zygote_continues_after_any_error_of_the_administrators_library(tmp_path, monkeypatch, error):
    (tmp_path / "raises_ahead.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "HANDLER_LIBRARIES", ())
    assert any("raises_ahead" in each for each in libraries.import_ahead(["raises_ahead"]))


def test_each_fork_draws_random_numbers_of_its_own():
    ran = subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True, check=True)
    first, second = ran.stdout.splitlines()
    assert not set(first.split()) & set(second.split())
