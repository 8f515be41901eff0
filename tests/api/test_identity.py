"""What a client says of itself is checked before it sends anything."""

import pytest

from overwinter.api.client import Client
from overwinter.core.errors import CallerError
from tests.api.fake_node import Served


def test_an_empty_token_counts_as_no_token(served: Served) -> None:
    with Client(served.url, token="") as client:
        assert client.live()


@pytest.mark.parametrize("token", [" abc", "abc ", " ", "a\nb", "é"])
def test_a_token_that_no_header_can_contain_is_refused(token: str) -> None:
    with pytest.raises(CallerError, match="a token is printable ASCII"):
        Client(token=token)


@pytest.mark.parametrize("tenant", ["é", "a\nb", "acme\n", " acme", "Acme", ""])
def test_an_invalid_tenant_is_refused(tenant: str) -> None:
    with pytest.raises(CallerError, match="not a valid tenant name"):
        Client(tenant=tenant)
    with Client() as client, pytest.raises(CallerError, match="not a valid tenant name"):
        client.for_tenant(tenant)
