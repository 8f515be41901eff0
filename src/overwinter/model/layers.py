"""Assigns calls to the modules that make them, and computes the cost of each layer.

A layer is an unbroken sequence of calls by one module, named by its path in the model; a module that is left and
entered again has several layers. The layers cover all calls.
"""

from collections.abc import Mapping, Sequence

from overwinter.model.liveness import alive_across
from overwinter.model.structure import Layer, Program, slots_of


def layer_table(
    program: Program, paths: Sequence[str | None], macs: Sequence[int], bytes_at_example: Mapping[int, int]
) -> tuple[Layer, ...]:
    """The layers of a program, given each call's module path (None: unknown) and multiply-accumulates.
    `bytes_at_example` holds the bytes of each result's elements; a view counts with the bytes needed to send it.
    """
    layers: list[Layer] = []
    seen: set[int] = set()
    for path, start, stop in spans(paths):
        used = {slot for call in program.calls[start:stop] for slot in slots_of(call) if slot < program.first_input}
        alive = program.output_slots if stop == len(program.calls) else alive_across(program, stop)
        layers.append(
            Layer(
                path=path,
                start=start,
                stop=stop,
                macs=sum(macs[start:stop]),
                weight_bytes=sum(program.weights[slot].nbytes for slot in used - seen),
                output_bytes=sum(bytes_at_example.get(slot, 0) for slot in set(alive)),
            )
        )
        seen |= used
    return tuple(layers)


def spans(paths: Sequence[str | None]) -> list[tuple[str, int, int]]:
    """Return consecutive calls of one path as (path, start, stop). A call of unknown path belongs to the previous path,
    or, without one, to the next.
    """
    known = next((path for path in paths if path is not None), "")
    found: list[tuple[str, int, int]] = []
    for index, path in enumerate(paths):
        known = known if path is None else path
        if found and found[-1][0] == known:
            found[-1] = (known, found[-1][1], index + 1)
        else:
            found.append((known, index, index + 1))
    return found
