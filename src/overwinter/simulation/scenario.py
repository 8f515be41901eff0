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
from overwinter.core.errors import CallerError
from overwinter.core.function import TIMES, BlobSize, FunctionSpec, Settings
from overwinter.core.ids import Address, FamilyId, FunctionName, TenantId, function_id
from overwinter.core.pipeline import INPUT, Pipeline, Stage, check_pipeline, needs
from overwinter.core.profile import Point, Profile, between
from overwinter.simulation.laws import Law, Row
from overwinter.simulation.workloads import Workload

MIB = 1 << 20


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all that a scenario is made of."""

    def check_above(self, *names: str, least: float | None = None) -> None:
        """ValueError unless these numbers are above 0, or not below `least`, and finite."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not ((value > 0 if least is None else value >= least) and value < inf):
                raise ValueError(f"{name} must be {'above 0' if least is None else f'at least {least}'}, got {value}")


class Machine(_Part, frozen=True, kw_only=True):
    """The modelled node."""

    cores: int = 16
    host_mib: float | None = None
    """The host store's size; None: no bound."""
    disk_mib_per_s: float = 1000.0
    fork_s: float = 0.005
    """Time of the zygote for each fork: forks wait for each other."""
    contain_s: float = 0.002
    """Of the start of a worker: what one that was forked ahead has done before."""
    stop_s: float = 0.002
    """From the wish that a worker ends until it is gone."""
    zygote_start_s: float = 3.0
    load_mib_per_s: float = 600.0
    """Speed at which a worker that shares nothing reads its own copy of the weights from the page cache."""

    def __post_init__(self) -> None:
        self.check_above("cores", "host_mib", "disk_mib_per_s", "load_mib_per_s")
        self.check_above("fork_s", "contain_s", "stop_s", "zygote_start_s", least=0)


class Blocks(_Part, frozen=True, kw_only=True):
    """Some blocks of a function, all of one size."""

    mib: float
    count: int = 1
    shared: str | None = None
    """A word: whoever says the same word here has the same blocks. None: each sibling has its own."""

    def __post_init__(self) -> None:
        self.check_above("mib", "count")


class FunctionModel(_Part, frozen=True, kw_only=True):
    """A function as the simulator knows it, and how many siblings of it there are."""

    name: str
    variants: int = 1
    blocks: tuple[Blocks, ...]
    latency_ms: dict[int, float] = {}
    """Of one run, by its batch; between the batches given it is linear, and beyond them."""
    profile: tuple[Row, ...] = ()
    """In place of it: rows of cores, batch, concurrency, latency in ms, and private MiB of a worker so made."""
    law: Law | None = None
    """In place of both: by which these rows are reckoned."""
    serial: float | None = None
    """With it latency_ms is of one core, and a worker may have any number of cores up to its threads and be made for
    any batch: this share of a run is not shortened by more cores, by Amdahl's law."""
    gmacs: float = 1.0
    """Billions of multiply-adds of one request."""
    jitter: float = 0.0
    """Standard deviation of a run's time, as a share of it."""
    start_s: float = 0.02
    """From the fork until the worker is ready, on a core, when the zygote has prepared the program."""
    prepare_s: float = 0.03
    """What the first start of a program takes longer, and what it takes the zygote to prepare it."""
    bind_s: float = 0.002
    """What binding a sibling in a worker that has another takes, on a core."""
    worker_mib: float = 20.0
    """Private memory of one worker."""
    sandboxed: bool = False
    tenant: TenantId = TenantId("simulated")
    """Whose it is: with `dedicated` in its settings its blocks are shared with that tenant's functions alone."""
    settings: Settings = Settings()
    workload: Workload | None = None
    """None: its requests come from applications."""

    def names(self) -> tuple[FunctionName, ...]:
        """What its siblings are called."""
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
        self.check_above("jitter", "start_s", "prepare_s", "bind_s", "serial", least=0)
        if self.serial is not None and (self.serial > 1 or not self.latency_ms):
            raise ValueError(f"serial is a share of latency_ms, from 0 to 1, got {self.serial}")
        if (bool(self.latency_ms), bool(self.profile), self.law is not None).count(True) != 1:
            raise ValueError("give one of latency_ms, profile and law")
        if self.latency_ms and (min(self.latency_ms) < 1 or min(self.latency_ms.values()) <= 0):
            raise ValueError("latency_ms needs a time above 0 for at least one batch from 1 on")
        if any(min(row) <= 0 for row in self.profile):
            raise ValueError("every number of a row of profile must be above 0")
        fault = self.measured().fault()
        if fault is not None:
            raise ValueError(f"what it says of its speed cannot be measured: {fault}")
        if not self.name or "@" in self.name:
            raise ValueError(f"name must be a word without @, got {self.name!r}")


