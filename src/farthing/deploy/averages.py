"""Average the uploads of one round: weights, late answers, and means that one dishonest party hardly moves.

All of it happens at the coordinator, after guards have charged and noised their uploads: post-processing,
which costs no party anything. It is about the model, not about privacy, which needs no honest coordinator.

A party states its number of records and its budget, and both set its weight. ``records`` and ``epsilon`` cap
what a statement can be worth: weights count no more records and no less noise than these. The norm of every
upload is bounded by what the party stated (`farthing.deploy.roster.longest`), so that after the cap one party
moves the mean by at most its share of the weights times two clipping norms, and noise.

``trimmed`` and ``median`` go further (Yin, Chen, Ramchandran & Bartlett 2018): each party has one vote for
the mean gradient of a record, and in every coordinate the largest and smallest votes are left out, or the
median taken. With no more liars than votes left out at each end, every coordinate lies between honest votes.
One dishonest party needs at least three votes. Both need to see uploads: local trust.

A late answer, to the question of s rounds before, counts 1/√(1+s) of its weight (FedBuff, Nguyen et al. 2022)
if it is at most ``staleness`` rounds late; otherwise it is dropped. It was charged in either case.

>>> honest = [Upload(np.array([1.0]), 1.0, 0.01) for _ in range(4)]
>>> liar = Upload(np.array([50.0]), 1.0, 0.01)
>>> [float(Averaging(mean=mean).combined([*honest, liar], Weights.PLAIN).mean[0]) for mean in MeanRule]
[10.8, 1.0, 1.0]

*Networks.* What a party may upload about a network is bounded, for gradients, steps and whole updates. An
upload after k local private steps is expected · (w_k - w), where each step moves by lr times a noisy mean
gradient and pulls back by lr · μ times the way already gone. With G the longest noisy sum of one round
(`farthing.deploy.roster.longest`), |w_k - w| is at most lr G / expected · Σ_{j<k} (1 + lr μ)^j, and rounding
to float32 after every step adds no more than k 2^-23 of the weights. Its noise has the variance of k answers,
times lr².

>>> round(geometric(2.0, 3), 1)
7.0
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Budget
from farthing.deploy.messages.forms import NetworkAsk, NetworkKind, Question
from farthing.deploy.messages.signed import Fields
from farthing.deploy.roster import longest
from farthing.errors import InvalidValue
from farthing.federated.terms import Terms, Weights, weight_of

Array = NDArray[np.float64]


class MeanRule(StrEnum):
    """A rule that makes one mean of all uploads."""

    WEIGHTED = "weighted"  # by records or noise, as the method says
    TRIMMED = "trimmed"  # without the largest and smallest votes of each coordinate
    MEDIAN = "median"  # of each coordinate


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """One upload: a noisy sum, the records that it holds on average and the variance of its noise.

    ``least`` is the least variance that its weight may count, ``stale`` by how many rounds it is late.
    """

    value: Array
    expected: float
    variance: float
    least: float = 0.0
    stale: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """A weighted sum of uploads, its divisor, and the variance of the noise on a coordinate of the mean."""

    total: Array
    divisor: float
    variance: float

    @property
    def mean(self) -> Array:
        """Return the mean contribution of a record."""
        return self.total / self.divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """The settings of the mean: [averaging] in a run's file."""

    mean: MeanRule = MeanRule.WEIGHTED
    trim: float = 0.1  # the share of votes left out at each end; at least one
    records: int | None = None  # no statement of more records counts more
    epsilon: float | None = None  # no statement of a larger budget counts more
    staleness: int = 0  # rounds by which an answer may be late

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", validate.choice(MeanRule, mean=self.mean))
        if not 0 < validate.positive(trim=self.trim) < 0.5:
            raise InvalidValue(f"trim must lie between 0 and 0.5, got {self.trim!r}")
        if self.records is not None:
            validate.count(records=self.records)
        if self.epsilon is not None:
            validate.positive(epsilon=self.epsilon)
        if self.staleness != 0:
            validate.count(staleness=self.staleness)

    def counted(self, stated: Sequence[tuple[Budget, int]]) -> list[tuple[Budget, int]]:
        """Return the statements of all parties, as far as the choice of steps may follow from them.

        That is up to the caps; where each party has one vote, also up to the median of all statements, so
        that one party moves it no further than the honest.
        """
        budgets, (epsilon, records) = [budget for budget, _ in stated], (self.epsilon, self.records)
        if self.mean is not MeanRule.WEIGHTED:
            middle = float(np.median([budget.epsilon for budget in budgets]))
            epsilon = middle if epsilon is None else min(epsilon, middle)
            half = math.ceil(np.median([many for _, many in stated]))
            records = half if records is None else min(records, half)
        return [
            (
                budget if epsilon is None else limited(budget, epsilon, budgets),
                many if records is None else min(records, many),
            )
            for budget, many in stated
        ]

    @property
    def sees_uploads(self) -> bool:
        """Return whether it needs the uploads of single parties, not only their sum."""
        return self != Averaging()

    def combined(self, uploads: Sequence[Upload], weights: Weights) -> Combined:
        """Return the sum of some uploads, in their order."""
        expected, variance = _of(uploads, "expected"), _of(uploads, "variance")
        counted = expected if self.records is None else np.minimum(expected, self.records)
        if self.mean is not MeanRule.WEIGHTED:
            return self._voted(
                [upload.value / upload.expected for upload in uploads], counted, expected, variance
            )
        weight = weight_of(weights, counted, np.maximum(variance, _of(uploads, "least")))
        weight = weight * (counted / expected) / np.sqrt(1.0 + _of(uploads, "stale"))
        total = np.tensordot(weight, np.array([upload.value for upload in uploads]), axes=1)
        divisor = float(weight @ expected)
        return Combined(total, divisor, float(np.square(weight) @ variance) / divisor**2)

    def _voted(self, votes: list[Array], counted: Array, expected: Array, variance: Array) -> Combined:
        """Return the trimmed mean or the median of votes, as a sum over all counted records.

        The variance is what equal noise of the votes' median variance has at most: that of the mean of as
        many votes as are kept, and π/2 that of all, the median's. (One liar cannot move a median far.)
        """
        n, out = len(votes), max(1, math.floor(self.trim * len(votes) + 1e-9))
        each, divisor = float(np.median(variance / expected**2)), float(counted.sum())
        if self.mean is MeanRule.MEDIAN or n <= 2 * out:
            return Combined(np.median(votes, axis=0) * divisor, divisor, each * min(1.0, math.pi / 2 / n))
        kept = np.sort(votes, axis=0)[out : n - out]
        return Combined(kept.mean(axis=0) * divisor, divisor, each * min(1 / len(kept), math.pi / 2 / n))


