"""Coordinates that are rescaled on the way: what noise leaves, what is kept, and that margins do not move."""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.linear.additive.basis import CELLS, VALUES, Binned, Cell, codes_of
from farthing.linear.additive.coordinates import LEAST, Coordinates, Residue
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import logistic, squared
from farthing.linear.methods.descent import MOMENTUM
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

RATES, CURVATURES = np.array([0.5, 1.0, 0.1]), np.array([1.0, 0.3, 0.01])
RECORDS, WIDTH = 20_000, 12


def run(push):
    """Return the sum of the later iterates of a descent with these slopes beside those of the loss."""
    w = velocity = total = np.zeros(push.shape[1:])
    for t, slope in enumerate(push, start=1):
        velocity = MOMENTUM * velocity - RATES * (CURVATURES * w + slope)
        w = w + velocity
        total = total + (t > 10) * w
    return total


def test_the_noise_left_on_weights_is_that_of_the_recursion():
    """Against running the recursion itself on drawn noise: the variance of 4,000 runs is within 10 %."""
    noises, left = np.geomspace(2, 1, 21), Residue(3)
    for t, noise in enumerate(noises, start=1):
        left.step(RATES, CURVATURES, noise, t > 10)
    drawn = np.random.default_rng(2).normal(size=(21, 4000, 3)) * noises[:, None, None]
    np.testing.assert_allclose(left.noise[:, 2, 2], run(drawn).var(axis=0), rtol=0.1)
    np.testing.assert_allclose(left.slope[:, 2], run(np.ones((21, 3))), rtol=1e-9)


