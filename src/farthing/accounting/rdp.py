"""Compute Rényi differential privacy: the divergence D_α as a function of the order α > 1.

Mironov 2017. Curves add up under adaptive composition, order by order, against an observer who sees every
answer and not the draws. ``noise`` is relative to the sensitivity under the caller's adjacency; sampled
curves state the adjacency that they are proven for. Curves are rounded up.

>>> curve = poisson_gaussian(4.0, 0.01, ORDERS)
>>> value, order = epsilon(10_000 * curve, ORDERS, 1e-5)
>>> round(value, 4)
1.0355
"""

import math
from typing import Any

import numpy as np
from scipy.special import gammaln

from farthing import validate
from farthing.accounting.gaussian import Array
from farthing.accounting.moments import log_moment, log_sum, points
from farthing.accounting.sampling import log_binomial
from farthing.errors import InvalidValue

_LARGEST_SUM = 1024  # orders above it are integrated, or bounded by the unsampled mechanism
_UP = 1 + 1e-12


def _grid() -> Array:
    low = 1 + np.geomspace(0.001, 0.1, 20)
    high = np.round(np.geomspace(64, 1e5, 33))
    return np.unique(np.concatenate([low, np.arange(12, 110) / 10, np.arange(11, 64), high]))


ORDERS = _grid()
"""Orders from 1.001 to 100,000: enough for ε from about 1e-3 to 1000."""
ORDERS.flags.writeable = False

WHOLE_ORDERS = np.array([a for a in ORDERS if a == round(a) and a <= _LARGEST_SUM])
"""The integer orders among :data:`ORDERS` up to 1024, for curves proven for integer orders only."""
WHOLE_ORDERS.flags.writeable = False


def _orders(orders: Any) -> Array:
    try:
        array = np.array(orders, dtype=np.float64, ndmin=1)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != 1 or not array.size or not (np.isfinite(array).all() and (array > 1).all()):
        raise InvalidValue(f"orders must be a vector of finite numbers > 1, got {orders!r}")
    return array


