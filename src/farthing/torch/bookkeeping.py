"""Σ of bounded per-example gradients of a model, for the price of about one ordinary gradient.

`Gradient` is a contribution for `farthing.query.Query`: the model holds its (public) weights, ``loss`` gives
one value a record, and `Gradient.bounded_sum` returns one flat float32 tensor, where `Layout` says which
parameter lies where.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import InvalidValue
from farthing.torch import clipping, vmapped


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each trainable parameter lies in a flat gradient: in the order of `named_parameters`.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.names, layout.shapes, layout.offsets, layout.size
    (('weight', 'bias'), ((2, 3), (2,)), (0, 6), 8)
    >>> [tuple(view.shape) for view in layout.views(torch.zeros(8))]
    [(2, 3), (2,)]
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        """The layout of a model's trainable parameters; tied ones count once, frozen ones not at all."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise InvalidValue("the model has no trainable parameter: every requires_grad is False")
        ends = list(accumulate(p.numel() for _, p in trained))
        names, shapes = zip(*((name, tuple(p.shape)) for name, p in trained), strict=True)
        return cls(names, shapes, (0, *ends[:-1]), ends[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many coordinates each parameter has."""
        return tuple(b - a for a, b in zip(self.offsets, (*self.offsets[1:], self.size), strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor, in its shape and without a copy."""
        parts = zip(self.offsets, self.sizes, self.shapes, strict=True)
        return [flat[start : start + size].view(shape) for start, size, shape in parts]


class Gradient:
    """The gradients of ``loss(model(inputs), targets)``, one an example, bounded and summed.

    ``loss`` returns one value a record (reduction="none"). At most ``physical`` rows go through the model at
    once. ``autocast`` is the dtype of mixed precision, if any; norms and sums stay in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        *,
        physical: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.loss, self.autocast = model, loss, autocast
        self.physical = None if physical is None else validate.count(physical=physical)
        self.layout = Layout.of(model)

    def bounded_sum(self, lot: Any, w: Any, bound: Any) -> Tensor:
        """Σ bounded gradients of the lot's examples, flat; ``w`` is not used, the model holds its weights."""
        bound = clipping.checked(bound, self.layout.size)
        device = next(self.model.parameters()).device
        total = torch.zeros(self.layout.size + clipping.extra(bound), device=device)
        for inputs, targets, weights in lot.batches(self.physical):
            with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                rows = vmapped.per_example(self.model, self.loss, self.layout.names, inputs, targets, weights)
            total += clipping.plain_sum(rows, bound)
        return total