def descending(budget, seed=1):
    """Return coordinates of 12 features, of which the first line and the second shape tell the class."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(RECORDS, WIDTH))
    y = (X[:, 0] + 2 * np.abs(X[:, 1] - 0.5) + 0.3 * rng.normal(size=RECORDS) > 1).astype(float)
    records = Binned(Table(X, y), codes_of(X, np.zeros(WIDTH), np.ones(WIDTH)))
    ledger = ft.Ledger(budget, stream=SeededStream(seed)).over(records)
    bend = 4 * np.abs(VALUES - 0.5) - 1
    bend[0] = 0.0
    groups = [Cell(feature, 1.7 * bend[:, None]) for feature in (1, 2)]
    features = Features(WIDTH, np.full(WIDTH, 0.5), np.full(WIDTH, 12**0.5))
    problem = Problem(logistic, RECORDS, WIDTH, unit=False)
    assert bend.shape == (CELLS,)
    schedule = BudgetSchedule(ledger, RECORDS)
    found = Coordinates(schedule, problem, logistic, 0.9, features, None, groups, [np.ones(1)] * 2)
    return found, records


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_what_tells_something_is_kept_and_what_is_noise_is_not(epsilon):
    found, _ = descending(ft.Budget(epsilon, 1e-6))
    before = found.size
    for _ in range(12):
        found.step(1.0, False)
    noise = found.schedule.deviation(0.01, ft.ClipNorm(np.sqrt(found.size)))
    found.weigh(1.0)
    assert found.lines[0] > 0.9
    assert found.shares[0] > 0.9
    assert np.median(found.lines[1:]) < 0.4
    assert found.lines.min() >= LEAST
    assert found.size < 0.8 * before
    assert found.schedule.deviation(0.01, ft.ClipNorm(np.sqrt(found.size))) < 0.9 * noise


def test_rescaling_changes_no_margin_but_by_shortening_weights():
    found, records = descending(ft.Budget(1e4, 1e-6))
    for _ in range(12):
        found.step(1.0, True)
    kept = found.w.copy()
    before = found.space.margins(records, found.w)
    found.grow([], [])
    np.testing.assert_allclose(found.space.margins(records, found.w), before, atol=1e-9)
    np.testing.assert_allclose(found.w, kept, atol=1e-12)
    lines, groups = found._ratios(1.0)
    factors = np.concatenate([np.maximum(0, 1 - 1 / lines), [1.0], np.maximum(0, 1 - 1 / np.array(groups))])
    shortened = found.space.margins(records, found.w * factors)
    found.weigh(1.0)
    np.testing.assert_allclose(found.space.margins(records, found.w), shortened, atol=1e-9)


def test_groups_that_are_added_begin_at_zero():
    found, records = descending(ft.Budget(1.0, 1e-6))
    for _ in range(5):
        found.step(1.0, True)
    before = found.space.margins(records, found.w)
    found.grow([Cell(5, np.ones((CELLS, 1)))], [np.ones(1)])
    np.testing.assert_allclose(found.space.margins(records, found.w), before, atol=1e-9)
    assert found.w[-1] == found.total[-1] == 0.0
    assert found.size == pytest.approx(WIDTH + 3)


def test_weights_of_groups_are_shortened_by_what_noise_explains_and_never_made_longer():
    found, _ = descending(ft.Budget(0.3, 1e-6))
    for t in range(40):
        found.step(1.0, t >= 20)
    w, place = found.found, WIDTH + 1
    signal, noise = np.abs(found.shrunk(1.0)[place:] / w[place:])
    assert 0.9 < signal <= 1.0
    assert noise < 0.7
    np.testing.assert_array_equal(found.shrunk(1.0)[:place], w[:place])


def test_within_a_group_coordinates_of_more_noise_are_shortened_more():
    """Against the least squares of θ on weights f θ + noise, drawn 100,000 times."""
    found, _ = descending(ft.Budget(0.3, 1e-6))
    for t in range(40):
        found.step(1.0, t >= 20)
    rng, here = np.random.default_rng(4), slice(WIDTH + 1, None)
    found.variances, deviation = [np.array([1.0, 1.0])], 0.5
    f, left = np.array([0.9, 0.5]), np.array([0.3, 0.4])
    found.residue.slope[here, 2] = -f * found.count / found._curvatures[here]
    found.residue.noise[here, 2, 2] = 0.0
    found.residue.noise[here, 2, 2] = left * found.count**2 - found._noise(2, 1.0)[here]
    found.total[here] = found.count * np.sqrt(np.square(f * deviation) + left)  # what is to be expected
    theta = deviation * rng.normal(size=(100_000, 2))
    seen = f * theta + np.sqrt(left) * rng.normal(size=theta.shape)
    best = (seen * theta).sum(axis=0) / np.square(seen).sum(axis=0)
    np.testing.assert_allclose(found.shrunk(1.0)[here] / found.found[here], best, atol=0.02)
    found.residue.noise[here, 2, 2] -= 0.999 * left * found.count**2  # then weights are short, not noisy
    np.testing.assert_array_equal(found.shrunk(1.0), found.found)


def test_steps_along_groups_that_tell_the_same_are_shortened_until_they_converge():
    """Nine copies of a coordinate have nine times its curvature: steps of the rate of one diverge."""
    x = np.random.default_rng(6).uniform(size=(RECORDS, 1))
    bend = 4 * np.abs(VALUES - 0.5) - 1
    bend[0] = 0.0
    codes = codes_of(x, np.zeros(1), np.ones(1))
    records = Binned(Table(x, bend[codes[0]]), codes)
    schedule = BudgetSchedule(ft.Ledger(ft.Budget(1e3, 1e-6), stream=SeededStream(1)).over(records), RECORDS)
    problem, features = Problem(squared, RECORDS, 1, unit=False), Features(1, 0.5, 12**0.5)
    groups, variances = [Cell(0, 1.7 * bend[:, None])] * 9, [np.ones(1)] * 9
    found = Coordinates(schedule, problem, squared, 0.9, features, None, groups, variances)
    for _ in range(40):
        found.step(1.0, False)
    assert max(found.slower[1:]) < 1.0
    assert np.abs(found.space.margins(records, found.w) - records.table.y).max() < 0.2
