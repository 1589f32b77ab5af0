"""Compute the exact privacy curve of the Gaussian mechanism, and its noise.

With μ = sensitivity / standard deviation the mechanism is (ε, δ)-DP if and only if

    δ >= Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)

(Balle & Wang 2018, "Improving the Gaussian mechanism for differential privacy", Theorem 8). It holds under
the adjacency of the sensitivity, against an observer who sees the answers.

With a = ε/μ − μ/2, b = ε/μ + μ/2 and Mills' ratio R(x) = Φ(−x)/φ(x) the right side is
φ(a) (R(a) − R(b)), because e^ε φ(b) = φ(a): no overflow, and no cancellation once R(a) − R(b) is
integrated from −R'(x) = 1 − x R(x). Every δ and ε is rounded up. A μ or a noise for a budget is rounded
inward by the margin of `accounting.tolerance`, so that it fits that budget on every processor.

>>> round(noise(1.0, 1e-5), 6)
3.730632
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr

from farthing import validate
from farthing.accounting.tolerance import inner
from farthing.errors import InvalidValue

Array = npt.NDArray[np.float64]

_SMALLEST = 5e-324  # a positive δ is never reported as 0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def safe_root(excess: Callable[[float], float], safe: float, unsafe: float) -> float:
    """Return the crossing of a monotone ``excess`` between the two points, on the side where it is <= 0.

    Regula falsi (Illinois), with a bisection every fourth step for guaranteed termination.
    """
    at_safe, at_unsafe, last = excess(safe), excess(unsafe), 0
    for step in range(300):
        if abs(unsafe - safe) <= 2e-15 * abs(safe):
            break
        middle = math.nan
        if step % 4 < 3 and math.isfinite(at_safe) and math.isfinite(at_unsafe) and at_unsafe > at_safe:
            middle = safe - at_safe * ((unsafe - safe) / (at_unsafe - at_safe))
        if not min(safe, unsafe) < middle < max(safe, unsafe):
            wide = min(safe, unsafe) > 0 and not 0.25 < safe / unsafe < 4
            middle = math.sqrt(safe) * math.sqrt(unsafe) if wide else safe + (unsafe - safe) / 2
        if middle in (safe, unsafe):
            break
        value = excess(middle)
        if value <= 0:
            safe, at_safe, at_unsafe = middle, value, at_unsafe / (2 if last < 0 else 1)
        else:
            unsafe, at_unsafe, at_safe = middle, value, at_safe / (2 if last > 0 else 1)
        last = -1 if value <= 0 else 1
    return safe


def _mills(x: Array) -> Array:
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2)))


def _mills_slope(x: Array) -> Array:
    """Return 1 − x R(x) = −R'(x) > 0, by its asymptotic series from 20 on."""
    inverse = 1 / np.square(np.maximum(x, 20.0))
    series = np.ones_like(x)
    for k in range(10, 0, -1):
        series = 1 - (2 * k + 1) * inverse * series
    return np.where(x < 20, 1 - x * _mills(np.minimum(x, 20.0)), inverse * series)


def _log_delta(mu: Array, epsilon: Array) -> Array:
    with np.errstate(all="ignore"):
        centre = epsilon / mu
        a, b = centre - mu / 2, centre + mu / 2
        log_phi = -np.square(a) / 2 - _LOG_SQRT_2PI
        narrow, far = mu <= 1, a > 1e5
        log_gap = np.log(mu) - np.log(a) - np.log(b)  # an upper bound, tight where a is large
        if (near := narrow & ~far).any():
            nodes = centre[near][..., None] + mu[near][..., None] / 2 * _NODES
            log_gap[near] = np.log(mu[near] / 2 * (_mills_slope(nodes) @ _WEIGHTS))
        if (wide := ~narrow & (a > 0) & ~far).any():
            log_gap[wide] = np.log(_mills(a[wide]) - _mills(b[wide]))
        result = log_phi + log_gap
        if (large := ~narrow & (a <= 0)).any():
            result[large] = np.log1p(-(ndtr(a[large]) + np.exp(log_phi[large]) * _mills(b[large])))
        result += 1e-13 + 1e-15 * np.maximum(a, 0) * b  # covers rounding
        result = np.where((mu == 0) | (a > 1e150), -math.inf, result)
    return np.minimum(result, 0.0)


def _non_negative(**value: Any) -> Array:
    ((name, given),) = value.items()
    if np.ndim(given) == 0:
        return np.asarray(validate.non_negative(**{name: given}))
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.array([math.nan])
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidValue(f"{name} must hold finite numbers >= 0, got {given!r}")
    return array


