"""What is simulated: a TOML file, read into frozen data that refuses whatever it does not know.

Everything that a person writes has its unit in its name. Errors name the file and the key.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from overwinter.core.config import MindConfig
from overwinter.core.errors import CallerError
from overwinter.core.function import BlobSize, FunctionSpec, Settings
from overwinter.core.ids import Address, FunctionName, TenantId, function_id
from overwinter.simulation.workloads import Workload

MIB = 1 << 20


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all that a scenario is made of."""

    def check_above(self, *names: str, least: float | None = None) -> None:
        """ValueError unless these numbers are above 0, or not below `least`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and (value <= 0 if least is None else value < least):
                raise ValueError(f"{name} must be {'above 0' if least is None else f'at least {least}'}, got {value}")


class Machine(_Part, frozen=True, kw_only=True):
    """The modelled node."""

    cores: int = 16
    host_mib: float | None = None
    """The host store's size; None: no bound."""
    disk_mib_per_s: float = 1000.0
    fork_s: float = 0.005
    """Time of the zygote for each fork: forks wait for each other."""
    stop_s: float = 0.002
    """From the wish that a body ends until it is gone."""
    zygote_start_s: float = 3.0

    def __post_init__(self) -> None:
        self.check_above("cores", "host_mib", "disk_mib_per_s")
        self.check_above("fork_s", "stop_s", "zygote_start_s", least=0)


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
    latency_ms: dict[int, float]
    """Of one run, by its batch; between the batches given it is linear, and beyond them."""
    jitter: float = 0.0
    """Standard deviation of a run's time, as a share of it."""
    start_s: float = 0.02
    """From the fork until the body is ready, on a core, when the zygote has prepared the program."""
    prepare_s: float = 0.03
    """What the first start of a program takes longer, and what it takes the zygote to prepare it."""
    body_mib: float = 20.0
    """Private memory of one body."""
    sandboxed: bool = False
    settings: Settings = Settings()
    workload: Workload

    def __post_init__(self) -> None:
        self.check_above("variants", "body_mib")
        self.check_above("jitter", "start_s", "prepare_s", least=0)
        if not self.latency_ms or min(self.latency_ms) < 1 or min(self.latency_ms.values()) <= 0:
            raise ValueError("latency_ms needs a time above 0 for at least one batch from 1 on")
        if not self.name or "@" in self.name:
            raise ValueError(f"name must be a word without @, got {self.name!r}")


class Window(_Part, frozen=True, kw_only=True):
    """A span of simulated time."""

    from_s: float
    until_s: float


class Faults(_Part, frozen=True, kw_only=True):
    """What goes wrong, and how often. None or 0: never."""

    run_crash_share: float = 0.0
    """Of the runs: the body dies in the middle of it."""
    start_crash_share: float = 0.0
    """Of the starts: the body dies before it is ready."""
    slow_load_share: float = 0.0
    slow_load_factor: float = 10.0
    """Of the starts and stages: so many take so much longer."""
    body_life_s: float | None = None
    """Mean time after which a body dies whatever it does."""
    zygote_life_s: float | None = None
    """Mean time after which the zygote dies, and its bodies with it."""
    store_full: tuple[Window, ...] = ()
    """Spans in which the host store takes nothing."""

    def __post_init__(self) -> None:
        self.check_above("run_crash_share", "start_crash_share", "slow_load_share", least=0)
        self.check_above("slow_load_factor", "body_life_s", "zygote_life_s")


class Simulated(msgspec.Struct, frozen=True):
    """One sibling: what the mind is told of it, and what the world knows."""

    spec: FunctionSpec
    model: FunctionModel
    sibling: int


class Scenario(_Part, frozen=True, kw_only=True):
    """All of a simulation but where recorded traces lie."""

    seed: int = 1
    duration_s: float
    """Of arrivals; what has come until then is still answered."""
    node: Machine = Machine()
    mind: MindConfig = MindConfig()
    faults: Faults = Faults()
    functions: tuple[FunctionModel, ...]

    def __post_init__(self) -> None:
        self.check_above("duration_s")
        names = [function.name for function in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"each function needs a name of its own, got {sorted(names)}")

    def times(self, copies: int) -> "Scenario":
        """The same with so many times the siblings."""
        more = tuple(msgspec.structs.replace(each, variants=each.variants * copies) for each in self.functions)
        return msgspec.structs.replace(self, functions=more)

    def simulated(self) -> tuple[Simulated, ...]:
        """Every sibling of every function."""
        return tuple(_sibling(model, index) for model in self.functions for index in range(model.variants))


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


def latency_s(model: FunctionModel, batch: int) -> float:
    """Seconds of a run of `batch` requests; the smallest batch's time below it, one request's share more beyond one."""
    table = sorted(model.latency_ms.items())
    if batch <= table[0][0]:
        return table[0][1] / 1000
    if len(table) == 1:
        table.insert(0, (0, 0.0))
    upper = next((at for at, (size, _) in enumerate(table) if size >= batch), len(table) - 1)
    (few, before), (many, after) = table[upper - 1], table[upper]
    return (before + (after - before) * (batch - few) / (many - few)) / 1000


def _sibling(model: FunctionModel, index: int) -> Simulated:
    name = FunctionName(model.name if model.variants == 1 else f"{model.name}-{index:04}")
    blobs = tuple(
        BlobSize(_address(*_owner(part, name, place), number), int(part.mib * MIB))
        for place, part in enumerate(model.blocks)
        for number in range(part.count)
    )
    spec = FunctionSpec(
        id=function_id(name, 1),
        name=name,
        version=1,
        tenant=TenantId("simulated"),
        settings=model.settings,
        program=_address(model.name, "program"),
        sandboxed=model.sandboxed,
        blobs=blobs,
    )
    return Simulated(spec, model, index)


def _owner(part: Blocks, name: FunctionName, place: int) -> tuple[str, object, float]:
    return ("own", (name, place), part.mib) if part.shared is None else ("shared", part.shared, part.mib)


def _address(*parts: object) -> Address:
    """A made address: as long as a real one, and the same for the same parts."""
    return Address(hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest())
