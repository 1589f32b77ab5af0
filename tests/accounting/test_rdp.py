"""Rényi curves and conversions: published digits, dp-accounting and high precision as oracles."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian, rdp
from farthing.accounting.accountants import Accountant, EqualSteps
from farthing.errors import InvalidValue

SOME = np.array([1.001, 1.01, 1.3, 2, 2.5, 7, 33, 100.5, 1024, 5000, 1e5])


def test_abadi_setting():
    epsilon, _ = rdp.epsilon(10_000 * rdp.poisson_gaussian(4.0, 0.01, rdp.ORDERS), rdp.ORDERS, 1e-5)
    assert epsilon == pytest.approx(1.0355, abs=5e-5)


def test_adadp_example():
    theorem = rdp.adadp_theorem_1(0.9, 0.01, rdp.WHOLE_ORDERS)
    epsilon, order = rdp.classic_epsilon(1800 * theorem, rdp.WHOLE_ORDERS, 1e-5)
    assert epsilon == pytest.approx(6.9214115, abs=5e-8)
    assert order == 4
    assert rdp.classic_epsilon(490 * theorem, rdp.WHOLE_ORDERS, 1e-5)[0] <= 4
    assert rdp.classic_epsilon(491 * theorem, rdp.WHOLE_ORDERS, 1e-5)[0] > 4
    poisson = rdp.poisson_gaussian(0.9, 0.01, rdp.WHOLE_ORDERS)
    epsilon, order = rdp.classic_epsilon(1800 * poisson, rdp.WHOLE_ORDERS, 1e-5)
    assert epsilon == pytest.approx(4.0152593, abs=5e-8)
    assert order == 6


def printed(noise, rate, steps, delta):
    """Equation (7) of AdaDP's Theorem 1, letter by letter, in 60 digits: the least ε and its order."""
    with mpmath.workdps(60):
        sigma, q = mpmath.mpf(noise), mpmath.mpf(rate)
        e = mpmath.exp(1 / sigma**2)

        def b(n):
            parts = (mpmath.exp(mpmath.mpf((i - 1) * i) / (2 * sigma**2)) for i in range(n + 1))
            return sum((-1) ** i * mpmath.binomial(n, i) * part for i, part in enumerate(parts))

        moments = {n: b(n) for n in range(2, 66, 2)}

        def cost(a):
            later = (
                q**j * mpmath.binomial(a, j) * mpmath.sqrt(moments[2 * -(-j // 2)] * moments[2 * (j // 2)])
                for j in range(3, a + 1)
            )
            inside = 1 + q**2 * mpmath.binomial(a, 2) * min(4 * (e - 1), 2 * e) + 4 * sum(later)
            return (steps * mpmath.log(inside) + mpmath.log(1 / mpmath.mpf(delta))) / (a - 1)

        costs = {a: cost(a) for a in range(2, 65)}
        best = min(costs, key=costs.get)
        return float(costs[best]), best


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [(0.9, 0.01, 1800, 1e-5), (8.0, 0.01, 1000, 1e-5), (4.0, 0.01, 10_000, 1e-5), (3.0, 0.1, 50, 1e-4)],
)
def test_theorem_1_of_adadp_is_an_accountant(noise, rate, steps, delta):
    epsilon, order = printed(noise, rate, steps, delta)
    plan = EqualSteps(noise, rate, steps)
    found = Accountant.ADADP.curve(plan)
    assert found.epsilon(delta) == pytest.approx(epsilon, rel=1e-8)
    assert found.delta(epsilon) == pytest.approx(delta, rel=1e-6)
    orders = np.arange(2.0, 65.0)
    theorem = steps * rdp.adadp_theorem_1(noise, rate, orders)
    assert rdp.classic_epsilon(theorem, orders, delta)[1] == order
    assert found.epsilon(delta) > Accountant.MOMENTS.curve(plan).epsilon(delta)
    assert found.epsilon(delta) > 2 * Accountant.PLD.curve(plan).epsilon(delta)


@pytest.mark.parametrize("noise", [0.5, 0.9, 4.0, 20.0])
@pytest.mark.parametrize("rate", [0.001, 0.01, 0.3, 1.0])
def test_theorem_1_of_adadp_holds_for_poisson_samples(noise, rate):
    """It is never below the exact Rényi divergence, which is dp-accounting's."""
    orders = np.arange(2.0, 65.0)
    exact = oracle._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders)
    assert (rdp.adadp_theorem_1(noise, rate, orders) >= exact * (1 - 1e-9)).all()


@pytest.mark.parametrize("noise", [0.5, 0.9, 4.0, 20.0])
@pytest.mark.parametrize("rate", [0.001, 0.01, 0.3])
def test_poisson_against_dp_accounting(noise, rate):
    orders = np.array([1.1, 1.5, 2, 3.7, 5, 10.9, 11, 40, 64, 256, 1024])
    expected = oracle._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders)
    found, whole = rdp.poisson_gaussian(noise, rate, orders), orders == np.round(orders)
    assert list(found[whole]) == pytest.approx(list(expected[whole]), rel=1e-7, abs=1e-13)
    # At fractional orders dp-accounting adds up a series without its signs: an upper bound.
    assert (found <= expected * (1 + 1e-7) + 1e-13).all()


