"""Makes the functions of a simulation, as the scheduler sees them, from their descriptions."""

import hashlib
from collections.abc import Sequence
from sys import intern

import msgspec

from overwinter.core.devices import DeviceConfig
from overwinter.core.function import BlobSize, FunctionSpec
from overwinter.core.ids import Address, FamilyId, FunctionName, function_id, program_id, program_name
from overwinter.simulation.models import MIB, Blocks, FunctionModel


class Simulated(msgspec.Struct, frozen=True):
    """One copy of a function: its specification for the scheduler, and its properties in the simulation."""

    spec: FunctionSpec
    model: FunctionModel
    copy: int


def copies(models: Sequence[FunctionModel], devices: Sequence[DeviceConfig]) -> tuple[Simulated, ...]:
    """Return every copy of every function, and the programs that run on devices for those that run in workers."""
    whole = [_copy(model, name, index) for model in models for index, name in enumerate(model.names())]
    programs = [_program(each) for each in whole if devices and each.spec.has_program]
    return (*programs, *(each if each.model.handler is None else _handler(each) for each in whole))


def _copy(model: FunctionModel, name: FunctionName, index: int) -> Simulated:
    spec = FunctionSpec(
        id=function_id(name, 1),
        name=name,
        version=1,
        tenant=model.tenant,
        settings=model.settings,
        program=_address(model.name, "program"),
        sandboxed=model.sandboxed or model.handler is not None,
        blobs=_blobs(model.blocks, name),
        profile=model.measured(),
        family=FamilyId("" if model.settings.isolation == "function" else f"{model.tenant}/{model.name}"),
    )
    return Simulated(spec, model, index)


def _program(function: Simulated) -> Simulated:
    """Return the function that runs on devices for this one, as a node makes it."""
    spec, model = function.spec, function.model.on_device()
    own = {"id": program_id(spec.id), "name": program_name(spec.name), "profile": model.measured()}
    if function.model.handler is not None:
        # A handler's function itself refuses what is too late.
        own |= {"sandboxed": False, "settings": msgspec.structs.replace(spec.settings, late="serve")}
    return Simulated(msgspec.structs.replace(spec, **own), model, function.copy)


def _handler(function: Simulated) -> Simulated:
    """Return the function that runs in workers for one with a handler, whose program runs on devices. As on a node,
    nothing is compiled for it, and the profile is that of its program.
    """
    spec, model = function.spec, function.model
    assert model.handler is not None
    blobs = _blobs(model.handler.blocks, f"{spec.name} handler")
    own = {"program": _address(model.name, "handler"), "blobs": blobs, "profile": None}
    return Simulated(msgspec.structs.replace(spec, **own), msgspec.structs.replace(model, prepare_s=0.0), function.copy)


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