@overload
def log_delta(mu: float, epsilon: float) -> float: ...
@overload
def log_delta(mu: Array, epsilon: Array | float) -> Array: ...
@overload
def log_delta(mu: float, epsilon: Array) -> Array: ...
def log_delta(mu: Array | float, epsilon: Array | float) -> Array | float:
    """Return ln of :func:`delta`, elementwise; −inf for μ = 0 or where ln δ is below −1e299."""
    pair = np.broadcast_arrays(_non_negative(mu=mu), _non_negative(epsilon=epsilon))
    result = _log_delta(*(np.array(x, dtype=np.float64, ndmin=1) for x in pair))
    return float(result[0]) if pair[0].ndim == 0 else result


@overload
def delta(mu: float, epsilon: float) -> float: ...
@overload
def delta(mu: Array, epsilon: Array | float) -> Array: ...
@overload
def delta(mu: float, epsilon: Array) -> Array: ...
def delta(mu: Array | float, epsilon: Array | float) -> Array | float:
    """Return the smallest δ at this ε (Balle & Wang 2018, Theorem 8), elementwise, rounded up."""
    pair = np.broadcast_arrays(_non_negative(mu=mu), _non_negative(epsilon=epsilon))
    logs = _log_delta(*(np.array(x, dtype=np.float64, ndmin=1) for x in pair))
    result = np.maximum(np.exp(logs), np.where(pair[0] > 0, _SMALLEST, 0.0))
    return float(result[0]) if pair[0].ndim == 0 else result


def _log(target: float) -> float:
    if target == 0:
        raise InvalidValue("delta must be > 0: Gaussian noise cannot give pure differential privacy")
    return math.log(validate.probability(delta=target))


def epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε at this δ, rounded up; 0 if δ alone suffices."""
    mu, goal = validate.non_negative(mu=mu), _log(delta)

    def excess(value: float) -> float:
        return log_delta(mu, value) - goal

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    upper = mu * (mu / 2 + 1e-6 + 1.000001 * math.sqrt(-2 * goal))  # δ <= exp(−a²/2) for a >= 0
    return safe_root(excess, upper, 0.0) if math.isfinite(upper) else math.inf


def mu(epsilon: float, delta: float) -> float:
    """Return the largest μ that is (ε, δ)-DP, rounded down by the margin."""
    return inner(largest_mu(inner(validate.non_negative(epsilon=epsilon)), _inner_delta(delta)))


def _inner_delta(delta: float) -> float:
    _log(delta)
    return inner(float(delta)) or float(delta)


def largest_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ that is (ε, δ)-DP, rounded down by the error bound of the arithmetic."""
    return _largest_mu(validate.non_negative(epsilon=epsilon), _log(delta), float(delta))


@lru_cache(maxsize=1024)  # a budget and its parts need the same few values
def _largest_mu(epsilon: float, goal: float, delta: float) -> float:
    safe = 0.999 * math.sqrt(2) * epsilon / (math.sqrt(epsilon - goal) + math.sqrt(-goal))
    safe = max(safe, 2.5 * delta)  # δ_μ(ε) <= δ_μ(0) <= μ/√(2π)
    unsafe = 2 * safe
    while log_delta(unsafe, epsilon) <= goal:
        safe, unsafe = unsafe, 4 * unsafe
    return safe_root(lambda value: log_delta(value, epsilon) - goal, safe, unsafe)


def noise(epsilon: float, delta: float) -> float:
    """Return the least deviation / sensitivity that is (ε, δ)-DP (Balle & Wang 2018, Algorithm 1)."""
    return math.nextafter(1 / mu(epsilon, delta), math.inf)


def classic_noise(epsilon: float, delta: float) -> float:
    """Return √(2 ln(1.25/δ))/ε (Dwork & Roth 2014, Theorem A.1), proven for ε < 1 only."""
    if validate.positive(epsilon=epsilon) >= 1:
        raise InvalidValue(
            f"epsilon must be < 1 for the classic Gaussian calibration, got {epsilon!r}: use noise(), "
            "which is exact at every epsilon"
        )
    validate.probability(delta=delta)
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon * (1 + 1e-15)


def compose(mus: Iterable[float]) -> float:
    """Return √Σμ², the exact composition of Gaussian mechanisms (Dong, Roth & Su 2022, Cor. 3.3).

    It does not apply to sampled mechanisms. A Gaussian on a random sample is not Gaussian-DP for any useful
    μ, and the central-limit formula μ = q√(T(e^{1/σ²} − 1)) is a limit, not a bound: it may be too small.
    """
    return math.hypot(*(validate.non_negative(mu=value) for value in mus)) * (1 + 1e-15)