def test_poisson_epsilon_against_dp_accounting():
    orders = rdp.WHOLE_ORDERS
    accountant = oracle.RdpAccountant(list(orders))
    event = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.3))
    accountant.compose(event, 700)
    curve = 700 * rdp.poisson_gaussian(1.3, 0.02, orders)
    epsilon, order = rdp.epsilon(curve, orders, 1e-6)
    expected, expected_order = accountant.get_epsilon_and_optimal_order(1e-6)
    assert epsilon == pytest.approx(expected, rel=1e-9)
    assert order == expected_order
    assert rdp.delta(curve, orders, 2.0) == pytest.approx(accountant.get_delta(2.0), rel=1e-8)


@pytest.mark.parametrize("rate", [1e-9, 1e-5, 0.2])
def test_tiny_rates_keep_their_digits(rate):
    with mpmath.workdps(60):
        for order in (2, 5, 60):
            q, terms = mpmath.mpf(rate), []
            for i in range(order + 1):
                weight = mpmath.binomial(order, i) * q**i * (1 - q) ** (order - i)
                terms.append(weight * mpmath.exp(mpmath.mpf(i * (i - 1)) / 2 / 9))
            exact = float(mpmath.log(mpmath.fsum(terms)) / (order - 1))
            found = float(rdp.poisson_gaussian(3.0, rate, np.array([order]))[0])
            assert exact <= found <= exact * (1 + 1e-11)


@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0, 60.0])
def test_sums_and_integrals_meet(noise):
    for order in (2.0, 17.0, 1024.0):
        beside = rdp.poisson_gaussian(noise, 0.05, np.array([order, order * (1 + 1e-9)]))
        assert beside[0] == pytest.approx(beside[1], rel=1e-6 if noise >= 0.5 else 0.01)


@pytest.mark.parametrize("noise", [0.7, 2.0, 10.0])
@pytest.mark.parametrize("rate", [0.001, 0.05])
def test_without_replacement_against_dp_accounting(noise, rate):
    orders = np.array([2, 3, 4, 8, 21, 64, 200])
    expected = oracle._compute_rdp_sample_wor_gaussian(rate, noise, orders)
    found = rdp.without_replacement_gaussian(noise, rate, orders)
    capped = np.minimum(expected, orders / (2 * noise**2))
    assert list(found) == pytest.approx(list(capped), rel=1e-6)
    assert (found <= rdp.adadp_theorem_1(noise, rate, orders)).all()


