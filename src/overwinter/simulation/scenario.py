"""Reads a scenario, a TOML file, into frozen data, and refuses unknown keys.

Every key has its unit in its name. Errors name the file and the key.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from math import inf
from pathlib import Path
from sys import intern
from typing import Annotated

import msgspec

from overwinter.core.bounds import check_bounds
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import CallerError
from overwinter.core.function import TIMES, BlobSize, FunctionSpec, Settings
from overwinter.core.ids import Address, FamilyId, FunctionName, TenantId, function_id, program_id, program_name
from overwinter.core.pipeline import INPUT, Pipeline, Stage, check_pipeline, needs
from overwinter.core.profile import Point, Profile, between
from overwinter.simulation.laws import LatencyLaw, Row
from overwinter.simulation.workloads import Workload

MIB = 1 << 20


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all parts of a scenario."""

    def check_above(self, *names: str, least: float | None = None) -> None:
        """Raise ValueError unless these numbers are finite and above 0, or at least `least`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not ((value > 0 if least is None else value >= least) and value < inf):
                raise ValueError(f"{name} must be {'above 0' if least is None else f'at least {least}'}, got {value}")


class Machine(_Part, frozen=True, kw_only=True):
    """The modelled node."""

    cores: int = 16
    host_mib: float | None = None
    """The size of the host store; None: unlimited."""
    disk_mib_per_s: float = 1000.0
    fork_s: float = 0.005
    """The time of the zygote for each fork; forks wait for each other."""
    contain_s: float = 0.002
    """The part of a worker's start that a process forked ahead has already completed."""
    stop_s: float = 0.002
    """The time from the decision to stop a worker until it has ended."""
    zygote_start_s: float = 3.0
    load_mib_per_s: float = 600.0
    """The speed at which a worker with its own copy of the weights reads it from the page cache."""
    executor_start_s: float = 0.5
    """The time from the fork of an executor until its device can be used."""

    def __post_init__(self) -> None:
        self.check_above("cores", "host_mib", "disk_mib_per_s", "load_mib_per_s")
        self.check_above("fork_s", "contain_s", "stop_s", "zygote_start_s", "executor_start_s", least=0)


class Blocks(_Part, frozen=True, kw_only=True):
    """Some blocks of a function, all of the same size."""

    mib: float
    count: int = 1
    shared: str | None = None
    """A key: functions with the same key have the same blocks. None: each copy has its own blocks."""

    def __post_init__(self) -> None:
        self.check_above("mib", "count")


class FunctionModel(_Part, frozen=True, kw_only=True):
    """A modelled function, and the number of its copies."""

    name: str
    variants: int = 1
    """The number of its copies, each with its own blocks unless they are shared."""
    blocks: tuple[Blocks, ...]
    latency_ms: dict[int, float] = {}
    """The latency of one run by batch size; linear between and beyond the given sizes. With `device = "pool"` in the
    settings: on a device that has all blocks.
    """
    device_ms: dict[int, float] = {}
    """With `device = "any"` in the settings: the latency on a device that has all blocks; without it as in a worker."""
    profile: tuple[Row, ...] = ()
    """Replaces latency_ms: rows of cores, batch, concurrency, latency in ms, and private MiB of a worker with this
    configuration.
    """
    law: LatencyLaw | None = None
    """Replaces latency_ms and profile: the law from which the rows of a profile are computed."""
    serial: float | None = None
    """The share of a run that more cores do not shorten (Amdahl's law). With it, latency_ms is for one core, and
    workers may have any configuration up to the function's threads.
    """
    gmacs: float = 1.0
    """Billions of multiply-accumulates of one request."""
    jitter: float = 0.0
    """The standard deviation of a run's time, as a share of it."""
    start_s: float = 0.02
    """The time from the fork until the worker is ready, on one core, for a program that the zygote has compiled."""
    prepare_s: float = 0.03
    """The further time of the first start of a program, and the time that the zygote takes to compile it."""
    bind_s: float = 0.002
    """The time to bind another function of the family in a worker, on one core."""
    swap_ms: float = 0.0
    """On a device: the time by which a run that brings blocks takes longer than its first group, and then its execution
    or its transfer, whichever is longer.
    """
    worker_mib: float = 20.0
    """The private memory of one worker."""
    sandboxed: bool = False
    tenant: TenantId = TenantId("simulated")
    """The owner. With `dedicated` in the settings, blocks are shared only with functions of this tenant."""
    settings: Settings = Settings()
    workload: Workload | None = None
    """The requests; None: they come from applications."""

    def names(self) -> tuple[FunctionName, ...]:
        """Return the names of its copies."""
        if self.variants == 1:
            return (FunctionName(self.name),)
        return tuple(FunctionName(f"{self.name}-{index:04}") for index in range(self.variants))

    def measured(self) -> Profile:
        """The profile that the scheduler gets."""
        points = (Point(c, int(mib * MIB), b, p, latency / 1000) for c, b, p, latency, mib in self._rows())
        return Profile(
            weight_bytes=int(sum(part.mib * part.count for part in self.blocks) * MIB),
            macs=int(self.gmacs * 1e9),
            points=tuple(points),
            wake_s=self.start_s,
        )

    def on_device(self) -> "FunctionModel":
        """Return the model of the function that runs on devices for one with `device = "any"`."""
        measured = {"latency_ms": self.device_ms, "profile": (), "law": None, "serial": None} if self.device_ms else {}
        return msgspec.structs.replace(self, workload=None, device_ms={}, **measured)

    def _rows(self) -> tuple[Row, ...]:
        if self.profile or self.law is not None:
            return self.profile if self.law is None else self.law.rows()
        threads, known = self.settings.threads, sorted(self.latency_ms.items())
        if self.serial is None:
            return tuple((threads, batch, 1, latency, self.worker_mib) for batch, latency in known)
        return tuple(
            (cores, batch, 1, between(known, batch) * (self.serial + (1 - self.serial) / cores), self.worker_mib)
            for cores in range(1, threads + 1)
            for batch in range(1, self.settings.max_batch + 1)
        )

    def __post_init__(self) -> None:
        self.check_above("variants", "worker_mib", "gmacs")
        self.check_above("jitter", "start_s", "prepare_s", "bind_s", "serial", "swap_ms", least=0)
        if self.serial is not None and (self.serial > 1 or not self.latency_ms):
            raise ValueError(f"serial is a share of latency_ms, from 0 to 1, got {self.serial}")
        if (bool(self.latency_ms), bool(self.profile), self.law is not None).count(True) != 1:
            raise ValueError("give one of latency_ms, profile and law")
        if self.latency_ms and (min(self.latency_ms) < 1 or min(self.latency_ms.values()) <= 0):
            raise ValueError("latency_ms needs a time above 0 for at least one batch from 1 on")
        if self.device_ms and (self.settings.device != "any" or min(self.device_ms.values()) <= 0):
            raise ValueError('device_ms needs device = "any", and times above 0')
        if any(min(row) <= 0 for row in self.profile):
            raise ValueError("every number of a row of profile must be above 0")
        fault = self.measured().fault()
        if fault is not None:
            raise ValueError(f"its latencies and memory are not possible: {fault}")
        if not self.name or "@" in self.name:
            raise ValueError(f"name must be a word without @, got {self.name!r}")


