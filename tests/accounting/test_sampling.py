"""A-DDP's theorem: the paper's settings, brute-force sums, and any number of rounds."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import composition, gaussian, sampling
from farthing.errors import InvalidValue


@pytest.mark.parametrize(
    ("epsilon", "noise", "rounds"),
    [(0.1, 899.480224, 37849), (0.5, 193.735434, 38012), (1.6, 64.920159, 38745)],
)
def test_the_papers_settings(epsilon, noise, rounds):
    found = sampling.addp_noise(epsilon, 1e-8, steps=10, slack=5e-9)
    assert found == pytest.approx(noise, abs=1e-6)
    assert sampling.rounds(found, 0.01, epsilon, 1e-8) == rounds
    assert (
        sampling.delta(found, 0.01, rounds, epsilon)
        <= 1e-8
        < sampling.delta(found, 0.01, rounds + 1, epsilon)
    )
    assert sampling.epsilon(found, 0.01, rounds, 1e-8) <= epsilon


def test_noise_grows_with_the_root_of_t_and_sampling_saves_of_it():
    """The text's bound for fixed T: σ₁ <= σ₃ = α H √T / √(2ε), α free of T; advanced composition has more."""
    epsilon, delta, alone = 0.5, 1e-6, gaussian.noise(0.5, 1e-6)
    for rounds in (10, 1000, 100_000):
        whole = math.sqrt(rounds) * alone  # σ₃: every record in every round
        assert sampling.delta(whole, 1.0, rounds, epsilon) == pytest.approx(delta, rel=1e-6)
        assert sampling.delta(whole, 0.1, rounds, epsilon) < delta  # so σ₁ is smaller
        assert whole < sampling.addp_noise(epsilon, delta, rounds, delta / 2)
    few, many = (sampling.addp_noise(epsilon, delta, T, delta / 2) / math.sqrt(T) for T in (10, 100_000))
    assert many > 1.2 * few  # √(T log T)


def test_the_papers_amplification_is_a_little_too_much():
    """(pε, pδ) a step, as the text has it: ln(1 + p(e^ε - 1)) is what holds, and is more."""
    for epsilon, p in ((0.1, 0.01), (1.0, 0.1)):
        assert composition.amplify_poisson(epsilon, 1e-5, p)[0] > p * epsilon


def test_figure_3_calibrates_each_step_by_itself():
    # (.1, 1e-5) is per iteration there, neither divided over T = 10 nor amplified by p = .1.
    noise = gaussian.noise(0.1, 1e-5)
    assert noise == pytest.approx(30.74956613, rel=1e-9)
    epsilon, delta = composition.advanced(0.1, 1e-5, 10, slack=1e-5)
    assert sampling.delta(noise, 0.1, 10, epsilon) < 1e-9 * delta


def test_amplifying_first_leaves_no_round():
    step, delta_iter = 0.5, 5e-10
    noise = gaussian.noise(step / 0.01, delta_iter / 0.01)
    assert sampling.rounds(noise, 0.01, 0.5, 1e-8) == 0


def brute_force(noise, rate, rounds, epsilon):
    with mpmath.workdps(60):
        total = mpmath.mpf(0)
        p = mpmath.mpf(rate)
        for i in range(1, rounds + 1):
            mu = mpmath.sqrt(i) / noise
            low = mpmath.erfc(-(mu / 2 - epsilon / mu) / mpmath.sqrt(2)) / 2
            gap = low - mpmath.exp(epsilon) * mpmath.erfc((mu / 2 + epsilon / mu) / mpmath.sqrt(2)) / 2
            total += mpmath.binomial(rounds, i) * p**i * (1 - p) ** (rounds - i) * gap
        return total


@pytest.mark.parametrize("tails", [0.5, 2.0, 6.0])
def test_what_is_not_added_up_is_bounded_and_added(monkeypatch, tails):
    monkeypatch.setattr(sampling, "_TAILS", tails)
    for noise, rate, rounds, epsilon in [(5.0, 0.3, 200, 2.0), (20.0, 0.3, 200, 0.0), (1.0, 0.5, 60, 30.0)]:
        exact = brute_force(noise, rate, rounds, epsilon)
        assert exact <= sampling.delta(noise, rate, rounds, epsilon) <= 1


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "epsilon"),
    [
        (1.0, 0.1, 1, 0.5),
        (2.0, 0.01, 50, 0.1),
        (5.0, 0.3, 200, 2.0),
        (40.0, 0.5, 300, 0.7),
        (0.5, 0.9, 40, 30.0),
        (3.0, 1e-6, 30, 1.0),
        (10.0, 1.0, 64, 1.0),
        (20.0, 0.02, 400, 0.0),
    ],
)
def test_small_sums_by_brute_force(noise, rate, rounds, epsilon):
    exact = brute_force(noise, rate, rounds, epsilon)
    found = sampling.delta(noise, rate, rounds, epsilon)
    assert exact <= found <= exact * (1 + 1e-9)


