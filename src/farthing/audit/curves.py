"""What an audit may take for granted of a mechanism, apart from what it is to find out.

Without a curve nothing is: counts bound ε at the claim's δ by `statistics.epsilons`. With one, a single
number is left open, counts bound that, and ε at δ follows from it. The verdict names what was taken for
granted.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.accounting import gaussian, pld
from farthing.audit import statistics
from farthing.budget import Adjacency, Budget
from farthing.errors import Unsupported
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

Array = NDArray[np.float64]


class Curve(Protocol):
    """How counts become a lower bound: first on a strength that grows with ε, then on ε."""

    @property
    def assumption(self) -> str:
        """What is taken for granted; empty for nothing."""

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        """Lower bounds on the strength, one for each pair of counts."""

    def epsilon(self, strength: float, claim: Budget) -> float:
        """ε at the claim's δ of a mechanism so strong."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is taken for granted: (ε, δ) itself is bounded."""

    assumption: str = ""

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        return statistics.epsilons(tp, fp, trials, claim.delta, confidence)

    def epsilon(self, strength: float, claim: Budget) -> float:
        return strength


@dataclass(frozen=True, slots=True)
class GaussianCurve:
    """The run as a whole is no easier to tell than some N(0, 1) from N(μ, 1): full-batch Gaussian noise."""

    assumption: str = "the trade-off curve of the run is that of a Gaussian mechanism"

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        return statistics.gaussian_mu(tp, fp, trials, confidence)

    def epsilon(self, strength: float, claim: Budget) -> float:
        if strength == math.inf:
            return math.inf
        return gaussian.epsilon(max(strength, 0.0), claim.delta)


@dataclass(frozen=True, slots=True)
class SampledCurve:
    """A trial is one step of ``steps``, each Gaussian noise on a Poisson sample of ``rate``: DP-SGD."""

    rate: float
    steps: int

    def __post_init__(self) -> None:
        validate.rate(rate=self.rate), validate.count(steps=self.steps)

    @property
    def assumption(self) -> str:
        return f"the run is {self.steps} Gaussian steps, each on a Poisson sample of rate {self.rate:g}"

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        return statistics.sampled_mu(tp, fp, trials, self.rate, confidence)

    def epsilon(self, strength: float, claim: Budget) -> float:
        if claim.adjacency is Adjacency.REPLACE_ONE and self.rate < 1:
            raise Unsupported("a record replaced on a sample has another curve: attack add-remove instead")
        if not strength > 1e-6:  # below, thousands of steps do not add up to anything
            return 0.0
        if strength == math.inf:
            return math.inf
        step = PoissonEvent(self.rate, GaussianEvent(1 / strength))
        return pld.epsilon(RepeatedEvent(step, self.steps), claim.delta, claim.adjacency)