class Application(_Part, frozen=True, kw_only=True):
    """A pipeline of the functions, called as one."""

    name: str
    stages: Annotated[dict[str, Stage], msgspec.Meta(min_length=1)]
    """As in a pipeline's file."""
    slo_ms: float | None = None
    """Of the whole. What it leaves to each stage is for the functions' settings to say."""
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
    """Of the runs: the worker dies in the middle of it."""
    start_crash_share: float = 0.0
    """Of the starts: the worker dies before it is ready."""
    slow_load_share: float = 0.0
    slow_load_factor: float = 10.0
    """Of the starts and stages: so many take so much longer."""
    worker_life_s: float | None = None
    """Mean time after which a worker dies whatever it does."""
    zygote_life_s: float | None = None
    """Mean time after which the zygote dies, and its workers with it."""
    store_full: tuple[Window, ...] = ()
    """Spans in which the host store takes nothing."""

    def __post_init__(self) -> None:
        self.check_above("run_crash_share", "start_crash_share", "slow_load_share", least=0)
        for share in (self.run_crash_share, self.start_crash_share, self.slow_load_share):
            if share > 1:
                raise ValueError(f"a share is at most 1, got {share}")
        self.check_above("slow_load_factor", "worker_life_s", "zygote_life_s")


class Simulated(msgspec.Struct, frozen=True):
    """One sibling: its specification for the scheduler, and its properties in the simulation."""

    spec: FunctionSpec
    model: FunctionModel
    sibling: int


class Scenario(_Part, frozen=True, kw_only=True):
    """A simulation, except the location of recorded traces."""

    seed: int = 1
    duration_s: float
    """Of arrivals; what has come until then is still answered."""
    settle_s: float = 0.0
    """Of the beginning: served like the rest, but what comes of it is in no figure of applications."""
    node: Machine = Machine()
    scheduler: SchedulerConfig = SchedulerConfig()
    faults: Faults = Faults()
    functions: tuple[FunctionModel, ...]
    applications: tuple[Application, ...] = ()

    def __post_init__(self) -> None:
        self.check_above("duration_s")
        self.check_above("settle_s", least=0)
        names = [function.name for function in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"each function needs a name of its own, got {sorted(names)}")
        self._check_applications()

    def _check_applications(self) -> None:
        known = {name for function in self.functions for name in function.names()}
        stages = [stage for each in self.applications for stage in each.stages.values()]
        called = {stage.function for stage in stages}
        names = [*known, *(application.name for application in self.applications)]
        if len(set(names)) != len(names):
            raise ValueError(f"each application needs a name of its own, got {sorted(names)}")
        if not called <= known:
            raise ValueError(f"no function is called {', '.join(sorted(called - known))}: a stage needs one")
        newer = {f"{stage.function}@{stage.version}" for stage in stages if stage.version not in (None, 1)}
        if newer:
            raise ValueError(f"no function is called {', '.join(sorted(newer))}: there is version 1 only")
        silent = {n for each in self.functions if each.workload is None for n in each.names()} - called
        if silent:
            raise ValueError(f"nobody calls {', '.join(sorted(silent))}: give a workload, or a stage of an application")

    def bounded_scheduler(self) -> SchedulerConfig:
        """The scheduler's configuration with the machine's resources."""
        host_bytes = None if self.node.host_mib is None else int(self.node.host_mib * MIB)
        return msgspec.structs.replace(
            self.scheduler,
            cores=self.scheduler.cores or self.node.cores,
            host_bytes=self.scheduler.host_bytes or host_bytes,
        )

    def times(self, copies: int) -> "Scenario":
        """The same scenario with so many times the siblings. CallerError if there are applications: they name their
        siblings.
        """
        if self.applications:
            raise CallerError("how many copies fit is a question for functions, and this scenario has applications")
        more = tuple(msgspec.structs.replace(each, variants=each.variants * copies) for each in self.functions)
        return msgspec.structs.replace(self, functions=more)

    def simulated(self) -> tuple[Simulated, ...]:
        """Every sibling of every function."""
        return tuple(
            _sibling(model, name, index) for model in self.functions for index, name in enumerate(model.names())
        )


def read_scenario(path: Path) -> Scenario:
    """The scenario in a file; CallerError names the key that is wrong."""
    try:
        return scenario_of(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"{path} is no TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise CallerError(f"{path}: {error}") from error


def scenario_of(table: Mapping[str, object]) -> Scenario:
    """The scenario in a table; msgspec.ValidationError names the key that is wrong."""
    return msgspec.convert(table, Scenario, str_keys=True)


def _sibling(model: FunctionModel, name: FunctionName, index: int) -> Simulated:
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


def _owner(part: Blocks, name: FunctionName, place: int) -> tuple[str, object, float]:
    return ("own", (name, place), part.mib) if part.shared is None else ("shared", part.shared, part.mib)


def _address(*parts: object) -> Address:
    """A made address: as long as a real one, and the same string for the same parts."""
    return Address(intern(hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()))
