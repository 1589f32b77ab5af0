"""Implement the moments accountant by numerical integration.

Abadi et al. 2016, "Deep Learning with Differential Privacy", Section 3.2: Poisson batches (the paper's lots)
at rate q, Gaussian noise σ, add-remove, against anyone who does not see which records were drawn. With
μ₀ = N(0, σ²) and μ = (1 − q) μ₀ + q N(1, σ²) the λ-th log moment of T steps is at most

    T max(ln E_{μ₀}[(μ₀/μ)^λ], ln E_μ[(μ/μ₀)^λ]),      ε = min over λ of (moment + ln 1/δ)/λ.

The second expectation is E_{μ₀}[(μ/μ₀)^(λ+1)]: moment λ is Rényi order λ + 1 (Mironov 2017), so the
best moment of the example, 19, is order 20 of a Rényi accountant. Better conversions of the same moments are
in :mod:`farthing.accounting.rdp`. ``noise`` is σ over the clipping norm.

>>> value, moment = epsilon(4.0, 0.01, 10_000, 1e-5)
>>> round(value, 7), moment
(1.2585747, 19)
"""

import math

import numpy as np
import numpy.typing as npt

from farthing import validate
from farthing.accounting.gaussian import Array

Indices = npt.NDArray[np.intp]

_MOST_POINTS = 2**14
_REACH = 12.0  # standard deviations beyond the outermost bump of an integrand


def log_sum(terms: Array, starts: Indices) -> Array:
    """Return ln Σ exp of the terms of each segment; the segments begin at ``starts``."""
    top = np.maximum(np.maximum.reduceat(terms, starts), -1e300)
    sizes = np.diff(np.append(starts, terms.size))
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(np.add.reduceat(np.exp(terms - np.repeat(top, sizes)), starts)))


def points(low: Array, high: Array, step: Array) -> tuple[Array, Indices, Indices]:
    """Return even grids from each low to each high, concatenated: points, grid of each point, starts."""
    counts = np.ceil((high - low) / step).astype(np.intp) + 1
    which = np.repeat(np.arange(low.size, dtype=np.intp), counts)
    starts: Indices = np.cumsum(counts) - counts
    return low[which] + step[which] * (np.arange(which.size) - starts[which]), which, starts


def _log_convex_gap(power: Array, log_ratio: Array, rate: float) -> Array:
    """Return ln((1 + u)^a − 1 − a u), 1 + u = 1 − q + q e^x: positive by Bernoulli, without cancellation."""
    u = rate * np.expm1(np.minimum(log_ratio, 700.0))
    log_one_plus = np.where(
        log_ratio < 30,
        np.log1p(rate * np.expm1(np.minimum(log_ratio, 30.0))),
        np.logaddexp(math.log1p(-rate), math.log(rate) + log_ratio),
    )
    y = power * log_one_plus
    with np.errstate(all="ignore"):
        direct = np.log(np.expm1(np.minimum(y, 30.0)) - power * u)
        ratio = power * np.exp(log_one_plus - y) + (1 - power) * np.exp(-y)  # (1 + a u)/(1 + u)^a
        direct = np.where(y > 30, y + np.log1p(-ratio), direct)
        linear = np.log(-power) + math.log(rate) + log_ratio
        direct = np.where((power < 0) & (u > 1e15), linear, direct)
        series = np.ones_like(u)
        for n in range(11, 1, -1):
            series = 1 + (power - n) * u / (n + 1) * series
        small = np.log(power * (power - 1) / 2 * series) + 2 * np.log(np.abs(u))
    return np.where((np.abs(power * u) < 0.05) & (np.abs(u) < 0.05), small, direct)


def log_moment(noise: float, rate: float, powers: Array) -> Array:
    """Return ln E_{μ₀}[(μ/μ₀)^a] for powers a > 1 or a < 0; inf if more than 2^14 points would be needed.

    As E_{μ₀}[μ/μ₀] = 1, the integrand minus 1 + a(μ/μ₀ − 1) has the same integral minus 1 and is never
    negative, so tiny rates lose no digits. The trapezoidal rule is exact to rounding: the integrand
    is a sum of unit Gaussians for whole powers, and analytic within πσ of the axis otherwise.
    """
    if rate == 1 or noise < 1e-100:
        with np.errstate(over="ignore"):
            return np.asarray(powers * (powers - 1) / 2 / noise / noise * (1 + 1e-12))
    whole = (powers > 0) & (powers == np.round(powers))
    step = np.where(whole, 0.25, min(0.25, noise / 2))
    floor = np.sqrt(2 * np.maximum(-powers, 0) * -math.log1p(-rate))
    low = np.maximum(np.minimum(powers, 0.0) / noise, -floor) - _REACH
    high = np.maximum(powers, 1.0) / noise + _REACH
    result = np.full(powers.shape, math.inf)
    feasible = (high - low) / step < _MOST_POINTS
    if not feasible.any():
        return result
    x, which, starts = points(low[feasible], high[feasible], step[feasible])
    gap = _log_convex_gap(powers[feasible][which], x / noise - 0.5 / noise / noise, rate)
    log_gap = log_sum(gap - x * x / 2, starts) + np.log(step[feasible] / math.sqrt(2 * math.pi))
    result[feasible] = np.maximum(np.logaddexp(0.0, log_gap) * (1 + 1e-12), 5e-324)
    return result


def log_moments(noise: float, rate: float, moments: int = 32) -> Array:
    """Return the log moments λ = 1, 2, … of one step.

    If the integral cannot be computed (tiny noise), λ(λ+1)/(2σ²) of the unsampled mechanism replaces it. The
    first expectation is then left out, as it is the smaller one (Mironov, Talwar & Zhang 2019, Section 3).
    """
    noise, rate = validate.positive(noise=noise), validate.rate(rate=rate)
    orders = np.arange(1.0, min(validate.count(moments=moments), 1024) + 1)
    with np.errstate(over="ignore"):
        unsampled = orders * (orders + 1) / 2 / noise / noise * (1 + 1e-12)
    second = np.minimum(log_moment(noise, rate, orders + 1), unsampled)
    first = log_moment(noise, rate, -orders)
    return np.where(np.isfinite(first), np.maximum(np.minimum(first, unsampled), second), second)


def epsilon(noise: float, rate: float, steps: int, delta: float, moments: int = 32) -> tuple[float, int]:
    """Return ε and the best moment λ: Abadi et al. 2016, Theorem 2."""
    steps, delta = validate.count(steps=steps), validate.probability(delta=delta)
    each = log_moments(noise, rate, moments)
    with np.errstate(over="ignore"):
        values = (steps * each - math.log(delta)) / np.arange(1, each.size + 1)
    best = int(np.argmin(values))
    return float(values[best]) * (1 + 1e-15), best + 1


def delta(noise: float, rate: float, steps: int, epsilon: float, moments: int = 32) -> float:
    """Return the minimum over λ of exp(moment − λε), at most 1: Abadi et al. 2016, Theorem 2."""
    steps, epsilon = validate.count(steps=steps), validate.non_negative(epsilon=epsilon)
    each = log_moments(noise, rate, moments)
    with np.errstate(over="ignore", invalid="ignore"):
        total = steps * each
        spent = np.minimum(np.arange(1, each.size + 1) * epsilon, 1e300)
        values = np.where(np.isinf(total), 0.0, total - spent + 1e-15 * (total + spent))
    return math.exp(min(0.0, max(float(np.min(values)), -744.0)))
