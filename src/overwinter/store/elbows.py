"""The elbows of links that were measured on this machine, in a file of the data directory.

The file is written by `overwinter elbow` and read when a node starts. It only affects speed: a file that is invalid
counts as empty, and the node says so.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from overwinter.core.bounds import check_bounds
from overwinter.core.devices import DEVICE_BOUNDS, GROUP_BYTES, DeviceConfig, DeviceKind
from overwinter.store.disk import OPEN_FLAGS, give_to_owner

FILE = "elbows.json"
ELBOWS_MAX = 1000
"""The most elbows in the file; the oldest is dropped first."""


class Elbow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The elbow of the link to one kind of device."""

    machine: str
    kind: DeviceKind
    bytes_per_s: float
    latency_s: float
    """The bandwidth and the latency are those configured; the link of a virtual device is a model."""
    group_bytes: int
    """The smallest transfer that comes near the best throughput."""

    def __post_init__(self) -> None:
        check_bounds(self, {name: DEVICE_BOUNDS[name] for name in ("bytes_per_s", "latency_s", "group_bytes")})

    @property
    def link(self) -> tuple[str, str, float, float]:
        """The measured link: the machine, the kind of device, and the configured bandwidth and latency."""
        return self.machine, self.kind, self.bytes_per_s, self.latency_s


def read_elbows(data: Path) -> list[Elbow]:
    """Return the elbows in a data directory. Raises ValueError, which names the file, if it is invalid."""
    path = data / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Elbow])
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is invalid, so no link counts as measured: {error}") from error


def put_elbow(data: Path, elbow: Elbow) -> None:
    """Store an elbow, in place of an older one of the same link. An invalid file is replaced. Raises OSError."""
    try:
        known = [each for each in read_elbows(data) if each.link != elbow.link]
    except ValueError:
        known = []
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = data / f"{FILE}.draft"
    with open(os.open(draft, os.O_WRONLY | os.O_TRUNC | OPEN_FLAGS, 0o600), "wb") as file:
        give_to_owner(file.fileno(), data)
        file.write(msgspec.json.format(msgspec.json.encode([*known, elbow][-ELBOWS_MAX:])))
    draft.replace(data / FILE)


def with_measured_groups(
    devices: Sequence[DeviceConfig], elbows: Sequence[Elbow], machine: str
) -> tuple[DeviceConfig, ...]:
    """Return these devices. One whose link was measured, and whose size of groups is the default, gets the measured
    size.
    """
    measured = {each.link: each.group_bytes for each in elbows}
    return tuple(
        msgspec.structs.replace(
            device,
            group_bytes=measured.get((machine, device.kind, device.bytes_per_s, device.latency_s), device.group_bytes),
        )
        if device.group_bytes == GROUP_BYTES
        else device
        for device in devices
    )
