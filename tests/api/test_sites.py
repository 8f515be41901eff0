"""Which requests a node without tokens takes for those of a web page of another site."""

import socket

import pytest

from overwinter.api.sites import Sites
from overwinter.core.errors import ForbiddenError


def is_allowed(sites: Sites, host: str | None, origin: str | None) -> bool:
    fields = {b"host": host, b"origin": origin}
    try:
        sites.check({name: value.encode() for name, value in fields.items() if value is not None})
    except ForbiddenError:
        return False
    return True


HOSTS = ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "node:8000", "a.localhost", None]


@pytest.mark.parametrize("host", HOSTS)
def test_a_local_node_may_be_addressed_by_names_that_no_site_has(host: str | None) -> None:
    assert is_allowed(Sites("127.0.0.1"), host, None)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example.",
        "[::1].evil.example",
        "[::1",
        "evil.example#.localhost",
        "a@b.localhost",
    ],
)
def test_another_name_of_a_local_node_is_refused(host: str) -> None:
    sites = Sites("::1")
    for _ in range(2):
        assert not is_allowed(sites, host, None)
    assert is_allowed(Sites("0.0.0.0"), host, None)


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "10.1.2.3"])
def test_a_page_of_another_site_is_refused(listens_on: str) -> None:
    sites = Sites(listens_on)
    for _ in range(2):
        assert not is_allowed(sites, "localhost:8000", "http://evil.example")
        assert not is_allowed(sites, "localhost:8000", "http://localhost.evil.example:8000")
        assert not is_allowed(sites, "localhost:8000", "null")
        assert not is_allowed(sites, None, "http://")
        assert not is_allowed(sites, "localhost:8000", "http://[::1].evil.example")
        assert not is_allowed(sites, "localhost:8000", "http://a.localhost:x.evil.example")
        assert is_allowed(sites, "localhost:8000", "http://localhost:8000")
        assert is_allowed(sites, "localhost:8000", "http://127.0.0.1:3000")
        assert is_allowed(sites, "10.1.2.3:8000", "http://10.1.2.3:8000")


def test_a_local_node_may_be_addressed_by_its_machine_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    sites = Sites("127.0.0.1")
    assert is_allowed(sites, "box.LAN.:8000", None)
    assert not is_allowed(sites, "other.lan", None)


def test_case_and_the_usual_port_make_no_difference() -> None:
    sites = Sites("0.0.0.0")
    assert is_allowed(sites, "Box.lan:8000", "http://box.lan:8000")
    assert is_allowed(sites, "box.lan:80", "http://box.lan")
    assert is_allowed(sites, "box.lan:443", "HTTPS://box.lan")
    assert not is_allowed(sites, "box.lan:443", "http://box.lan")
    assert not is_allowed(sites, "box.lan:8000", "http://box.lan")


def test_long_headers_are_not_kept() -> None:
    sites = Sites("127.0.0.1")
    for number in range(300):
        assert is_allowed(sites, "x" * 600 + str(number), None)
        assert is_allowed(sites, str(number), None)
    assert sum(len(host) for host, _ in sites._allowed) < 256 * 512


def test_a_page_of_the_node_itself_may_call_it_by_any_name() -> None:
    assert is_allowed(Sites("0.0.0.0"), "models.example.org", "https://models.example.org")
    assert not is_allowed(Sites("0.0.0.0"), "models.example.org", "https://example.org")
