"""Run one training step with a canary in a coordinate that no other record moves, all runs in one release.

In that coordinate the sum is the canary's contribution, or 0 where the canary was not drawn or is absent. So
a run is one number, and a million runs are one release of a million coordinates through the query's own
sampler, contribution, bound and noise: the code of `Ledger.ask`, without its charges.

`sums` is a law of sums: rounding does not let neighbours differ by more than their bound.

>>> terms = badly_rounded(2**10)
>>> float(terms.max()), bool(abs(terms.sum() - 2**9) < 1)
(1.0, True)

`Groups` are data sets of few distinct records, so that thousands of runs fit into arrays, one row a run. A
batch counts how often each distinct record was drawn in each run; gradients have one row per run and distinct
record. The targets of `as_published` use them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, expit

from farthing.audit.auditing import Verdict, judge
from farthing.audit.statistics import Curve, SampledCurve, value
from farthing.budget import Budget
from farthing.data.tables import Features, Table
from farthing.errors import Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import LinearGradient, squared
from farthing.noise.lattice import Stream, gaussian
from farthing.queries.bounds import ClipNorm
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import PerExample, Query, Rows
from farthing.queries.samplers import FixedSize, Poisson

Array = NDArray[np.float64]

_AT_ONCE = 2**20  # runs in one release


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """Steps of ``query`` at ``w``; ``canary`` is a data set of the canary alone."""

    query: Query
    canary: Any
    w: Any = None

    def __call__(self, present: bool, runs: int, stream: Stream) -> Array:
        """Return the release in the canary's own direction, one number a run."""
        moved, mechanism, bound = self.length(), self.query.mechanism, self.query.bound
        if not isinstance(mechanism, Gaussian) or not isinstance(bound, ClipNorm):
            raise Unsupported("a canary step needs ClipNorm and Gaussian noise")
        parts = []
        for start in range(0, runs, _AT_ONCE):
            size = min(_AT_ONCE, runs - start)
            total = np.zeros(size)
            if present:
                total[self._drawn(size, stream)] = moved
            parts.append(mechanism.release(total, bound, stream))
        return np.concatenate(parts)

    def length(self) -> float:
        """Return the norm of the canary's clipped contribution."""
        one = self.query.contribution.bounded_sum(self.canary, self.w, self.query.bound)
        return float(np.linalg.norm(np.asarray(one)))

    def _drawn(self, runs: int, stream: Stream) -> Any:
        """Return the runs in which the canary was drawn."""
        match self.query.sampler:
            case FixedSize(size, of) if size < of:
                return np.array([of - 1 in stream.choose(size, of) for _ in range(runs)])
        return self.query.sampler.draw(runs, stream)


def per_step(
    step: CanaryStep,
    claim: Budget,
    steps: int,
    trials: int = 1_000_000,
    confidence: float = 0.99,
    *,
    stream: Stream,
    worlds: Callable[[bool, int, Stream], Array] | None = None,
) -> Verdict:
    """Judge ``steps`` Gaussian steps on Poisson samples by ``trials`` single steps a world.

    Runs above half of the canary's length are flagged: the two densities of a step cross there at any noise.
    ``worlds`` is the target, by default ``step`` itself.
    """
    sampler = step.query.sampler
    rate = sampler.sampling_rate if isinstance(sampler, Poisson) else 1.0
    curve: Curve = SampledCurve(rate, steps)
    run = step if worlds is None else worlds
    without, within = (run(present, trials, stream) for present in (False, True))
    return judge(
        without,
        within,
        claim,
        [("canary in an unused coordinate, per step", value)],
        confidence,
        threshold=step.length() / 2,
        curve=curve,
    )


