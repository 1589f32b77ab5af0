"""Training additive models and trees: what is charged, what is learnt, and when a model is only linear."""

import itertools

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import RdpFilter, ZcdpFilter
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue
from farthing.linear.additive.basis import CELLS, Binned, Cell, ObliviousTree, codes_of
from farthing.linear.additive.coordinates import CoordinateBlock, Coordinates
from farthing.linear.additive.method import _lines, additive
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import logistic, multinomial, squared
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(8000, 4))
X[:, 3] = X[:, 3] > 0.5
ENDS = np.zeros(4), np.ones(4)
BUMP = np.exp(-np.square((X[:, 0] - 0.5) / 0.15))
CROSSED = np.where(X[:, 1] > 0.5, X[:, 3], 1 - X[:, 3])


def trained(y, loss=squared, budget=None, rule=None, rows=X, outputs=0, **settings):
    ledger = ft.Ledger(budget or ft.Budget(2.0, 1e-6), filter=rule, stream=SeededStream(1))
    records = Binned(Table(rows, y), codes_of(rows, *ENDS))
    problem = Problem(loss, len(rows), 4, outputs, unit=False)
    return ledger, list(additive(ledger.over(records), problem, **settings))


def predicted(steps, rows=X):
    return steps[-1].w.margins(rows, codes_of(rows, *ENDS))


def explained(y, steps):
    return 1 - np.mean(np.square(predicted(steps) - y)) / y.var()


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
@pytest.mark.parametrize(
    ("loss", "y"), [(logistic, (BUMP > 0.5) * 1.0), (squared, BUMP)], ids=["classes", "numbers"]
)
def test_the_budget_is_spent_to_the_end(adjacency, loss, y):
    ledger, steps = trained(y, loss, ft.Budget(1.0, 1e-6, adjacency), trees=5)
    assert ledger.share == pytest.approx(1.0, abs=1e-6)
    assert ledger.share <= 1.0
    assert all(step.receipts for step in steps)
    parts = [ledger.filter.cost(receipt.event)[0] for step in steps for receipt in step.receipts]
    assert sum(parts) == pytest.approx(ledger.filter.mu**2, rel=1e-6)


@pytest.mark.parametrize("rule", [ZcdpFilter, RdpFilter])
def test_any_filter_that_prices_gaussians_will_do(rule):
    ledger, _ = trained(BUMP, rule=rule, trees=0)
    assert 0.999 < ledger.share <= 1.0


def test_a_shape_is_learnt_that_no_line_has():
    assert explained(BUMP, trained(BUMP, trees=0)[1]) > 0.8


def test_trees_learn_a_product_that_no_shape_has():
    assert explained(CROSSED, trained(CROSSED, trees=0)[1]) < 0.1
    assert explained(CROSSED, trained(CROSSED, trees=40)[1]) > 0.5


@pytest.mark.parametrize("trees", [0, 10])
def test_classes(trees):
    two = (BUMP > 0.5).astype(float)
    assert np.mean((predicted(trained(two, logistic, trees=trees)[1]) > 0) == two) > 0.9
    three = np.digitize(X[:, 0], [0.3, 0.6]).astype(float)
    found = predicted(trained(three, multinomial, outputs=3, trees=trees)[1])
    assert np.mean(found.argmax(axis=1) == three) > 0.85


def test_probabilities_are_neither_too_sure_nor_too_cautious():
    y = (RNG.uniform(size=8000) < 1 / (1 + np.exp(4 - 8 * BUMP))).astype(float)
    margins = predicted(trained(y, logistic)[1])
    losses = [logistic.value(factor * margins, y).mean() for factor in (0.5, 0.7, 1.0, 1.4, 2.0)]
    assert losses[2] < 1.03 * min(losses)


def test_predictions_of_a_skewed_target_have_its_mean():
    """Clipped residuals lead to the median of targets of 0 and 1, which is 0 here; the mean is 0.27."""
    y = (RNG.uniform(size=8000) < 0.2 + 0.14 * X[:, 3]).astype(float)
    _, steps = trained(y, budget=ft.Budget(0.5, 1e-6), trees=0)
    assert predicted(steps).mean() == pytest.approx(y.mean(), abs=0.03)
    assert explained(y, steps) > -0.02


@pytest.mark.parametrize(("alike", "least"), [(False, 0.997), (True, 0.99)], ids=["apart", "alike"])
def test_lengths_and_the_constant_are_found_anew_also_of_features_that_tell_the_same(alike, least):
    rng = np.random.default_rng(3)
    rows = rng.uniform(size=(8000, 4))
    if alike:
        rows = np.clip(rows[:, :1] + 0.02 * rng.normal(size=(8000, 4)), 0, 1)
    y = 0.2 + rows @ np.array([0.3, 0.2, 0.1, 0.0])
    _, steps = trained(y, budget=ft.Budget(0.5, 1e-6), rows=rows, trees=5)
    assert 1 - np.mean(np.square(predicted(steps, rows) - y)) / y.var() > least


