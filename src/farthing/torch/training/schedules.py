"""Schedule bounds: one for all batches, one per step, or one that follows released values.

>>> falling = Bounds(lambda t: 1.0 / t)
>>> [falling.at(t, noise_multiplier=1.0, batch_size=100.0).norm() for t in (1, 4)]
[1.0, 0.25]

**Average.** A moving average of released weights is post-processing, so it costs nothing.

De et al. 2022, "Unlocking high-accuracy differentially private image classification through scale": averages
remove much of the noise of single iterates. The decay is min(decay, (1 + t) / (10 + t)), so that the first
weights are soon forgotten.

>>> model = torch.nn.Linear(1, 1, bias=False)
>>> _ = torch.nn.init.constant_(model.weight, 0.0)
>>> average = Average(model, 0.999)
>>> _ = torch.nn.init.constant_(model.weight, 1.0)
>>> average.update(model, 1)
>>> round(average.model.weight.item(), 4)  # 1 - 2/11
0.8182

**Quantile.** A clipping norm may follow a quantile of the gradients' norms, paid for inside the same answer.

Andrew et al. 2021, "Differentially private learning with adaptive clipping", Algorithm 1. Every example adds
one coordinate to its gradient: whether its norm is within the clip, less ½ (`ClipCounted`). Gradient and
count are one Gaussian release of one norm, so the price is that of the noise; and the clip, which follows
from released values only, changes that price no more than any other public number.

The clip is updated geometrically (line 17 there): C ← C exp(-step (b - quantile)), where b is the released
share of gradients within C, over the *expected* batch size. The count's noise on b is `deviation` (their σ_b,
m/20: 5 % of the batch), which makes the gradient's noise larger by a factor 1/√(1 - share); share is about
(noise / (2 deviation batch size))², 1 in 2,500 at a batch of 500 and noise 1.

>>> import torch
>>> clip = Quantile(0.5, start=1.0)
>>> bound = clip.bound(noise_multiplier=1.0, batch_size=500.0)
>>> round(bound.share, 6)
0.0004
>>> released = torch.tensor([0.0, 0.0, 50 * bound.unit])  # 300 of 500 were within the clip
>>> gradient = clip.learn(bound, released, batch_size=500.0)
>>> gradient.shape, round(clip.clip_norm, 4)
(torch.Size([2]), 0.9802)
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import InvalidValue
from farthing.queries.bounds import Bound, ClipNorm
from farthing.torch.gradients.clipping import ClipCounted, checked
from farthing.torch.gradients.layout import Layout


class Average:
    """A copy of a model whose weights follow it slowly."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = validate.probability(average=decay)
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module, t: int) -> None:
        """Move the averaged weights, after update t = 1, 2, … of ``model``."""
        weight = 1 - min(self.decay, (1 + t) / (10 + t))
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            if new.requires_grad:
                old.lerp_(new, weight)
        for buffer, current in zip(self.model.buffers(), model.buffers(), strict=True):
            buffer.copy_(current)


_MOST_SHARE = 0.5  # of the squared norm, for the count: where batches are so small that it is hardly heard


