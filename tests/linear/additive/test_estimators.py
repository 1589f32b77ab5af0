"""Estimators of additive models and boosted trees: scikit-learn's checks, one ledger, shapes to draw."""

import pickle
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator

import farthing as ft
from farthing.accounting.filters import RdpFilter
from farthing.errors import BudgetSpent, InvalidValue

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, size=(4000, 3))
BUDGET = {"epsilon": 2.0, "delta": 1e-5, "bounds": (-2, 2)}
Y = np.where(np.abs(X[:, 0]) > 1, "out", "in")
NUMBERS = 10 * np.square(X[:, 1])
KINDS = [ft.AdditiveClassifier, ft.GradientBoostingClassifier]
REGRESSORS = [ft.AdditiveRegressor, ft.GradientBoostingRegressor]


class Classifier(ft.GradientBoostingClassifier):
    """scikit-learn's checks bring their own labels and do not declare them: here the test does."""

    def fit(self, X, y):
        given = self.classes
        try:
            self.classes = np.unique(np.asarray(y)) if y is not None else given
            return super().fit(X, y)
        finally:
            self.classes = given


ESTIMATORS = [
    Classifier(1e4, 1e-3, bounds=(-10, 10), trees=3),
    ft.GradientBoostingRegressor(1e4, 1e-3, bounds=(-10, 10), target_bounds=(-300, 300), trees=3),
]
# Rows that count as nothing, where scikit-learn wants an error; and arrays of objects, which are refused.
ENDS = dict.fromkeys(["check_estimators_nan_inf", "check_supervised_y_no_nan"], AssertionError)
ENDS["check_dtype_object"] = InvalidValue


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "check"),
    [pair for estimator in ESTIMATORS for pair in estimator_checks_generator(estimator)],
    ids=lambda part: getattr(part, "func", type(part)).__name__,
)
def test_scikit_learns_own_checks(estimator, check):
    name = getattr(check, "func", check).__name__
    labels = name == "check_supervised_y_no_nan" and isinstance(estimator, Classifier)
    if "sparse" in name:  # values that are not stored are the lower bound
        estimator = clone(estimator).set_params(bounds=(0, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ENDS[name]) if name in ENDS and not labels else nullcontext():
            check(estimator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_learns_what_no_line_tells_apart(kind):
    model = kind(**BUDGET, classes=["in", "out"]).fit(X, Y)
    assert model.score(X, Y) > 0.9
    p = model.predict_proba(X)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    np.testing.assert_allclose(np.log(p[:, 1] / p[:, 0]), model.decision_function(X), atol=1e-6)
    assert (model.privacy_.epsilon, model.privacy_.delta) == (2.0, 1e-5)
    assert "public" in model.privacy_.note
    assert model.feature_importances_.argmax() == 0
    assert model.feature_importances_.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", REGRESSORS)
def test_predictions_of_a_regressor_stay_within_the_bounds_of_its_target(kind):
    model = kind(**BUDGET, target_bounds=(0, 25)).fit(X, NUMBERS)
    assert model.score(X, np.clip(NUMBERS, 0, 25)) > 0.8
    far = model.predict(1e6 * RNG.normal(size=(200, 3)))
    assert 0 <= far.min() <= far.max() <= 25
    np.testing.assert_array_equal(model.predict(X * 50), model.predict(np.clip(X * 50, -2, 2)))


def test_shapes_add_up_to_the_margin_of_an_additive_model():
    model = ft.AdditiveClassifier(**BUDGET, classes=["in", "out"]).fit(X, Y)
    shapes = [model.shape(j) for j in range(3)]
    assert all(x[0] == -2 and x[-1] == 2 and len(x) == len(effect) for x, effect in shapes)
    low = model.decision_function(np.full((1, 3), -2.0))[0]
    high = model.decision_function(np.array([[2.0, -2.0, -2.0]]))[0]
    effect = shapes[0][1]
    assert high - low == pytest.approx(effect[-1] - effect[0], abs=1e-9)
    with pytest.raises(InvalidValue, match="feature must be from 0 to 2"):
        model.shape(3)


def test_the_shape_of_a_regressor_is_in_units_of_its_target():
    model = ft.AdditiveRegressor(20.0, 1e-5, bounds=(-2, 2), target_bounds=(0, 40)).fit(X, NUMBERS)
    x, effect = model.shape(1)
    assert effect[0] - effect[np.abs(x).argmin()] == pytest.approx(40, abs=8)


def test_several_classes_a_sparse_table_and_copies():
    rows = np.where(X > 0, X, 0.0)
    labels = np.digitize(rows[:, 0], [0.5, 1.0])
    model = ft.GradientBoostingClassifier(4.0, 1e-5, bounds=(0, 2), classes=range(3), trees=5)
    dense = clone(model).set_params(random_state=1).fit(rows, labels)
    stored = clone(model).set_params(random_state=1).fit(sparse.csr_array(rows), labels)
    assert dense.score(rows, labels) > 0.8
    assert dense.shape(0)[1].shape[1] == 3
    np.testing.assert_allclose(stored.predict_proba(rows), dense.predict_proba(rows), atol=1e-6)
    again = pickle.loads(pickle.dumps(dense))
    np.testing.assert_array_equal(again.predict(rows), dense.predict(rows))


def test_all_fits_spend_from_one_ledger():
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    model = ft.GradientBoostingClassifier(0.5, 1e-6, bounds=(-2, 2), classes=["in", "out"], ledger=ledger)
    scores = cross_val_score(model, X, Y, cv=2, error_score="raise")
    assert len(scores) == 2
    assert 0.1 < ledger.share < 0.2
    with pytest.raises(BudgetSpent):
        clone(model).set_params(epsilon=5.0, delta=1e-5).fit(X, Y)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bounds": None}, "declare bounds"),
        ({"bounds": (1, 0)}, "low < high"),
        ({"trees": 0.5}, "trees must be"),
        ({"classes": (1,)}, "two labels"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_charged(changed, said):
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    model = ft.GradientBoostingClassifier(bounds=(-2, 2), classes=["in", "out"], ledger=ledger)
    with pytest.raises(InvalidValue, match=said):
        model.set_params(**changed).fit(X, Y)
    assert ledger.share == 0


@pytest.mark.parametrize("kind", [ft.AdditiveClassifier, ft.GradientBoostingClassifier])
def test_bounds_are_bought_from_the_same_budget(kind):
    X = 100 * np.random.default_rng(0).uniform(size=(3000, 2)) + 1900
    y = (np.abs(X[:, 0] - 1950) > 25).astype(int)
    ledger = ft.Ledger(ft.Budget(2.0, 1e-6))
    model = kind(bounds="private", ledger=ledger).fit(X, y)
    assert ledger.share <= 1
    assert model.privacy_.epsilon == 2.0
    seeded = kind(2.0, 1e-6, bounds="private", random_state=0).fit(X, y)
    low, high = seeded.bounds_
    assert (low > 1800).all()
    assert (high < 2100).all()
    assert seeded.score(X, y) > 0.8
    assert not hasattr(kind(2.0, 1e-6, bounds=(1900, 2000)).fit(X, y), "bounds_")


def test_bounds_that_cannot_be_bought_are_refused_before_anything_is_charged():
    ledger = ft.Ledger(ft.Budget(2.0, 1e-6), filter=RdpFilter)
    with pytest.raises(ft.Unsupported, match="GDP, zCDP or basic"):
        ft.AdditiveClassifier(bounds="private", ledger=ledger).fit(np.ones((9, 2)), np.zeros(9, int))
    assert ledger.share == 0
    with pytest.raises(ft.InvalidValue, match="dense table"):
        ft.AdditiveClassifier(1.0, 1e-6, bounds="private").fit(sparse.eye_array(9).tocsr(), np.zeros(9, int))