class Application(_Part, frozen=True, kw_only=True):
    """A pipeline of the functions, called as one."""

    name: str
    stages: Annotated[dict[str, Stage], msgspec.Meta(min_length=1)]
    """The stages, as in the file of a pipeline."""
    slo_ms: float | None = None
    """The SLO of the application. The functions' settings divide it among the stages."""
    timeout_s: float = 60.0
    workload: Workload

    def __post_init__(self) -> None:
        check_bounds(self, TIMES)
        sources = {source for stage in self.stages.values() for source in stage.inputs.values()}
        inputs = sorted(source.partition(":")[2] for source in sources if source.startswith(f"{INPUT}:"))
        last = set(self.stages).difference(*(needs(stage) for stage in self.stages.values()))
        outputs = {f"of-{name}": f"{name}:output" for name in sorted(last)}
        try:
            check_pipeline(
                Pipeline(name=FunctionName(self.name), inputs=tuple(inputs), stages=self.stages, outputs=outputs)
            )
        except CallerError as error:
            raise ValueError(str(error)) from error


class Window(_Part, frozen=True, kw_only=True):
    """A span of simulated time."""

    from_s: float
    until_s: float


class Faults(_Part, frozen=True, kw_only=True):
    """The simulated faults and their rates. None or 0: never."""

    run_crash_share: float = 0.0
    """The share of runs during which the worker dies."""
    start_crash_share: float = 0.0
    """The share of starts during which the worker dies."""
    slow_load_share: float = 0.0
    slow_load_factor: float = 10.0
    """The factor by which slow starts and loads take longer."""
    worker_life_s: float | None = None
    """The mean lifetime of a worker that dies at random."""
    executor_life_s: float | None = None
    """The mean lifetime of an executor that dies at random."""
    unplaced_share: float = 0.0
    """The share of swaps for which the free memory of the device is not adjacent, unless no other function is there."""
    zygote_life_s: float | None = None
    """The mean lifetime of the zygote. Its workers die with it."""
    store_full: tuple[Window, ...] = ()
    """The spans in which the host store accepts nothing."""

    def __post_init__(self) -> None:
        shares = ("run_crash_share", "start_crash_share", "slow_load_share", "unplaced_share")
        self.check_above(*shares, least=0)
        for share in (getattr(self, name) for name in shares):
            if share > 1:
                raise ValueError(f"a share is at most 1, got {share}")
        self.check_above("slow_load_factor", "worker_life_s", "zygote_life_s", "executor_life_s")


class Simulated(msgspec.Struct, frozen=True):
    """One copy of a function: its specification for the scheduler, and its properties in the simulation."""

    spec: FunctionSpec
    model: FunctionModel
    copy: int