def test_parts_add_up_to_the_weights_and_deviations_are_those_of_margins():
    rng = np.random.default_rng(0)
    mixed = X[:, :3] @ rng.normal(size=(3, 3))
    features = Features(3, mixed.mean(axis=0), 1 / mixed.std(axis=0))
    covariance = np.corrcoef(mixed.T)
    schedule = BudgetSchedule(ft.Ledger(ft.Budget(1.0, 1e-6)), len(X))
    problem = Problem(squared, len(X), 3, unit=False)
    descending = Coordinates(schedule, problem, squared, 0.9, features, covariance, [])
    tree = ObliviousTree((0, 1), (120, 120), np.vstack([np.zeros((1, 3)), rng.normal(size=(4, 3))]))
    w = np.append(np.linalg.eigh(covariance)[1][:, -1], 2.0)  # along which features vary together
    parts, deviations = descending.parts(w)
    assert parts.shape == (4, 1)  # trees that are not there are no part
    np.testing.assert_allclose(parts.sum(axis=1), [*w[:3], 0.0])
    told = (mixed - features.centre) * features.scale @ w[:3]
    assert deviations[0] == pytest.approx(told.std(), rel=1e-6)
    descending.grow(CoordinateBlock((Cell(1, rng.normal(size=(CELLS, 2))),), np.array([0.5, 0.2])))
    descending.grow(CoordinateBlock((tree,), np.ones(3), np.linalg.qr(rng.normal(size=(3, 3)))[0]))
    w = rng.normal(size=9)
    parts, deviations = descending.parts(w)
    np.testing.assert_allclose(parts[:, 0], [*w[:3], *np.zeros(6)])
    np.testing.assert_allclose(parts[:, 1], [*np.zeros(4), *w[4:6], *np.zeros(3)])
    np.testing.assert_allclose(parts[:, 2], [*np.zeros(6), *w[6:]])
    assert deviations[1] == pytest.approx(np.sqrt(0.5 * w[4] ** 2 + 0.2 * w[5] ** 2))
    assert deviations[2] == pytest.approx(np.linalg.norm(w[6:]))


def test_shapes_of_many_features_do_not_drown_what_lines_tell():
    """Every shape adds to the noise on all lines: at the strength that is right for ten, R² is 0.01 here."""
    rng = np.random.default_rng(5)
    rows = rng.uniform(size=(6000, 200))
    told = (rows - 0.5) @ rng.normal(size=200)
    y = np.clip((told + told.std() * rng.normal(size=6000)) / 40 + 0.5, 0, 1)
    model = ft.AdditiveRegressor(0.3, 1e-5, bounds=(0, 1), target_bounds=(0, 1), random_state=1)
    assert model.fit(rows, y).score(rows, y) > 0.1


def test_a_large_budget_comes_near_the_truth():
    _, steps = trained(BUMP, budget=ft.Budget(1e4, 1e-3), trees=0)
    assert explained(BUMP, steps) > 0.99


def test_a_small_budget_gives_a_linear_model_and_says_why():
    small, large = ft.Budget(0.05, 1e-6), ft.Budget(1.0, 1e-6)
    model = trained(BUMP, budget=small)[1][-1].w
    assert model.why.startswith("linear: the budget is worth ")
    assert not model.tables.any()
    assert not model.trees
    model = trained(BUMP, budget=large)[1][-1].w
    assert model.why.startswith("boosted: the budget is worth ")
    assert model.tables.any()
    assert len(model.trees) > 0


@pytest.mark.parametrize("labels", [2, 3])
def test_a_linear_choice_is_the_default_of_linear_models(labels):
    rows = np.random.default_rng(4).uniform(size=(60, 5))
    y, classes = (rows[:, 0] * labels).astype(int), range(labels)
    chosen, plain = (
        kind(0.5, 1e-5, bounds=(0, 1), classes=classes, random_state=3).fit(rows, y)
        for kind in (ft.GradientBoostingClassifier, ft.LogisticRegression)
    )
    assert chosen.choice_.startswith("linear")
    np.testing.assert_allclose(chosen.decision_function(rows), plain.decision_function(rows), atol=1e-5)
    assert chosen.feature_importances_.sum() == pytest.approx(1.0)


def test_nonsense_is_refused_before_a_charge():
    for trees in (-1, 2.5, "many"):
        with pytest.raises(InvalidValue, match="trees"):
            trained(BUMP, trees=trees)


@pytest.mark.parametrize(("epsilon", "trees"), [(1e-6, None), (1e-3, 3)])
def test_tiny_budgets_stay_finite(epsilon, trees):
    _, steps = trained(BUMP[:50], budget=ft.Budget(epsilon, 1e-9), rows=X[:50], trees=trees)
    assert np.isfinite(predicted(steps)).all()


def test_every_step_has_a_model():
    _, steps = trained(BUMP, trees=3)
    assert [step.t for step in steps] == list(range(1, len(steps) + 1))
    moves = [np.abs(b.w.weights - a.w.weights).max() for a, b in itertools.pairwise(steps)]
    assert np.mean(moves[-5:]) < np.mean(moves[:5])


def test_rare_categories_begin_with_less_variance_than_numbers():
    shares = np.array([0.5, 0.1, 0.01, 0.3])
    features = Features(4, shares, 1 / np.sqrt(shares * (1 - shares)))
    lines = _lines(features, np.array([False, False, False, True]))
    np.testing.assert_allclose(lines, [1.0, 0.6, 2 * np.sqrt(0.0099), 1.0])
