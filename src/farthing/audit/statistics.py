"""Compute test statistics of an attack, and the lower bounds on ε that their counts prove.

An attack flags a run or not. Of ``trials`` runs with the record ``tp`` were flagged, of as many without it
``fp``. If the mechanism is (ε, δ)-DP, then P(flag | with) <= e^ε P(flag | without) + δ and the same for "not
flagged" with the worlds exchanged (Kairouz, Oh & Viswanath 2015, Thm. 2.1). Both rates are bounded by Clopper
& Pearson 1934, each at half of the failure allowed, so that the bound on ε fails with probability at most
1 - confidence. What is flagged must not have been chosen on the runs that are counted.

f-DP says more: if the whole trade-off curve is known but for one number, the number is bounded instead.
`gaussian_mu` and `sampled_mu` do that for the curve of a Gaussian mechanism (Dong, Roth & Su 2022, Def. 2.6)
and for one step of it on a Poisson sample (Nasr et al. 2023, "Tight auditing of differentially private
machine learning", Sections 4 and 5). Both look at the two rates and at their difference: right answers among
all runs are a sum of independent coins, whose upper tail is at most that of a binomial of the same mean
(Hoeffding 1956, Thm. 5), so that one interval serves for both rates, at √2 less loss. Of the failure allowed
`_RATES` goes to the rates and the rest to the difference.

>>> round(epsilon(9549, 0, 10_000), 2)
7.49
>>> round(float(gaussian_mu(6915, 3085, 10_000)), 3)  # these are the rates at μ = 1
0.955

A *curve* is what an audit may assume of a mechanism. Without one nothing is assumed: counts bound ε at the
claim's δ (`epsilons`). With one, a single number is left open, counts bound that, and ε at δ follows from it.
The verdict names the assumption.

A *test statistic* is what an attack looks at in the outputs of a run: one number a run, large where it says
"with". A plain function of all outputs (one row a run) is fixed ahead. A `FittedStatistic` is learnt: ``fit``
sees outputs of both worlds that are not counted later, and returns such a function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from farthing import validate
from farthing.accounting import calibrate, gaussian, pld
from farthing.budget import Adjacency, Budget
from farthing.errors import Unsupported
from farthing.queries.events import Event, GaussianEvent, PoissonEvent, RepeatedEvent

Array = NDArray[np.float64]

_RATES = 0.25


def at_least(successes: ArrayLike, trials: ArrayLike, failure: float) -> Array:
    """Return a rate that the true one falls short of with probability ``failure`` at most."""
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.where(k > 0, betaincinv(np.maximum(k, 1), n - k + 1, failure), 0.0)


def at_most(successes: ArrayLike, trials: ArrayLike, failure: float) -> Array:
    """Return a rate that the true one exceeds with probability ``failure`` at most."""
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1), 1 - failure), 1.0)


def _rates(tp: ArrayLike, fp: ArrayLike, trials: int, failure: float) -> tuple[Array, Array]:
    return at_least(tp, trials, failure / 2), at_most(fp, trials, failure / 2)


def epsilons(
    tp: ArrayLike, fp: ArrayLike, trials: int, delta: float = 0.0, confidence: float = 0.99
) -> Array:
    """Return lower bounds on ε at ``delta``, one for each pair of counts; each holds by itself."""
    hit, false = _rates(tp, fp, trials, 1 - confidence)
    with np.errstate(divide="ignore", invalid="ignore"):
        flagged = np.log(np.maximum(hit - delta, 0.0)) - np.log(false)
        spared = np.log(np.maximum(1 - false - delta, 0.0)) - np.log(1 - hit)
    return np.asarray(np.fmax(np.fmax(flagged, spared), 0.0))


def epsilon(tp: int, fp: int, trials: int, delta: float = 0.0, confidence: float = 0.99) -> float:
    """Return the lower bound on ε at ``delta`` from one pair of counts."""
    return float(epsilons(tp, fp, trials, delta, confidence))


def advantage(tp: ArrayLike, fp: ArrayLike, trials: int, failure: float) -> Array:
    """Return a lower bound on P(flag | with) - P(flag | without), from the right answers in both worlds."""
    right = np.asarray(tp) + (trials - np.asarray(fp))
    return 2 * at_least(right, 2 * trials, failure) - 1


def gaussian_mu(tp: ArrayLike, fp: ArrayLike, trials: int, confidence: float = 0.99) -> Array:
    """Return lower bounds on μ if the trade-off curve is that of N(0, 1) against N(μ, 1)."""
    failure = 1 - confidence
    hit, false = _rates(tp, fp, trials, failure * _RATES)
    gap = np.maximum(advantage(tp, fp, trials, failure * (1 - _RATES)), 0.0)
    with np.errstate(invalid="ignore"):
        by_rates = ndtri(hit) - ndtri(false)
    return np.asarray(np.fmax(by_rates, 2 * ndtri((1 + gap) / 2)))


def sampled_mu(tp: ArrayLike, fp: ArrayLike, trials: int, rate: float, confidence: float = 0.99) -> Array:
    """Return lower bounds on μ if the curve is of N(0, 1) against (1 - rate) N(0, 1) + rate N(μ, 1)."""
    failure = 1 - confidence
    hit, false = _rates(tp, fp, trials, failure * _RATES)
    gap = np.maximum(advantage(tp, fp, trials, failure * (1 - _RATES)), 0.0)
    with np.errstate(invalid="ignore"):
        by_rates = ndtri(np.minimum((hit - (1 - rate) * false) / rate, 1.0)) - ndtri(false)
    by_gap = 2 * ndtri(np.minimum((1 + gap / rate) / 2, 1.0))
    return np.where(gap < rate, np.fmax(np.fmax(by_rates, by_gap), 0.0), math.inf)


class Curve(Protocol):
    """An assumption by which counts become a lower bound: on a strength that grows with ε, and then on ε."""

    @property
    def assumption(self) -> str:
        """Return what is assumed; empty for nothing."""

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        """Return lower bounds on the strength, one for each pair of counts."""

    def epsilon(self, strength: float, claim: Budget) -> float:
        """Return ε at the claim's δ of a mechanism of this strength."""

    def claimed(self, claim: Budget) -> float:
        """Return the strength of a mechanism that is exactly what is claimed."""

    def rates(self, strength: float, claim: Budget) -> tuple[Array, Array]:
        """Return the rates of flagging with and without, at several thresholds, of the best attack on it."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No assumption: counts bound ε at the claim's δ itself.

    Attributes
    ----------
    assumption : str
        What is assumed, in words.

    Examples
    --------
    >>> Unknown().assumption
    ''
    """

    assumption: str = ""

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        return epsilons(tp, fp, trials, claim.delta, confidence)

    def epsilon(self, strength: float, claim: Budget) -> float:
        return strength

    def claimed(self, claim: Budget) -> float:
        return claim.epsilon

    def rates(self, strength: float, claim: Budget) -> tuple[Array, Array]:
        false = np.minimum(
            np.geomspace(1e-4, 0.5, 24), (1 - claim.delta) / (1 + math.exp(min(strength, 700)))
        )
        return claim.delta + np.exp(np.log(false) + strength), false


