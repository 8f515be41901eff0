"""A node starts with the data directory of an older version, and serves the functions in it."""

import sqlite3
from contextlib import closing

import msgspec

from .nodes import NodeProcess, ask, deploy

OLDER = {"max_workers": "max_bodies"}
"""Settings with their names in an older version."""


def write_as_an_older_version(node: NodeProcess) -> list[dict]:
    """Rename the settings of all functions; return the settings."""
    written = []
    with closing(sqlite3.connect(node.data / "catalog.sqlite")) as catalog, catalog:
        for name, data in catalog.execute("SELECT name, manifest FROM functions").fetchall():
            manifest = msgspec.json.decode(data)
            settings = {OLDER.get(key, key): value for key, value in manifest["settings"].items()}
            manifest["settings"] = settings
            catalog.execute("UPDATE functions SET manifest = ? WHERE name = ?", (msgspec.json.encode(manifest), name))
            written.append(settings)
    return written


def test_a_node_serves_the_other_functions_if_it_cannot_read_one(make_node):
    node = make_node()
    deploy(node, "newer")
    deploy(node, "f")
    assert ask(node, "f", 2.0) == [5.0] * 4
    node.stop()
    with closing(sqlite3.connect(node.data / "catalog.sqlite")) as catalog, catalog:
        [[data]] = catalog.execute("SELECT manifest FROM functions WHERE name = 'newer'")
        manifest = msgspec.json.decode(data)
        manifest["settings"]["of_a_newer_version"] = True
        catalog.execute("UPDATE functions SET manifest = ? WHERE name = 'newer'", (msgspec.json.encode(manifest),))
    node.start()
    assert ask(node, "f", 2.0) == [5.0] * 4
    assert [each["name"] for each in node.client.functions()] == ["f"]
    assert deploy(node, "newer").version == 2
    assert ask(node, "newer", 2.0) == [5.0] * 4


def test_functions_with_settings_under_old_names_are_served(shared_node):
    node = shared_node()
    deploy(node, "f", max_workers=3, slo_ms=500.0)
    assert ask(node, "f", 2.0) == [5.0] * 4
    settings = node.client.function("f")["settings"]
    node.stop()
    [written] = write_as_an_older_version(node)
    assert written["max_bodies"] == 3
    node.start()
    assert ask(node, "f", 2.0) == [5.0] * 4
    assert node.client.function("f")["settings"] == settings
    assert node.client.function("f")["settings"]["max_workers"] == 3
    deploy(node, "f", max_workers=2)
    assert node.client.function("f")["settings"]["max_workers"] == 2
