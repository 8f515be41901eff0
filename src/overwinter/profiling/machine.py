"""Identifies the machine as far as it determines speed, because profiles hold for one kind of machine only."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MODEL_KEYS = ("model name", "cpu model", "CPU part")
"""The keys under which different processors report their model."""


def core_count() -> int:
    """Return the number of cores that this process and its children may use."""
    return len(os.sched_getaffinity(0))


def fingerprint() -> str:
    """Return the processor's model, the number of cores and the version of PyTorch."""
    return f"{_model(CPUINFO.read_text(errors='replace'))}; {core_count()} cores; torch {version('torch')}"


def _model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in MODEL_KEYS:
            return value.strip()
    return platform.machine()
