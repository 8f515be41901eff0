"""The messages of workers and executors as the node receives them.

The senders are untrusted. A tensor takes only a few bytes in a message, so a small message can describe far more
tensors than a run has. So the number of outcomes is compared with the requests of the run, and then they are decoded
one by one.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from overwinter.core.ids import RunId
from overwinter.worker.messages import (
    BindFailed,
    Bound,
    Failure,
    LoadFailed,
    Measured,
    Outputs,
    PoolCall,
    Ready,
    Trying,
    Waiting,
    WarmedUp,
)

OUTCOMES_MAX = 8192
"""The most outcomes in an answer."""


class PackedAnswer(msgspec.Struct, frozen=True, tag="Answer", array_like=True):
    """An `Answer` whose outcomes are not decoded yet."""

    run: RunId
    outcomes: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=OUTCOMES_MAX)]
    moved_bytes: int = 0
    peer_bytes: int = 0
    unplaced: bool = False
    program_s: float = 0.0
    fault: str = ""


Received = Waiting | Trying | Ready | LoadFailed | Bound | BindFailed | PoolCall | PackedAnswer | WarmedUp | Measured

decode_outcome = msgspec.msgpack.Decoder(Outputs | Failure).decode
