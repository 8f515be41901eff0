"""The scenarios of Torpor's figures, all made from scenarios/torpor.toml."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import DeviceId
from overwinter.core.policies import Policy
from overwinter.simulation.models import Blocks, FunctionModel
from overwinter.simulation.scenario import Scenario, read_scenario
from overwinter.simulation.workloads import MinuteCounts

SCENARIO = Path(__file__).parent.parent.parent / "scenarios" / "torpor.toml"
BERT = "bert-qa"
GB = 10**9

TORPOR = Policy(device_order="rrc", device_binding="torpor", device_eviction="torpor")
OURS = Policy()
ABLATIONS: Mapping[str, Policy] = {
    "torpor": TORPOR,
    "torpor-fifo": msgspec.structs.replace(TORPOR, device_order="fifo"),
    "torpor-random": msgspec.structs.replace(TORPOR, device_binding="random"),
    "torpor-lru": msgspec.structs.replace(TORPOR, device_eviction="lru"),
    "simple-swap": Policy(device_order="fifo", device_binding="random", device_eviction="lru"),
    "non-swap": Policy(device_order="fifo", device_binding="native", device_eviction="lru"),
    "overwinter": OURS,
}
"""Figure 11's policies except Torpor-Block, whose allocator `benchmarks.pool` measures; figure 14's; and ours."""

NATIVE_MS = {
    "densenet-169": 30,
    "densenet-201": 36,
    "inception-v3": 19,
    "efficientnet": 17,
    "resnet-50": 11,
    "resnet-101": 20,
    "resnet-152": 25,
    BERT: 42,
}
"""The milliseconds of a run in a native process, from the paper's table 4."""
COLD_MS, COLD_BERT_MS = 8000.0, 11000.0
"""Cold starts of ResNet-152 and Bert-qa in the paper's table 1; the others have ResNet-152's."""
NATIVE_TIMEOUT_S = 60.0
"""A cold start takes longer than the timeout of a node that swaps."""
SLOTS = 18
"""The models that a device has room for in native processes, as the prototype counts them; 72 on a node."""
NATIVE = Policy(device_order="fifo", device_binding="native", device_eviction="lru")
INFLESS = msgspec.structs.replace(NATIVE, device_binding="infless", keep_alive="history", keep_alive_s=600.0)


def paper(minutes: float) -> Scenario:
    """Return the node of the paper with 560 functions, and this many minutes after those that do not count."""
    scenario = read_scenario(SCENARIO)
    settle_s = min(scenario.settle_s, 60.0 * minutes)
    return msgspec.structs.replace(scenario, duration_s=settle_s + 60.0 * minutes, settle_s=settle_s)


def with_policy(scenario: Scenario, policy: Policy) -> Scenario:
    """Return the scenario under another policy."""
    return msgspec.structs.replace(scenario, scheduler=msgspec.structs.replace(scenario.scheduler, policy=policy))


def with_functions(scenario: Scenario, count: int, first_row: int = 0) -> Scenario:
    """Return the scenario with this many functions, the models in turn. `first_row`: the row of the trace of the first
    function.
    """
    models = []
    for place, model in enumerate(scenario.functions):
        share = count // len(scenario.functions) + (place < count % len(scenario.functions))
        if share:
            models.append(_placed(model, share, first_row))
        first_row += share
    return msgspec.structs.replace(scenario, functions=tuple(models))


def only(scenario: Scenario, counts: Mapping[str, int], scale: float = 1.0) -> Scenario:
    """Return the scenario with these numbers of functions of some models; `scale`: of the rates of the trace."""
    models, row = [], 0
    for model in scenario.functions:
        if model.name in counts:
            models.append(_placed(model, counts[model.name], row, scale))
            row += counts[model.name]
    return msgspec.structs.replace(scenario, functions=tuple(models))


def _placed(model: FunctionModel, variants: int, row: int, scale: float = 1.0) -> FunctionModel:
    assert isinstance(model.workload, MinuteCounts)
    workload = msgspec.structs.replace(model.workload, row=row, scale=scale)
    return msgspec.structs.replace(model, variants=variants, workload=workload)


def with_slos(scenario: Scenario, vision_ms: float, bert_ms: float) -> Scenario:
    """Return the scenario with other SLOs."""
    functions = tuple(
        msgspec.structs.replace(
            model,
            settings=msgspec.structs.replace(model.settings, slo_ms=bert_ms if model.name == BERT else vision_ms),
        )
        for model in scenario.functions
    )
    return msgspec.structs.replace(scenario, functions=functions)


def sharing_bases(scenario: Scenario) -> Scenario:
    """Return the scenario with functions that are fine-tuned variants: all blocks but the last of each are those of the
    base model.
    """
    functions = tuple(
        msgspec.structs.replace(model, blocks=(*_shared(model.blocks[:-1], model.name), model.blocks[-1]))
        for model in scenario.functions
    )
    return msgspec.structs.replace(scenario, functions=functions)


def _shared(blocks: Sequence[Blocks], name: str) -> list[Blocks]:
    return [msgspec.structs.replace(each, shared=name) for each in blocks]


def native(scenario: Scenario, infless: bool) -> Scenario:
    """Return the scenario with a process on a device for each function.

    A process has all memory that it needs, a cold start, and the native latency. So each place for one is a device with
    room for one function; processes on one GPU do not slow each other down, which favours them. `infless`: they end
    after INFless's keep-alive, and start again with a cold start; otherwise they have started before the first request.
    """
    functions = tuple(
        msgspec.structs.replace(
            model,
            blocks=(Blocks(mib=1.0),),
            latency_ms={1: float(NATIVE_MS[model.name])},
            swap_ms=(COLD_BERT_MS if model.name == BERT else COLD_MS) if infless else 0.0,
            settings=msgspec.structs.replace(model.settings, timeout_s=NATIVE_TIMEOUT_S),
        )
        for model in scenario.functions
    )
    slots = tuple(
        DeviceConfig(name=DeviceId(f"{device.name}/{slot}"), memory_bytes=1 << 20, latency_s=0.0)
        for device in scenario.devices
        for slot in range(SLOTS)
    )
    made = msgspec.structs.replace(scenario, functions=functions, devices=slots)
    return with_policy(made, INFLESS if infless else NATIVE)
