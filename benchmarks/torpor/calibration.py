"""Compares the times of the simulated devices with tables 3 and 4 of the paper."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.torpor.setting import BERT
from overwinter.core.actions import RunOnDevice, StartExecutor
from overwinter.core.events import Event, RunEnded
from overwinter.core.ids import DeviceId, RequestId, RunId, WorkerId
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.executors import Executors
from overwinter.simulation.scenario import Scenario
from overwinter.simulation.timeline import Timeline

TABLE_4: Mapping[str, Sequence[int]] = {
    "densenet-169": (25, 27, 26),
    "densenet-201": (28, 30, 30),
    "inception-v3": (14, 17, 16),
    "efficientnet": (12, 13, 13),
    "resnet-50": (9, 13, 11),
    "resnet-101": (14, 22, 16),
    "resnet-152": (17, 25, 20),
    BERT: (43, 144, 45),
}
"""Milliseconds of a run: on a device that has the model, swapped over PCIe, and swapped from a peer."""
CONTENDERS = ("densenet-169", "resnet-152", BERT)
TABLE_3: Mapping[str, Sequence[int]] = {"densenet-169": (27, 27, 27), "resnet-152": (31, 29, 43), BERT: (166, 240, 149)}
"""Milliseconds of a swapped run while each of these models is swapped again and again. In its own column, a model runs
alone.
"""
SPAN_S = 10.0


class Devices:
    """The devices of a node without a scheduler."""

    def __init__(self, node: Scenario) -> None:
        self.functions = {each.model.name: each for each in reversed(node.simulated_functions())}
        self.timeline = Timeline()
        self.names = [device.name for device in node.devices]
        self.took_s: dict[WorkerId, list[float]] = {}
        self._then: dict[WorkerId, Callable[[], None]] = {}
        self._began: dict[WorkerId, float] = {}
        self.executors = Executors(node.devices, self.timeline, self._handle)
        for number, name in enumerate(self.names):
            self.executors.start(StartExecutor(WorkerId(number), name), 0.0, None, None)
        self.timeline.run_until(0.0)

    def run(self, place: int, function: SimulatedFunction, swapped: bool, peer: DeviceId | None = None) -> None:
        """Run a function on a device that has it; if `swapped`, evict the function first."""
        executor, spec = WorkerId(place), function.spec
        self._began[executor] = self.timeline.now
        missing = sum(spec.weights.values()) if swapped else 0
        if swapped:
            self.executors.unbind(executor, spec.id)
        action = RunOnDevice(
            executor, self.names[place], RunId(0), spec.id, (RequestId(0),), missing_bytes=missing, peer=peer
        )
        self.executors.run(action, [function], function.model.latency_ms[1] / 1000, None, False)

    def swap_again_and_again(self, place: int, function: SimulatedFunction) -> None:
        """Swap a function in whenever its run has ended."""
        self._then[WorkerId(place)] = partial(self.run, place, function, True)
        self.run(place, function, True)

    def ms(self, place: int) -> float:
        """Return the mean milliseconds of the runs on a device since the last call."""
        took = self.took_s.pop(WorkerId(place))
        return 1000 * sum(took) / len(took)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.took_s.setdefault(event.worker, []).append(self.timeline.now - self._began[event.worker])
            self._then.get(event.worker, int)()


def table_4(node: Scenario, model: str) -> list[float]:
    """Return the milliseconds of a model's run alone, as in table 4. One of the fastest links joins
    devices 1 and 2.
    """
    devices = Devices(node)
    function = devices.functions[model]
    found = []
    for place, swapped, peer in ((1, True, None), (1, False, None), (2, True, devices.names[1])):
        devices.run(place, function, swapped, peer)
        devices.timeline.run_until(devices.timeline.now + SPAN_S)
        found.append(devices.ms(place))
    swap, resident, near = found
    return [resident, swap, near]


def table_3(node: Scenario, model: str) -> list[float]:
    """Return the milliseconds of a model's run while another is swapped, as in the paper's table 3."""
    found = []
    for other in CONTENDERS:
        devices = Devices(node)
        devices.swap_again_and_again(0, devices.functions[model])
        if other != model:
            devices.swap_again_and_again(1, devices.functions[other])
        devices.timeline.run_until(SPAN_S)
        found.append(devices.ms(0))
    return found


def calibration(node: Scenario) -> None:
    """Print both tables."""
    print("\nTable 4: ms of a run on a device that has the model, swapped from the host, and swapped from a peer")
    _print({model: (paper, table_4(node, model)) for model, paper in TABLE_4.items()})
    print(
        "\nTable 3: ms of a swapped run while DenseNet-169, ResNet-152 or Bert-qa is swapped on the other device behind"
    )
    print("the switch; in a model's own column it runs alone")
    _print({model: (paper, table_3(node, model)) for model, paper in TABLE_3.items()})


def _print(rows: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    print(f"  {'':16}{'paper':>18}{'here':>18}")
    for model, (paper, here) in rows.items():
        print(f"  {model:16}" + "".join(f"{each:6}" for each in paper) + "".join(f"{each:6.0f}" for each in here))