class Scenario(_Part, frozen=True, kw_only=True):
    """A simulation, except the location of recorded traces."""

    seed: int = 1
    duration_s: float
    """The duration of arrivals; requests that have arrived are still answered afterwards."""
    settle_s: float = 0.0
    """The first part of the duration, whose requests the figures of applications exclude; without applications, those
    of functions do.
    """
    node: Machine = Machine()
    devices: tuple[DeviceConfig, ...] = ()
    """The devices of the pool."""
    scheduler: SchedulerConfig = SchedulerConfig()
    faults: Faults = Faults()
    functions: tuple[FunctionModel, ...]
    applications: tuple[Application, ...] = ()

    def __post_init__(self) -> None:
        self.check_above("duration_s")
        self.check_above("settle_s", least=0)
        names = [function.name for function in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"function names must be unique, got {sorted(names)}")
        if len({device.name for device in self.devices}) != len(self.devices):
            raise ValueError(f"device names must be unique, got {sorted(device.name for device in self.devices)}")
        if self.scheduler.devices:
            raise ValueError("give the devices as devices of the scenario, not of its scheduler")
        if not self.devices and any(function.settings.device == "pool" for function in self.functions):
            raise ValueError('a function has device = "pool", and the scenario has no devices')
        if any(function.settings.device != "cpu" and function.sandboxed for function in self.functions):
            raise ValueError('a function has device = "pool" or "any" and a handler, which is not simulated')
        self._check_applications()

    def _check_applications(self) -> None:
        known = {name for function in self.functions for name in function.names()}
        stages = [stage for each in self.applications for stage in each.stages.values()]
        called = {stage.function for stage in stages}
        names = [*known, *(application.name for application in self.applications)]
        if len(set(names)) != len(names):
            raise ValueError(f"application names must be unique, got {sorted(names)}")
        if not called <= known:
            raise ValueError(f"a stage calls {', '.join(sorted(called - known))}: there is no such function")
        newer = {f"{stage.function}@{stage.version}" for stage in stages if stage.version not in (None, 1)}
        if newer:
            raise ValueError(f"a stage calls {', '.join(sorted(newer))}: there is only version 1")
        silent = {n for each in self.functions if each.workload is None for n in each.names()} - called
        if silent:
            raise ValueError(f"nothing calls {', '.join(sorted(silent))}: add a workload, or a stage of an application")

    def bounded_scheduler(self) -> SchedulerConfig:
        """The scheduler's configuration with the machine's resources."""
        host_bytes = None if self.node.host_mib is None else int(self.node.host_mib * MIB)
        return msgspec.structs.replace(
            self.scheduler,
            cores=self.scheduler.cores or self.node.cores,
            host_bytes=self.scheduler.host_bytes or host_bytes,
            devices=self.devices,
        )

    def times(self, copies: int) -> "Scenario":
        """Return the scenario with this many times the copies. Raises CallerError for applications, which name their
        functions.
        """
        if self.applications:
            raise CallerError("the capacity is defined for functions, and this scenario has applications")
        more = tuple(msgspec.structs.replace(each, variants=each.variants * copies) for each in self.functions)
        return msgspec.structs.replace(self, functions=more)

    def simulated(self) -> tuple[Simulated, ...]:
        """Return every copy of every function, and of those that run in workers or on devices also their programs."""
        copies = [_copy(model, name, index) for model in self.functions for index, name in enumerate(model.names())]
        programs = [_program(each) for each in copies if self.devices and each.spec.settings.device == "any"]
        return (*programs, *copies)


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from a file; CallerError names a wrong key."""
    try:
        return scenario_of(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"{path} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise CallerError(f"{path}: {error}") from error


def scenario_of(table: Mapping[str, object]) -> Scenario:
    """Read a scenario from a table; msgspec.ValidationError names a wrong key."""
    return msgspec.convert(table, Scenario, str_keys=True)


def _copy(model: FunctionModel, name: FunctionName, index: int) -> Simulated:
    blobs = tuple(
        BlobSize(_address(*_owner(part, name, place), number), int(part.mib * MIB))
        for place, part in enumerate(model.blocks)
        for number in range(part.count)
    )
    spec = FunctionSpec(
        id=function_id(name, 1),
        name=name,
        version=1,
        tenant=model.tenant,
        settings=model.settings,
        program=_address(model.name, "program"),
        sandboxed=model.sandboxed,
        blobs=blobs,
        profile=model.measured(),
        family=FamilyId("" if model.settings.isolation == "function" else f"{model.tenant}/{model.name}"),
    )
    return Simulated(spec, model, index)


def _program(function: Simulated) -> Simulated:
    """Return the function that runs on devices for this one, as a node makes it."""
    spec, model = function.spec, function.model.on_device()
    own = {"id": program_id(spec.id), "name": program_name(spec.name), "profile": model.measured()}
    return Simulated(msgspec.structs.replace(spec, **own), model, function.copy)


def _owner(part: Blocks, name: FunctionName, place: int) -> tuple[str, object, float]:
    return ("own", (name, place), part.mib) if part.shared is None else ("shared", part.shared, part.mib)


def _address(*parts: object) -> Address:
    """Return an invented address: as long as a real one, and the same string object for equal parts."""
    return Address(intern(hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()))