@pytest.mark.parametrize("noise", [0.3, 1.0, 8.0, 300.0])
def test_central_moments_are_the_alternating_sum(noise):
    found = rdp._log_central_moments(noise, 40)
    with mpmath.workdps(400):
        for half in (1, 2, 5, 20):
            l_ = 2 * half
            terms = (
                (-1) ** i
                * mpmath.binomial(l_, i)
                * mpmath.exp(mpmath.mpf(i * (i - 1)) / (2 * mpmath.mpf(noise) ** 2))
                for i in range(l_ + 1)
            )
            assert found[half - 1] == pytest.approx(
                float(mpmath.log(mpmath.fsum(terms))), rel=1e-11, abs=1e-11
            )


@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0, 30.0, 1e7])
def test_laplace(noise):
    found = rdp.laplace(noise, SOME)
    with mpmath.workdps(60):
        for order, value in zip(SOME, found, strict=True):
            a, t = mpmath.mpf(order), 1 / mpmath.mpf(noise)
            inside = a * mpmath.exp((a - 1) * t) + (a - 1) * mpmath.exp(-a * t)
            exact = float(mpmath.log(inside / (2 * a - 1)) / (a - 1))
            assert exact <= value <= exact * (1 + 1e-10)


@pytest.mark.parametrize("epsilon", [1e-7, 1e-3, 0.5, 3.0, 1e3])
def test_pure_is_randomised_response(epsilon):
    found = rdp.pure(epsilon, SOME)
    with mpmath.workdps(60):
        p, n = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon))), 1 / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        for order, value in zip(SOME, found, strict=True):
            a = mpmath.mpf(order)
            exact = float(mpmath.log(p**a * n ** (1 - a) + n**a * p ** (1 - a)) / (a - 1))
            assert exact * (1 - 1e-15) <= value <= exact * (1 + 1e-10)
    assert (rdp.pure(0.0, SOME) == 0).all()


def test_simple_curves():
    assert list(rdp.gaussian(2.0, SOME)) == pytest.approx(list(SOME / 8))
    assert list(rdp.zcdp(0.3, SOME)) == pytest.approx(list(0.3 * SOME))
    assert (rdp.poisson_gaussian(2.0, 1.0, SOME) == rdp.gaussian(2.0, SOME)).all()


@pytest.mark.parametrize("epsilon", [1e-3, 0.01, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-15, 1e-8, 1e-5])
def test_default_orders_reach_far(epsilon, delta):
    noise = gaussian.noise(epsilon, delta)
    found, _ = rdp.epsilon(rdp.gaussian(noise, rdp.ORDERS), rdp.ORDERS, delta)
    assert epsilon <= found <= 1.75 * epsilon


def test_conversions():
    curve = rdp.gaussian(1.0, rdp.ORDERS)
    classic, _ = rdp.classic_epsilon(curve, rdp.ORDERS, 1e-5)
    better, _ = rdp.epsilon(curve, rdp.ORDERS, 1e-5)
    assert gaussian.epsilon(1.0, 1e-5) < better < classic
    assert rdp.delta(curve, rdp.ORDERS, better) == pytest.approx(1e-5, rel=1e-9)
    assert rdp.epsilon(1e-12 * curve, rdp.ORDERS, 0.1) == (0.0, rdp.ORDERS[0])
    assert rdp.delta(0 * curve, rdp.ORDERS, 0.0) == 0
    nothing = np.full_like(curve, math.inf)
    assert rdp.epsilon(nothing, rdp.ORDERS, 0.1)[0] == math.inf
    assert rdp.classic_epsilon(nothing, rdp.ORDERS, 0.1)[0] == math.inf
    assert rdp.delta(nothing, rdp.ORDERS, 1.0) == 1


