"""Reads a scenario, a TOML file, into frozen data, and refuses unknown keys.

Keys have their units in their names; rates of requests are per second. The errors of `read_scenario` name the file, and
the key if one key is wrong.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from overwinter.core.bounds import check_bounds
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig, check_devices
from overwinter.core.errors import CallerError
from overwinter.core.function import TIME_BOUNDS
from overwinter.core.ids import FunctionName
from overwinter.core.pipeline import INPUT, Pipeline, Stage, check_pipeline, needs
from overwinter.core.policies import policy_named
from overwinter.simulation.copies import SimulatedFunction, cuts, simulated_functions
from overwinter.simulation.models import MIB, FunctionModel, ScenarioPart
from overwinter.simulation.workloads import Workload


class Machine(ScenarioPart, frozen=True, kw_only=True):
    """The simulated node."""

    cores: int = 16
    host_mib: float | None = None
    """The size of all host stores together; None: unlimited."""
    disk_mib_per_s: float = 1000.0
    fork_s: float = 0.005
    """The time of the zygote for each fork; forks wait for each other."""
    contain_s: float = 0.002
    """The part of a worker's start that a process forked ahead has already completed."""
    stop_s: float = 0.002
    """The time from the decision to stop a worker or an executor until it has ended."""
    zygote_start_s: float = 3.0
    load_mib_per_s: float = 600.0
    """The speed at which a worker with its own copy of the weights reads it from the page cache."""
    executor_start_s: float = 0.5
    """The time from the fork of an executor until its device can be used."""

    def __post_init__(self) -> None:
        self.check_above("cores", "host_mib", "disk_mib_per_s", "load_mib_per_s")
        self.check_above("fork_s", "contain_s", "stop_s", "zygote_start_s", "executor_start_s", least=0)


class Application(ScenarioPart, frozen=True, kw_only=True):
    """A pipeline of the functions, called as one."""

    name: str
    stages: Annotated[dict[str, Stage], msgspec.Meta(min_length=1)]
    """The stages, as in the file of a pipeline."""
    slo_ms: float | None = None
    """The SLO of the application. It is divided among the stages of the longest path in proportion to the SLOs of their
    functions, or equally if a function has none.
    """
    timeout_s: float = 60.0
    workload: Workload

    def __post_init__(self) -> None:
        check_bounds(self, TIME_BOUNDS)
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


class Window(ScenarioPart, frozen=True, kw_only=True):
    """A span of simulated time."""

    from_s: float
    until_s: float


class Faults(ScenarioPart, frozen=True, kw_only=True):
    """The simulated faults and their rates. None or 0: never."""

    run_crash_share: float = 0.0
    """The share of runs during which the worker or executor dies."""
    start_crash_share: float = 0.0
    """The share of starts and binds during which the process dies."""
    slow_load_share: float = 0.0
    slow_load_factor: float = 10.0
    """The factor by which slow starts, binds and loads take longer."""
    worker_life_s: float | None = None
    """The mean lifetime of a worker that dies at random."""
    executor_life_s: float | None = None
    """The mean lifetime of an executor that dies at random."""
    unplaced_share: float = 0.0
    """The share of swaps for which the free memory of the device is not contiguous, unless no other function is on it.
    """
    zygote_life_s: float | None = None
    """The mean lifetime of the zygote. Its workers and executors die with it."""
    store_full: tuple[Window, ...] = ()
    """The spans in which the host store accepts nothing."""

    def __post_init__(self) -> None:
        shares = ("run_crash_share", "start_crash_share", "slow_load_share", "unplaced_share")
        self.check_above(*shares, least=0)
        for name in shares:
            if (share := getattr(self, name)) > 1:
                raise ValueError(f"{name} must be at most 1, got {share}")
        self.check_above("slow_load_factor", "worker_life_s", "zygote_life_s", "executor_life_s")


