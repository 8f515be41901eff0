"""The inputs and outputs of a pipeline with different versions of its functions."""

from overwinter.core.errors import CallerError, ForbiddenError
from overwinter.core.ids import FunctionName, TenantId
from overwinter.core.pipeline import Find, Pipeline, Signature, signature
from overwinter.core.tensor import TensorSpec
from overwinter.node.registry import Registry
from overwinter.node.views import DeployedView

REMEMBERED = 2
"""How many signatures of a pipeline are remembered: one for the current versions, one for a change that is checked."""

_Tensors = list[tuple[TensorSpec, ...]]


class Signatures:
    """Computes the signatures of one pipeline of a tenant, and remembers the last ones."""

    def __init__(self, pipeline: Pipeline, tenant: TenantId, functions: Registry) -> None:
        self.pipeline = pipeline
        self._tenant = tenant
        self._functions = functions
        self._used = {(stage.function, stage.version) for stage in pipeline.stages.values()}
        self.functions = {name for name, _ in self._used}
        self._last: list[tuple[_Tensors, Signature | CallerError]] = []
        """The inputs and outputs of the functions, and what follows from them; the latest is first."""

    def current(self) -> Signature:
        """Return the signature with the current versions of the functions; raise CallerError if they do not form a
        pipeline of the tenant. Every request needs it.
        """
        return self.of(self.find)

    def of(self, find: Find) -> Signature:
        """Return the signature with the functions that `find` returns; raise CallerError if they do not form a
        pipeline.
        """
        try:
            found = [find(*each) for each in self._used]
        except CallerError:
            # Raise it again; a NotFoundError then has the name of the stage.
            return signature(self.pipeline, find)
        tensors = [tuple(specs) for each in found for specs in (each.inputs, each.outputs)]
        result = next((result for known, result in self._last if known == tensors), None)
        if result is None:
            result = self._computed(find)
        # The tensors of this lookup are remembered, even if equal ones were: identical objects are compared fastest.
        others = [each for each in self._last if each[1] is not result]
        self._last = [(tensors, result), *others][:REMEMBERED]
        if isinstance(result, CallerError):
            # Not the same error again: it would keep the frames of its caller.
            raise type(result)(str(result))
        return result

    def _computed(self, find: Find) -> Signature | CallerError:
        try:
            return signature(self.pipeline, find)
        except CallerError as error:
            return error.with_traceback(None)

    def find(self, name: FunctionName, version: int | None) -> DeployedView:
        """Return a function that the pipeline may call; raise NotFoundError or ForbiddenError."""
        function = self._functions.view(name, version)
        if function.tenant != self._tenant:
            raise ForbiddenError(
                f"function {name!r} belongs to another tenant: a pipeline calls only functions of its tenant"
            )
        return function

    @property
    def valid(self) -> bool:
        """Whether the current versions of the functions form a pipeline."""
        try:
            self.current()
        except CallerError:
            return False
        return True
