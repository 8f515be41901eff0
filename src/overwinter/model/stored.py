"""How the elements of a weight lie in memory."""

import torch

from overwinter.model.structure import Weight


def shaped(flat: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the weight of these elements, which are in the order of `weight.order`."""
    order = weight.order
    if not order:
        return flat.view(weight.shape)
    stored = flat.view([weight.shape[dim] for dim in order])
    return stored.permute([order.index(dim) for dim in range(len(order))])
