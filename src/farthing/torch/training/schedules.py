"""Which bound a lot has: one for all, one a step, or one that follows released values.

>>> falling = Bounds(lambda t: 1.0 / t)
>>> falling.at(1, noise=1.0, lot=100.0).norm(), falling.at(4, noise=1.0, lot=100.0).norm()
(1.0, 0.25)
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farthing import validate
from farthing.errors import InvalidValue
from farthing.queries.bounds import Bound, ClipNorm
from farthing.torch.gradients.clipping import ClipCounted, checked
from farthing.torch.training.flat import Layout
from farthing.torch.training.quantile import Quantile

Clip = float | Bound | Quantile | Sequence[float | Bound] | Callable[[int], float | Bound]


class Bounds:
    """The bound of each lot, by a ``clip`` of any kind. A clip never changes the price of a lot."""

    def __init__(self, clip: Clip, layout: Layout | None = None) -> None:
        self._layout = layout
        self._clip: Any = clip
        if isinstance(clip, list | tuple | np.ndarray):
            self._clip = [self._bound(each) for each in clip]
        elif not isinstance(clip, Quantile) and not callable(clip):
            self._clip = self._bound(clip)

    def at(self, t: int, noise: float, lot: float) -> Bound:
        """That of lot t = 1, 2, …; the same object where nothing changed."""
        if isinstance(self._clip, Quantile):
            return self._clip.bound(noise, lot)
        each = self._clip[t - 1] if isinstance(self._clip, list) else self._clip
        return self._bound(each(t) if callable(each) else each)

    def learn(self, bound: Bound, released: Tensor, lot: float) -> Tensor:
        """The gradient in what was released; a `Quantile` moves by the rest."""
        if isinstance(self._clip, Quantile) and isinstance(bound, ClipCounted):
            return self._clip.learn(bound, released, lot)
        return released

    def covers(self, steps: int) -> None:
        """Raises unless there is a bound for every one of ``steps`` lots."""
        if isinstance(self._clip, list) and len(self._clip) < steps:
            raise InvalidValue(f"clip must have a value for each of {steps} steps, got {len(self._clip)}")

    def _bound(self, clip: Any) -> Bound:
        if isinstance(clip, int | float) or not hasattr(clip, "sensitivity"):
            return ClipNorm(validate.positive(clip=clip))
        if self._layout is not None:
            clip = checked(clip, self._layout.size, self._layout.offsets)
        bound: Bound = clip
        return bound

    def state_dict(self) -> dict[str, float] | None:
        """What changes: the clip of a `Quantile`."""
        return self._clip.state_dict() if isinstance(self._clip, Quantile) else None

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """From a checkpoint."""
        if isinstance(self._clip, Quantile) and state is not None:
            self._clip.load_state_dict(state)
