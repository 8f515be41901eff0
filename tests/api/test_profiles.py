"""The answer of a measurement ends with its result, however the measurement ends."""

import asyncio
from itertools import islice

import httpx
import msgspec
import pytest

from overwinter.api import profiles
from overwinter.core.errors import WorkerError
from overwinter.core.profiling import ProfileLine, ProfileOptions, Progress, ReportProgress
from tests.api.fake_node import Served

MEASURE = "/overwinter/v1/functions/add/profile"
STEP = Progress(done=0, total=1, what="begins")


def lines_of(http: httpx.Client) -> list[ProfileLine]:
    """Measure a function, and return the lines of the answer that are not empty."""
    answer = http.post(MEASURE)
    assert answer.status_code == 200
    return [msgspec.json.decode(line, type=ProfileLine) for line in answer.text.splitlines() if line]


def failing(served: Served, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let measurements report a step, and then raise an error."""

    async def profile(name: str, version: int | None, options: ProfileOptions, report: ReportProgress) -> None:
        report(STEP)
        await asyncio.sleep(0)
        raise error

    monkeypatch.setattr(served.node, "profile", profile, raising=False)


def test_a_failed_measurement_ends_with_its_error(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(served, monkeypatch, WorkerError("it did not run"))
    assert lines_of(http) == [ProfileLine(progress=STEP), ProfileLine(error="it did not run", status=500)]


def test_an_unexpected_error_is_logged_and_ends_the_answer_as_an_internal_one(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(served, monkeypatch, OSError(28, "No space left on device"))
    last = ProfileLine(error="internal error (OSError); see the node's log", status=500)
    assert lines_of(http) == [ProfileLine(progress=STEP), last]
    [record] = caplog.records
    assert "No space left" in caplog.text
    assert record.function == "add"  # type: ignore[attr-defined]


def test_the_answer_of_a_cancelled_measurement_ends(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "SILENT_S", 0.01)
    failing(served, monkeypatch, asyncio.CancelledError())
    with http.stream("POST", MEASURE) as answer:
        # Without its end, the answer would have empty lines forever.
        assert len(list(islice(answer.iter_lines(), 100))) < 100
