"""The queue for cores, as data; order.py maintains it."""

import msgspec

from overwinter.core.ids import FunctionId


class CoreLine(msgspec.Struct):
    """The functions whose requests wait for a core. order.py maintains it."""

    due: list[tuple[int, float, int, FunctionId]] = msgspec.field(default_factory=list)
    """A heap of (level, due, number, function); an entry counts while it is in `hopeful`."""
    hopeful: dict[FunctionId, tuple[int, float, int, FunctionId]] = msgspec.field(default_factory=dict)
    """Those whose first request can be in time. Of those due at once the longest waiting has the least number."""
    late: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Those of which some request cannot, the longest waiting first."""
    number: int = 0
    """Functions that joined so far."""
    given: int = 0
    """Cores given out so far."""

    @property
    def waits(self) -> bool:
        """Whether any function waits."""
        return bool(self.hopeful) or bool(self.late)
