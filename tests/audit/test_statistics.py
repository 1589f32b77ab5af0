"""Bounds hold as often as they say, against exact laws and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from farthing.accounting import gaussian, pld
from farthing.audit import canaries, statistics
from farthing.audit.statistics import GaussianCurve, SampledCurve, Unknown, caught
from farthing.budget import Adjacency, Budget
from farthing.queries.events import FixedSizeEvent, GaussianEvent, RepeatedEvent

RNG = np.random.default_rng


def gaussian_rates(mu, threshold, rate=1.0):
    """P(flag | with) and P(flag | without) where values of N(0, 1) above the threshold are flagged."""
    false = stats.norm.sf(threshold)
    return (1 - rate) * false + rate * stats.norm.sf(threshold - mu), false


def test_clopper_pearson_is_the_inversion_of_the_binomial():
    for k, n in ((0, 10), (3, 10), (10, 10), (517, 1000)):
        low, high = float(statistics.at_least(k, n, 0.01)), float(statistics.at_most(k, n, 0.02))
        assert low == 0 if k == 0 else stats.binom.sf(k - 1, n, low) == pytest.approx(0.01)
        assert high == 1 if k == n else stats.binom.cdf(k, n, high) == pytest.approx(0.02)


def test_the_figure_of_the_frozen_coordinate():
    assert statistics.epsilon(9549, 0, 10_000, 0.0) == pytest.approx(7.49, abs=0.005)


def test_delta_and_the_other_region_count():
    assert statistics.epsilon(9549, 0, 10_000, 0.5) < statistics.epsilon(9549, 0, 10_000, 0.0)
    # "not flagged" is the stronger evidence here: 1 of 10,000 with, 5,000 of 10,000 without
    assert statistics.epsilon(9999, 5000, 10_000) == pytest.approx(statistics.epsilon(5000, 1, 10_000))


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("delta", [0.0, 0.05])
def test_epsilon_is_covered_exactly(epsilon, delta):
    """Randomised response with δ: all pairs of counts, each with its probability."""
    trials, confidence = 60, 0.9
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    hit, false = delta + (1 - delta) * keep, (1 - delta) * (1 - keep)  # tight at (ε, δ)
    counts = np.arange(trials + 1)
    weight = np.outer(stats.binom.pmf(counts, trials, hit), stats.binom.pmf(counts, trials, false))
    found = statistics.epsilons(counts[:, None], counts[None], trials, delta, confidence)
    assert weight[found > epsilon].sum() <= 1 - confidence
    assert weight[found > 0.3 * epsilon].sum() > 0.01  # it does say something


@pytest.mark.parametrize(("mu", "threshold"), [(0.3, 0.1), (1.0, 0.5), (2.0, 2.0)])
def test_mu_is_covered_exactly(mu, threshold):
    trials, confidence = 80, 0.9
    counts = np.arange(trials + 1)
    for rate in (1.0, 0.3):
        hit, false = gaussian_rates(mu, threshold, rate)
        weight = np.outer(stats.binom.pmf(counts, trials, hit), stats.binom.pmf(counts, trials, false))
        if rate == 1:
            found = statistics.gaussian_mu(counts[:, None], counts[None], trials, confidence)
        else:
            found = statistics.sampled_mu(counts[:, None], counts[None], trials, rate, confidence)
        assert weight[found > mu].sum() <= 1 - confidence


def test_mu_comes_near_the_truth():
    trials = 10**6
    for mu in (0.2, 1.0, 3.0):
        hit, false = gaussian_rates(mu, mu / 2)
        assert 0.95 < statistics.gaussian_mu(hit * trials, false * trials, trials) / mu < 1
        hit, false = gaussian_rates(mu, mu / 2, 0.2)
        assert 0.85 < statistics.sampled_mu(hit * trials, false * trials, trials, 0.2) / mu < 1


def test_a_replaced_record_on_samples_of_a_fixed_size_shows_no_more_than_it_costs():
    claim = Budget(8.0, 1e-3, "replace-one")
    for size, of, steps, noise in ((1, 2, 4, 1.4), (3, 4, 8, 2.0), (2, 2, 3, 1.5)):
        event = RepeatedEvent(FixedSizeEvent(size, of, GaussianEvent(noise)), steps)
        exact = pld.epsilon(event, claim.delta, Adjacency.REPLACE_ONE)
        shown = SampledCurve(size / of, steps, fixed_size=True).epsilon(2 / noise, claim)  # it moves by 2
        assert 0.95 * exact < shown <= exact * (1 + 1e-6)


def test_a_replaced_record_in_every_step_is_one_gaussian():
    claim = Budget(1.0, 1e-5, "replace-one")
    steps, whole = SampledCurve(1.0, 4), GaussianCurve()
    assert steps.epsilon(0.25, claim) == pytest.approx(whole.epsilon(0.5, claim), rel=1e-6)
    assert 2 * steps.claimed(claim) == pytest.approx(whole.claimed(claim), rel=1e-4)


def test_steps_on_samples_of_a_fixed_size_are_covered():
    """Simulated: four steps of one record of two, flagged where the likelihood ratio is above 1."""
    curve, claim, confidence = SampledCurve(0.5, 4, fixed_size=True), Budget(8.0, 1e-3, "replace-one"), 0.9
    rng, mu, trials = RNG(9), 1.4, 2000
    hit, false = gaussian_rates(mu, mu / 2, 0.5)
    counts = rng.binomial(trials, hit, 4000), rng.binomial(trials, false, 4000)
    assert np.mean(curve.strengths(*counts, trials, claim, confidence) > mu) <= 1 - confidence


def test_one_run_never_exceeds_what_independent_canaries_do():
    """Independent Gaussian canaries, all guessed: the number of right guesses is binomial, exactly."""
    for m in (1, 2, 7, 40):
        for mu in (0.2, 1.0, 3.0):
            rate = stats.norm.cdf(mu / 2)
            for right in range(m + 1):
                failure = float(stats.binom.sf(right - 1, m, rate)) * (1 - 1e-9)
                assert not failure < 1 or canaries.gaussian_mu(m, m, right, 1 - failure) <= mu
            epsilon = math.log(rate / (1 - rate))  # the randomised response that is as accurate
            for right in range(m + 1):
                failure = float(stats.binom.sf(right - 1, m, rate)) * (1 - 1e-9)
                assert not failure < 1 or canaries.epsilon(m, m, right, 0.0, 1 - failure) <= epsilon + 1e-6


@pytest.mark.parametrize(("mu", "guesses"), [(0.3, 10), (1.0, 20), (2.0, 6)])
def test_one_run_with_abstentions_is_covered(mu, guesses):
    rng, m, runs, confidence = RNG(7), 60, 3000, 0.9
    coins = rng.random((runs, m)) < 0.5
    scores = coins * mu + rng.normal(size=coins.shape)
    order = np.argsort(scores, axis=1)
    out, into = order[:, : guesses // 2], order[:, -(guesses // 2) :]
    right = np.take_along_axis(coins, into, 1).sum(1) + (~np.take_along_axis(coins, out, 1)).sum(1)
    found = {k: canaries.gaussian_mu(m, guesses, int(k), confidence) for k in np.unique(right)}
    epsilon = gaussian.epsilon(mu, 1e-5)
    by_pairs = {k: canaries.epsilon(m, guesses, int(k), 1e-5, confidence) for k in np.unique(right)}
    assert np.mean([found[k] > mu for k in right]) <= 1 - confidence
    assert np.mean([by_pairs[k] > epsilon for k in right]) <= 1 - confidence


@pytest.mark.parametrize(("m", "guesses"), [(60, 60), (60, 12), (400, 40)])
@pytest.mark.parametrize("delta", [1e-3, 0.05])
def test_one_run_never_exceeds_what_is_exactly_epsilon_delta_private(m, guesses, delta):
    """A coin is told with probability δ, and by randomised response otherwise: the count is known exactly."""
    for epsilon in (0.3, 1.5):
        told = np.minimum(np.arange(m + 1), guesses)
        chances = stats.binom.pmf(np.arange(m + 1), m, delta)
        for right in range(guesses + 1):
            left = stats.binom.sf(right - told - 1, guesses - told, 1 / (1 + math.exp(-epsilon)))
            failure = float(chances @ left)  # of as many right guesses or more
            if 1e-12 < failure < 1:
                assert canaries.epsilon(m, guesses, right, delta, 1 - failure) <= epsilon + 1e-6
    assert canaries.epsilon(1000, 100, 95, 1e-3, 0.95) > 2  # 0.59 by the theorem for pairs


def test_one_run_grows_with_right_guesses_and_refuses_nonsense():
    found = [canaries.gaussian_mu(1000, 200, right) for right in (110, 140, 170, 200)]
    assert found == sorted(found)
    assert found[-1] > 1
    steps = [canaries.sampled_epsilon(1000, 200, right, 0.1, 100, 1e-5, 0.95) for right in (140, 180)]
    assert 0 < steps[0] < steps[1]
    with pytest.raises(ValueError, match="right <= guesses <= canaries"):
        canaries.epsilon(10, 11, 3, 0.0)


@pytest.mark.parametrize("curve", [Unknown(), GaussianCurve()])
def test_the_power_of_an_attack_is_what_it_catches(curve):
    """Simulated: at the ε that it is said to catch, the best attack refutes the claim nine times of ten."""
    claim, trials, rng = Budget(2.0, 1e-3), 1000, np.random.default_rng(0)
    strength = curve.claimed(claim)
    hit, false = (np.max(rates) for rates in curve.rates(strength, claim))
    whole = caught(
        curve, *(round(trials * rate) for rate in _best(curve, strength, claim)), trials, claim, 0.99
    )
    assert claim.epsilon < whole < 2.5 * claim.epsilon
    assert 0 < false < hit
    low, high = strength, 20 * strength
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if curve.epsilon(middle, claim) < whole else (low, middle)
    hit, false = curve.rates(high, claim)
    refuted = [
        np.nanmax(
            curve.strengths(
                rng.binomial(trials, np.minimum(hit, 1)), rng.binomial(trials, false), trials, claim, 0.99
            )
        )
        > strength
        for _ in range(300)
    ]
    assert np.mean(refuted) > 0.8


def _best(curve, strength, claim):
    """The rates at the threshold that shows most of a mechanism of this strength."""
    hit, false = curve.rates(strength, claim)
    place = int(np.nanargmax(curve.strengths(1000 * hit, 1000 * false, 1000, claim, 0.99)))
    return float(min(hit[place], 1.0)), float(false[place])


def test_an_attack_that_sees_nothing_catches_nothing():
    claim = Budget(2.0, 1e-3)
    assert caught(GaussianCurve(), 500, 500, 1000, claim, 0.99) == math.inf
    seen = [caught(GaussianCurve(), 500 + right, 500 - right, 1000, claim, 0.99) for right in (50, 100, 150)]
    assert seen[0] > seen[1] > seen[2] > 2.0  # the more of the claim an attack sees, the more it catches
