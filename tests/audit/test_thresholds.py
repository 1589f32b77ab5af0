"""How an attack flags runs: the statistic is chosen on runs that it was not fitted on, and the threshold."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.audit import judge
from farthing.audit.statistics import LastBits, Outcomes, Projection, Unknown, lowest_bit, value
from farthing.audit.thresholds import best
from farthing.noise.lattice import SeededStream, gaussian

CLAIM = ft.Budget(1.0, 1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_whole_numbers_of_which_none_comes_twice_are_told_apart_by_size(width):
    """A likelihood ratio of outcomes separates the runs that it was fitted on, and none of the others."""

    def lattice(data, runs, stream):
        noise = gaussian(stream, width * runs, 20).reshape(runs, width)
        return data * 4 * 2**20 + (noise if width > 1 else noise[:, 0])

    verdict = ft.audit_mechanism(lattice, (0, 1), CLAIM, trials=2000, stream=SeededStream(3))
    assert verdict.eps_lower > 4


def test_whole_numbers_in_no_order_are_told_apart_by_outcome():
    def code(data, runs, stream):
        return np.array([5, 1, 9, 4])[2 * stream.bernoulli(0.5, runs) + data]

    verdict = ft.audit_mechanism(code, (0, 1), CLAIM, trials=2000, stream=SeededStream(3))
    assert verdict.eps_lower > 4
    assert "outcomes" in verdict.attack


def test_wide_whole_numbers_break_no_right_claim():
    delta, wide = 0.05, 1000
    claim = ft.Budget(ft.epsilon(ft.Gaussian(1.0), delta=delta), delta)

    def rounded(data, runs, stream):
        return data * wide + np.rint(gaussian(stream, runs, 20) * (wide / 2**20)).astype(np.int64)

    found = [
        ft.audit_mechanism(rounded, (0, 1), claim, trials=1000, confidence=0.9, stream=SeededStream(seed))
        for seed in range(100)
    ]
    assert sum(verdict.broken for verdict in found) <= 16  # of 10 allowed on average, on fixed seeds


@pytest.mark.parametrize(
    "apart",
    [(0.0, 5e-324), (1.0, math.nextafter(1.0, 2.0)), (1e308, 1.5e308), (-1.5e308, 1.5e308), (0.0, math.inf)],
)
def test_a_threshold_lies_above_one_value_and_not_above_the_next(apart):
    for low, high in (apart, apart[::-1]):
        without, within = np.full(400, low), np.full(400, high)
        assert judge(without, within, CLAIM, [("value", value)]).broken, apart


def test_the_statistic_that_shows_most_on_other_runs_is_taken():
    rng = np.random.default_rng(0)
    without, within = rng.normal(size=(400, 2)), rng.normal(size=(400, 2)) + np.array([0.0, 3.0])
    named = [("bits", LastBits()), ("lowest", lowest_bit), ("projection", Projection()), ("rows", Outcomes())]
    name, rule = best(named, without, within, Unknown(), CLAIM, 0.99)
    assert name == "projection"
    assert rule.flagged(without) < 20 < 200 < rule.flagged(within)


def test_outputs_that_cannot_be_compared_are_refused():
    def shaped(data, runs, stream):
        return np.zeros((runs, 1 + data))

    with pytest.raises(ft.FarthingError, match="must have one shape"):
        ft.audit_mechanism(shaped, (0, 1), CLAIM, trials=10)
    with pytest.raises(ft.FarthingError, match="at least one number each"):
        ft.audit_mechanism(lambda data, runs, stream: np.zeros((runs, 0)), (0, 1), CLAIM, trials=10)
    plain = lambda data, runs, stream: np.full(runs, float(data))  # noqa: E731
    for odd in (lambda outputs: outputs[:3], lambda outputs: outputs[:, None], lambda outputs: 1.0):
        with pytest.raises(ft.FarthingError, match="one number a run"):
            ft.audit_mechanism(plain, (0, 1), CLAIM, odd, trials=10)
    with pytest.raises(ft.FarthingError, match="threshold"):
        ft.audit_mechanism(plain, (0, 1), CLAIM, value, threshold=math.nan, trials=10)
