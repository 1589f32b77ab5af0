"""Weights, optimiser and step number to a file and back; never the spend.

What was spent stands in the ledger's journal and nowhere else. A run that is restored, from however old a
checkpoint, goes on with what is left there: the weights go back, the budget does not.

    for step in (training := ft.torch.train(model, loss, data, ledger)):
        if step.t % 100 == 0:
            ft.torch.save("model.pt", training)

    training = ft.torch.train(model, loss, data, ledger)     # in another process, the same ledger's journal
    ft.torch.restore("model.pt", training)

A file holds tensors, numbers and texts only and is read with ``weights_only=True``, so that reading one runs
no code. It is written beside its place and moved there once it is whole. Checkpoints are as public as the
model.

Parameters end to end in one flat tensor: their gradients, and an optimiser's state of them.

A step is then a few operations, however many parameters there are.

>>> weights = [torch.ones(2, 2), torch.zeros(3)]
>>> states = [{}, {"mean": torch.ones(3)}]
>>> flat = Flat(weights, states, ["mean"])
>>> flat["mean"].add_(1).tolist()
[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
>>> states[0]["mean"].shape, flat.holds(weights, states, ["mean"])
(torch.Size([2, 2]), True)
"""

import contextlib
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farthing.errors import InvalidValue

_FORMAT = 1
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Stateful(Protocol):
    """Something with a state of tensors and numbers: a `Training`, for instance."""

    def state_dict(self) -> dict[str, Any]:
        """All that changes on the way."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes such a state up again."""


def save(path: str | os.PathLike[str], training: Stateful) -> None:
    """Write a checkpoint of a run: weights, optimiser, schedule and step number, never the spend.

    The file is written beside its place and moved there when it is whole, so that a crash leaves the one
    before it. It is as public as the model.

    Parameters
    ----------
    path : str or PathLike
        Where to write.
    training : Training
        The run, or anything with ``state_dict()`` of tensors, numbers and texts.

    Raises
    ------
    InvalidValue
        A state that holds anything else: it could not be read back without running code.
    """
    state = {"farthing": _FORMAT, "state": training.state_dict()}
    _check(state, "the checkpoint")
    beside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def restore(path: str | os.PathLike[str], training: Stateful) -> None:
    """Put a checkpoint's weights, optimiser and step number back into a run.

    Nothing is spent and nothing refunded: the run goes on with what its ledger has left.

    Parameters
    ----------
    path : str or PathLike
        A file that `save` wrote. It is read with ``weights_only=True``, which runs no code.
    training : Training
        A run of the same model and optimiser, made by `train` with the same ledger's journal.

    Raises
    ------
    InvalidValue
        No such file, not a checkpoint, or one of another model or optimiser.

    Examples
    --------
    >>> import os, tempfile
    >>> import farthing as ft
    >>> data, loss = (torch.randn(2000, 3), torch.zeros(2000)), lambda out, y: (out[:, 0] - y).square()
    >>> runs = [ft.torch.train(nn.Linear(3, 1), loss, data, epsilon=1, delta=1e-5, steps=2) for _ in range(2)]
    >>> _ = next(runs[0])
    >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
    >>> save(path, runs[0])
    >>> restore(path, runs[1])
    >>> runs[1].t, bool((runs[0].model.weight == runs[1].model.weight).all())
    (1, True)
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InvalidValue(f"there is no checkpoint at {os.fspath(path)!r}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise InvalidValue(f"{os.fspath(path)!r} is not a checkpoint of farthing: {error}") from None
    if not isinstance(found, dict) or found.get("farthing") != _FORMAT:
        raise InvalidValue(f"{os.fspath(path)!r} is not a checkpoint of farthing, format {_FORMAT}")
    try:
        training.load_state_dict(found["state"])
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise InvalidValue(
            f"the checkpoint at {os.fspath(path)!r} is of another model or optimizer, and what is in memory "
            f"now may be half of it: {error}"
        ) from None


def _check(value: Any, name: str) -> None:
    """Refuses, before anything is written, what could not be read back without running code."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict, Counter):
        for key, part in value.items():
            _check(part, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for part in value:
            _check(part, name)
    elif not isinstance(value, (*_PLAIN, Tensor)):
        raise InvalidValue(
            f"{name} holds a {type(value).__name__}, a checkpoint only tensors, numbers and texts; "
            "leave the optimizer or scheduler that keeps it out of the checkpoint"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each trained parameter lies in a flat gradient, in the order of ``named_parameters``.

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
        """The layout of a model's trainable parameters; tied ones count once, frozen ones not at all."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise InvalidValue("the model has no trainable parameter: every requires_grad is False")
        return cls.over(trained)

    @classmethod
    def over(cls, tensors: dict[str, Any]) -> "Layout":
        """The layout of these, one after the other."""
        ends = list(accumulate(tensor.numel() for tensor in tensors.values()))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        return cls(tuple(tensors), shapes, (0, *ends[:-1]), ends[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many coordinates each parameter has."""
        return tuple(b - a for a, b in zip(self.offsets, (*self.offsets[1:], self.size), strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor, in its shape and without a copy."""
        parts = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [part.view(shape) for part, shape in parts]


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
        one = torch.zeros((), device=self.device)
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
        """The flat state of this name, if there is one."""
        return self._whole.get(name)

    def holds(
        self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], names: Sequence[str]
    ) -> bool:
        """Whether it is these parameters' state still, by all of these names."""
        known = [state.get(name) for name in self._names for state in states]
        return (
            self._names == names
            and len(parameters) == len(self._parameters)
            and all(one is other for one, other in zip(parameters, self._parameters, strict=True))
            and all(one is other for one, other in zip(known, self._views, strict=True))
        )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors end to end in float32; no copy where they lie so already, in one flat tensor.

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