class Scenario(ScenarioPart, frozen=True, kw_only=True):
    """A simulation, except the location of recorded traces."""

    seed: int = 1
    duration_s: float
    """The duration of arrivals; requests that have arrived are still answered afterwards."""
    settle_s: float = 0.0
    """The first part of the duration. The figures of applications exclude its requests; without applications, the
    figures of functions exclude them.
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
        self._check_names()
        check_devices(self.devices)
        if self.scheduler.devices:
            raise ValueError("give the devices as devices of the scenario, not of its scheduler")
        pooled = [function for function in self.functions if function.settings.device == "pool"]
        if pooled and not self.devices:
            raise ValueError('a function has device = "pool", and the scenario has no devices')
        for function in pooled:
            cuts(function, self.devices)
        for function in self.functions:
            self._check_latencies(function)
        self._check_applications()

    def _check_names(self) -> None:
        # The copies of one entry share its program and its measured times, so entries need different names too.
        copies = [name for function in self.functions for name in function.names()]
        for names in ([function.name for function in self.functions], copies):
            repeated = sorted(name for name, times in Counter(names).items() if times > 1)
            if repeated:
                raise ValueError(f"function names must be unique, got more than once: {', '.join(repeated)}")

    def _check_latencies(self, function: FunctionModel) -> None:
        """Raise ValueError if the latencies of a function have no configuration that it can run with."""
        settings, policy = function.settings, policy_named(self.scheduler.policy)
        profile, cores = function.scheduler_profile(), self.scheduler.cores or self.node.cores
        if settings.device != "pool":
            most = min(settings.threads, policy.cores_max), min(settings.max_batch, policy.batch_max)
            allowed = any(
                each.cores <= most[0]
                and each.batch <= most[1]
                and each.concurrency <= min(settings.concurrency, policy.concurrency_max)
                for each in profile.points
            )
            if not allowed and not profile.run_s(min(settings.threads, cores), settings.concurrency):
                raise ValueError(
                    f"no latency of function {function.name!r} is for a worker that its settings allow: threads up to "
                    f"{settings.threads}, max_batch {settings.max_batch}, concurrency {settings.concurrency}"
                )
        if (
            self.devices
            and settings.device != "cpu"
            and not function.on_device().scheduler_profile().run_s(settings.threads, 1)
        ):
            raise ValueError(
                f"function {function.name!r} has no latency on a device: give one for as many cores as threads, "
                f"{settings.threads}, and a concurrency of 1"
            )

    def _check_applications(self) -> None:
        known = {name for function in self.functions for name in function.names()}
        stages = [stage for each in self.applications for stage in each.stages.values()]
        called = {stage.function for stage in stages}
        names = [*known, *(application.name for application in self.applications)]
        if len(set(names)) != len(names):
            raise ValueError(f"no application may have the name of a function or of another one, got {sorted(names)}")
        if not called <= known:
            raise ValueError(f"a stage calls {', '.join(sorted(called - known))}: there is no such function")
        newer = {f"{stage.function}@{stage.version}" for stage in stages if stage.version not in (None, 1)}
        if newer:
            raise ValueError(f"a stage calls {', '.join(sorted(newer))}: there is only version 1")
        uncalled = {n for each in self.functions if each.workload is None for n in each.names()} - called
        if uncalled:
            raise ValueError(
                f"nothing calls {', '.join(sorted(uncalled))}: add a workload, or a stage of an application"
            )

    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's configuration with the scenario's devices. Cores and host bytes that it does not set are the
        machine's.
        """
        host_bytes = self.scheduler.host_bytes
        if host_bytes is None and self.node.host_mib is not None:
            host_bytes = int(self.node.host_mib * MIB)
        return msgspec.structs.replace(
            self.scheduler,
            cores=self.scheduler.cores or self.node.cores,
            host_bytes=host_bytes,
            devices=self.devices,
        )

    def multiplied(self, copies: int) -> "Scenario":
        """Return the scenario with this many times as many variants of each function. Raises CallerError if there are
        applications, because they name their functions.
        """
        if self.applications:
            raise CallerError("the capacity is defined for functions, and this scenario has applications")
        more = tuple(msgspec.structs.replace(each, variants=each.variants * copies) for each in self.functions)
        return msgspec.structs.replace(self, functions=more)

    def simulated_functions(self) -> tuple[SimulatedFunction, ...]:
        """Return the functions for the scheduler: each copy of each function, with its slices and programs."""
        return simulated_functions(self.functions, self.devices)


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from a file. Raises CallerError if it is not valid TOML, or not a valid scenario."""
    try:
        return scenario_of(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"{path} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise CallerError(f"{path}: {error}") from error


def scenario_of(table: Mapping[str, object]) -> Scenario:
    """Read a scenario from a table. Raises msgspec.ValidationError if it is not a valid one."""
    return msgspec.convert(table, Scenario, str_keys=True)
