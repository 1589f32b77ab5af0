"""The Gaussian mechanism against 400-digit arithmetic, and its conservative direction."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian
from farthing.accounting.tolerance import MARGIN
from farthing.errors import InvalidValue

EPSILONS = [1e-6, 1e-3, 0.1, 1, 10, 100, 1e3]
DELTAS = [1e-300, 1e-100, 1e-15, 1e-8, 1e-5, 0.01, 0.5]
GRID = [(epsilon, delta) for epsilon in EPSILONS for delta in DELTAS]


def true_delta(mu, epsilon):
    with mpmath.workdps(400):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first = mpmath.erfc(-(mu / 2 - epsilon / mu) / mpmath.sqrt(2)) / 2
        return first - mpmath.exp(epsilon) * mpmath.erfc((mu / 2 + epsilon / mu) / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_calibration_is_safe_and_tight(epsilon, delta):
    mu = gaussian.largest_mu(epsilon, delta)
    at_mu = true_delta(mu, epsilon)
    assert at_mu <= delta < true_delta(mu * (1 + 1e-11), epsilon)
    assert at_mu <= gaussian.delta(mu, epsilon) <= at_mu * (1 + 1e-11)
    noise = gaussian.noise(epsilon, delta)
    assert true_delta(1 / mpmath.mpf(noise), epsilon) <= delta


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_epsilon_is_safe_and_tight(epsilon, delta):
    mu = gaussian.largest_mu(epsilon, delta)
    found = gaussian.epsilon(mu, delta)
    assert found == pytest.approx(epsilon, rel=1e-11, abs=1e-12)
    assert true_delta(mu, found) <= delta


@pytest.mark.parametrize("mu", [1e-9, 1e-4, 0.03, 0.99, 1.0, 1.01, 3.0, 30.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.01, 0.5, 3.0, 20.0, 1e3])
def test_delta_and_its_logarithm(mu, epsilon):
    exact = true_delta(mu, epsilon)
    if exact < mpmath.mpf("1e-350"):
        assert gaussian.log_delta(mu, epsilon) < math.log(5e-324)
        assert gaussian.delta(mu, epsilon) == 5e-324
        return
    assert gaussian.log_delta(mu, epsilon) == pytest.approx(float(mpmath.log(exact)), rel=1e-12, abs=2e-12)
    assert gaussian.delta(mu, epsilon) >= exact


def test_known_digits():
    assert gaussian.largest_mu(1, 1e-5) == pytest.approx(0.268051123211, abs=1e-12)
    assert gaussian.mu(1, 1e-5) == pytest.approx(0.268051123211, rel=4 * MARGIN)
    assert gaussian.noise(0.1, 1e-5) == pytest.approx(30.74956613, rel=4 * MARGIN)
    assert 10 * gaussian.noise(1, 1e-6) == pytest.approx(42.25, abs=0.005)  # 100 steps


def test_arrays_agree_with_numbers():
    mus, epsilons = np.array([0.0, 0.1, 1.0, 2.0, 50.0]), np.array([[0.0], [0.3], [40.0]])
    table = gaussian.delta(mus, epsilons)
    assert table.shape == (3, 5)
    for row, epsilon in zip(table, epsilons[:, 0], strict=True):
        expected = [gaussian.delta(float(mu), float(epsilon)) for mu in mus]
        assert list(row) == pytest.approx(expected, rel=1e-13, abs=0)
    assert gaussian.delta(0.0, 1.0) == 0
    assert gaussian.log_delta(0.0, 1.0) == -math.inf
    assert gaussian.delta(1.0, np.array([0.5, 1.0])).shape == (2,)


def test_extremes_stay_finite():
    assert gaussian.delta(1e-320, 1e3) == 5e-324
    assert gaussian.delta(1e300, 1.0) == 1.0
    assert gaussian.epsilon(1e200, 1e-5) == math.inf
    assert 0 < gaussian.mu(1e-300, 1e-300) < gaussian.mu(1e6, 1 - 1e-12) < math.inf
    assert gaussian.mu(0.0, 0.1) == pytest.approx(0.251322, abs=1e-6)  # 2 Φ(μ/2) − 1 = .1
    assert gaussian.epsilon(0.1, 0.2) == 0


def test_classic_noise():
    assert gaussian.classic_noise(0.5, 1e-5) == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 0.5)
    assert gaussian.classic_noise(0.999, 1e-5) > gaussian.noise(0.999, 1e-5)
    with pytest.raises(InvalidValue, match="epsilon must be < 1"):
        gaussian.classic_noise(1.0, 1e-5)


def test_composition_is_exact():
    assert gaussian.compose([3.0, 4.0]) == pytest.approx(5.0, rel=1e-14)
    assert gaussian.compose([]) == 0
    assert gaussian.compose(iter([0.1] * 100)) >= 1.0


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e3), st.floats(1e-300, 0.5))
def test_laws(noise, epsilon, delta):
    price = gaussian.epsilon(1 / noise, delta)
    assert price >= 0
    assert gaussian.epsilon(0.5 / noise, delta) <= price
    assert 0 <= gaussian.delta(1 / noise, epsilon) <= 1
    assert gaussian.delta(1 / noise, 2 * epsilon) <= gaussian.delta(1 / noise, epsilon)
    assert gaussian.delta(gaussian.mu(epsilon, delta), epsilon) <= delta * (1 + 1e-13)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, "1", True, None])
def test_bad_values(bad):
    for call in (
        lambda: gaussian.delta(bad, 1.0),
        lambda: gaussian.delta(0.0, bad),
        lambda: gaussian.delta(1.0, bad),
        lambda: gaussian.epsilon(bad, 0.1),
        lambda: gaussian.epsilon(1.0, bad),
        lambda: gaussian.mu(bad, 0.1),
        lambda: gaussian.noise(1.0, bad),
        lambda: gaussian.compose([bad]),
        lambda: gaussian.classic_noise(bad, 0.1),
    ):
        with pytest.raises(InvalidValue):
            call()


def test_pure_privacy_is_refused_in_words():
    with pytest.raises(InvalidValue, match="pure"):
        gaussian.mu(1.0, 0.0)
    with pytest.raises(InvalidValue, match="mu must hold"):
        gaussian.delta(np.array([1.0, math.nan]), 1.0)


@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2, 0.1])
def test_the_textbook_with_four_fifths_holds_below_one(delta):
    """δ >= 4/5 exp(-(σε)²/2), as Abadi et al. 2016 print it: 1.25 in the textbook. Both are far above δ."""
    for epsilon in np.linspace(0.01, 0.999, 30):
        noise = math.sqrt(2 * math.log(0.8 / delta)) / epsilon
        assert gaussian.delta(1 / noise, float(epsilon)) <= 0.07 * delta
