"""Update the server's weights by the mean update of clients: SGD, momentum, FedAdam and FedYogi.

Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2, lines 10 to 14: the server's optimiser
takes the mean update of clients (here also the negative mean gradient) as a pseudo-gradient Δ.

    m = β₁ m + (1 - β₁) Δ
    v = β₂ v + (1 - β₂) Δ²                        FedAdam
    v = v - (1 - β₂) Δ² sign(v - Δ²)              FedYogi
    w = w + η m / (√v + τ)

Deviation: the variance of the noise in Δ, which is public (`Answers.variance`), is subtracted from Δ², and
negative results are set to 0, because E Δ² is the square of the true update plus that variance. All of this
is post-processing of released values.

>>> server = ServerOptimizer("momentum", lr=0.5, beta1=0.9)
>>> w = server.step(np.zeros(1), np.ones(1))
>>> server.step(w, np.ones(1)).tolist()
[1.45]

`L2Projection` projects onto the set C of projected gradient descent, a ball around 0, and chooses step
lengths.

>>> projection = L2Projection(2.0)
>>> projection.project(np.array([3.0, 4.0]))
array([1.2, 1.6])
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.data.tables import Features
from farthing.errors import InvalidValue
from farthing.linear.problem import Problem

Array = NDArray[np.float64]


class ServerRule(StrEnum):
    """A rule by which a server applies the mean update.

    Examples
    --------
    >>> ServerRule("yogi")
    <ServerRule.YOGI: 'yogi'>
    """

    SGD = "sgd"  # w + η Δ: FedAvg with η = 1
    MOMENTUM = "momentum"  # FedAvgM: m = β₁ m + Δ
    ADAM = "adam"
    YOGI = "yogi"


class ServerOptimizer:
    """A server's optimiser of flat weights.

    Parameters
    ----------
    rule : {"sgd", "momentum", "adam", "yogi"}, default "sgd"
        The rule by which it applies the mean update.
    lr : float or callable, default 1.0
        η, or a function of t = 1, 2, ….
    beta1 : float, default 0.9
        β₁, the decay of the mean of updates.
    beta2 : float, default 0.99
        β₂, the decay of the mean of their squares.
    tau : float, default 1e-3
        τ, which is added to √v.

    Raises
    ------
    InvalidValue
        If the rule is unknown or a value is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> ft.federated.ServerOptimizer("sgd", lr=0.5).step(np.zeros(2), np.ones(2)).tolist()
    [0.5, 0.5]
    """

    def __init__(
        self,
        rule: str = "sgd",
        lr: float | Callable[[int], float] = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        self.rule = validate.choice(ServerRule, server=rule)
        self._lr = lr if callable(lr) else validate.positive(lr=lr)
        self._beta1, self._beta2 = validate.non_negative(beta1=beta1), validate.non_negative(beta2=beta2)
        if not max(beta1, beta2) < 1:
            raise InvalidValue(f"beta1 and beta2 must be below 1, got {beta1!r} and {beta2!r}")
        self._tau, self._t = validate.positive(tau=tau), 0
        self._mean: Array | float = 0.0
        self._square: Array | float = 0.0

    def step(self, w: Array, update: Array, variance: float = 0.0) -> Array:
        """Return the weights after one round; ``variance`` is the update's noise variance per coordinate."""
        self._t += 1
        lr = validate.positive(lr=self._lr(self._t)) if callable(self._lr) else self._lr
        if self.rule is ServerRule.SGD:
            return w + lr * update
        if self.rule is ServerRule.MOMENTUM:
            self._mean = self._beta1 * self._mean + update
            return w + lr * self._mean
        square, share = np.maximum(np.square(update) - variance, 0.0), 1 - self._beta2
        self._mean = self._beta1 * self._mean + (1 - self._beta1) * update
        if self.rule is ServerRule.ADAM:
            self._square = self._beta2 * self._square + share * square
        else:
            self._square = self._square - share * square * np.sign(self._square - square)
        found: Array = w + lr * self._mean / (np.sqrt(self._square) + self._tau)
        return found


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
        """Return the initial weights: the centre, or the given weights, which must be public."""
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
    """Return L, the clipping norm: the given one, or the loss's largest slope times the largest row norm."""
    if given is not None:
        return validate.positive(lipschitz=given)
    largest = problem.loss.slope * (features.radius or problem.radius)
    if not math.isfinite(largest):
        raise InvalidValue(
            f"lipschitz must be given: the slope of {type(problem.loss).__name__} has no bound; "
            "gradients are clipped to it"
        )
    return largest
