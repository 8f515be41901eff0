"""The messages of workers and executors as the node receives them.

The senders are untrusted: a message of a few bytes for each tensor can hold far more tensors than a run has. So the
outcomes of an answer are decoded one by one, after their number was compared with the run.
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
