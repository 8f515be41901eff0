"""Which worker goes when all together take more memory than they may?

A worker is admitted with what its function was measured to need, and may take up to `memory_mib`. The room of a node is
given out by needs, so that whenever there is too little, somebody takes more than its need. None but those are stopped:
whoever keeps within its need loses nothing for what others take. What is beyond the needs is free until somebody needs
it: then a worker of another tenant that takes far more than its need goes at once (room.py).

A need is measured without the handler and without large tensors, and is a guess before that. So a worker may take
somewhat more; who takes far more goes first. Of these it is one of the tenant whose workers together are furthest
beyond their needs: many that are a little beyond count as one that is much beyond. Of that tenant's, one that is idle
goes before one that runs something. Where nobody takes far more, nobody is at fault, and any that is idle goes first.
"""

from collections import Counter
from collections.abc import Iterable

from overwinter.core.ids import TenantId
from overwinter.policy.state import Body

MIB = 1 << 20
SLACK = 1.5
SLACK_BYTES = 32 << 20
"""A worker may take so many times its need and so much more before it is far beyond it."""


def is_far_beyond(body: Body) -> bool:
    """Whether it takes far more than it was to need."""
    return body.taken > body.point.memory_bytes * SLACK + SLACK_BYTES


def next_to_stop(bodies: Iterable[Body]) -> Body | None:
    """The worker that is stopped next; None: none takes more than its need."""
    beyond = [body for body in bodies if body.state != "stopping" and _excess(body) > 0]
    far = [body for body in beyond if is_far_beyond(body)]
    beyond = far or beyond
    together: Counter[TenantId] = Counter()
    for body in beyond:
        together[body.tenant] += _excess(body)
    return max(beyond, key=lambda body: (not far and body.state == "idle", _place(body, together)), default=None)


def told(body: Body, limit: int | None) -> str:
    """Why a worker is stopped, and what can be done."""
    most = "the machine runs short" if limit is None else f"all workers may have {limit / MIB:.1f} MiB (--memory-bytes)"
    return (
        f"a worker of function {body.function} took {body.taken / MIB:.1f} MiB and was stopped: it was to need "
        f"{body.point.memory_bytes / MIB:.1f} MiB, and {most}. Let it take less, set memory_mib so that it hears of "
        "its own bound first, or give the node more"
    )


def _excess(body: Body) -> int:
    return body.nbytes - body.point.memory_bytes


def _place(body: Body, together: Counter[TenantId]) -> tuple[int, TenantId, bool, int, int]:
    return together[body.tenant], body.tenant, body.state == "idle", _excess(body), body.id
