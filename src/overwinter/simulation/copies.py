"""Makes the functions of a simulation, as the scheduler sees them, from their descriptions."""

import hashlib
from collections.abc import Iterator, Sequence
from sys import intern

import msgspec

from overwinter.core.cutting import SLICES_MAX, balanced_starts
from overwinter.core.devices import DeviceConfig
from overwinter.core.function import BlobSize, FunctionSpec
from overwinter.core.ids import (
    Address,
    FamilyId,
    FunctionId,
    FunctionName,
    function_id,
    program_id,
    program_name,
    slice_name,
)
from overwinter.simulation.models import MIB, Blocks, FunctionModel


class SimulatedFunction(msgspec.Struct, frozen=True):
    """One copy of a function, or a part of one: its specification for the scheduler, and its properties in the
    simulation.
    """

    spec: FunctionSpec
    model: FunctionModel
    copy: int


def simulated_functions(
    models: Sequence[FunctionModel], devices: Sequence[DeviceConfig]
) -> tuple[SimulatedFunction, ...]:
    """Return the functions for the scheduler: each copy of each function, with its slices and programs. The ones that
    run in workers come after the programs that run on devices for them, and later slices of a program before earlier
    ones.
    """
    found = [_copy(model, name, index) for model in models for index, name in enumerate(model.names())]
    begins = {model.name: _begins(model, devices) for model in models}
    programs = [_program(each) for each in found if each.spec.has_pool_program and begins[each.model.name] is not None]
    whole = [*programs, *(each if each.model.handler is None else _handler(each) for each in found)]
    return tuple(part for each in whole for part in _slices(each, begins[each.model.name] or ()))


def _begins(model: FunctionModel, devices: Sequence[DeviceConfig]) -> Sequence[int] | None:
    """Return the blocks at which the slices of a function's program begin; empty if a device can hold all of it. None:
    the function runs in workers only. Raises the error of `cuts` with `device = "pool"`.
    """
    if model.settings.device == "cpu" or not devices:
        return None
    try:
        return cuts(model, devices)
    except ValueError:
        if model.settings.device == "pool":
            raise
        return None


def cuts(model: FunctionModel, devices: Sequence[DeviceConfig]) -> Sequence[int]:
    """Return the blocks at which the slices of a program begin; empty if a device can hold all of it. Raises ValueError
    if no slices fit.
    """
    sizes, most = _sizes(model), max(each.memory_bytes for each in devices)
    if sum(dict(sizes).values()) <= most:
        return ()
    for count in range(2, SLICES_MAX + 1):
        begins = balanced_starts([(each,) for each in sizes], count, most)
        if begins is not None:
            return begins
    largest, total = max(nbytes for _, nbytes in sizes), sum(dict(sizes).values())
    why = f"need more than {SLICES_MAX} slices"
    if largest > most:
        why = f"have a block of {largest / MIB:g} MiB: give it as several, between which the program can be cut"
    raise ValueError(f"the {total / MIB:g} MiB of function {model.name!r}, on devices of {most / MIB:g} MiB, {why}")


def _sizes(model: FunctionModel) -> list[tuple[str, int]]:
    """Return a key and the bytes of each block of a function, in order; equal blocks have equal keys."""
    return [(blob.address, blob.nbytes) for blob in _blobs(model.blocks, model.name)]


def _copy(model: FunctionModel, name: FunctionName, index: int) -> SimulatedFunction:
    spec = FunctionSpec(
        id=function_id(name, 1),
        name=name,
        version=1,
        tenant=model.tenant,
        settings=model.settings,
        program=_address(model.name, "program"),
        has_handler=model.has_handler or model.handler is not None,
        blobs=_blobs(model.blocks, name),
        profile=model.scheduler_profile(),
        family=FamilyId("" if model.settings.isolation == "function" else f"{model.tenant}/{model.name}"),
    )
    return SimulatedFunction(spec, model, index)


def _program(function: SimulatedFunction) -> SimulatedFunction:
    """Return the function that runs on devices for this one, as a node makes it."""
    spec, model = function.spec, function.model.on_device()
    own = {"id": program_id(spec.id), "name": program_name(spec.name), "profile": model.scheduler_profile()}
    if function.model.handler is not None:
        # The function with the handler refuses late requests itself, so its program serves all.
        own |= {"has_handler": False, "settings": msgspec.structs.replace(spec.settings, late="serve")}
    return SimulatedFunction(msgspec.structs.replace(spec, **own), model, function.copy)


def _handler(function: SimulatedFunction) -> SimulatedFunction:
    """Return the function that runs in workers for one with a handler. As on a node, if its program runs on devices
    only, its worker compiles nothing and has neither weights nor a profile.
    """
    spec, model = function.spec, function.model
    assert model.handler is not None
    blobs = _blobs(model.handler.blocks, f"{spec.name} handler")
    spec = msgspec.structs.replace(spec, program=_address(model.name, "handler"), blobs=(*spec.blobs, *blobs))
    if spec.settings.device == "pool":
        spec = msgspec.structs.replace(spec, blobs=blobs, profile=None)
        model = msgspec.structs.replace(model, prepare_s=0.0)
    return SimulatedFunction(spec, model, function.copy)


def _slices(function: SimulatedFunction, begins: Sequence[int]) -> Iterator[SimulatedFunction]:
    """Yield the slices of a function, the last first; only itself if it runs in workers or is not cut. The first slice
    has the function's name. Each takes a part of the time as large as its part of the work.
    """
    if not begins or not function.spec.on_pool:
        yield function
        return
    spec, ends = function.spec, [*begins[1:], len(function.spec.blobs)]
    blobs = [spec.blobs[begin:end] for begin, end in zip(begins, ends, strict=True)]
    relative_times = function.model.relative_times()
    following: FunctionId | None = None
    for number in range(len(begins), 0, -1):
        share = sum(relative_times[begins[number - 1] : ends[number - 1]]) / sum(relative_times)
        name = spec.name if number == 1 else slice_name(spec.name, number)
        own = msgspec.structs.replace(
            spec,
            id=function_id(name, spec.version),
            name=name,
            blobs=blobs[number - 1],
            profile=None if spec.profile is None else spec.profile.part(share),
            family=FamilyId(f"{spec.family}/{number}" if spec.family else ""),
            following=following,
        )
        model = msgspec.structs.replace(function.model, prepare_s=share * function.model.prepare_s)
        if number > 1:
            model = msgspec.structs.replace(model, workload=None)
        yield SimulatedFunction(own, model, function.copy)
        following = own.id


def _blobs(blocks: Sequence[Blocks], owner: str) -> tuple[BlobSize, ...]:
    return tuple(
        BlobSize(_address(*_owner(part, owner, place), number), int(part.mib * MIB))
        for place, part in enumerate(blocks)
        for number in range(part.count)
    )


def _owner(part: Blocks, name: str, place: int) -> tuple[str, object, float]:
    return ("own", (name, place), part.mib) if part.shared is None else ("shared", part.shared, part.mib)


def _address(*parts: object) -> Address:
    """Return an invented address: as long as a real one, and the same string object for equal parts."""
    return Address(intern(hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()))
