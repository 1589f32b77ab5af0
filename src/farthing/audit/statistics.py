"""What counts prove: lower bounds on ε that hold with a stated confidence, whatever the mechanism.

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
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtr, ndtri

Array = NDArray[np.float64]

_RATES = 0.25


def at_least(successes: ArrayLike, trials: ArrayLike, failure: float) -> Array:
    """A rate that the true one falls short of with probability ``failure`` at most."""
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.where(k > 0, betaincinv(np.maximum(k, 1), n - k + 1, failure), 0.0)


def at_most(successes: ArrayLike, trials: ArrayLike, failure: float) -> Array:
    """A rate that the true one exceeds with probability ``failure`` at most."""
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1), 1 - failure), 1.0)


def _rates(tp: ArrayLike, fp: ArrayLike, trials: int, failure: float) -> tuple[Array, Array]:
    return at_least(tp, trials, failure / 2), at_most(fp, trials, failure / 2)


def epsilons(
    tp: ArrayLike, fp: ArrayLike, trials: int, delta: float = 0.0, confidence: float = 0.99
) -> Array:
    """Lower bounds on ε at ``delta``, one for each pair of counts; each holds by itself."""
    hit, false = _rates(tp, fp, trials, 1 - confidence)
    with np.errstate(divide="ignore", invalid="ignore"):
        flagged = np.log(np.maximum(hit - delta, 0.0)) - np.log(false)
        spared = np.log(np.maximum(1 - false - delta, 0.0)) - np.log(1 - hit)
    return np.asarray(np.fmax(np.fmax(flagged, spared), 0.0))


def epsilon(tp: int, fp: int, trials: int, delta: float = 0.0, confidence: float = 0.99) -> float:
    """The lower bound on ε at ``delta`` from one pair of counts."""
    return float(epsilons(tp, fp, trials, delta, confidence))


def advantage(tp: ArrayLike, fp: ArrayLike, trials: int, failure: float) -> Array:
    """A lower bound on P(flag | with) - P(flag | without), from the right answers in both worlds."""
    right = np.asarray(tp) + (trials - np.asarray(fp))
    return 2 * at_least(right, 2 * trials, failure) - 1


def gaussian_mu(tp: ArrayLike, fp: ArrayLike, trials: int, confidence: float = 0.99) -> Array:
    """Lower bounds on μ if the mechanism's trade-off curve is that of N(0, 1) against N(μ, 1)."""
    failure = 1 - confidence
    hit, false = _rates(tp, fp, trials, failure * _RATES)
    gap = np.maximum(advantage(tp, fp, trials, failure * (1 - _RATES)), 0.0)
    with np.errstate(invalid="ignore"):
        by_rates = ndtri(hit) - ndtri(false)
    return np.asarray(np.fmax(by_rates, 2 * ndtri((1 + gap) / 2)))


def sampled_mu(tp: ArrayLike, fp: ArrayLike, trials: int, rate: float, confidence: float = 0.99) -> Array:
    """Lower bounds on μ if the curve is that of N(0, 1) against (1 - rate) N(0, 1) + rate N(μ, 1)."""
    failure = 1 - confidence
    hit, false = _rates(tp, fp, trials, failure * _RATES)
    gap = np.maximum(advantage(tp, fp, trials, failure * (1 - _RATES)), 0.0)
    with np.errstate(invalid="ignore"):
        by_rates = ndtri(np.minimum((hit - (1 - rate) * false) / rate, 1.0)) - ndtri(false)
    by_gap = 2 * ndtri(np.minimum((1 + gap / rate) / 2, 1.0))
    return np.where(gap < rate, np.fmax(np.fmax(by_rates, by_gap), 0.0), math.inf)


def gaussian_rates(mu: float, threshold: float, rate: float = 1.0) -> tuple[float, float]:
    """P(flag | with) and P(flag | without) where N(0, 1) above ``threshold`` is flagged: for planning."""
    false = float(ndtr(-threshold))
    return (1 - rate) * false + rate * float(ndtr(mu - threshold)), false
