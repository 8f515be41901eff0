"""The node's record of an executor: the functions that it was handed, and what it does now."""

from collections.abc import Sequence

from overwinter.core.actions import PrepareOnDevice, StartExecutor
from overwinter.core.ids import DeviceId, FunctionId, WorkerId
from overwinter.core.profile import Profile
from overwinter.core.tensor import ANSWER_BYTES_MAX
from overwinter.node.answers import AnswerCheck
from overwinter.node.bindings import Bindings
from overwinter.node.contained import ContainedProcess, PendingRun, ProcessFiles
from overwinter.node.functions import DeployedFunction
from overwinter.node.peers import SharedFile
from overwinter.worker.messages import Answer

OUTPUTS_BYTES = 4 * ANSWER_BYTES_MAX
"""The most bytes of the outputs of a run: the memory of executors is not measured."""
UNSENT_BYTES_MAX = 64 << 20
"""The most bytes of messages to an executor that are kept until it has read others: it reads none during a run."""


class ExecutorProcess(ContainedProcess):
    """A process that owns a device, in a sandbox. It runs one batch at a time."""

    unsent_bytes_max = UNSENT_BYTES_MAX

    def __init__(self, action: StartExecutor, files: ProcessFiles) -> None:
        """Raises OSError when the system has no descriptors left."""
        what = f"executor of {action.device}"
        super().__init__(action.executor, action.tenant, what, 1, files, lambda text: None, OUTPUTS_BYTES)
        self.device = action.device
        self.bindings = Bindings()
        self.used: dict[FunctionId, None] = {}
        """The functions handed over for a run or a preparation that has begun, the least recently used first."""
        self.known: set[FunctionId] = set()
        """These functions, and those that it does not map any more but that may still be on the device."""
        self.profiles: dict[FunctionId, Profile | None] = {}
        """The profiles of the functions handed over, as it last got their figures."""
        self.unconfirmed: list[str] = []
        """The functions for which it may still send a BindFailed: it has answered no run that was sent later."""
        self._unconfirmed_before_run: list[str] = []
        """Those of them that were handed over before the run in progress, whose answer confirms them."""
        self.preparing: PrepareOnDevice | None = None
        self.warms_up = False
        """Whether `WarmUp` was sent for the function that it prepares, and `WarmedUp` has not arrived yet."""
        self.memory: SharedFile | None = None
        """The memory of its device, if other devices may copy from it."""
        self.mapped: dict[DeviceId, WorkerId] = {}
        """The devices whose memory it was given, and the executor that each had at that time."""
        self._weight_bytes = 0

    def runs_next(self, functions: Sequence[DeployedFunction]) -> None:
        """The next run is of these functions of a family. Errors name the first."""
        self.function = functions[0].id
        for function in functions:
            self.record_use(function)
        self._unconfirmed_before_run = list(self.unconfirmed)
        self.answer_check = AnswerCheck(functions[0].run_outputs)
        self._weight_bytes = sum(function.nbytes for function in functions)

    def record_use(self, function: DeployedFunction) -> None:
        """Record that it runs or prepares a function, which is then the most recently used one."""
        self.used.pop(function.id, None)
        self.used[function.id] = None
        self.known.add(function.id)

    def complete_run(self, answer: Answer) -> PendingRun:
        """Return the run that was answered; raise ValueError for an impossible answer."""
        pending = super().complete_run(answer)
        if not 0 <= answer.moved_bytes <= self._weight_bytes * max(1, len(pending.requests)):
            raise ValueError(f"it cannot have moved {answer.moved_bytes} bytes")
        if not 0 <= answer.peer_bytes <= answer.moved_bytes:
            raise ValueError(f"{answer.peer_bytes} of {answer.moved_bytes} bytes cannot have come from a peer")
        for function in self._unconfirmed_before_run:
            if function in self.unconfirmed:
                self.unconfirmed.remove(function)
        return pending
