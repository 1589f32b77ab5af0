"""Compute zero-concentrated differential privacy: D_α(M(x) ‖ M(x')) <= ρα for every order α > 1.

Bun & Steinke 2016. ρ adds up under adaptive composition, under the adjacency of the parts, against an
observer who sees every answer. Conversions follow Canonne, Kamath & Steinke 2020, Proposition 12: every order
gives a valid bound, so an imperfect search for the best order costs tightness, never validity.

>>> round(rho(1.0, 1e-5), 6), round(rho_tight(1.0, 1e-5), 6)
(0.02082, 0.030557)
"""

import math
from functools import lru_cache

import numpy as np

from farthing import validate
from farthing.accounting.gaussian import safe_root
from farthing.accounting.tolerance import inner
from farthing.errors import InvalidValue


def rho_of_gaussian(noise: float) -> float:
    """Return 1/(2 noise²): Bun & Steinke 2016, Proposition 1.6."""
    noise = validate.positive(noise=noise)
    return 0.5 / noise / noise * (1 + 1e-15)


def rho_of_pure(epsilon: float) -> float:
    """Return ε tanh(ε/2), which is below both ε²/2 and ε; exact for randomised response.

    Every ε-DP mechanism is a post-processing of randomised response (Kairouz, Oh & Viswanath 2015),
    for which (α − 1) D_α = ln cosh((2α − 1)ε/2) − ln cosh(ε/2). At α = 1 this and ρα(α − 1) are both
    0; the slope in α of the first, ε tanh((2α − 1)ε/2), is at most that of the second,
    (2α − 1) ε tanh(ε/2), because tanh is concave.
    """
    epsilon = validate.non_negative(epsilon=epsilon)
    return epsilon * math.tanh(epsilon / 2) * (1 + 1e-15)


def rho_of_bounded_range(epsilon: float) -> float:
    """Return ε²/8 (Cesar & Rogers 2021; exponential mechanism), capped at the cost of pure ε-DP.

    The privacy loss Z lies in an interval of length ε, so by Hoeffding's lemma ln E e^((α−1)Z) is at
    most (α − 1) E Z + (α − 1)² ε²/8, and E Z <= ε²/8 because E e^(−Z) = 1.
    """
    pure = rho_of_pure(epsilon)
    return min(epsilon * epsilon / 8 * (1 + 1e-15), pure)


def _inner(delta: float, approximate: float) -> float:
    """Return δ minus the failure probability ξ, for the conversion."""
    if delta == 0:
        raise InvalidValue("delta must be > 0: zCDP cannot give pure differential privacy unless rho is 0")
    left = validate.probability(delta=delta) - validate.delta(approximate=approximate)
    if left <= 0:
        raise InvalidValue(f"delta must be above approximate={approximate!r}, got {delta!r}")
    return left if approximate == 0 else math.nextafter(left, 0.0)


def epsilon(rho: float, delta: float, approximate: float = 0.0) -> float:
    """Return the smallest ε that Proposition 12 gives ρ-zCDP at this δ, rounded up.

    ε = inf over α of ρα + (ln(1/δ) − ln α)/(α − 1) + ln(1 − 1/α). A mechanism that is only
    ξ-approximately ρ-zCDP (``approximate`` = ξ) is (ε, ξ + δ')-DP (Bun & Steinke 2016, Section 8).
    """
    if validate.non_negative(rho=rho) == 0 and validate.delta(delta=delta) >= approximate:
        validate.delta(approximate=approximate)
        return 0.0
    log_inverse = -math.log(_inner(delta, approximate))
    centre, width = (math.log(log_inverse) - math.log(rho)) / 2, 9.0
    best = math.inf
    with np.errstate(over="ignore", divide="ignore"):
        for _ in range(7):
            offsets = np.exp(np.clip(np.linspace(centre - width, centre + width, 65), -200.0, 200.0))
            rest = (log_inverse - np.log1p(offsets)) / offsets - np.log1p(1 / offsets)
            size = rho * (1 + offsets) + np.abs(rest) + log_inverse / offsets + 1 / offsets
            values = rho * (1 + offsets) + rest + 1e-15 * size
            chosen = int(np.argmin(values))
            best = min(best, float(values[chosen]))
            centre, width = float(np.log(offsets[chosen])), width / 16
    return max(0.0, best)


def delta(rho: float, epsilon: float, approximate: float = 0.0) -> float:
    """Return the smallest δ that Proposition 12 gives ρ-zCDP at this ε, rounded up; at most 1."""
    rho, epsilon = validate.non_negative(rho=rho), validate.non_negative(epsilon=epsilon)
    approximate = validate.delta(approximate=approximate)
    if rho == 0:
        return approximate
    return min(1.0, max(math.exp(_log_delta(rho, epsilon)), 5e-324) + approximate)


def _log_delta(rho: float, epsilon: float) -> float:
    """Return inf over α of (α − 1)(αρ − ε) + α ln(1 − 1/α) − ln(α − 1), by bisection on its slope."""
    low, high = -50.0, math.log(epsilon / rho + 1 / math.sqrt(rho) + 4) + 1  # of ln(α − 1)
    for _ in range(60):
        middle = (low + high) / 2
        gap = math.exp(min(middle, 690.0))
        slope = (2 * gap + 1) * rho - epsilon - math.log1p(1 / gap)
        low, high = (middle, high) if slope < 0 else (low, middle)
    gap = math.exp(min(high, 690.0))
    order, last = 1 + gap, (1 + gap) * math.log1p(1 / gap)
    value = gap * (order * rho - epsilon) - last - math.log(gap)
    size = gap * (order * rho + epsilon) + last + abs(math.log(gap))
    if not math.isfinite(size):  # numbers near the largest: at order 2, δ <= e^(2ρ − ε)
        return -math.inf if rho < epsilon / 8 else 0.0
    return min(0.0, value + 4e-16 * size)


def rho(epsilon: float, delta: float) -> float:
    """Return (√(ln 1/δ + ε) − √(ln 1/δ))², for ρ + 2√(ρ ln 1/δ) = ε: Bun & Steinke 2016, Prop. 1.3."""
    epsilon, log_inverse = validate.non_negative(epsilon=epsilon), -math.log(_inner(delta, 0.0))
    root = epsilon / (math.sqrt(log_inverse + epsilon) + math.sqrt(log_inverse))
    return root * root * (1 - 1e-15)


def rho_tight(epsilon: float, delta: float) -> float:
    """Return the largest ρ whose :func:`delta` at this ε stays within δ, rounded down by `tolerance.MARGIN`.

    It is at least :func:`rho`, up to that margin.
    """
    _inner(delta, 0.0)
    return inner(_largest_rho(inner(validate.positive(epsilon=epsilon)), inner(delta) or delta))


@lru_cache(maxsize=1024)  # a budget and its parts need the same few values
def _largest_rho(epsilon: float, delta: float) -> float:
    safe, goal = rho(epsilon, delta), math.log(delta)
    unsafe = 2 * safe
    if unsafe == 0:
        return 0.0
    while unsafe < 1e300 and _log_delta(unsafe, epsilon) <= goal:
        safe, unsafe = unsafe, 4 * unsafe
    if unsafe >= 1e300:
        return safe
    if _log_delta(safe, epsilon) > goal:
        return safe
    return safe_root(lambda value: _log_delta(value, epsilon) - goal, safe, unsafe)
