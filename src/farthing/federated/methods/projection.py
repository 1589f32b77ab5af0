"""Project onto the set C of projected gradient descent, a ball around 0, and choose step lengths.

>>> projection = L2Projection(2.0)
>>> projection.project(np.array([3.0, 4.0]))
array([1.2, 1.6])
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.data.tables import Features
from farthing.errors import InvalidValue
from farthing.linear.problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class L2Projection:
    """The ball of all w with |w|₂ <= radius (of a weight matrix, the Frobenius norm)."""

    radius: float

    def __post_init__(self) -> None:
        validate.positive(radius=self.radius)

    def project(self, w: Array) -> Array:
        """Return the nearest point of the ball."""
        norm = float(np.linalg.norm(w))
        return w if norm <= self.radius else w * (self.radius / norm)

    def start(self, given: ArrayLike | None, zeros: Array) -> Array:
        """Return the first point: the centre, or the one given, which must be public."""
        if given is None:
            return zeros
        start = np.array(given, dtype=np.float64)
        if start.shape != zeros.shape or not np.isfinite(start).all():
            raise InvalidValue(f"start must be finite, of shape {zeros.shape}, got shape {start.shape}")
        return self.project(start)

    def length(self, t: int, square: float, convexity: float) -> float:
        """Return η(t): the diameter over √(t · square), or 1/(convexity · t) for a strongly convex sum.

        ``square`` bounds the mean square of the noisy gradient (Shamir & Zhang 2013, Theorems 2 and 1).
        """
        return 1 / (convexity * t) if convexity else 2 * self.radius / math.sqrt(t * square)


def lipschitz_of(problem: Problem, features: Features, given: float | None) -> float:
    """Return L, the clipping norm: the one given, or the loss's largest slope times the longest row."""
    if given is not None:
        return validate.positive(lipschitz=given)
    largest = problem.loss.slope * (features.radius or problem.radius)
    if not math.isfinite(largest):
        raise InvalidValue(
            f"lipschitz must be given: the slope of {type(problem.loss).__name__} has no bound; "
            "gradients are clipped to it"
        )
    return largest
