"""Released gradients that wait for their update, and the noise that is in their mean.

All of it is public: what was released, and the terms that it was asked for with.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.queries.bounds import Bound
from farthing.queries.query import Receipt
from farthing.torch.gradients.layout import Layout
from farthing.torch.kernels.noise import beside
from farthing.torch.training.course import BatchTerms
from farthing.torch.training.sharding import like


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedSum:
    """A released sum of gradients, with the bound and terms that it was asked for with."""

    gradient: Tensor
    bound: Bound
    terms: BatchTerms
    receipts: tuple[Receipt, ...]


def in_order(
    deviation: float | list[Tensor], trained: list[nn.Parameter], groups: list[dict[str, Any]]
) -> float | list[Tensor]:
    """Return deviations by parameter in the order of an optimiser's groups."""
    if isinstance(deviation, float):
        return deviation
    of = {id(p): like(p, part) for p, part in zip(trained, deviation, strict=True)}
    return [of[id(p)] for group in groups for p in group["params"]]


def mean_of(held: list[ReleasedSum]) -> Tensor:
    """Return the mean gradient of released sums, by the public sizes of their batches."""
    total = held[0].gradient if len(held) == 1 else torch.stack([one.gradient for one in held]).sum(0)
    return total.div_(sum(one.terms.expected_batch_size for one in held))  # nobody else has it


class Deviations:
    """The standard deviation of the noise on a mean gradient, computed once for batches asked for alike."""

    def __init__(self, layout: Layout, device: torch.device, factor: float = 1.0) -> None:
        self._layout, self._device, self._factor = layout, device, factor
        self._last: tuple[list[tuple[Bound, BatchTerms]], float | list[Tensor]] | None = None

    def of(self, held: list[ReleasedSum]) -> float | list[Tensor]:
        """Return one number, or by parameter where coordinates differ."""
        asked = [(one.bound, one.terms) for one in held]
        last = self._last
        if last is None or len(last[0]) != len(asked) or any(map(_differ, last[0], asked)):
            self._last = last = asked, self._deviation(held)
        return last[1]

    def norm(self, held: list[ReleasedSum], size: int) -> Tensor | float:
        """Return the root mean square norm of the noise on a mean gradient of ``size`` coordinates."""
        deviation = self.of(held)
        if isinstance(deviation, float):
            return deviation * math.sqrt(size)
        whole: Tensor = torch.linalg.vector_norm(torch.cat([part.flatten() for part in deviation]))
        return whole

    def _deviation(self, held: list[ReleasedSum]) -> float | list[Tensor]:
        variance: Any = 0.0
        for one in held:
            scale: Any = one.bound.scale
            each = scale if isinstance(scale, float) else beside(scale, self._device)
            variance = variance + (self._factor * one.terms.noise_multiplier * one.bound.norm() * each) ** 2
        spread = variance**0.5 / sum(one.terms.expected_batch_size for one in held)
        return self._layout.views(spread) if isinstance(spread, Tensor) and len(spread) > 1 else float(spread)


def _differ(one: tuple[Bound, BatchTerms], other: tuple[Bound, BatchTerms]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]