def canary_table(records: int, width: int, came: NDArray[np.bool_]) -> Table:
    """Return ``records`` rows on the first ``width`` features, and canaries, each on its own feature."""
    canaries = len(came)
    x = np.zeros((records + int(came.sum()), width + canaries))
    places = np.arange(records)
    x[places, places % width] = 1.0
    x[records + np.arange(int(came.sum())), width + np.flatnonzero(came)] = 1.0
    return Table(x, np.append(places // width % 2, np.ones(int(came.sum()))).astype(np.float64))


def train_once(
    ledger: Ledger, query: Query, canaries: int, steps: int, records: int, length: float = 0.5
) -> Array:
    """Run DP-SGD once on a `canary_table`; score each canary from released answers only.

    A canary's score is the log-likelihood ratio of its coordinate, summed over steps, between a record of the
    bound's full length drawn at the sampler's rate, and none.
    """
    sampler, mechanism, clip = query.sampler, query.mechanism, query.bound.norm()
    if not isinstance(sampler, Poisson) or not isinstance(mechanism, Gaussian):
        raise Unsupported("canaries are scored for Gaussian noise on Poisson batches")
    features: Features = query.contribution.features  # type: ignore[attr-defined]
    w, scores = np.zeros(features.size), np.zeros(canaries)
    for _ in range(steps):
        answer = ledger.ask(query, w).value
        seen = -answer[-canaries:] / clip  # a record of label 1 decreases its gradient
        ratio = (seen - 0.5) / mechanism.noise_multiplier**2
        scores += np.log1p(sampler.sampling_rate * np.expm1(np.minimum(ratio, 500.0)))
        w = w - length * answer / (sampler.sampling_rate * records)
    return scores


_RECORDS = 2**20
_MOST = 2.0**-18  # tolerance: at so many records a sequential sum exceeds the bound by 2⁻¹⁵


def badly_rounded(records: int, apart: int = 1, bits: int = 52) -> Array:
    """Return numbers of at most 1 whose partial sums stay at a power of two, every ``apart``-th one rounded.

    Sums that begin with 1 instead of 0 stay just above the power and round to twice the cell of those that
    stay below: the two drift apart by half a cell at every addition. Floats have ``bits`` bits.
    """
    half = records // 2
    cell, terms = 2.0**-bits * half, np.zeros(records)
    terms[1 : half + 1] = 1.0
    rest = terms[half + 1 :][::apart]
    rest[0::2] = -1.0 + cell / 2 + cell / 16
    rest[1::2] = 1.0 - cell / 2 + cell / 16
    return terms


def moved(total: Callable[[Array], Array], terms: Array) -> float:
    """Return the distance of two sums whose first record contributes 1 or nothing."""
    one = terms.copy()
    one[0] = 1.0
    return float(np.linalg.norm(np.asarray(total(one)) - np.asarray(total(terms))))


def sums(stream: Stream) -> list[str]:
    """Check that sums of examples and of gradients move by one record's bound (`farthing.noise.summing`)."""
    bound, beside = ClipNorm(1.0), np.column_stack([np.ones(_RECORDS), np.zeros(_RECORDS)])
    examples = PerExample(lambda rows, w: rows[0][:, None] * np.array([1.0, 0.0]))
    gradient = LinearGradient(squared, Features(2, intercept=0.0))
    ways: dict[str, Callable[[Array], Array]] = {
        "examples": lambda terms: examples.bounded_sum(Rows(terms), None, bound),
        "gradients": lambda terms: gradient.bounded_sum(Table(beside, -terms), np.zeros(2), bound),
    }
    return [
        f"a sum of {name} moves by more than its bound"
        for name, total in ways.items()
        if any(moved(total, badly_rounded(_RECORDS, apart)) > 1 + _MOST for apart in (1, 4))
    ] + _cancelling(stream)


def _cancelling(stream: Stream, records: int = 2**12) -> list[str]:
    """Return clipped rows near a centre far from zero: Σ v x and c Σ v are huge, and cancel."""
    words = stream.integers(4 * records).astype(np.float64) * 2.0**-63 - 1
    centre = np.full(3, 1e7 + 0.1)
    X, y = centre + words[: 3 * records].reshape(-1, 3) * 1e-6, words[3 * records :] * 1e10
    gradient = LinearGradient(squared, Features(3, centre, intercept=0.0))
    ends = [gradient.bounded_sum(Table(X[i:], y[i:]), np.zeros(3), ClipNorm(1.0)) for i in range(8)]
    apart = max(float(np.linalg.norm(a - b)) for a, b in pairwise(ends))
    return ["a sum of rows near their centre moves by more than its bound"] if apart > 1 + _MOST else []


_BITS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A data set with ``counts`` of each distinct record: a row of ``x`` and a label 0 or 1 in ``y``."""

    x: Array
    y: Array
    counts: NDArray[np.int64]

    def batches(self, rate: float, runs: int, stream: Stream) -> Array:
        """Draw Poisson batches of all runs: how often each distinct record was drawn, (runs, distinct)."""
        return np.column_stack([binomial(stream, int(count), rate, runs) for count in self.counts])

    def gradients(self, w: Array) -> Array:
        """Return logistic gradients of each distinct record in each run, (runs, distinct, weights)."""
        residual = expit(w @ self.x.T) - self.y
        return np.asarray(residual[:, :, None] * self.x)


def canary_pair() -> tuple[Groups, Groups]:
    """Return 500 records e₁ and 500 records e₂, and the same with one record e₃, all with label 1."""
    x, y = np.eye(3), np.ones(3)
    return tuple(Groups(x, y, np.array([500, 500, present])) for present in (0, 1))  # type: ignore[return-value]


def corner_pair(length: float) -> tuple[Groups, Groups]:
    """Return 1000 records 0, and the same with one record of this length along every axis, of label 1."""
    x, y = np.repeat([[0.0], [0.0], [length]], 3, axis=1), np.ones(3)
    return tuple(Groups(x, y, np.array([500, 500, present])) for present in (0, 1))  # type: ignore[return-value]


def normal(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Draw standard normals, exact except for their last bits."""
    cells: Array = gaussian(stream, int(np.prod(shape)), _BITS).astype(np.float64).reshape(shape)
    return cells * 2.0**-_BITS


def uniform(stream: Stream, size: int) -> Array:
    """Draw uniform numbers in [0, 1), on a grid of 2⁻⁵³."""
    return (stream.integers(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def binomial(stream: Stream, trials: int, rate: float, size: int) -> NDArray[np.int64]:
    """Draw binomial numbers, by inversion of their distribution function."""
    if trials == 0:
        return np.zeros(size, np.int64)
    steps = bdtr(np.arange(trials + 1, dtype=np.float64), trials, rate)
    return np.searchsorted(steps, uniform(stream, size), side="right").clip(0, trials)