@dataclass(frozen=True, slots=True)
class GaussianCurve:
    """The assumption that a run is one Gaussian mechanism (full-batch noise), so that counts bound its μ.

    Attributes
    ----------
    assumption : str
        What is assumed, in words.

    Notes
    -----
    Its trade-off curve is that of N(0, 1) against N(μ, 1) (Dong, Roth & Su 2022, Def. 2.6).

    Examples
    --------
    >>> GaussianCurve().assumption
    'the trade-off curve of the run is that of a Gaussian mechanism'
    """

    assumption: str = "the trade-off curve of the run is that of a Gaussian mechanism"

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        return gaussian_mu(tp, fp, trials, confidence)

    def epsilon(self, strength: float, claim: Budget) -> float:
        if strength == math.inf:
            return math.inf
        return gaussian.epsilon(max(strength, 0.0), claim.delta)

    def claimed(self, claim: Budget) -> float:
        return claim.mu

    def rates(self, strength: float, claim: Budget) -> tuple[Array, Array]:
        return _gaussian_rates(strength, 1.0)


@dataclass(frozen=True, slots=True)
class SampledCurve:
    """The assumption that a run is DP-SGD and a trial one of its steps, so that counts bound the step's μ.

    Parameters
    ----------
    sampling_rate : float
        The probability of a record to be in a step's batch.
    steps : int
        The number of steps of the run.
    fixed_size : bool, default False
        Whether every batch has the same size, so that a replaced record, where it is drawn, is the only one
        that differs from the others. By default batches are Poisson samples.

    Notes
    -----
    Nasr et al. 2023, Sections 4 and 5. A step's curve is that of N(0, 1) against the mixture (1 - q) N(0, 1)
    + q N(μ, 1): of a record more on Poisson samples, and of a replaced one on samples of a fixed size, where
    all other records are alike (Zhu, Dong & Wang 2022, Thm. 11). A record that is replaced on Poisson samples
    has another curve, and `Unsupported` is raised.

    Examples
    --------
    >>> SampledCurve(0.01, 100).assumption
    'the run is 100 equal Gaussian steps, each on a Poisson sample of rate 0.01'
    """

    sampling_rate: float
    steps: int
    fixed_size: bool = False

    def __post_init__(self) -> None:
        validate.rate(sampling_rate=self.sampling_rate), validate.count(steps=self.steps)

    @property
    def assumption(self) -> str:
        sample = "sample of a fixed size, at rate" if self.fixed_size else "Poisson sample of rate"
        part = f", each on a {sample} {self.sampling_rate:g}" if self.sampling_rate < 1 else ""
        return f"the run is {self.steps} equal Gaussian steps{part}"

    def strengths(self, tp: ArrayLike, fp: ArrayLike, trials: int, claim: Budget, confidence: float) -> Array:
        return sampled_mu(tp, fp, trials, self.sampling_rate, confidence)

    def epsilon(self, strength: float, claim: Budget) -> float:
        if claim.adjacency is Adjacency.REPLACE_ONE and self.sampling_rate < 1 and not self.fixed_size:
            raise Unsupported("a record replaced on a sample has another curve: attack add-remove instead")
        if not strength > 1e-6:  # below this, thousands of steps compose to nothing
            return 0.0
        if strength == math.inf:
            return math.inf
        return pld.epsilon(self._plan(1 / strength), claim.delta)

    def claimed(self, claim: Budget) -> float:
        return 1 / calibrate.noise(self._plan, replace(claim, adjacency=Adjacency.ADD_REMOVE))

    def rates(self, strength: float, claim: Budget) -> tuple[Array, Array]:
        return _gaussian_rates(strength, self.sampling_rate)

    def _plan(self, noise: float) -> Event:
        """Return the steps of a record that comes, whose μ is 1 over ``noise``: of whatever neighbours."""
        return RepeatedEvent(PoissonEvent(self.sampling_rate, GaussianEvent(noise)), self.steps)


