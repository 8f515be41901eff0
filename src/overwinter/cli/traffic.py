"""The commands that choose which versions of a function get the requests that name no version."""

import click

from overwinter.cli.options import (
    as_json,
    assignment,
    connect,
    echo,
    function_version,
    node_url,
    print_json,
    tenant_option,
)
from overwinter.core.errors import CallerError
from overwinter.core.versions import WHOLE, Share, check_shares

NEWEST = "newest"


@click.command()
@click.argument("name")
@click.argument("version", metavar=f"VERSION|{NEWEST}", required=False)
@tenant_option
@node_url
@as_json
def promote(name: str, version: str | None, tenant: str, url: str, as_json: bool) -> None:
    """Send all requests that name no version to one version of a function.

    That version gets them until the next promotion or split, even when new versions are deployed. Promoting an older
    version is a rollback. `overwinter promote NAME newest` restores the default: each new version gets the requests
    when it is deployed. NAME@VERSION is the same as NAME VERSION.
    """
    if version is None:
        name, number = function_version(name)
        version = "" if number is None else str(number)
    if version != NEWEST and not _is_positive(version):
        raise click.BadParameter(f"{version!r} must be a version number or {NEWEST}")
    shares = {} if version == NEWEST else {int(version): WHOLE}
    with connect(url, tenant=tenant) as client:
        client.set_traffic(name, shares)
    who = "the newest version" if version == NEWEST else f"{name}@{version}"
    _done(name, shares, f"requests for {name} that name no version go to {who}", as_json)


@click.command()
@click.argument("name")
@click.argument("shares", nargs=-1, required=True, metavar="VERSION=PERCENT...")
@tenant_option
@node_url
@as_json
def split(name: str, shares: tuple[str, ...], tenant: str, url: str, as_json: bool) -> None:
    """Divide the requests that name no version among versions of a function, for example 1=90 2=10.

    The versions must have the same inputs and outputs. `overwinter promote` ends the split.
    """
    chosen = [_share(text) for text in shares]
    try:
        check_shares(tuple(chosen))
    except CallerError as error:
        raise click.UsageError(str(error)) from error
    by_version = {share.version: share.percent for share in chosen}
    with connect(url, tenant=tenant) as client:
        client.set_traffic(name, by_version)
    division = ", ".join(f"{percent}% to {name}@{version}" for version, percent in by_version.items())
    _done(name, by_version, f"requests for {name} that name no version go {division}", as_json)


def _share(text: str) -> Share:
    version, percent = assignment(text)
    if not (_is_positive(version) and _is_positive(percent)):
        raise click.BadParameter(f"{text!r} must be a version and a whole percentage, for example 2=10")
    return Share(int(version), int(percent))


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text) > 0


def _done(name: str, shares: dict[int, int], text: str, as_json: bool) -> None:
    if as_json:
        divided = [{"version": version, "percent": percent} for version, percent in shares.items()]
        print_json({"name": name, "shares": divided})
    else:
        echo(text)
