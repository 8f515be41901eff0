"""Transfers over a shared link share its bandwidth, up to the bandwidth of their own links."""

import pytest

from overwinter.simulation.links import SharedLink, Transfer
from overwinter.simulation.timeline import Timeline


class Links:
    """A shared link of 100 bytes a second, and when its transfers arrived."""

    def __init__(self):
        self.timeline = Timeline()
        self.link = SharedLink(100.0, self.timeline)
        self.arrived = {}

    def begin(self, name, nbytes, at=0.0, most=80.0):
        transfer = Transfer(nbytes, most, lambda: self.arrived.update({name: self.timeline.now}))
        self.timeline.at(at, lambda: self.link.begin(transfer))
        return transfer

    def run(self):
        self.timeline.run_until(100.0)
        return self.arrived


@pytest.fixture
def links():
    return Links()


def test_a_transfer_alone_has_the_bandwidth_of_its_link(links):
    links.begin("a", 40)
    assert links.run() == {"a": 0.5}


def test_two_transfers_have_half_of_the_bandwidth_each(links):
    links.begin("a", 100)
    links.begin("b", 100)
    assert links.run() == {"a": 2.0, "b": 2.0}


def test_bandwidth_that_a_slow_link_cannot_use_goes_to_the_others(links):
    links.begin("slow", 40, most=20.0)
    links.begin("fast", 160)
    assert links.run() == {"slow": 2.0, "fast": 2.0}


def test_bandwidth_changes_whenever_a_transfer_begins_or_ends(links):
    links.begin("a", 100)
    links.begin("b", 100, at=0.5)
    # 60 bytes are left of a when b begins; b has 40 left when a ends.
    assert links.run() == pytest.approx({"a": 1.7, "b": 2.2})


def test_a_cancelled_transfer_frees_its_bandwidth_and_never_arrives(links):
    transfer = links.begin("a", 100)
    links.begin("b", 100)
    links.timeline.at(1.0, lambda: links.link.cancel(transfer))
    assert links.run() == pytest.approx({"b": 1.625})