def _gaussian_rates(mu: float, rate: float) -> tuple[Array, Array]:
    thresholds = mu / 2 + np.linspace(-1.0, 3.0, 17)
    false = ndtr(-thresholds)
    return (1 - rate) * false + rate * ndtr(mu - thresholds), false


_TRIES = 0.9  # the probability with which a violation is caught


def caught(curve: Curve, tp: int, fp: int, trials: int, claim: Budget, confidence: float) -> float:
    """Estimate the smallest ε that an attack refutes the claim for, with probability `_TRIES`.

    An attack whose test is the best there is refutes it from some strength on: the counts that come out with
    probability `_TRIES` at least then bound the strength above the claim's. The attack at hand sees a part of
    the strength only (its neighbours may not be the worst, its statistic not the best). That part is taken to
    be what its counts show of the claim, by the same curve without confidence, and to stay as it is.

    >>> round(caught(GaussianCurve(), 9000, 1000, 10_000, Budget(10.0, 1e-5), 0.99), 1)  # μ 2.56 of 2.00
    10.6
    >>> caught(Unknown(), 10, 0, 10, Budget(8.0, 1e-5), 0.99)  # ten runs refute no ε of 8
    inf
    """
    whole = curve.claimed(claim)
    seen = float(curve.strengths(tp, fp, trials, claim, 0.0))
    share = min(seen / whole, 1.0) if math.isfinite(seen) else 1.0
    if not share > _LEAST or not _refutes(curve, _MOST * whole, whole, trials, claim, confidence):
        return math.inf
    low, high = whole, _MOST * whole
    while high - low > 1e-3 * whole:
        middle = (low + high) / 2
        found = _refutes(curve, middle, whole, trials, claim, confidence)
        low, high = (low, middle) if found else (middle, high)
    return curve.epsilon(high / share, claim) if high < _MOST * share * whole else math.inf


