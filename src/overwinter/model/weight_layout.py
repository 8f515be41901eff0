"""How the elements of a stored weight lie in memory."""

import torch

from overwinter.model.structure import Weight


def strides(weight: Weight) -> tuple[int, ...]:
    """Return the distance, in elements, between neighbours in each dimension."""
    found = [1] * len(weight.shape)
    distance = 1
    for dim in reversed(weight.order or range(len(weight.shape))):
        found[dim] = distance
        distance *= max(1, weight.shape[dim])
    return tuple(found)


def shaped(flat: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the weight of these elements, which are in the order of `weight.order`."""
    if weight.order:
        return flat.as_strided(weight.shape, strides(weight))
    return flat if len(weight.shape) == 1 else flat.view(weight.shape)
