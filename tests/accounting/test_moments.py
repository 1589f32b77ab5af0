"""The moments accountant: published digits, binomial sums, high-precision integrals."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import moments
from farthing.errors import InvalidValue


def test_published_setting():
    epsilon, moment = moments.epsilon(4.0, 0.01, 10_000, 1e-5)
    assert epsilon == pytest.approx(1.2585747, abs=5e-8)
    assert moment == 19  # Rényi order 20
    assert moments.delta(4.0, 0.01, 10_000, epsilon) == pytest.approx(1e-5, rel=1e-9)


def binomial_sum(noise, rate, power):
    with mpmath.workdps(50):
        q = mpmath.mpf(rate)
        terms = (
            mpmath.binomial(power, i)
            * q**i
            * (1 - q) ** (power - i)
            * mpmath.exp(mpmath.mpf(i * (i - 1)) / 2 / noise**2)
            for i in range(power + 1)
        )
        return float(mpmath.log(mpmath.fsum(terms)))


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 4.0, 50.0, 1e4])
@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.01, 0.5, 0.999])
def test_whole_powers_are_the_binomial_sum(noise, rate):
    powers = np.array([2.0, 3.0, 7.0, 20.0, 33.0])
    exact = [binomial_sum(noise, rate, int(power)) for power in powers]
    found = moments.log_moment(noise, rate, powers)
    assert list(found) == pytest.approx(exact, rel=5e-12, abs=0)
    assert (found >= exact).all()


def integral(noise, rate, power):
    with mpmath.workdps(30):
        s, q, a = mpmath.mpf(noise), mpmath.mpf(rate), mpmath.mpf(power)

        def gap(x):
            u = q * mpmath.expm1(x / s - 1 / (2 * s * s))
            return mpmath.npdf(x) * ((1 + u) ** a - 1 - a * u)

        low = min(a, 0) / s - 12
        high = max(a, 1) / s + 12
        cuts = list(mpmath.linspace(low, high, 2 + int((high - low) / 3)))
        return float(mpmath.log1p(mpmath.quad(gap, cuts)))


@pytest.mark.parametrize("noise", [0.4, 1.0, 6.0])
@pytest.mark.parametrize("rate", [1e-6, 0.02, 0.6])
@pytest.mark.parametrize("power", [-4.0, -1.0, 1.001, 1.7, 4.3])
def test_other_powers_are_the_integral(noise, rate, power):
    exact = integral(noise, rate, power)
    found = float(moments.log_moment(noise, rate, np.array([power]))[0])
    assert exact <= found <= exact * (1 + 1e-11)


def test_the_second_expectation_is_the_larger():
    for noise, rate in [(0.5, 0.01), (1.0, 0.3), (4.0, 0.01), (10.0, 0.9)]:
        orders = np.arange(1.0, 33)
        first, second = (moments.log_moment(noise, rate, power) for power in (-orders, orders + 1))
        assert (first <= second * (1 + 1e-9)).all()
        assert list(moments.log_moments(noise, rate)) == pytest.approx(list(second))


@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rate", [1e-9, 0.01, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("steps", [1, 10**12])
def test_extremes_finish(noise, rate, steps):
    for delta in (1e-300, 0.5):
        epsilon, moment = moments.epsilon(noise, rate, steps, delta)
        assert 0 < epsilon < math.inf
        assert 1 <= moment <= 32
        assert 0 < moments.delta(noise, rate, steps, epsilon * (1 + 1e-9)) <= delta * (1 + 1e-9)
    assert 0 < moments.delta(noise, rate, steps, 0.0) <= 1


@settings(max_examples=50, deadline=None)
@given(st.floats(0.3, 1e4), st.floats(1e-6, 1), st.integers(1, 10**9), st.floats(1e-200, 0.5))
def test_laws(noise, rate, steps, delta):
    epsilon, _ = moments.epsilon(noise, rate, steps, delta)
    assert moments.epsilon(1.5 * noise, rate, steps, delta)[0] <= epsilon * (1 + 1e-9)
    assert moments.epsilon(noise, rate / 2, steps, delta)[0] <= epsilon * (1 + 1e-9)
    assert moments.epsilon(noise, rate, 2 * steps, delta)[0] >= epsilon
    assert moments.epsilon(noise, rate, steps, delta / 2)[0] >= epsilon
    assert moments.epsilon(noise, rate, steps, delta, moments=64)[0] <= epsilon


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, "1", None, 0])
def test_bad_values(bad):
    for call in (
        lambda: moments.log_moments(bad, 0.1),
        lambda: moments.log_moments(1.0, bad),
        lambda: moments.log_moments(1.0, 0.1, moments=bad),
        lambda: moments.epsilon(1.0, 0.1, bad, 1e-5),
        lambda: moments.epsilon(1.0, 0.1, 1, bad),
        lambda: moments.delta(1.0, 0.1, 1, -1.0 if bad == 0 else bad),
    ):
        with pytest.raises(InvalidValue):
            call()


def test_absurd_noise():
    assert moments.epsilon(1e-320, 0.5, 10, 1e-5)[0] == math.inf
    assert moments.delta(1e-320, 0.5, 10, 1.0) == 1
    assert moments.epsilon(1e300, 1e-300, 10, 0.5)[0] > 0
