"""Real processes, as for the tests of the node."""

from tests.node.conftest import one_rig, rig

__all__ = ["one_rig", "rig"]