_LEAST, _MOST = 0.02, 20.0  # shares of the claim that are seen at least, and looked for at most


def _refutes(
    curve: Curve, strength: float, claimed: float, trials: int, claim: Budget, confidence: float
) -> bool:
    """Return whether some threshold of the best attack on this strength probably refutes the claim."""
    hit, false = curve.rates(strength, claim)
    unlucky = (1 - _TRIES) / 2
    tp, fp = binom.ppf(unlucky, trials, np.minimum(hit, 1.0)), binom.ppf(1 - unlucky, trials, false)
    return bool(np.nanmax(curve.strengths(tp, fp, trials, claim, confidence)) > claimed)


Scores = Callable[[Any], Array]


@runtime_checkable
class FittedStatistic(Protocol):
    """A test statistic that is fitted on runs which are not counted."""

    @property
    def name(self) -> str:
        """Return its name in a few words, for the verdict."""

    def fit(self, without: Any, within: Any) -> Scores:
        """Return the function of outputs that was fitted on those of both worlds."""


_FEW = 3


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection on the direction that separates the worlds best, if outputs are Gaussian (Fisher 1936).

    Notes
    -----
    Where there are fewer than `_FEW` runs an entry, correlations cannot be estimated, and entries are weighed
    as if they were independent (Bickel & Levina 2004).
    """

    name: str = "projection on the worst direction"

    def fit(self, without: Any, within: Any) -> Scores:
        first, second = (np.nan_to_num(_flat(part), posinf=0.0, neginf=0.0) for part in (without, within))
        apart = second.mean(axis=0) - first.mean(axis=0)
        if _FEW * len(apart) > len(first):
            own = first.var(axis=0) + second.var(axis=0)
            direction = apart / (own + max(1e-9 * float(own.mean()), 1e-300))
        else:
            spread = np.atleast_2d(np.cov(first.T)) + np.atleast_2d(np.cov(second.T))
            # constant coordinates would make it singular
            spread += np.eye(len(spread)) * max(1e-9 * float(np.trace(spread)) / len(spread), 1e-300)
            direction = np.linalg.lstsq(spread, apart, rcond=None)[0]

        def scores(outputs: Any) -> Array:
            with np.errstate(invalid="ignore"):  # infinity times 0
                return np.asarray(_flat(outputs) @ direction)

        return scores


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A likelihood ratio of discrete outputs, such as a chosen candidate."""

    name: str = "likelihood ratio of outcomes"

    def fit(self, without: Any, within: Any) -> Scores:
        kinds, places = np.unique(np.concatenate([without, within]), axis=0, return_inverse=True)
        places = places.reshape(-1)
        counts = [np.bincount(part, minlength=len(kinds)) for part in np.split(places, [len(without)])]
        ratio = np.log((counts[1] + 0.5) / (counts[0] + 0.5))
        known = {kind.tobytes(): value for kind, value in zip(kinds, ratio, strict=True)}
        return lambda outputs: np.array([known.get(kind.tobytes(), 0.0) for kind in np.asarray(outputs)])


def value(outputs: Any) -> Array:
    """Return the output itself, where it is one number a run."""
    return _flat(outputs)[:, 0]


