"""The profile of a program on one machine: cores, memory, batch size, concurrency and latency (`<c, m, b, p, l>`) of
each measured configuration of a worker, and the latency of each layer.

See Tetris 3.2 and AsyFunc 3.3. All of it is data; the packages worker and profiling measure it.
"""

from collections.abc import Iterator

import msgspec

from overwinter.core.bounds import Bound, seconds

POINTS_MAX = 4096
"""The most points of a profile: those of a few measurements."""
LAYER_LATENCIES_MAX = 32_768
"""The most latencies of layers in a profile, for all batch sizes together."""
LAYER_TEXT_MAX = 256 << 10
"""The most characters of the paths of all layers in a profile."""
ENCODED_BYTES_MAX = 4 << 20
"""A profile within the bounds above is shorter."""
LATENCY_BOUND = seconds(1e-7, 86_400, "no clock measures less, and no measurement takes longer than a day")
LAYER_LATENCY_BOUND = seconds(0, 86_400, "an empty layer takes no time, and no measurement takes longer than a day")
BYTES_BOUND = Bound(0, 1 << 53, "bytes", "no machine has so many")
MACS_BOUND = Bound(0, 1 << 62, "multiply-accumulates", "no program has so many")
POINT_BOUNDS = {
    "cores": Bound(1, 4096, "cores", "no machine has so many"),
    "memory_bytes": BYTES_BOUND,
    "batch": Bound(1, 65_536, "requests", "no function's settings allow more"),
    "concurrency": Bound(1, 4096, "runs", "no function's settings allow more"),
    "latency_s": LATENCY_BOUND,
}
"""The bounds of each number of a point, in order."""


class Configuration(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The configuration of a worker: its cores, its batch size, its concurrency."""

    cores: int
    batch: int
    concurrency: int

    def text(self) -> str:
        """Return it in words."""
        return f"cores {self.cores}, batch {self.batch}, concurrency {self.concurrency}"


class Point(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One measured configuration, Tetris's 5-tuple."""

    cores: int
    memory_bytes: int
    """The peak private memory of one worker with this configuration, without its shared weights."""
    batch: int
    concurrency: int
    latency_s: float
    """The latency of one run of `batch` requests while `concurrency` runs are in progress."""

    @property
    def configuration(self) -> Configuration:
        """The configuration without the measured values."""
        return Configuration(self.cores, self.batch, self.concurrency)

    @property
    def run_cores(self) -> int:
        """The cores of each of the concurrent runs."""
        return self.cores // self.concurrency or 1

    @property
    def throughput(self) -> float:
        """Requests per second of one worker that is never idle: b·p/l."""
        return self.batch * self.concurrency / self.latency_s


class LayerPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The profile of one layer of a program."""

    path: str
    macs: int
    """The multiply-accumulates of one request."""
    weight_bytes: int
    output_bytes: int
    """The output bytes of one request."""
    latency_s: dict[int, float]
    """The latency on one core, by batch size."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The profile of a program on one machine."""

    weight_bytes: int
    macs: int
    """The multiply-accumulates of one request; AsyFunc's rho is macs / weight_bytes."""
    points: tuple[Point, ...] = ()
    layers: tuple[LayerPoint, ...] = ()
    wake_s: float | None = None
    """The time from the fork until a worker is ready, with its blocks in the host store."""

    def fault(self) -> str | None:
        """Return why the profile must not be used, or None. Data from a damaged disk must not influence decisions."""
        if len(self.points) > POINTS_MAX:
            return f"it has more than {POINTS_MAX} points"
        if sum(len(layer.latency_s) or 1 for layer in self.layers) > LAYER_LATENCIES_MAX:
            return f"it has more than {LAYER_LATENCIES_MAX} latencies of layers"
        if sum(len(layer.path) for layer in self.layers) > LAYER_TEXT_MAX:
            return f"the paths of its layers have more than {LAYER_TEXT_MAX} characters"
        if len({point.configuration for point in self.points}) < len(self.points):
            return "it has two points of one configuration"
        return next((message for name, bound, value in self._numbers() if (message := bound.fault(name, value))), None)

    def _numbers(self) -> Iterator[tuple[str, Bound, float]]:
        yield "weight_bytes", BYTES_BOUND, self.weight_bytes
        yield "macs", MACS_BOUND, self.macs
        if self.wake_s is not None:
            yield "wake_s", LATENCY_BOUND, self.wake_s
        for point in self.points:
            yield from zip(POINT_BOUNDS, POINT_BOUNDS.values(), msgspec.structs.astuple(point), strict=True)
        for layer in self.layers:
            yield "macs", MACS_BOUND, layer.macs
            yield "weight_bytes", BYTES_BOUND, layer.weight_bytes
            yield "output_bytes", BYTES_BOUND, layer.output_bytes
            for batch, latency_s in layer.latency_s.items():
                yield "batch", POINT_BOUNDS["batch"], batch
                yield f"a latency of layer {layer.path!r}", LAYER_LATENCY_BOUND, latency_s

    def part(self, share: float) -> "Profile":
        """Return the profile of a part of the program that takes this share of its time."""
        points = tuple(msgspec.structs.replace(each, latency_s=share * each.latency_s) for each in self.points)
        weight_bytes, macs = int(share * self.weight_bytes), int(share * self.macs)
        return msgspec.structs.replace(self, weight_bytes=weight_bytes, macs=macs, points=points, layers=())

    def point(self, configuration: Configuration) -> Point | None:
        """Return the point of this configuration, or None."""
        return next((point for point in self.points if point.configuration == configuration), None)

    def worker_bytes(self, cores: int, concurrency: int) -> dict[int, int]:
        """Return the private memory of a worker with this many cores and concurrent runs, by ascending batch size;
        empty if it was not measured.
        """
        alike = (point for point in self.points if (point.cores, point.concurrency) == (cores, concurrency))
        return {point.batch: point.memory_bytes for point in sorted(alike, key=lambda point: point.batch)}

    def run_s(self, cores: int, concurrency: int) -> dict[int, float]:
        """Return the seconds of a run with this many cores and concurrent runs, by ascending batch size; empty if they
        were not measured.
        """
        alike = (point for point in self.points if (point.cores, point.concurrency) == (cores, concurrency))
        return {point.batch: point.latency_s for point in sorted(alike, key=lambda point: point.batch)}

    def latency_s(self, cores: int, batch: int, concurrency: int) -> float | None:
        """Return the seconds of a run of `batch` requests, linear between and above the measured batches; None:
        unknown.
        """
        known = list(self.run_s(cores, concurrency).items())
        return between(known, batch) if known else None


def decode_profile(encoded: bytes) -> Profile | None:
    """Decode a stored profile; None if it has the format of another version, or must not be used."""
    if len(encoded) > ENCODED_BYTES_MAX:
        return None
    try:
        profile = msgspec.msgpack.decode(encoded, type=Profile)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return profile if profile.fault() is None else None


def between(known: list[tuple[int, float]], at: int) -> float:
    """Interpolate linearly in ascending (position, value) pairs.

    Below the first position the first value applies. Above the last one the last two are extrapolated, but never to
    less than the last: a slightly shorter measurement of a larger batch would lead to negative times. A single value
    grows in proportion.
    """
    if at <= known[0][0]:
        return known[0][1]
    if len(known) == 1:
        place, value = known[0]
        return value * at / place
    upper = next((index for index, (place, _) in enumerate(known) if place >= at), len(known) - 1)
    (low, before), (high, after) = known[upper - 1], known[upper]
    value = before + (after - before) * (at - low) / (high - low)
    return max(after, value) if at > high else value