def limited(budget: Budget, epsilon: float, all_: Sequence[Budget]) -> Budget:
    """Return what a stated budget counts: a large delta buys as little noise as a large epsilon."""
    delta = float(np.median([other.delta for other in all_]))
    return budget.with_(min(epsilon, budget.epsilon), min(delta, budget.delta))


def _of(uploads: Sequence[Upload], name: str) -> Array:
    return np.array([getattr(upload, name) for upload in uploads], dtype=np.float64)


_ROUNDED = 2.0**-23


def steps_of(question: Question, said: Fields) -> float:
    """Return the factor on the variance of one answer: lr² for each local step that was taken."""
    asked = question.contribution
    if not isinstance(asked, NetworkAsk) or asked.kind is not NetworkKind.STEPS:
        return 1.0
    return asked.lr**2 * said.whole("taken", 1, asked.steps)


def longest_upload(question: Question, body: bytes, terms: Terms, records: int) -> float:
    """Return the norm that no honest upload exceeds but with a probability of 1e-12 for each answer."""
    asked, size = question.contribution, math.prod(question.answered)
    one = longest(terms, records, size)
    if not isinstance(asked, NetworkAsk) or asked.kind is not NetworkKind.STEPS:
        return one
    moved = asked.lr * one * geometric(1 + asked.lr * asked.proximal, asked.steps)
    rounding = asked.steps * _ROUNDED * (float(np.linalg.norm(question.weights(body))) + moved)
    return moved + terms.expected * rounding


def geometric(ratio: float, terms: int) -> float:
    """Return 1 + ratio + ... of so many terms; infinity where that is too large."""
    try:
        return float(terms) if ratio == 1.0 else (ratio**terms - 1) / (ratio - 1)
    except OverflowError:
        return math.inf
