"""The policies of a scheduler by name: Overwinter's own, the papers' algorithms, and their baselines."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds

Scaling = Literal["overwinter", "dts", "dts-cores", "exact", "mls", "infless", "photons", "tetris-ro", "batch"]
Rate = Literal["window", "last-value", "k-last-value", "on-demand", "peak", "oracle"]
Batching = Literal["overwinter", "greedy", "adaptive", "timeout"]
KeepAlive = Literal["room", "fixed", "history"]
Eviction = Literal["worth", "lru"]
WorkerEviction = Literal["cost-aware", "lru"]
Order = Literal["deadline", "any"]


BOUNDS = {
    "keep_alive_s": seconds(0, 31_536_000, "0 stops an idle worker at once, and a year is for ever"),
    "period_s": seconds(0.01, 86_400, "a look at every function takes its time, and after a day it is too late"),
    "history": Bound(1, 10_000, "periods", "one must be known, and all are looked at each period"),
    "alpha": Bound(0.01, 1, "of the capacity", "it is a share, and rates are divided by it", whole=False),
    "beta": Bound(0.001, 1, "of the capacity", "it is a share, below alpha", whole=False),
    "core_mib": Bound(0, 1 << 20, "MiB", "it is weighed against the memory of a worker", whole=False),
    "cores_max": Bound(1, 4096, "cores", "no machine has more"),
    "batch_max": Bound(1, 65_536, "requests", "no function's settings allow more"),
    "concurrency_max": Bound(1, 4096, "runs", "no function's settings allow more"),
}
"""Of every number in a policy."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule for each question."""

    scaling: Scaling = "overwinter"
    """How many workers, and of which shape."""
    rate: Rate = "window"
    """How many requests are expected."""
    batching: Batching = "overwinter"
    """When waiting requests are handed to which worker."""
    keep_alive: KeepAlive = "room"
    """How long an idle worker stays: until others need its room, for a fixed time, or as its past says. Never longer
    than its function's settings say."""
    keep_alive_s: float = 60.0
    """That fixed time, and the longest by its past, of a function whose settings say none."""
    worker_eviction: WorkerEviction = "cost-aware"
    """Which idle worker goes first when others need its room."""
    eviction: Eviction = "worth"
    """Which function's blocks leave a host store that is full."""
    order: Order = "deadline"
    """Whose request gets the next core that is free; any: the kernel shares the cores among all."""
    eager: bool = True
    """Whether requests that wait may start a worker between two periods; the first worker is always started so."""
    reserves: bool = False
    """Whether a worker keeps its cores while it is idle."""
    shares: bool = True
    """Whether the workers that are modelled share their weights. Real ones always do."""
    period_s: float = 10.0
    """Time between two looks at the number of workers."""
    history: int = 6
    """Periods that are remembered for the expected rate."""
    alpha: float = 0.85
    """More workers when the rate is above so much of what they can do."""
    beta: float = 0.7
    """Fewer when it is below so much. Both closer than AsyFunc's 0.8 and 0.6: a worker that is missed comes in tens of
    milliseconds (benchmarks/asyfunc)."""
    binds: bool = True
    """Whether functions of one family share workers."""
    joins: bool = True
    """Whether requests of functions of one family share runs, if they share workers."""
    core_mib: float = 64.0
    """Memory that one core weighs as much as."""
    cores_max: int = 16
    batch_max: int = 64
    concurrency_max: int = 16
    """Bounds of every worker's shape, beside the function's own."""

    def __post_init__(self) -> None:
        check_bounds(self, BOUNDS)
        if not self.beta < self.alpha:
            raise ValueError(f"beta must be below alpha, got beta {self.beta} and alpha {self.alpha}")


_ASYFUNC = Policy(
    scaling="mls",
    rate="last-value",
    batching="adaptive",
    order="any",
    eager=False,
    reserves=True,
    keep_alive="fixed",
    worker_eviction="lru",
    binds=False,
    joins=False,
    shares=False,
    alpha=0.8,
    beta=0.6,
    cores_max=16,
    batch_max=8,
)
_TETRIS = Policy(
    scaling="dts",
    rate="last-value",
    batching="timeout",
    order="any",
    eager=False,
    reserves=True,
    keep_alive="fixed",
    worker_eviction="lru",
    binds=False,
    joins=False,
    core_mib=0.0,
    alpha=0.8,
    beta=0.6,
)

POLICIES: Mapping[str, Policy] = {
    "overwinter": Policy(),
    "tetris": _TETRIS,
    "tetris-cores": msgspec.structs.replace(_TETRIS, scaling="dts-cores", core_mib=256.0),
    "tetris-exact": msgspec.structs.replace(_TETRIS, scaling="exact"),
    "tetris-ro": msgspec.structs.replace(_TETRIS, scaling="tetris-ro", shares=False),
    "infless": msgspec.structs.replace(_TETRIS, scaling="infless", shares=False, keep_alive="history"),
    "photons": msgspec.structs.replace(_TETRIS, scaling="photons", shares=False),
    "mls": _ASYFUNC,
    "last-value": _ASYFUNC,
    "k-last-value": msgspec.structs.replace(_ASYFUNC, rate="k-last-value"),
    "on-demand": msgspec.structs.replace(_ASYFUNC, rate="on-demand", eager=True),
    "oracle": msgspec.structs.replace(_ASYFUNC, rate="oracle"),
    "batch": msgspec.structs.replace(_ASYFUNC, scaling="batch", rate="peak", batching="timeout", history=30),
    "batch+": msgspec.structs.replace(_ASYFUNC, scaling="batch", rate="peak", history=30),
    "lru": Policy(eviction="lru", worker_eviction="lru"),
    "separate": Policy(joins=False),
    "fixed": Policy(batching="greedy", keep_alive="fixed", eviction="lru", worker_eviction="lru", order="any"),
}
"""Named sets of rules. A configuration may also spell a Policy out."""


def policy_named(policy: "str | Policy") -> Policy:
    """The policy of this name; ValueError lists the known names."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"no policy is called {policy!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]
