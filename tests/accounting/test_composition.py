"""Composition and amplification: published digits, exactness, and which of them are proven."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import composition
from farthing.errors import InvalidValue


def test_basic_is_rounded_up():
    assert composition.basic(0.5, 1e-6, 4) == (2.0, 4e-6)
    epsilon, delta = composition.basic(0.1, 0.3, 10)
    assert 1.0 < epsilon < 1.0 + 1e-15
    assert delta == 1.0


def test_advanced_formula():
    epsilon, delta = composition.advanced(0.1, 1e-8, 100, 1e-5)
    assert epsilon == pytest.approx(math.sqrt(200 * math.log(1e5)) * 0.1 + 10 * math.expm1(0.1), rel=1e-12)
    assert delta == pytest.approx(1.1e-5)
    assert delta >= 1.1e-5
    assert composition.advanced(1e4, 0.0, 10, 1e-5)[0] == math.inf
    assert composition.advanced(0.0, 0.0, 10, 1e-5) == (0.0, 1e-5)


@settings(deadline=None)
@given(st.floats(1e-4, 50), st.floats(1e-300, 0.5), st.integers(1, 10**12))
def test_inverse_stays_within_and_is_tight(epsilon, delta, steps):
    step, delta_iter = composition.advanced_epsilon_iter(epsilon, delta, steps, delta / 2)
    assert composition.advanced(step, 0.0, steps, delta / 2)[0] <= epsilon
    assert steps * delta_iter + delta / 2 <= delta
    assert step <= epsilon
    if step < epsilon:
        assert composition.advanced(step * (1 + 1e-9), 0.0, steps, delta / 2)[0] > epsilon


def test_inverse_needs_room_for_the_slack():
    with pytest.raises(InvalidValue, match="slack must be below delta"):
        composition.advanced_epsilon_iter(1.0, 1e-5, 10, 1e-5)
    assert composition.advanced_epsilon_iter(1e-9, 0.9999, 1, 0.99985)[0] == 1e-9


def test_strong_as_published_digits():
    epsilon, valid = composition.strong_as_published(4, 0.01, 10_000, 1e-5)
    assert epsilon == pytest.approx(9.3390652, abs=5e-8)
    assert not valid  # ε₀ = 1.27 > 1
    assert composition.advanced_sampled(4, 0.01, 10_000, 1e-5) == pytest.approx(17.1623, abs=5e-5)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(20, 0.01, 10_000), (50, 1.0, 100), (200, 0.01, 10**6)])
def test_strong_as_published_is_valid_where_a_proof_covers_it(noise, rate, steps):
    epsilon, valid = composition.strong_as_published(noise, rate, steps, 1e-5)
    assert valid
    assert epsilon >= composition.advanced_sampled(noise, rate, steps, 1e-5)


def test_strong_as_published_where_its_formula_has_no_meaning():
    assert composition.strong_as_published(4, 1e-9, 1, 0.5) == (math.inf, False)  # δ₀ > 1


def test_strong_covers_the_exact_composition_of_randomised_response():
    for step, steps in [(0.1, 100), (1.0, 10), (3.0, 5)]:
        epsilon, slack = composition.strong(step, 0.0, steps, 1e-4)
        p = 1 / (1 + math.exp(-step))
        losses = [
            ((2 * i - steps) * step, math.comb(steps, i) * p**i * (1 - p) ** (steps - i))
            for i in range(steps + 1)
        ]
        assert sum(mass * max(0.0, -math.expm1(epsilon - loss)) for loss, mass in losses) <= slack


def test_amplification():
    assert composition.amplify_poisson(1.0, 1e-5, 1.0) == (1.0, 1e-5)
    epsilon, delta = composition.amplify_poisson(2.0, 1e-5, 0.1)
    assert epsilon == pytest.approx(math.log(1 + 0.1 * math.expm1(2.0)))
    assert delta == pytest.approx(1e-6)
    assert composition.amplify_poisson(1e-9, 0.0, 1e-9)[0] == pytest.approx(1e-18, rel=1e-6)
    for big in (699.9, 700.0, 1e4):
        assert big + math.log(0.01) <= composition.amplify_poisson(big, 0.0, 0.01)[0] <= big


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1e-9, 1), st.integers(1, 10**12), st.floats(1e-300, 0.5))
def test_sampled_laws(noise, rate, steps, delta):
    epsilon = composition.advanced_sampled(noise, rate, steps, delta)
    assert epsilon >= 0
    assert composition.advanced_sampled(2 * noise, rate, steps, delta) <= epsilon * (1 + 1e-9)
    assert composition.advanced_sampled(noise, rate, 2 * steps, delta) >= epsilon * (1 - 1e-9)
    published, valid = composition.strong_as_published(noise, rate, steps, delta)
    assert published >= 0
    assert isinstance(valid, bool)


@pytest.mark.parametrize("bad", [math.nan, -1.0, "1", None])
def test_bad_values(bad):
    for call in (
        lambda: composition.basic(bad, 0.0, 1),
        lambda: composition.basic(1.0, bad, 1),
        lambda: composition.basic(1.0, 0.0, bad),
        lambda: composition.advanced(1.0, 0.0, 1, bad),
        lambda: composition.advanced_epsilon_iter(bad, 1e-5, 1, 1e-6),
        lambda: composition.strong(bad, 0.0, 1, 1e-6),
        lambda: composition.amplify_poisson(1.0, 0.0, bad),
        lambda: composition.strong_as_published(bad, 0.1, 1, 1e-5),
        lambda: composition.advanced_sampled(1.0, 0.1, bad, 1e-5),
    ):
        with pytest.raises(InvalidValue):
            call()
