"""The policies of a scheduler by name: Overwinter's own, the papers' algorithms, and their baselines."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds

Scaling = Literal["overwinter", "dts", "dts-cores", "exact", "mls", "infless", "photons", "tetris-ro", "batch"]
Rate = Literal["window", "last-value", "k-last-value", "on-demand", "peak", "oracle"]
Batching = Literal["overwinter", "greedy", "adaptive", "timeout"]
KeepAlive = Literal["unlimited", "fixed", "history"]
Eviction = Literal["cost-aware", "lru"]
WorkerEviction = Literal["cost-aware", "lru"]
Order = Literal["due-time", "any"]
DeviceOrder = Literal["rrc", "fifo", "due-time", "overwinter"]
DeviceBinding = Literal["missing-bytes", "torpor", "random", "native", "infless"]
DeviceEviction = Literal["cost-aware", "torpor", "lru"]
DeviceAhead = Literal["nothing", "programs", "replicas"]


POLICY_BOUNDS = {
    "keep_alive_s": seconds(0, 31_536_000, "0 stops an idle worker at once, and a year is the maximum"),
    "period_s": seconds(0.01, 86_400, "each period checks every function, and must react within a day"),
    "history": Bound(1, 10_000, "periods", "one is needed, and all are read in each period"),
    "alpha": Bound(0.01, 1, "of the capacity", "it is a fraction, and rates are divided by it", whole=False),
    "beta": Bound(0.001, 1, "of the capacity", "it is a fraction below alpha", whole=False),
    "core_mib": Bound(0, 1 << 20, "MiB", "it is compared with the memory of a worker", whole=False),
    "cores_max": Bound(1, 4096, "cores", "no machine has more"),
    "batch_max": Bound(1, 65_536, "requests", "no function's settings allow more"),
    "concurrency_max": Bound(1, 4096, "runs", "no function's settings allow more"),
}
"""The bounds of every number in a policy."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy for each decision of the scheduler."""

    scaling: Scaling = "overwinter"
    """How many workers, and with which configurations."""
    rate: Rate = "window"
    """How many requests are expected."""
    batching: Batching = "overwinter"
    """When waiting requests are sent, and to which worker."""
    keep_alive: KeepAlive = "unlimited"
    """How long an idle worker is kept: until others need its resources, for a fixed time, or by its functions' history.
    A function's own `keep_alive_s` replaces the fixed time, and limits the others.
    """
    keep_alive_s: float = 60.0
    """The fixed time, or with `history` the maximum, for functions without a setting of their own."""
    worker_eviction: WorkerEviction = "cost-aware"
    """Which idle worker is stopped first when others need its resources."""
    eviction: Eviction = "cost-aware"
    """Which function's blocks are evicted from a full host store."""
    order: Order = "due-time"
    """Whose request gets the next free core: the one due first; with `any` the kernel shares the cores."""
    eager: bool = True
    """Whether waiting requests may start further workers between two periods; the first worker always starts at once.
    """
    reserves: bool = False
    """Whether the cores of a worker stay reserved for it while it is idle."""
    shares: bool = True
    """Whether the scaler assumes that workers share their weights, as simulated workers then do; real ones always share
    them.
    """
    period_s: float = 10.0
    """The seconds between two decisions on the number of workers."""
    history: int = 6
    """The periods from which the expected rate is computed."""
    alpha: float = 0.85
    """The utilization above which workers are added."""
    beta: float = 0.7
    """The utilization below which workers are released. `alpha` and `beta` are closer together than in AsyFunc (0.8 and
    0.6), because a missing worker starts in tens of milliseconds (benchmarks/asyfunc).
    """
    binds: bool = True
    """Whether functions of one family share workers."""
    joins: bool = True
    """Whether requests of functions of one family share runs, if `binds` is true."""
    device_order: DeviceOrder = "overwinter"
    """Whose request gets the next free device: by default those that can be in time, in the order of the time for which
    their runs would wait for blocks, then those without an SLO, then late ones; and some runs are for requests that
    have waited for a long time. The other orders: by the required request count (`rrc`; Torpor, A.3), by arrival, or
    by due time.
    """
    device_binding: DeviceBinding = "missing-bytes"
    """Which free device a request gets: the one on which its run waits least for blocks, the one that Torpor's
    algorithm 1 chooses, or (`random`) one that has all blocks, otherwise a random one. `native` binds a function to one
    device until it is unloaded or removed, `infless` at most until it has been idle for its keep-alive.
    """
    device_eviction: DeviceEviction = "cost-aware"
    """Which function is evicted from a device that is full."""
    device_ahead: DeviceAhead = "replicas"
    """What idle devices do before a request comes: `programs` prepares the programs of the functions that they may run,
    one at a time. `replicas` also brings functions to a further device if their rate is too high for those that have
    them, and later slices of a program while an earlier one runs.
    """
    core_mib: float = 64.0
    """The memory that costs as much as one core."""
    cores_max: int = 16
    batch_max: int = 64
    concurrency_max: int = 16
    """These three limit the measured configurations that workers may have, in addition to the function's settings."""

    def __post_init__(self) -> None:
        check_bounds(self, POLICY_BOUNDS)
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
"""The named policies. `SchedulerConfig.policy` may also be a Policy instead of a name."""


def policy_named(policy: "str | Policy") -> Policy:
    """The policy of this name; ValueError lists the known names."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"no policy is called {policy!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]