def _log_expm1(y: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(y > 30, y + np.log1p(-np.exp(-y)), np.log(np.expm1(np.minimum(y, 30.0))))


def gaussian(noise: float, orders: Array) -> Array:
    """Return α/(2 noise²): Mironov 2017, Proposition 7."""
    noise = validate.positive(noise=noise)
    with np.errstate(over="ignore"):
        return _orders(orders) / 2 / noise / noise * (1 + 1e-15)


def zcdp(rho: float, orders: Array) -> Array:
    """Return ρα: Bun & Steinke 2016, Definition 1.1."""
    with np.errstate(over="ignore"):
        return validate.non_negative(rho=rho) * _orders(orders) * (1 + 1e-15)


def pure(epsilon: float, orders: Array) -> Array:
    """Return the curve of the worst ε-DP mechanism, randomised response (Mironov 2017, Proposition 5).

    It is ln(1 + 2 sinh(αε/2) sinh((α−1)ε/2)/cosh(ε/2))/(α − 1) (worst: Kairouz et al. 2015).
    """
    epsilon, a = validate.non_negative(epsilon=epsilon), _orders(orders)
    if epsilon == 0:
        return np.zeros_like(a)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        x, y, z = a * epsilon / 2, (a - 1) * epsilon / 2, epsilon / 2
        log_sinhs = _log_expm1(2 * x) - x + _log_expm1(2 * y) - y  # each less ln 2
        log_cosh = z + math.log1p(math.exp(-epsilon))
        curve = np.logaddexp(0.0, log_sinhs - log_cosh) / (a - 1)
    return np.where(np.isfinite(curve), np.minimum(curve * _UP, epsilon), epsilon)


def laplace(noise: float, orders: Array) -> Array:
    """Return ln(α/(2α−1) e^((α−1)t) + (α−1)/(2α−1) e^(−αt))/(α−1), t = 1/noise: Mironov 2017, Prop. 6."""
    a, t = _orders(orders), 1 / validate.positive(noise=noise)
    up, down = (a - 1) * t, -a * t
    with np.errstate(over="ignore", invalid="ignore"):
        small = (a * _second_order(up) + (a - 1) * _second_order(down)) / (2 * a - 1)
        large = np.logaddexp(np.log(a) + up, np.log(a - 1) + down) - np.log(2 * a - 1)
        curve = np.where(up < 1, np.log1p(small), large) / (a - 1)
    return np.where(np.isfinite(curve), np.minimum(curve * _UP, t * (1 + 1e-15)), t * (1 + 1e-15))


def _second_order(x: Array) -> Array:
    """Return e^x − 1 − x."""
    near, series = np.clip(x, -0.1, 0.1), np.ones_like(x)
    for n in range(12, 2, -1):
        series = 1 + near / n * series
    return np.where(np.abs(x) < 0.1, near * near / 2 * series, np.expm1(x) - x)


def poisson_gaussian(noise: float, rate: float, orders: Array) -> Array:
    """Return the curve of a Gaussian on Poisson samples under add-remove, for integer and fractional orders.

    Mironov, Talwar & Zhang 2019, "Rényi differential privacy of the sampled Gaussian mechanism": D_α(μ ‖ μ₀)
    bounds both directions. Integer orders up to 1024 use their binomial sum without its first terms, Σ_{i>=2}
    C(α,i) q^i (1−q)^(α−i) (e^{i(i−1)/2σ²} − 1), all positive; others use integration. If that fails (α/σ >
    4000, at orders that are never the best), the unsampled curve is used.
    """
    unsampled, a = gaussian(noise, orders), _orders(orders)
    if validate.rate(rate=rate) == 1 or noise < 1e-100:
        return unsampled
    summed = (a == np.round(a)) & (a <= _LARGEST_SUM)
    log_total = np.empty_like(a)
    if summed.any():
        k = a[summed]
        i, which, starts = points(np.full_like(k, 2.0), k, np.ones_like(k))
        growth = _log_expm1(i * (i - 1) / 2 / noise / noise)
        log_total[summed] = np.logaddexp(0.0, log_sum(log_binomial(i, k[which], rate) + growth, starts))
    if not summed.all():
        log_total[~summed] = log_moment(noise, rate, np.maximum(a[~summed], 1.0001))
        low = ~summed & (a < 1.0001)  # D_α grows with α: the value at 1.0001 is a bound
        log_total[low] *= (a[low] - 1) / 0.0001
    return np.minimum(np.maximum(log_total / (a - 1) * _UP, 5e-324), unsampled)


def _log_central_moments(noise: float, largest: int) -> Array:
    """Return ln B(l), B(l) = Σ_i (−1)^i C(l,i) e^{i(i−1)/2σ²}, at even l = 2, 4, … up to ``largest``.

    B(l) = E[(L − 1)^l] with L the likelihood ratio of N(1, σ²) to N(0, σ²): integrated, since the sum
    cancels. Once L at the outermost bump exceeds e^45 l, its last term is B(l) to double precision.
    """
    even = np.arange(2.0, largest + 1, 2)
    with np.errstate(over="ignore"):
        result = even * (even - 1) / 2 / noise / noise
    if (near := (even - 0.5) / noise / noise <= 45 + np.log(even)).any():
        l_, reach = even[near], np.sqrt(even[near]) + 12
        x, which, starts = points(-reach, l_ / noise + reach, np.full_like(l_, 0.25))
        with np.errstate(divide="ignore", over="ignore"):
            e = x / noise - 0.5 / noise / noise
            log_gap = np.where(e > 30, e, np.log(np.abs(np.expm1(np.minimum(e, 30.0)))))
        terms = l_[which] * log_gap - x * x / 2
        result[near] = log_sum(terms, starts) + math.log(0.25 / math.sqrt(2 * math.pi))
    return result


def _without_replacement(noise: float, rate: float, orders: Array, as_adadp: bool) -> Array:
    a, noise, rate = _orders(orders), validate.positive(noise=noise), validate.rate(rate=rate)
    if not ((a == np.round(a)).all() and (a <= _LARGEST_SUM).all()):
        raise InvalidValue(
            f"orders must be whole numbers from 2 to {_LARGEST_SUM}, as in WHOLE_ORDERS; got {orders!r}"
        )
    if noise < 1e-100:
        return np.full_like(a, math.inf)
    central = np.concatenate([[0.0, 0.0], np.repeat(_log_central_moments(noise, int(a.max()) + 1), 2)])
    j, which, starts = points(np.full_like(a, 2.0), a, np.ones_like(a))
    lower, upper = 2 * np.floor(j / 2), 2 * np.ceil(j / 2)
    plain = math.log(2) + j * (j - 1) / 2 / noise / noise
    halves = 0.5 * (central[lower.astype(int)] + central[upper.astype(int)])
    first = np.minimum(math.log(4) + _log_expm1(np.array(1 / noise / noise)), plain)
    later = math.log(4) + halves
    growth = np.where(j == 2, first, later if as_adadp else np.minimum(plain, later))
    choose = gammaln(a[which] + 1) - gammaln(j + 1) - gammaln(a[which] - j + 1)
    return np.logaddexp(0.0, log_sum(choose + j * math.log(rate) + growth, starts)) / (a - 1) * (1 + 1e-10)


def without_replacement_gaussian(noise: float, rate: float, orders: Array) -> Array:
    """Return the curve of a Gaussian on m of n records without replacement, q = m/n, under replace-one.

    Wang, Balle & Kasiviswanathan 2019, "Subsampled Rényi differential privacy and analytical moments
    accountant", Theorem 9: term by term the smaller of its plain and its B(l) form, capped at the unsampled
    mechanism. Orders are integers up to 1024. ``noise`` is relative to the replace-one sensitivity (2C for a
    sum).
    """
    return np.minimum(_without_replacement(noise, rate, orders, False), gaussian(noise, orders))


def adadp_theorem_1(noise: float, rate: float, orders: Array) -> Array:
    """Return one step's Rényi cost as printed in AdaDP's Theorem 1; integer orders to 1024.

    Xu et al. 2020, "An adaptive and fast convergent approach to differentially private deep learning",
    equation (7). It holds in two settings. (1) m of n records without replacement under replace-one, with
    ``noise`` relative to that sensitivity, by Wang, Balle & Kasiviswanathan 2019, Thm. 9. (2) Poisson samples
    under add-remove and zero-out, with ``noise`` relative to the clipping norm, as in the paper: there the
    exact moment is E[(1 + q(L - 1))^α] = 1 + Σ_j C(α, j) q^j E[(L - 1)^j], with L the likelihood ratio of
    N(1, σ²) to N(0, σ²), whose second term is e^(1/σ²) - 1 and whose later ones are at most √(B(2⌈j/2⌉)
    B(2⌊j/2⌋)) by Cauchy-Schwarz; the theorem has four times these. The other direction costs less (Mironov,
    Talwar & Zhang 2019). So it is looser than `poisson_gaussian`, and both are looser than
    `farthing.accounting.pld`.
    """
    return _without_replacement(noise, rate, orders, True)


def _curve(rdp: Any, orders: Any) -> tuple[Array, Array]:
    a = _orders(orders)
    try:
        curve = np.array(rdp, dtype=np.float64, ndmin=1)
    except (TypeError, ValueError):
        curve = np.empty(0)
    if curve.shape != a.shape or np.isnan(curve).any() or (curve < 0).any():
        raise InvalidValue(f"rdp must hold one number >= 0 for each of the {a.size} orders, got {rdp!r}")
    return curve, a


def epsilon(rdp: Array, orders: Array, delta: float) -> tuple[float, float]:
    """Return ε and its order: min over α of D + ln(1 − 1/α) − (ln δ + ln α)/(α − 1), rounded up, at least 0.

    Canonne, Kamath & Steinke 2020, Proposition 12. If a D is so small that δ covers the total variation
    distance, √(1 − e^(−D)) <= δ (Bretagnolle & Huber 1979), ε is 0.
    """
    (curve, a), delta = _curve(rdp, orders), validate.probability(delta=delta)
    rest = np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    values = curve + rest + 1e-15 * (curve + np.abs(rest) + 1 / (a - 1))
    values = np.where(-np.expm1(-curve) * (1 + 1e-15) <= delta * delta, 0.0, np.maximum(values, 0.0))
    best = int(np.argmin(values))
    return float(values[best]), float(a[best])


def classic_epsilon(rdp: Array, orders: Array, delta: float) -> tuple[float, float]:
    """Return ε and its order: min over α of D + ln(1/δ)/(α − 1): Mironov 2017, Proposition 3."""
    (curve, a), delta = _curve(rdp, orders), validate.probability(delta=delta)
    values = (curve - math.log(delta) / (a - 1)) * (1 + 1e-15)
    best = int(np.argmin(values))
    return float(values[best]), float(a[best])


def classic_delta(rdp: Array, orders: Array, epsilon: float) -> float:
    """Return δ at this ε, min over α of e^((α − 1)(D − ε)), rounded up; at most 1: Mironov 2017, Prop. 3."""
    (curve, a), epsilon = _curve(rdp, orders), validate.non_negative(epsilon=epsilon)
    with np.errstate(over="ignore"):
        logs = (a - 1) * (curve - epsilon + 1e-15 * (curve + epsilon))
    return math.exp(min(0.0, max(float(np.min(logs)), -744.0)))


def delta(rdp: Array, orders: Array, epsilon: float) -> float:
    """Return the δ at this ε by the same bounds as :func:`epsilon`, rounded up; at most 1."""
    (curve, a), epsilon = _curve(rdp, orders), validate.non_negative(epsilon=epsilon)
    if (curve == 0).any():
        return 0.0
    finite = np.isfinite(curve)
    curve, a = np.where(finite, curve, 0.0), np.where(finite, a, 1.5)
    size = 1e-15 * (a - 1) * (curve + epsilon + 1)
    with np.errstate(over="ignore"):
        logs = (a - 1) * (curve - epsilon + np.log1p(-1 / a)) - np.log(a) + size
        logs = np.minimum(logs, 0.5 * np.log(-np.expm1(-np.where(finite, curve, 1.0)) * (1 + 1e-15)))
    return math.exp(min(0.0, max(float(np.min(np.where(finite, logs, 0.0))), -744.0)))
