"""A clip that follows a quantile of the gradients' norms, paid for inside the same answer.

Andrew et al. 2021, "Differentially private learning with adaptive clipping", Algorithm 1. Every example adds
one coordinate to its gradient: whether its norm is within the clip, less ½ (`ClipCounted`). Gradient and
count are one Gaussian release of one norm, so the price is that of the noise; and the clip, which follows
from released values only, changes that price no more than any other public number.

The clip is updated geometrically (line 17 there): C ← C exp(-step (b - quantile)), where b is the released
share of gradients within C, over the *expected* lot. The count's noise on b is `deviation` (their σ_b, m/20:
5 % of the lot), which makes the gradient's noise larger by a factor 1/√(1 - share); share is about
(noise / (2 deviation lot))², 1 in 2,500 at a lot of 500 and noise 1.

>>> import torch
>>> clip = Quantile(0.5, start=1.0)
>>> bound = clip.bound(noise=1.0, lot=500.0)
>>> round(bound.share, 6)
0.0004
>>> released = torch.tensor([0.0, 0.0, 50 * bound.unit])  # 300 of 500 were within the clip
>>> gradient = clip.learn(bound, released, lot=500.0)
>>> gradient.shape, round(clip.clip, 4)
(torch.Size([2]), 0.9802)
"""

import math

from torch import Tensor

from farthing import validate
from farthing.errors import InvalidValue
from farthing.torch.gradients.clipping import ClipCounted

_MOST_SHARE = 0.5  # of the squared norm, for the count: where lots are so small that it is hardly heard


class Quantile:
    """Clips at the ``quantile`` of norms, found on the way from ``start``, within ``low`` and ``high``.

    It belongs to one run: `learn` moves its ``clip``.
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
        self.clip = validate.positive(start=start)
        if not self.low <= self.clip <= self.high:
            raise InvalidValue(f"start must be from low={low:g} to high={high:g}, got {start:g}")

    def bound(self, noise: float, lot: float) -> ClipCounted:
        """Today's bound: the clip, and the share of the norm that the count may take."""
        wanted = (noise / (2 * self.deviation * lot)) ** 2
        return ClipCounted(self.clip, min(wanted, _MOST_SHARE))

    def learn(self, bound: ClipCounted, released: Tensor, lot: float) -> Tensor:
        """Moves the clip by the released count, and returns the released gradient."""
        gradient, count = bound.read(released)
        within = count / lot + 0.5
        moved = math.log(bound.clip) - self.step * (within - self.quantile)
        self.clip = min(max(math.exp(min(moved, 700.0)), self.low), self.high)
        return gradient

    def state_dict(self) -> dict[str, float]:
        """The clip: all that changes."""
        return {"clip": self.clip}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The clip of a checkpoint."""
        self.clip = min(max(validate.positive(clip=state["clip"]), self.low), self.high)