@pytest.mark.parametrize("noise", [1e-3, 0.02, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("rate", [1e-9, 0.01, 1 - 1e-9, 1.0])
def test_extremes_finish(noise, rate):
    curve = rdp.poisson_gaussian(noise, rate, rdp.ORDERS)
    assert (curve > 0).all()
    assert np.isfinite(curve).all()
    assert (np.diff(curve) >= -1e-9 * curve[1:]).all()  # grows with the order
    fixed = rdp.without_replacement_gaussian(noise, rate, rdp.WHOLE_ORDERS)
    assert (fixed > 0).all()
    assert not np.isnan(rdp.adadp_theorem_1(noise, rate, rdp.WHOLE_ORDERS)).any()
    for steps in (1, 10**12):
        for delta in (1e-300, 0.5):
            assert 0 <= rdp.epsilon(steps * curve, rdp.ORDERS, delta)[0] < math.inf
            assert 0 < rdp.delta(steps * curve, rdp.ORDERS, 1.0) <= 1


@settings(max_examples=50, deadline=None)
@given(st.floats(0.3, 1e4), st.floats(1e-9, 1), st.floats(1e-300, 0.5))
def test_laws(noise, rate, delta):
    orders = rdp.ORDERS[::7]
    curve = rdp.poisson_gaussian(noise, rate, orders)
    assert (curve <= rdp.gaussian(noise, orders)).all()
    assert (rdp.poisson_gaussian(1.5 * noise, rate, orders) <= curve * (1 + 1e-9)).all()
    assert (rdp.poisson_gaussian(noise, rate / 2, orders) <= curve * (1 + 1e-9)).all()
    epsilon, _ = rdp.epsilon(curve, orders, delta)
    assert 0 <= epsilon <= rdp.classic_epsilon(curve, orders, delta)[0]
    assert rdp.epsilon(2 * curve, orders, delta)[0] >= epsilon
    assert rdp.delta(curve, orders, epsilon) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("bad", [math.nan, -1.0, "1", None])
def test_bad_values(bad):
    two = np.array([2.0, 3.0])
    for call in (
        lambda: rdp.gaussian(bad, two),
        lambda: rdp.laplace(bad, two),
        lambda: rdp.pure(bad, two),
        lambda: rdp.zcdp(bad, two),
        lambda: rdp.poisson_gaussian(bad, 0.1, two),
        lambda: rdp.poisson_gaussian(1.0, bad, two),
        lambda: rdp.without_replacement_gaussian(1.0, bad, two),
        lambda: rdp.adadp_theorem_1(bad, 0.1, two),
        lambda: rdp.epsilon(two, two, bad),
        lambda: rdp.delta(two, two, bad),
    ):
        with pytest.raises(InvalidValue):
            call()


@pytest.mark.parametrize("orders", [[], [1.0], [math.inf], [math.nan, 2.0], [[2.0]], ["x"], None])
def test_bad_orders(orders):
    with pytest.raises(InvalidValue, match="orders"):
        rdp.gaussian(1.0, orders)
    with pytest.raises(InvalidValue, match="whole numbers"):
        rdp.without_replacement_gaussian(1.0, 0.1, np.array([2.5]))
    for curve in ([1.0], [1.0, math.nan], [1.0, -1.0]):
        with pytest.raises(InvalidValue, match="rdp must hold"):
            rdp.epsilon(np.array(curve), np.array([2.0, 3.0]), 0.1)


@pytest.mark.parametrize("noise", [1e-320, 1e-200, 1e-90, 1e200, 1e300])
@pytest.mark.parametrize("rate", [1e-300, 0.5])
def test_absurd_noise_is_still_bounded_from_above(noise, rate):
    curve = rdp.poisson_gaussian(noise, rate, rdp.ORDERS)
    assert (curve >= 0).all()
    assert not (noise < 1 and (curve < 1e100).any())
    for bound in (rdp.without_replacement_gaussian, rdp.adadp_theorem_1):
        assert (bound(noise, rate, rdp.WHOLE_ORDERS) >= 0).all()
    assert (rdp.laplace(noise, rdp.ORDERS) >= 0).all()
