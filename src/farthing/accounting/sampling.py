"""Compute the Gaussian Sampling Composition Theorem of A-DDP.

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Theorem 1: in k
rounds, each of which draws the differing record independently with probability p and adds Gaussian
noise of standard deviation σ to a sum of sensitivity H,

    δ(ε) = Σ_i Binomial(i; k, p) δ_Gauss(√i H/σ, ε).

Proof: condition on how often the record was drawn; the hockey-stick divergence is jointly convex. So it holds
even against a coordinator who sees which records were drawn in which round, and is loose if that stays
secret. ``noise`` is σ/H, with H under the caller's adjacency (zero-out: the clipping norm C; replace-one, or
always exactly one drawn record: 2C). Omitted terms of the sum are bounded and added; δ and ε are rounded up,
the number of rounds down.

>>> noise = addp_noise(0.5, 1e-8, steps=10, slack=5e-9)
>>> round(noise, 1), rounds(noise, 0.01, 0.5, 1e-8)
(193.7, 38012)
"""

import math

import numpy as np
from scipy.special import gammaln

from farthing import validate
from farthing.accounting import composition, gaussian
from farthing.accounting.gaussian import Array

_MOST_TERMS = 2**16
_TAILS = 40.0  # tails below e^-40 of the sum are bounded by Chernoff and added as a whole
_LARGEST_COUNT = 2**62 - 1


def _deviance(x: Array, mean: Array | float) -> Array:
    """Return x ln(x/m) + m − x, without cancellation (Loader 2000, "bd0")."""
    with np.errstate(over="ignore"):
        u = (x - mean) / mean
    near = np.clip(u, -0.1, 0.1)
    series = np.zeros_like(u)
    for n in range(17, 1, -1):
        series = 1 / (n * (n - 1)) - near * series
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_ratio = np.where(np.isfinite(u), np.log(x / mean), np.log(x) - np.log(mean))
        exact = np.where(x > 0, x * log_ratio, 0.0) + mean - x
    return np.where(np.abs(u) < 0.1, mean * near * near * series, exact)


def _stirling_error(n: Array) -> Array:
    """Return ln n! − ln(√(2πn) (n/e)^n) for n >= 1."""
    small = np.minimum(n, 16.0)
    exact = gammaln(small + 1) - (small + 0.5) * np.log(small) + small - 0.5 * math.log(2 * math.pi)
    square = 1 / np.square(np.maximum(n, 16.0))
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188)))) / n
    return np.where(n < 16, exact, series)


def log_binomial(i: Array, k: Array | float, p: float) -> Array:
    """Return ln of the binomial probability of i successes in k trials, 1 <= i <= k, any k, 0 < p < 1.

    Loader 2000, "Fast and accurate computation of binomial probabilities": no large terms cancel.
    """
    k = np.broadcast_to(np.asarray(k, dtype=np.float64), i.shape)
    rest = np.maximum(k - i, 1.0)
    saddle = -_deviance(i, k * p) - _deviance(rest, k * (1 - p))
    tails = _stirling_error(k) - _stirling_error(i) - _stirling_error(rest)
    inside = saddle + tails + 0.5 * (np.log(k) - np.log(i) - np.log(rest) - math.log(2 * math.pi))
    return np.where(i < k, inside, k * math.log(p))


def _deviance_of_one(x: float, mean: float) -> float:
    u = (x - mean) / mean
    if abs(u) < 1e-4:
        return mean * u * u * (0.5 - u * (1 / 6 - u * (1 / 12 - u / 20)))
    return (x * math.log(x / mean) if x > 0 else 0.0) + mean - x


def _exponent(x: float, k: float, p: float) -> float:
    """Return k KL(x/k ‖ p), Chernoff's bound on ln 1/P(a binomial is as far out as x), rounded down."""
    return (_deviance_of_one(x, k * p) + _deviance_of_one(k - x, k * (1 - p))) * (1 - 1e-6)


def _window_end(k: float, p: float, end: float, exponent: float) -> float:
    """Return the count between k p and ``end`` beyond which Chernoff leaves at most e^−exponent."""
    inner, outer = k * p, end
    if _exponent(outer, k, p) <= exponent:
        return end
    while abs(outer - inner) > 0.25 + 1e-3 * abs(outer - k * p):
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if _exponent(middle, k, p) < exponent else (inner, middle)
    return math.ceil(outer) if end > k * p else math.floor(outer)


