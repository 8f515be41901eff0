"""Long listings are made in steps, and reserve memory of the requests' budget."""

import json
from pathlib import Path

import httpx
import msgspec
import pytest

from overwinter.api.budget import Budget, Reservation
from overwinter.api.listing import STEP_BYTES, STEP_ITEMS, listed
from overwinter.api.steps import finish
from tests.api.fake_node import FUNCTIONS, LIMITS, serving

COUNT = 3000


def held() -> Reservation:
    return Reservation(Budget(1 << 30, 1.0, 0.01), "caller")


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_each_item_is_listed(count: int) -> None:
    assert json.loads(finish(listed(range(count), lambda each: {"n": each}, held()))) == [
        {"n": each} for each in range(count)
    ]


def test_a_step_encodes_a_few_items_and_reserves_their_memory() -> None:
    results: list[int] = []
    reservation = held()
    steps = listed(range(100), lambda each: results.append(each) or "x" * 100, reservation)
    before = 0
    for _ in steps:
        assert len(results) - before <= STEP_ITEMS
        before = len(results)
        assert reservation.nbytes >= 100 * len(results)
    assert len(results) == 100


def test_a_step_encodes_one_long_item() -> None:
    results: list[int] = []
    steps = listed(range(20), lambda each: results.append(each) or "x" * STEP_BYTES, held())
    assert [len(results) for _ in steps] == list(range(21))


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v2/repository/index"), ("GET", "/v2/models"), ("GET", "/overwinter/v1/functions")],
)
def test_a_listing_without_memory_is_refused(tmp_path: Path, method: str, path: str) -> None:
    limits = msgspec.structs.replace(LIMITS, requests_bytes_max=1 << 20, caller_share=0.1)
    with serving(tmp_path, limits=limits) as served, httpx.Client(base_url=served.url) as http:
        assert http.request(method, path).status_code == 200
        known = served.node.views["slow", 1]
        names = [f"{'long' * 10}-{number}" for number in range(COUNT)]
        served.node.views |= {(name, 1): msgspec.structs.replace(known, name=name) for name in names}
        assert http.request(method, path).status_code == 413
        served.node.views = {key: view for key, view in served.node.views.items() if key[0] in FUNCTIONS}
        assert http.request(method, path).status_code == 200
        assert served.budget.held == 0