def largest(outputs: Any) -> Array:
    """Return the largest |entry| of a run, which shows a leak in the level of the noise."""
    return np.asarray(np.abs(_flat(outputs)).max(axis=1))


def spread(outputs: Any) -> Array:
    """Return the mean square of a run's entries, which shows a leak in the variance of the noise."""
    return np.asarray(np.square(_flat(outputs)).mean(axis=1))


def level(outputs: Any) -> Array:
    """Return the mean logarithm of a run's |entries|, which shows noise whose level varies."""
    sizes = np.abs(_flat(outputs))
    return np.asarray(np.log(np.maximum(sizes, 1e-300)).mean(axis=1))


def frozen(outputs: Any) -> Array:
    """Return minus the number of entries that are exactly 0, which shows noise that was never added."""
    return np.asarray(-np.count_nonzero(_flat(outputs) == 0, axis=1), dtype=np.float64)


def lowest_bit(outputs: Any) -> Array:
    """Return the finest power of two that some entry of a run is no multiple of (Mironov 2012).

    A sum x + noise in floating point is a multiple of the last place of x wherever it comes out near 0; noise
    alone is not. On a lattice of integers both are the same multiples of one cell.
    """
    return np.asarray(_places(_flat(outputs))[0].min(axis=1))


@dataclass(frozen=True, slots=True)
class LastBits:
    """A likelihood ratio of sign, exponent and last binary place of each entry, summed over a run's entries.

    Notes
    -----
    Where a sum x + noise in floating point comes out near 0, its last place is that of x or of the noise, and
    not its own (Mironov 2012): which places occur tells values of x apart that `lowest_bit` ranks alike, such
    as -0.5 and 0.5. Cells whose counts differ by less than chance makes them differ somewhere among as many
    entries, √(2 ln entries) deviations, count as equal.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> runs = [shift + rng.normal(size=9000) for shift in (-0.5, 0.5)]
    >>> scores = LastBits().fit(*runs)
    >>> bool(scores(runs[1]).mean() > scores(runs[0]).mean())
    True
    """

    name: str = "last bits"

    def fit(self, without: Any, within: Any) -> Scores:
        first, second = _cells(without), _cells(within)
        kinds, found = np.unique(np.concatenate([first.ravel(), second.ravel()]), return_inverse=True)
        parts = np.split(found.reshape(-1), [first.size])
        fewer, more = (np.bincount(part, minlength=len(kinds)).astype(np.float64) for part in parts)
        chance = np.sqrt(2 * math.log(len(kinds)) * (fewer + more))
        ratio = np.where(np.abs(more - fewer) > chance, np.log((more + 0.5) / (fewer + 0.5)), 0.0)

        def scores(outputs: Any) -> Array:
            cells = _cells(outputs)
            place = np.minimum(np.searchsorted(kinds, cells), len(kinds) - 1)
            return np.asarray(np.where(kinds[place] == cells, ratio[place], 0.0).sum(axis=1))

        return scores


_NO_PLACE = 2000  # of entries that are 0 or not finite: above every place of a float64


def _places(values: Array) -> tuple[Array, NDArray[np.int64]]:
    """Return the binary place of each entry's lowest bit, and its exponent."""
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.abs(np.ldexp(mantissa, 53)).astype(np.int64)
    lowest = np.log2((whole & -whole).astype(np.float64), out=np.zeros(whole.shape), where=whole > 0)
    return np.where(whole > 0, exponent - 53 + lowest, _NO_PLACE), exponent.astype(np.int64)


def _cells(outputs: Any) -> NDArray[np.int64]:
    """Return sign, exponent, last place and coordinate of each entry as one number."""
    values = _flat(outputs)
    place, exponent = _places(values)
    base = 4 * _NO_PLACE
    code = ((place.astype(np.int64) + base) * base + exponent + base // 2) * 2 + np.signbit(values)
    return np.asarray(code * values.shape[1] + np.arange(values.shape[1]))


def _flat(outputs: Any) -> Array:
    array = np.asarray(outputs, dtype=np.float64)
    return array.reshape(len(array), -1)
