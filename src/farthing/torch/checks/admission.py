"""Checks of what a run is given that need no gradient: is it a model, and are its weights there yet?

Everything here is decided by the model and by the shape of a record, which are public.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from farthing.errors import InvalidValue, Unsupported
from farthing.torch.checks.probe import Source, form_of
from farthing.torch.gradients.tape import call


def refuse_other_kinds(model: Any) -> None:
    """Refuses what is no model with weights: several models are one module that holds them."""
    if isinstance(model, list | tuple | dict):
        raise InvalidValue(
            f"model must be an nn.Module, got a {type(model).__name__} of {len(model)}: of several models "
            "put those that see private records into one module, whose forward returns what the loss needs; "
            "the others (a generator, say) are trained between the steps, for nothing"
        )
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be an nn.Module, got a {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise InvalidValue(f"the model ({type(model).__name__}) has no parameters: there is nothing to train")


@torch.no_grad()
def materialise(model: nn.Module, inputs: Any) -> None:
    """Give lazy layers their weights, by made-up inputs of the records' shape.

    >>> model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
    >>> materialise(model, torch.zeros(1, 5))
    >>> [tuple(p.shape) for p in model.parameters()]
    [(3, 5), (3,), (2, 3), (2,)]
    """
    if not any(map(is_lazy, model.parameters())):
        return
    made = Source(inputs, None).batch(2)[0]
    try:
        call(model, made)
    except Exception as error:
        raise Unsupported(
            f"a lazy layer could not be given its weights by made-up inputs, {form_of(made)} each "
            f"({type(error).__name__}: {error}); call the model once on public inputs before training"
        ) from error
