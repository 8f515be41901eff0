"""A request to a function with `device = "any"` goes where it is answered sooner."""

import pytest

from overwinter.scheduler.policies.either import Price, Prices, cheaper


def price(wait_ms: float, run_ms: float | None, may_try: bool = False) -> Price:
    return Price("there", wait_ms / 1e3, None if run_ms is None else run_ms / 1e3, may_try)


@pytest.mark.parametrize(
    ("workers", "devices", "place"),
    [
        (price(0, 10), price(3, 5), "devices"),
        (price(0, 10), price(8, 5), "workers"),
        (price(20, 10), price(8, 5), "devices"),
        (price(0, 5), price(0, 5), "workers"),
        (price(float("inf"), 5), price(900, 5), "devices"),
        (price(900, 5), price(float("inf"), 5), "workers"),
        # What was never measured is tried once, the workers first.
        (price(30, None, may_try=True), price(1, None, may_try=True), "workers"),
        (price(30, None), price(1, None, may_try=True), "devices"),
        (price(30, None, may_try=True), price(1, 1), "workers"),
        (price(0, 1), price(1000, None, may_try=True), "devices"),
        # While it is being tried it is assumed to take as long as the other.
        (price(0, None), price(5, 1), "workers"),
        (price(9, None), price(5, 1), "devices"),
        (price(2, 10), price(3, None), "workers"),
        (price(4, 10), price(3, None), "devices"),
        (price(1, None), price(0, None), "devices"),
    ],
)
def test_the_cheaper_way_is_chosen(workers, devices, place):
    prices = Prices(workers, devices)
    assert cheaper(prices) is getattr(prices, place)


def test_both_prices_are_said():
    workers = Price("workers", 0.03, 0.01, may_try=False)
    assert Prices(workers, Price("virtual:0", 0.5, 0.002, may_try=False)).text() == (
        "workers 40.0 ms (30.0 until it runs); virtual:0 502.0 ms (500.0 until it runs)"
    )
    tried = Prices(workers, Price("virtual:0", 0.5, None, may_try=True))
    assert tried.text() == "virtual:0 was never measured; workers 40.0 ms (30.0 until it runs)"
