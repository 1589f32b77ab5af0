"""With a budget without end every estimator and solver meets its optimum without privacy."""

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.datasets import make_classification

import farthing as ft
from farthing.linear.losses import huber_hinge, logistic, multinomial
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(4000, 5))
Y = (RNG.uniform(size=4000) < 1 / (1 + np.exp(-X @ np.array([4.0, -4, 2, -2, 1]) + 0.5))).astype(int)
MIXED, CLASSES = make_classification(4000, 6, n_informative=5, n_redundant=0, n_classes=4, random_state=1)
MIXED = (MIXED - MIXED.min(axis=0)) / np.ptp(MIXED, axis=0)
NUMBERS = np.clip(0.2 + X @ np.array([0.3, -0.1, 0.2, 0.0, 0.1]) + 0.05 * RNG.normal(size=4000), 0, 1)
AMPLE = {"epsilon": 1e6, "delta": 1e-3, "bounds": (0, 1)}
# These answer from a fixed number of candidates, steps or a penalty that no budget removes.
BOUNDED = {"majority", "privgene", "sgd-adv", "sgd-ma", "dpagd", "output", "objective", "pure"}


def excess(model, loss, rows, y, margins):
    """The mean loss above that of the fit without privacy, in nats."""
    found, best = (
        loss.value(each, y.astype(float)).mean() for each in (model.decision_function(rows), margins)
    )
    return found - best


@pytest.mark.parametrize("solver", sorted(set(CLASSIFIERS) - BOUNDED))
def test_two_classes(solver):
    plain = linear_model.LogisticRegression(C=1e6, max_iter=1000).fit(X, Y)
    model = ft.LogisticRegression(**AMPLE, solver=solver).fit(X, Y)
    assert excess(model, logistic, X, Y, plain.decision_function(X)) < 2e-3
    svc = ft.LinearSVC(**AMPLE, solver=solver).fit(X, Y)
    best = ft.LinearSVC(**AMPLE, solver="nonprivate").fit(X, Y).decision_function(X)
    assert excess(svc, huber_hinge, X, Y, best) < 2e-3


@pytest.mark.parametrize("solver", sorted(BOUNDED - {"majority", "privgene"}))
def test_solvers_that_stop_short_come_near(solver):
    plain = linear_model.LogisticRegression(C=1e6, max_iter=1000).fit(X, Y)
    model = ft.LogisticRegression(**{**AMPLE, "epsilon": 1e3}, solver=solver).fit(X, Y)
    assert model.score(X, Y) > plain.score(X, Y) - 0.03


@pytest.mark.parametrize("solver", ["auto", "nonprivate"])
def test_four_classes(solver):
    plain = linear_model.LogisticRegression(C=1e6, max_iter=2000).fit(MIXED, CLASSES)
    model = ft.LogisticRegression(**AMPLE, solver=solver, classes=range(4)).fit(MIXED, CLASSES)
    assert excess(model, multinomial, MIXED, CLASSES, plain.decision_function(MIXED)) < 0.01


@pytest.mark.parametrize("solver", sorted(set(REGRESSORS) - {"gradient"}))
def test_least_squares(solver):
    plain = linear_model.LinearRegression().fit(X, NUMBERS)
    model = ft.LinearRegression(**AMPLE, solver=solver, target_bounds=(0, 1)).fit(X, NUMBERS)
    found, best = (np.mean(np.square(each.predict(X) - NUMBERS)) for each in (model, plain))
    assert found < 1.01 * best


@pytest.mark.parametrize("kind", [ft.AdditiveRegressor, ft.GradientBoostingRegressor])
def test_an_additive_truth_is_learnt(kind):
    y = 0.5 + 0.3 * np.sin(6 * X[:, 0]) + 0.2 * np.square(X[:, 1]) - 0.2 * X[:, 2]
    assert kind(**AMPLE, target_bounds=(0, 1)).fit(X, y).score(X, y) > 0.99


@pytest.mark.parametrize("kind", [ft.AdditiveClassifier, ft.GradientBoostingClassifier])
def test_additive_classes_lose_nothing_to_lines(kind):
    plain = linear_model.LogisticRegression(C=1e6, max_iter=1000).fit(X, Y)
    model = kind(**AMPLE).fit(X, Y)
    assert excess(model, logistic, X, Y, plain.decision_function(X)) < 2e-3


@pytest.mark.parametrize("kind", [ft.LinearRegression, ft.AdditiveRegressor, ft.GradientBoostingRegressor])
@pytest.mark.parametrize("epsilon", [0.01, 1.0])
def test_predictions_stay_within_the_bounds_of_the_target(kind, epsilon):
    model = kind(epsilon, 1e-6, bounds=(0, 1), target_bounds=(0.1, 0.7)).fit(X, NUMBERS)
    far = model.predict(1e9 * RNG.normal(size=(300, 5)))
    assert 0.1 <= far.min() <= far.max() <= 0.7
