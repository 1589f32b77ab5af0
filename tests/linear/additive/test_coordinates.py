"""Coordinates that are rescaled on the way: what noise leaves, what is kept, and that margins do not move."""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.linear.additive.basis import CELLS, VALUES, Binned, Cell, codes_of
from farthing.linear.additive.coordinates import LEAST, CoordinateBlock, Coordinates
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import logistic, squared
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

RECORDS, WIDTH = 20_000, 12


def descending(budget, seed=1):
    """Return coordinates of 12 features, of which the first line and the second shape tell the class."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(RECORDS, WIDTH))
    y = (X[:, 0] + 2 * np.abs(X[:, 1] - 0.5) + 0.3 * rng.normal(size=RECORDS) > 1).astype(float)
    records = Binned(Table(X, y), codes_of(X, np.zeros(WIDTH), np.ones(WIDTH)))
    ledger = ft.Ledger(budget, stream=SeededStream(seed)).over(records)
    bend = 4 * np.abs(VALUES - 0.5) - 1
    bend[0] = 0.0
    blocks = [CoordinateBlock((Cell(feature, 1.7 * bend[:, None]),), np.ones(1)) for feature in (1, 2)]
    features = Features(WIDTH, np.full(WIDTH, 0.5), np.full(WIDTH, 12**0.5))
    problem = Problem(logistic, RECORDS, WIDTH, unit=False)
    assert bend.shape == (CELLS,)
    schedule = BudgetSchedule(ledger, RECORDS)
    found = Coordinates(schedule, problem, logistic, 0.9, features, None, blocks)
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
    assert found.blocks[0].share > 0.9
    assert np.median(found.lines[1:]) < 0.4
    assert found.lines.min() >= LEAST
    assert found.size < 0.8 * before
    assert found.schedule.deviation(0.01, ft.ClipNorm(np.sqrt(found.size))) < 0.9 * noise


def test_rescaling_changes_no_margin_but_by_shortening_weights():
    found, records = descending(ft.Budget(1e4, 1e-6))
    for _ in range(12):
        found.step(1.0, True)
    w, noise = found.w.copy(), found._noise(0, 1.0)
    before = found.space.margins(records, found.w)
    found._place()
    np.testing.assert_allclose(found.space.margins(records, found.w), before, atol=1e-9)
    np.testing.assert_allclose(found.w, w, atol=1e-12)
    lines, parts = found._kept(np.square(w), noise)
    signal = np.concatenate([lines, [1.0], parts])
    factors = np.minimum(signal / found._arrived(0, 1), 1.0)
    shortened = found.space.margins(records, found.w * factors)
    found.weigh(1.0)
    np.testing.assert_allclose(found.space.margins(records, found.w), shortened, atol=1e-9)


def test_groups_that_are_added_begin_at_zero():
    found, records = descending(ft.Budget(1.0, 1e-6))
    for _ in range(5):
        found.step(1.0, True)
    before = found.space.margins(records, found.w)
    found.grow(CoordinateBlock((Cell(5, np.ones((CELLS, 1))),), np.ones(1)))
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
    found.blocks, deviation = [CoordinateBlock((), np.ones(2))], 0.5
    f, left = np.array([0.9, 0.5]), np.array([0.3, 0.4])
    found.residue.slope[here, 2] = -f * found.count / found._curvatures[here]
    found.residue.noise[here, 2, 2] = 0.0
    found.residue.noise[here, 2, 2] = left * found.count**2 - found._noise(2, 1.0)[here]
    found.total[here] = found.count * np.sqrt(np.square(f * deviation) + left)  # what is to be expected
    theta = deviation * rng.normal(size=(100_000, 2))
    seen = f * theta + np.sqrt(left) * rng.normal(size=theta.shape)
    best = (seen * theta).sum(axis=0) / np.square(seen).sum(axis=0)
    spread = found.spread[here]
    found._kept = lambda squares, noise: ([], [1 - spread @ noise[here] / (spread @ squares[here])])
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
    blocks = [CoordinateBlock((Cell(0, 1.7 * bend[:, None]),), np.ones(1))] * 9
    found = Coordinates(schedule, problem, squared, 0.9, features, None, blocks)
    for _ in range(40):
        found.step(1.0, False)
    assert max(block.slower for block in found.blocks) < 1.0
    assert np.abs(found.space.margins(records, found.w) - records.table.y).max() < 0.2


def test_the_noise_on_components_of_trees_that_ask_alike_is_that_of_their_own_curvature():
    """Two coordinates that are the same: noise is pulled back along their sum, not along their difference.

    Against the weights of 60 runs with a target of zeros, where nothing but noise moves them.
    """
    rng = np.random.default_rng(7)
    x = rng.uniform(size=(2000, 1))
    codes = codes_of(x, np.zeros(1), np.ones(1))
    bend = 1.7 * (4 * np.abs(VALUES - 0.5) - 1)
    bend[0] = 0.0
    records = Binned(Table(x, np.zeros(2000)), codes)
    turn, variances = np.array([[1.0, 1.0], [-1.0, 1.0]]) / 2**0.5, np.array([0.0, 2.0])
    problem, features = Problem(squared, 2000, 1, unit=False), Features(1, 0.5, 12**0.5)
    found, predicted = [], np.zeros(2)
    for seed in range(60):
        ledger = ft.Ledger(ft.Budget(4.0, 1e-6), stream=SeededStream(seed)).over(records)
        block = CoordinateBlock((Cell(0, bend[:, None]), Cell(0, bend[:, None])), variances, turn)
        schedule = BudgetSchedule(ledger, 2000)
        each = Coordinates(schedule, problem, squared, 0.9, features, None, [block])
        for t in range(20):
            each.step(1.0, t >= 10)
        found.append(turn.T @ each.w[-2:])
        predicted = each.residue.noise[-2:, 0, 0]
    assert predicted[0] > 2 * predicted[1]
    np.testing.assert_allclose(np.square(found).mean(axis=0), predicted, rtol=0.6)
