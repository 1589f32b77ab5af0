"""zCDP: its sources against Rényi divergences, its conversions against a fine search over orders."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian, zcdp
from farthing.errors import InvalidValue


def searched_epsilon(rho, delta):
    a = 1 + np.exp(np.linspace(-25, 25, 2_000_001))
    return float(np.min(rho * a + (math.log(1 / delta) - np.log(a)) / (a - 1) + np.log1p(-1 / a)))


@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-15, 1e-5, 0.01, 0.5])
def test_epsilon_is_the_infimum(rho, delta):
    expected = max(0.0, searched_epsilon(rho, delta))
    assert zcdp.epsilon(rho, delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(st.floats(1e-8, 1e3), st.floats(1e-300, 0.5))
def test_conversions_agree(rho, delta):
    epsilon = zcdp.epsilon(rho, delta)
    closed = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert 0 <= epsilon <= closed * (1 + 1e-12)
    assert epsilon >= gaussian.epsilon(math.sqrt(2 * rho), delta) * (1 - 1e-9)
    assert 0 < zcdp.delta(rho, epsilon) <= delta * (1 + 1e-9)
    assert zcdp.epsilon(2 * rho, delta) >= epsilon
    assert zcdp.delta(rho, 1.5 * epsilon) <= zcdp.delta(rho, epsilon)


@settings(deadline=None)
@given(st.floats(1e-6, 1e3), st.floats(1e-300, 0.5))
def test_budgets_fit(epsilon, delta):
    closed, tight = zcdp.rho(epsilon, delta), zcdp.rho_tight(epsilon, delta)
    assert 0 < closed <= tight
    assert closed + 2 * math.sqrt(closed * math.log(1 / delta)) <= epsilon * (1 + 1e-14)
    assert zcdp.delta(tight, epsilon) <= delta * (1 + 1e-12)
    assert zcdp.delta(tight * (1 + 1e-8), epsilon) >= delta * (1 - 1e-6)
    assert zcdp.epsilon(tight, delta) == pytest.approx(epsilon, rel=1e-6, abs=1e-9)  # inward by the margin
    assert zcdp.epsilon(tight, delta) <= epsilon * (1 + 1e-12)
    assert tight <= gaussian.mu(epsilon, delta) ** 2 / 2 * (1 + 1e-9)


def test_known_digits():
    assert zcdp.rho(1.0, 1e-5) == pytest.approx(
        (math.sqrt(math.log(1e5) + 1) - math.sqrt(math.log(1e5))) ** 2
    )
    assert zcdp.rho(1.0, 1e-5) == pytest.approx(0.0208199, abs=5e-8)


def test_approximate_zcdp():
    assert zcdp.epsilon(0.1, 1e-5, approximate=4e-6) == pytest.approx(zcdp.epsilon(0.1, 6e-6), rel=1e-9)
    assert zcdp.delta(0.1, 2.0, approximate=1e-3) == pytest.approx(zcdp.delta(0.1, 2.0) + 1e-3)
    with pytest.raises(InvalidValue, match="above approximate"):
        zcdp.epsilon(0.1, 1e-6, approximate=1e-6)


def test_pure_privacy_is_refused_in_words():
    for call in (lambda: zcdp.epsilon(0.1, 0.0), lambda: zcdp.rho(1.0, 0), lambda: zcdp.rho_tight(1.0, 0)):
        with pytest.raises(InvalidValue, match="zCDP cannot give pure"):
            call()
    assert zcdp.epsilon(0.0, 0.0) == 0
    assert zcdp.delta(0.0, 0.0) == 0
    with pytest.raises(InvalidValue):
        zcdp.epsilon(0.0, 1e-6, approximate=1e-5)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 5.0, 50.0])
def test_sources_bound_every_order(epsilon):
    orders = np.array([1.0001, 1.01, 1.5, 2, 5, 20, 100])
    with mpmath.workdps(60):
        p = mpmath.exp(epsilon) / (1 + mpmath.exp(epsilon))
        exact = [
            mpmath.log(
                p ** mpmath.mpf(a) * (1 - p) ** (1 - mpmath.mpf(a))
                + (1 - p) ** mpmath.mpf(a) * p ** (1 - mpmath.mpf(a))
            )
            / (mpmath.mpf(a) - 1)
            for a in orders
        ]
    for order, divergence in zip(orders, exact, strict=True):
        assert divergence <= zcdp.rho_of_pure(epsilon) * order
    assert zcdp.rho_of_pure(epsilon) <= min(epsilon, epsilon**2 / 2) * (1 + 1e-14)
    assert exact[0] >= zcdp.rho_of_pure(epsilon) * 0.999  # tight as the order falls to 1
    assert zcdp.rho_of_bounded_range(epsilon) <= min(epsilon**2 / 8, epsilon) * (1 + 1e-14)


def test_gaussian_source_and_extremes():
    assert zcdp.rho_of_gaussian(2.0) == pytest.approx(0.125)
    assert zcdp.epsilon(1e-300, 1e-300) >= 0
    assert math.isfinite(zcdp.epsilon(1e12, 1e-300))
    assert zcdp.delta(1e-12, 1e6) == 5e-324
    assert zcdp.delta(1e12, 0.0) == 1.0
    assert zcdp.epsilon(1e-3, 1 - 1e-9) == 0


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, "1", None])
def test_bad_values(bad):
    for call in (
        lambda: zcdp.rho_of_gaussian(bad),
        lambda: zcdp.rho_of_pure(bad),
        lambda: zcdp.rho_of_bounded_range(bad),
        lambda: zcdp.epsilon(bad, 1e-5),
        lambda: zcdp.epsilon(0.1, bad),
        lambda: zcdp.epsilon(0.1, 1e-5, approximate=bad),
        lambda: zcdp.delta(0.1, bad),
        lambda: zcdp.rho(bad, 1e-5),
        lambda: zcdp.rho_tight(1.0, bad),
    ):
        with pytest.raises(InvalidValue):
            call()