class AdaptiveClip(ABC):
    """A clipping norm that follows released values: the base class of adaptive ``clip_norm`` arguments.

    A subclass returns the bound of the next batch, and learns from what was released under it. It never sees
    anything that was not released, so a batch costs what its noise multiplier costs.

    Notes
    -----
    `Quantile` is one. The bound may change in everything but its price: sensitivity over noise stays.

    Examples
    --------
    >>> isinstance(Quantile(0.5, start=1.0), AdaptiveClip)
    True
    """

    @abstractmethod
    def bound(self, noise_multiplier: float, batch_size: float) -> Bound:
        """Return the bound of the next batch."""

    @abstractmethod
    def learn(self, bound: Any, released: Tensor, batch_size: float) -> Tensor:
        """Take in what was released under a bound; return the gradient in it."""

    @abstractmethod
    def state_dict(self) -> dict[str, float]:
        """Return all that changes, for checkpoints."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""


class Quantile(AdaptiveClip):
    """A clipping norm that follows a quantile of gradient norms, paid for in the same answer.

    It belongs to one run: `learn` moves its ``clip_norm``.

    Parameters
    ----------
    quantile : float, default 0.5
        The share of gradients that are to be within the clip, in (0, 1).
    start : float, default 1.0
        The first clipping norm.
    step : float, default 0.2
        How far the logarithm of the clip moves for a share that is off by 1.
    deviation : float, default 0.05
        Standard deviation of the noise on the released share.
    low, high : float, default 1e-6 and 1e6
        The clip stays within these.

    Notes
    -----
    Andrew et al. 2021, "Differentially private learning with adaptive clipping", Algorithm 1. Gradient and
    count are one Gaussian release of norm clip_norm / √(1 - share) (`ClipCounted`), so a batch costs what its
    noise multiplier costs.

    Examples
    --------
    >>> clip = Quantile(0.5, start=1.0)
    >>> round(clip.bound(noise_multiplier=1.0, batch_size=500.0).norm(), 4)
    1.0002
    """

    def __init__(
        self,
        quantile: float = 0.5,
        *,
        start: float = 1.0,
        step: float = 0.2,
        deviation: float = 0.05,
        low: float = 1e-6,
        high: float = 1e6,
    ) -> None:
        self.quantile = validate.probability(quantile=quantile)
        self.step = validate.positive(step=step)
        self.deviation = validate.positive(deviation=deviation)
        self.low, self.high = validate.positive(low=low), validate.positive(high=high)
        self.clip_norm = validate.positive(start=start)
        if not self.low <= self.clip_norm <= self.high:
            raise InvalidValue(f"start must be from low={low:g} to high={high:g}, got {start:g}")

    def bound(self, noise_multiplier: float, batch_size: float) -> ClipCounted:
        """Return the bound of the next batch: the clip, and the share of the norm that the count may take."""
        wanted = (noise_multiplier / (2 * self.deviation * batch_size)) ** 2
        return ClipCounted(self.clip_norm, min(wanted, _MOST_SHARE))

    def learn(self, bound: ClipCounted, released: Tensor, batch_size: float) -> Tensor:
        """Move the clip by the released count; return the released gradient."""
        gradient, count = bound.read(released)
        within = count / batch_size + 0.5
        moved = math.log(bound.clip_norm) - self.step * (within - self.quantile)
        self.clip_norm = min(max(math.exp(min(moved, 700.0)), self.low), self.high)
        return gradient

    def state_dict(self) -> dict[str, float]:
        """Return the clip, which is all that changes."""
        return {"clip": self.clip_norm}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the clip of a checkpoint."""
        self.clip_norm = min(max(validate.positive(clip_norm=state["clip"]), self.low), self.high)


Clip = float | Bound | AdaptiveClip | Sequence[float | Bound] | Callable[[int], float | Bound]


class Bounds:
    """The bound of each batch, by a ``clip_norm`` of any kind. A clip never changes the price of a batch."""

    def __init__(self, clip_norm: Clip, layout: Layout | None = None) -> None:
        self._layout = layout
        self._adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
        self._clip: Any = clip_norm
        if isinstance(clip_norm, list | tuple | np.ndarray):
            self._clip = [self._bound(each) for each in clip_norm]
        elif self._adaptive is None and not callable(clip_norm):
            self._clip = self._bound(clip_norm)

    def at(self, t: int, noise_multiplier: float, batch_size: float) -> Bound:
        """Return the bound of batch t = 1, 2, …: the same object as long as nothing changes."""
        if self._adaptive is not None:
            return self._adaptive.bound(noise_multiplier, batch_size)
        self.covers(t)
        each = self._clip[t - 1] if isinstance(self._clip, list) else self._clip
        return self._bound(each(t) if callable(each) else each)

    def learn(self, bound: Bound, released: Tensor, batch_size: float) -> Tensor:
        """Return the gradient in what was released; an `AdaptiveClip` moves by the rest."""
        return released if self._adaptive is None else self._adaptive.learn(bound, released, batch_size)

    def covers(self, steps: int) -> None:
        """Raise unless there is a bound for each of ``steps`` batches."""
        if isinstance(self._clip, list) and len(self._clip) < steps:
            raise InvalidValue(
                f"clip_norm must have a value for each of {steps} steps, got {len(self._clip)}"
            )

    def at_norm(self, clip_norm: float) -> "Bounds":
        """Return bounds of the same layout at one clipping norm."""
        return Bounds(clip_norm, self._layout)

    def _bound(self, clip: Any) -> Bound:
        if isinstance(clip, int | float) or not hasattr(clip, "sensitivity"):
            return ClipNorm(validate.positive(clip_norm=clip))
        if self._layout is not None:
            checked(clip, self._layout.size, self._layout.offsets)
        bound: Bound = clip
        return bound

    def state_dict(self) -> dict[str, float] | None:
        """Return what changes: the state of an `AdaptiveClip`."""
        return None if self._adaptive is None else self._adaptive.state_dict()

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Go on from a checkpoint."""
        if self._adaptive is not None and state is not None:
            self._adaptive.load_state_dict(state)