def _mu(noise: float, rounds: int) -> float:
    return min(math.sqrt(rounds) / noise * (1 + 1e-15), 1e290)


def _delta(noise: float, rate: float, rounds: int, epsilon: float) -> float:
    if rate == 1:
        return gaussian.delta(_mu(noise, rounds), epsilon)
    k = float(rounds)

    def log_price(counts: Array) -> Array:
        return gaussian.log_delta(np.sqrt(counts) * _mu(noise, 1), epsilon)

    typical = np.array([min(k, max(1.0, math.floor(k * rate)))])
    size = float(log_binomial(typical, k, rate)[0] + log_price(typical)[0])
    low = max(1.0, _window_end(k, rate, 0.0, _TAILS))
    high = max(low, _window_end(k, rate, k, _TAILS - max(size, -750.0)))
    # The summand varies on the scale of the binomial and of one unit of √i/noise. A stride of an
    # eighth of that makes the trapezoidal rule exact to e^−600: it is a sum of near-Gaussian bumps.
    scale = min(math.sqrt(k * rate * (1 - rate)), 2 * math.sqrt(low) * noise)
    stride = max(1.0, math.floor(scale / 8))
    stiff = (high - low) / stride > _MOST_TERMS
    if stiff:
        stride = math.ceil((high - low) / _MOST_TERMS)
    counts = np.minimum(low + stride * np.arange(math.ceil((high - low) / stride) + 1), k)
    weights, prices = log_binomial(counts, k, rate), log_price(counts)
    if stiff:  # both factors take their largest value within each stride: coarse, still an upper bound
        mode = min(k, max(1.0, math.floor((k + 1) * rate)))
        around = (counts[:-1] <= mode + 1) & (counts[1:] >= mode - 1)
        top = np.where(around, log_binomial(np.array([mode]), k, rate), np.maximum(weights[:-1], weights[1:]))
        weights, prices = top, prices[1:]
    total = stride * float(np.exp(np.minimum(weights + prices, 0.0)).sum())
    below = math.exp(-_exponent(low, k, rate) + float(prices[0])) if 1 < low < k * rate else 0.0
    above = math.exp(-_exponent(high, k, rate)) if high < k else 0.0
    return min(1.0, max((total + below + above) * (1 + 1e-11), 5e-324))


def _checked(noise: float, rate: float) -> tuple[float, float]:
    return validate.positive(noise=noise), validate.rate(rate=rate)


def delta(noise: float, rate: float, rounds: int, epsilon: float) -> float:
    """Return δ of ``rounds`` rounds at this ε, rounded up, in milliseconds for any number of rounds."""
    noise, rate = _checked(noise, rate)
    return _delta(noise, rate, validate.count(rounds=rounds), validate.non_negative(epsilon=epsilon))


def epsilon(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Return ε of ``rounds`` rounds at this δ, rounded up."""
    (noise, rate), rounds = _checked(noise, rate), validate.count(rounds=rounds)
    goal = math.log(validate.probability(delta=delta))
    most = gaussian.epsilon(_mu(noise, rounds), delta)

    def excess(value: float) -> float:
        return math.log(_delta(noise, rate, rounds, value)) - goal

    if most == 0 or excess(0.0) <= 0:
        return 0.0
    return most if math.isinf(most) or excess(most) > 0 else gaussian.safe_root(excess, most, 0.0)


def rounds(noise: float, rate: float, epsilon: float, delta: float) -> int:
    """Return the most rounds that are (ε, δ)-DP: 0 if not even one is, at most 2**62 − 1."""
    (noise, rate), epsilon = _checked(noise, rate), validate.non_negative(epsilon=epsilon)
    validate.probability(delta=delta)
    fits, fails = 0, 1
    while _delta(noise, rate, fails, epsilon) <= delta:
        if fails == _LARGEST_COUNT:
            return fails
        fits, fails = fails, min(4 * fails, _LARGEST_COUNT)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _delta(noise, rate, middle, epsilon) <= delta else (fits, middle)
    return fits


def addp_noise(epsilon: float, delta: float, steps: int, slack: float) -> float:
    """Return σ/C as A-DDP chooses it (Algorithm 1, lines 5 and 14) for an estimated number of ``steps``.

    The total (ε, δ) is divided by advanced composition with δ' = ``slack``, without amplification, and each
    step is calibrated exactly. This only chooses the noise; :func:`delta` computes the cost of the rounds.
    """
    return gaussian.noise(*composition.advanced_epsilon_iter(epsilon, delta, steps, slack))