def full_sum(noise, rate, rounds, epsilon):
    i = np.arange(1.0, rounds + 1)
    return float(
        np.exp(sampling.log_binomial(i, rounds, rate) + gaussian.log_delta(np.sqrt(i) / noise, epsilon)).sum()
    )


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.05, 0.7, 30.0, 1000.0])
@pytest.mark.parametrize("z", [0.0, 4.0, 20.0])
def test_strides_lose_nothing(rate, noise, z):
    rounds = 150_000
    mu = math.sqrt(rounds * rate) / noise
    epsilon = mu * (mu / 2 + z)
    full = full_sum(noise, rate, rounds, epsilon)
    assert full <= sampling.delta(noise, rate, rounds, epsilon) * (1 + 1e-12) <= full * (1 + 1e-9)


def test_the_coarse_bound_is_an_upper_bound(monkeypatch):
    fine = sampling.delta(0.05, 0.3, 400_000, 1.8e7)
    monkeypatch.setattr(sampling, "_MOST_TERMS", 64)
    assert fine <= sampling.delta(0.05, 0.3, 400_000, 1.8e7) <= 1


def test_binomial_probabilities():
    for k, p in [(1, 0.3), (7, 1e-9), (40, 0.5), (10**6, 0.001), (10**12, 0.01), (10**15, 0.5)]:
        with mpmath.workdps(60):
            for i in {1, 2, max(1, int(k * p)), max(1, int(k * p * 1.0001)), k - 1 or 1, k}:
                if i > k:
                    continue
                rest = (mpmath.mpf(k) - i) * mpmath.log1p(-mpmath.mpf(p))
                choose = (
                    mpmath.loggamma(k + 1) - mpmath.loggamma(i + 1) - mpmath.loggamma(mpmath.mpf(k) - i + 1)
                )
                exact = float(choose + i * mpmath.log(p) + rest)
                found = float(sampling.log_binomial(np.array([float(i)]), k, p)[0])
                assert found == pytest.approx(exact, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rate", [1e-9, 0.01, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("rounds", [1, 10**6, 10**12, 2**62 - 1])
def test_extremes_finish(noise, rate, rounds):
    for delta in (1e-300, 0.5):
        epsilon = sampling.epsilon(noise, rate, rounds, delta)
        assert 0 <= epsilon < math.inf
        assert sampling.delta(noise, rate, rounds, epsilon) <= delta * (1 + 1e-9)
        most = gaussian.epsilon(math.sqrt(rounds) / noise, delta)
        assert epsilon <= most * (1 + 1e-9)


def test_rounds_at_the_ends():
    assert sampling.rounds(1e6, 1e-9, 1.0, 0.5) == 2**62 - 1
    assert sampling.rounds(0.1, 0.5, 0.1, 1e-5) == 0
    assert sampling.rounds(30.0, 1.0, 1.0, 1e-5) == math.floor((30 * gaussian.mu(1.0, 1e-5)) ** 2)


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0.1, 1e4), st.floats(1e-9, 1), st.integers(1, 10**12), st.floats(0, 100), st.floats(1e-300, 0.5)
)
def test_laws(noise, rate, rounds, epsilon, delta):
    price = sampling.delta(noise, rate, rounds, epsilon)
    assert 0 < price <= 1
    assert sampling.delta(2 * noise, rate, rounds, epsilon) <= price * (1 + 1e-9)
    assert sampling.delta(noise, rate, 2 * rounds, epsilon) >= price * (1 - 1e-9)
    assert sampling.delta(noise, rate, rounds, epsilon + 1) <= price * (1 + 1e-9)
    most = sampling.rounds(noise, rate, epsilon, delta)
    assert most == 0 or sampling.delta(noise, rate, most, epsilon) <= delta


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, "1", None])
def test_bad_values(bad):
    for call in (
        lambda: sampling.delta(bad, 0.1, 1, 1.0),
        lambda: sampling.delta(1.0, bad, 1, 1.0),
        lambda: sampling.delta(1.0, 0.1, bad, 1.0),
        lambda: sampling.delta(1.0, 0.1, 1, bad),
        lambda: sampling.epsilon(1.0, 0.1, 1, bad),
        lambda: sampling.rounds(1.0, 0.1, bad, 1e-5),
        lambda: sampling.rounds(1.0, 0.1, 1.0, bad),
        lambda: sampling.addp_noise(bad, 1e-5, 10, 1e-6),
    ):
        with pytest.raises(InvalidValue):
            call()


def test_absurd_noise():
    assert sampling.delta(1e-320, 0.5, 10, 1.0) == pytest.approx(1 - 0.5**10)
    assert sampling.epsilon(1e-320, 0.5, 10, 1e-5) == math.inf
    assert sampling.delta(1e300, 0.5, 10, 1.0) == 5e-324
    assert composition.advanced_sampled(1e-320, 0.5, 10, 1e-5) == math.inf
