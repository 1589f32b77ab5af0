"""Per-example gradients of any model through torch.func: the way that always works.

Every row is a whole gradient, so memory grows with examples × parameters; `farthing.torch.bookkeeping` takes
this way only for what it has no rule for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Loss = Callable[[Any, Any], Tensor]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's outputs; several inputs are a tuple."""
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``function`` of every tensor in a (nested) tuple."""
    if isinstance(value, list | tuple):
        return tuple(mapped(part, function) for part in value)
    return function(value) if isinstance(value, Tensor) else value


def per_example(
    model: nn.Module,
    loss: Loss,
    names: tuple[str, ...],
    inputs: Any,
    targets: Any,
    weights: Tensor | None,
) -> Tensor:
    """One row a gradient of the named parameters, in float32.

    With ``weights`` of two dimensions an example is a group of records along the second one; the model sees
    one record at a time as a batch of one.
    """
    parameters = dict(model.named_parameters())
    trained = {name: parameters[name].detach() for name in names}
    fixed = {name: p.detach() for name, p in parameters.items() if name not in trained}
    fixed |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    grouped = weights is not None and weights.ndim == 2

    def objective(trained: dict[str, Tensor], x: Any, y: Any, weight: Tensor | None) -> Tensor:
        if not grouped:
            x, y = mapped(x, lambda t: t[None]), mapped(y, lambda t: t[None])
        losses = loss(call(lambda *args: functional_call(model, trained | fixed, args), x), y)
        return (losses.float() if weight is None else losses.float() * weight).sum()

    where = (None, 0, 0, None if weights is None else 0)
    found = vmap(grad(objective), in_dims=where, randomness="different")(trained, inputs, targets, weights)
    return torch.cat([found[name].flatten(1).float() for name in names], 1)
