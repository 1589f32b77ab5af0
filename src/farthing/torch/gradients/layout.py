"""Lay out parameters end to end in one flat tensor, with their gradients and an optimiser's state.

A step is then a few operations, however many parameters there are.

>>> weights = [torch.ones(2, 2), torch.zeros(3)]
>>> states = [{}, {"mean": torch.ones(3)}]
>>> flat = Flat(weights, states, ["mean"])
>>> flat["mean"].add_(1).tolist()
[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
>>> states[0]["mean"].shape, flat.holds(weights, states, ["mean"])
(torch.Size([2, 2]), True)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farthing.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of each trained parameter in a flat gradient, in the order of ``named_parameters``.

    Attributes
    ----------
    names : tuple of str
        The parameters' names.
    shapes : tuple of tuple of int
        Their shapes.
    offsets : tuple of int
        Where each begins.
    size : int
        The number of coordinates of all.

    Examples
    --------
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
        """Return the layout of a model's trainable parameters; tied ones count once, frozen ones never."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise InvalidValue("the model has no trainable parameter: every requires_grad is False")
        if lazy := [name for name, p in trained.items() if is_lazy(p)]:
            raise InvalidValue(f"{lazy[0]} has no weights yet: call the model once on public inputs first")
        return cls.over(trained)

    @classmethod
    def over(cls, tensors: dict[str, Any]) -> "Layout":
        """Return the layout of these, one after the other."""
        ends = list(accumulate(coordinates(tensor) for tensor in tensors.values()))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        return cls(tuple(tensors), shapes, (0, *ends[:-1]), ends[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many coordinates each parameter has."""
        return tuple(b - a for a, b in zip(self.offsets, (*self.offsets[1:], self.size), strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor, in its shape; a copy only of complex ones."""
        parts = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [_shaped(part, shape) for part, shape in parts]


def coordinates(p: Tensor) -> int:
    """Return how many real numbers a parameter has: a complex weight is two."""
    return p.numel() * (2 if p.is_complex() else 1)


def real(p: Tensor) -> Tensor:
    """Return a tensor in float32, real and imaginary parts along one dimension more.

    >>> real(torch.tensor([1 + 2j])).tolist(), real(torch.tensor([3.0])).tolist()
    ([[1.0, 2.0]], [3.0])
    """
    return torch.view_as_real(p.resolve_conj()).float() if p.is_complex() else p.float()


def dense(gradient: Tensor | None, p: Tensor) -> Tensor:
    """Return the gradient of a parameter: zeros where there is none, of a sparse one all of it."""
    if gradient is None:
        return torch.zeros_like(p)
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _shaped(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    if part.numel() == math.prod(shape):
        return part.view(shape)
    return torch.view_as_complex(part.view(*shape, 2).clone())  # clone: it must begin at an even place


class Flat:
    """For each name one float32 tensor, of which every parameter's state is a view.

    States of ``names`` have a parameter's shape, those of ``numbers`` are one number a parameter. They begin
    with what they hold, or with zeros. Who replaces one, by loading a checkpoint, say, makes the flat one
    stale: `holds` tells.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        names: Sequence[str],
        numbers: Sequence[str] = (),
    ) -> None:
        self._parameters, self._names = list(parameters), [*names, *numbers]
        self.layout = Layout.over({str(n): parameter for n, parameter in enumerate(parameters)})
        self.device = parameters[0].device
        self._whole: dict[str, Tensor] = {}
        self._views: list[Tensor] = []
        one = torch.zeros((), device=self.device, dtype=torch.float32)
        for name in self._names:
            zeros = [one] * len(states) if name in numbers else [one.expand(p.shape) for p in parameters]
            old = [state.get(name, zero) for state, zero in zip(states, zeros, strict=True)]
            self._whole[name] = whole = torch.cat([part.to(self.device).float().flatten() for part in old])
            views = list(whole) if name in numbers else self.layout.views(whole)
            for state, view in zip(states, views, strict=True):
                state[name] = view
            self._views += views

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name]

    def get(self, name: str) -> Tensor | None:
        """Return the flat state of this name, if there is one."""
        return self._whole.get(name)

    def holds(
        self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], names: Sequence[str]
    ) -> bool:
        """Return whether it is these parameters' state still, by all of these names."""
        known = [state.get(name) for name in self._names for state in states]
        return (
            self._names == names
            and len(parameters) == len(self._parameters)
            and all(one is other for one, other in zip(parameters, self._parameters, strict=True))
            and all(one is other for one, other in zip(known, self._views, strict=True))
        )


class Sketch:
    """Gradients made short for a comparison: large parameters' coordinates with random signs, in buckets.

    A linear map that keeps squared norms on average (Charikar, Chen & Farach-Colton 2002), so that rows that
    differ have sketches that differ, by about as much. Where all parameters together are small it leaves
    them as they are.

    >>> sketch = Sketch([3, 2**24])
    >>> sketch(0, torch.ones(2, 3)).shape, sketch(1, torch.ones(2, 2**24)).shape
    (torch.Size([2, 3]), torch.Size([2, 4096]))
    """

    _MOST = 2**23  # numbers of all parameters that are compared as they are
    _BUCKETS = 2**12

    def __init__(self, sizes: Sequence[int]) -> None:
        self._shortens = sum(sizes) > self._MOST

    def __call__(self, slot: int, rows: Tensor) -> Tensor:
        """Return the rows of a parameter's gradient, (examples, size), in (examples, fewer) numbers."""
        size = rows.shape[1]
        if not self._shortens or size <= 2 * self._BUCKETS:
            return rows
        made = torch.Generator(rows.device).manual_seed(slot)
        with torch._C.DisableTorchFunction():  # a check without random numbers leaves these as they are
            signs = torch.randint(2, (size,), generator=made, device=rows.device, dtype=torch.int8)
        signs.mul_(2).sub_(1)
        each = size // self._BUCKETS
        cut = each * self._BUCKETS
        short = (rows[:, :cut] * signs[:cut]).view(len(rows), self._BUCKETS, each).sum(2)
        short[:, : size - cut] += rows[:, cut:] * signs[cut:]
        return short


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors end to end in float32; no copy where they lie so already, in one flat tensor.

    >>> whole = torch.arange(6.0)
    >>> joined([whole[:4].view(2, 2), whole[4:]]).data_ptr() == whole.data_ptr()
    True
    >>> joined([whole[4:], whole[:4]]).tolist()
    [4.0, 5.0, 0.0, 1.0, 2.0, 3.0]
    """
    base = parts[0]._base
    if base is not None and base.ndim == 1 and base.is_contiguous() and base.dtype == torch.float32:
        first = end = parts[0].storage_offset()
        for part in parts:
            if part._base is not base or part.storage_offset() != end or not part.is_contiguous():
                break
            end += part.numel()
        else:
            start = base.storage_offset()
            return base.detach()[first - start : end - start]
    return torch.cat([part.detach().float().flatten() for part in parts])
