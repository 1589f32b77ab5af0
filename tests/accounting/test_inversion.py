"""δ(ε) from a transform: exact cases, never below the truth, at every δ a float can hold."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.pairs import Shift, TwoPoint
from farthing.accounting.transform import Contour, transform


def gaussian_line(mu, epsilon, frequencies=128, parts=1):
    tilt = max(epsilon / mu**2 - 0.5, 0.3 / mu)
    line = Line.empty(Contour(tilt, min(0.15 * tilt, 0.6 / mu), frequencies))
    for _ in range(parts):
        line.add(transform(Shift(mu / math.sqrt(parts)), line.contour))
    return line


def exact_log_delta(mu, epsilon):
    with mpmath.workdps(60 + int(epsilon)):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        value = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        return float(mpmath.log(value))


@pytest.mark.parametrize("mu", [0.03, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("delta", [0.4, 0.1, 1e-3, 1e-8, 1e-15, 1e-30, 1e-60, 1e-100])
def test_gaussian_at_every_delta(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    truth = exact_log_delta(mu, epsilon)
    found = gaussian_line(mu, epsilon).log_delta(epsilon)
    assert truth <= found <= truth + (1e-6 if delta > 1e-40 else 0.1)


@given(st.floats(0.01, 5), st.floats(0, 20), st.floats(0.02, 50), st.floats(0.01, 0.3), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_every_line_is_an_upper_bound(mu, epsilon, tilt, part, count):
    line = Line.empty(Contour(tilt, part * tilt, count))
    line.add(transform(Shift(mu), line.contour))
    assert line.log_delta(epsilon) >= exact_log_delta(mu, epsilon) - 1e-13


@given(st.floats(0.01, 3), st.integers(1, 60), st.floats(0, 1), st.floats(0.1, 30), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_every_line_is_an_upper_bound_for_atoms(epsilon, steps, part, tilt, count):
    line = Line.empty(Contour(tilt, 0.15 * tilt, count))
    line.add(transform(TwoPoint(epsilon), line.contour), steps)
    at = part * steps * epsilon
    assert math.exp(line.log_delta(at)) >= kairouz(epsilon, steps, at) * (1 - 1e-11)


def kairouz(epsilon, steps, at):
    """δ of ``steps`` randomised responses: Kairouz, Oh & Viswanath 2015, Thm. 3.3, by its binomial."""
    heads = np.arange(steps + 1)
    up = 1 / (1 + math.exp(-epsilon))
    log_p = [
        math.log(math.comb(steps, int(k))) + k * math.log(up) + (steps - k) * math.log(1 - up) for k in heads
    ]
    loss = (2 * heads - steps) * epsilon
    return float(np.sum(np.exp(log_p) * np.maximum(-np.expm1(np.minimum(at - loss, 0)), 0)))


def test_parts_add_up():
    whole, parts = gaussian_line(1.0, 3.0), gaussian_line(1.0, 3.0, parts=50)
    assert parts.log_delta(3.0) == pytest.approx(whole.log_delta(3.0), abs=1e-9)


def test_few_frequencies_are_smoothed_not_wrong():
    line = gaussian_line(1.0, 3.0, frequencies=3)
    assert line.log_delta(3.0) >= exact_log_delta(1.0, 3.0)
    assert line.weak
    assert line.loose


def test_infinite_error_promises_nothing():
    line = gaussian_line(1.0, 3.0)
    line.error = math.inf
    assert line.log_delta(3.0) == 0.0
    assert line.loose


@given(st.floats(1e-6, 1e6))
def test_factor_is_the_supremum(tilt):
    t = math.log1p(1 / tilt)
    assert log_factor(tilt) == pytest.approx(math.log(-math.expm1(-t)) - tilt * t, rel=1e-9, abs=1e-9)


@given(st.floats(-3, 3), st.floats(-5, 0), st.floats(0, 5))
def test_smallest_ends_where_it_holds(root, below, above):
    found = smallest(lambda x: root - x**3, root + below - 10, abs(root) + above + 2)
    assert root - found**3 <= 0
    assert found == pytest.approx(math.copysign(abs(root) ** (1 / 3), root), abs=1e-3)
    assert smallest(lambda x: -1.0, 2.0, 3.0) == 2.0
