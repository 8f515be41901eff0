"""Whether a request to a function with `device = "any"` goes to a worker or a device: where it is answered sooner.

Workers or devices for which the program was never measured are tried once: the workers first, and devices as soon as
one is free. Until then a run there is assumed to take as long as on the other side.
"""

import msgspec


class Estimate(msgspec.Struct, frozen=True):
    """The expected seconds until one more request is answered by a worker, or on a device."""

    place: str
    """`workers`, the name of a device, or `devices` if the program fits on none."""
    wait_s: float
    """Until it begins: for a core and a slot, a bind or a start; for a device, an executor and the missing blocks."""
    run_s: float | None
    """The execution; None: it was never measured."""
    may_try: bool
    """Whether it may be tried now if it was never measured: nothing of the function waits or runs there, and a device
    that is to be tried is free and serves the tenant or nobody. A worker whose handler calls the program always may.
    """

    def text(self) -> str:
        """The estimate in words."""
        if self.run_s is None:
            return f"{self.place}: never measured"
        wait_ms, run_ms = 1e3 * self.wait_s, 1e3 * self.run_s
        return f"{self.place} {wait_ms + run_ms:.1f} ms ({wait_ms:.1f} until it runs)"


class Estimates(msgspec.Struct, frozen=True):
    """Both estimates of a request."""

    workers: Estimate
    devices: Estimate

    def text(self) -> str:
        """Both estimates in words, the chosen one first."""
        chosen = sooner(self)
        other = self.devices if chosen is self.workers else self.workers
        return f"{chosen.text()}; {other.text()}"


def sooner(estimates: Estimates) -> Estimate:
    """Return the estimate by which a request is placed: of equal ones that of the workers, which need no transfer."""
    workers, devices = estimates.workers, estimates.devices
    for each in (workers, devices):
        if each.run_s is None and each.may_try:
            return each
    return devices if _seconds(devices, workers) < _seconds(workers, devices) else workers


def _seconds(estimate: Estimate, other: Estimate) -> float:
    run_s = other.run_s if estimate.run_s is None else estimate.run_s
    return estimate.wait_s + (run_s or 0.0)
