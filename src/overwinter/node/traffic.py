"""Checks, stores and restores which versions get the requests that name none.

The scheduler chooses the version of each request. Here the tenant's setting is checked, stored on disk, and passed to
the scheduler.
"""

import asyncio
from collections.abc import Callable, Iterable

from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.events import Event, TrafficSet
from overwinter.core.ids import FunctionName
from overwinter.core.pipeline import HasSignature
from overwinter.core.tensor import TensorSpec
from overwinter.core.versions import Shares, Versions, check_shares, default_of
from overwinter.node.completion import completed
from overwinter.node.log import Log
from overwinter.node.pipelines import Pipelines
from overwinter.node.registry import Registry
from overwinter.store.manifest import Manifest
from overwinter.store.traffic import StoredTraffic

VersionsOf = Callable[[FunctionName], Versions]
"""Returns the versions of a function that passed their trial."""


class TrafficSplits:
    """Promotions and splits. Used on the event loop's thread only."""

    def __init__(
        self, functions: Registry, pipelines: Pipelines, stored: StoredTraffic, post: Callable[[Event], None]
    ) -> None:
        self._functions = functions
        self._post = post
        self._pipelines = pipelines
        self._stored = stored
        self._coming: dict[FunctionName, Shares] = {}
        """The shares that are being checked or stored, and are not posted yet."""

    async def set(self, name: FunctionName, shares: Shares) -> None:
        """Divide the requests without a version among these versions; with no shares the newest gets all.

        Raises CallerError for invalid shares, NotFoundError for a missing version, ConflictError for the name of a
        pipeline, for a version that answers no requests, for versions with different inputs or outputs, or if a
        pipeline would become invalid.
        """
        check_shares(shares)
        if name in self._pipelines:
            raise ConflictError(f"{name!r} is a pipeline, of which there is one version: promote its functions")
        tenant = self._functions.view(name, None).tenant
        # The stored shares and those of the scheduler change in the same order.
        async with self._pipelines.changing.turn(tenant):
            # It may have been removed since, and another tenant may have deployed one of this name.
            if self._functions.view(name, None).tenant != tenant:
                raise NotFoundError(f"function {name!r} was removed")
            views = {share.version: self._functions.view(name, share.version) for share in shares}
            default = default_of(self._functions.versions(name), shares)
            self._check_answer(name, views or [default])
            if len({_signature(view) for view in views.values()}) > 1:
                named = " and ".join(map(str, views))
                raise ConflictError(
                    f"versions {named} of {name!r} differ in their inputs or outputs, and callers cannot know "
                    "which one answers: promote one of them"
                )
            # From here on a new version is checked if it would answer with these shares.
            self._coming[name] = shares
            try:
                await self._pipelines.protect(name, self._functions.view(name, default))
                # One may have been unloaded since.
                self._check_answer(name, views or [default])
                await completed(self._store(name, shares))
            finally:
                del self._coming[name]

    async def _store(self, name: FunctionName, shares: Shares) -> None:
        await asyncio.to_thread(self._stored.put, name, shares)
        self._post(TrafficSet(name, shares))

    def _check_answer(self, name: FunctionName, versions: Iterable[int]) -> None:
        """Raise ConflictError if one of these versions answers no requests."""
        for version in versions:
            view = self._functions.view(name, version)
            if view.state == "LOADING":
                raise ConflictError(f"version {version} of {name!r} is on trial: wait until its deploy has ended")
            if view.state != "READY":
                raise ConflictError(
                    f"version {version} of {name!r} answers no requests ({view.reason}): load it first "
                    f"(`overwinter load {name}@{version}`)"
                )

    async def check_before_trial(self, new: Manifest, versions_of: VersionsOf) -> None:
        """Raise ConflictError if a pipeline would break when this version, after its trial, gets the requests that name
        no version. The result is remembered, so that `check_new` is fast.
        """
        if self._would_answer(new, versions_of(new.name)):
            await self._pipelines.protect(new.name, new)

    def check_new(self, new: Manifest, versions_of: VersionsOf, version: int) -> None:
        """Raise ConflictError if a pipeline would break because this version of a function answers from now on."""
        known = versions_of(new.name)
        if version > max(known.numbers, default=0) and self._would_answer(new, known):
            self._pipelines.protect_at_once(new.name, new)

    def _would_answer(self, new: Manifest, known: Versions) -> bool:
        """Whether the newest version gets the requests that name none, now or after a change in progress."""
        return not (known.shares and self._coming.get(new.name, known.shares))

    def restore(self, log: Log) -> None:
        """Post the stored shares to the scheduler, which must have the functions. Log those of versions not served."""
        for name, shares in self._stored.all().items():
            absent = {share.version for share in shares} - set(self._functions.versions(name))
            if absent:
                which = " and ".join(map(str, sorted(absent)))
                text = f"version {which} of {name!r} has a share of the requests and is not served: the newest gets all"
                log(text, level="error")
            self._post(TrafficSet(name, shares))


def unchanged_traffic(shares: Shares) -> str:
    """Return a note for the author of a new version if other versions were promoted; otherwise empty."""
    if not shares:
        return ""
    versions = " and ".join(str(share.version) for share in shares)
    return f"requests that name no version still go to version {versions}: promote this one to change that"


def _signature(function: HasSignature) -> tuple[object, ...]:
    return tuple(_kind(spec) for specs in (function.inputs, function.outputs) for spec in (*specs, None))


def _kind(spec: TensorSpec | None) -> object:
    """The properties of a tensor except the names of its dynamic sizes."""
    if spec is None:
        return None
    return spec.name, spec.datatype, tuple(size if isinstance(size, int) else -1 for size in spec.shape)
