"""Weights of records and classes, and fits that go on: what is declared, what is charged, what comes out."""

import warnings

import numpy as np
import pytest
from sklearn import linear_model

import farthing as ft
from farthing.accounting.filters import BasicFilter
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.linear import weights
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(3000, 3))
Y = (X @ [3, -3, 1] + RNG.logistic(size=3000) > 1.5).astype(int)
WEIGHTS = np.where(X[:, 0] > 0.5, 3.0, 1.0) * RNG.uniform(size=3000)
AMPLE = {"epsilon": 1e5, "delta": 1e-3, "bounds": (0, 1)}
SMALL = {"epsilon": 1.0, "delta": 1e-6, "bounds": (0, 1)}


def test_with_an_ample_budget_weighed_classes_are_those_of_scikit_learn():
    for class_weight in ({0: 1.0, 1: 4.0}, "balanced"):
        model = ft.LogisticRegression(**AMPLE, class_weight=class_weight).fit(X, Y)
        plain = linear_model.LogisticRegression(C=1e6, class_weight=class_weight).fit(X, Y)
        np.testing.assert_allclose(model.predict_proba(X), plain.predict_proba(X), atol=0.03)


def test_with_an_ample_budget_weighed_records_are_those_of_scikit_learn():
    model = ft.LogisticRegression(**AMPLE, max_sample_weight=3.0).fit(X, Y, WEIGHTS)
    plain = linear_model.LogisticRegression(C=1e6).fit(X, Y, WEIGHTS)
    np.testing.assert_allclose(model.predict_proba(X), plain.predict_proba(X), atol=0.03)
    bent = np.square(X[:, 0]) / 2 + X[:, 1] / 4
    for alpha in (0.0, 300.0):
        model = ft.LinearRegression(**AMPLE, target_bounds=(0, 1), alpha=alpha, max_sample_weight=3.0)
        plain = linear_model.Ridge(alpha).fit(X, bent, WEIGHTS)
        wanted = np.clip(plain.predict(X), 0, 1)
        np.testing.assert_allclose(model.fit(X, bent, WEIGHTS).predict(X), wanted, atol=0.01)


def test_a_weight_beyond_the_largest_counts_as_the_largest_and_a_missing_one_as_none():
    options = {**SMALL, "max_sample_weight": 2.0, "random_state": 1}
    odd, even = WEIGHTS.copy(), np.minimum(WEIGHTS, 2.0)
    odd[:3], even[:3] = (np.nan, -5.0, 1e300), (0.0, 0.0, 2.0)
    models = [ft.LogisticRegression(**options).fit(X, Y, each) for each in (odd, even)]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)


def test_batches_take_weights_without_buying_their_total():
    model = ft.LogisticRegression(
        20.0, 1e-5, bounds=(0, 1), solver="sgd-ma", class_weight={1: 30.0, 0: 1.0}
    ).fit(X, Y)
    assert model.predict(X).mean() > 0.8  # the class that counts thirty times is predicted


@pytest.mark.parametrize("solver", [name for name, method in CLASSIFIERS.items() if not method.weighed])
def test_solvers_without_a_proof_for_weights_refuse_them(solver):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=BasicFilter)
    model = ft.LogisticRegression(0.5, 5e-7, bounds=(0, 1), solver=solver, ledger=ledger, class_weight={1: 2})
    with pytest.raises(Unsupported, match="no proof for records with weights"):
        model.fit(X, Y)
    assert ledger.share == 0


@pytest.mark.parametrize("solver", [name for name, method in REGRESSORS.items() if not method.weighed])
def test_regression_without_a_proof_for_weights_refuses_them(solver):
    model = ft.LinearRegression(**SMALL, target_bounds=(0, 1), solver=solver, max_sample_weight=3.0)
    with pytest.raises(Unsupported, match="no proof for records with weights"):
        model.fit(X, X[:, 0], WEIGHTS)


@pytest.mark.parametrize(
    ("options", "fitted", "said"),
    [
        ({}, {"sample_weight": WEIGHTS}, "needs max_sample_weight"),
        ({"max_sample_weight": -1.0}, {"sample_weight": WEIGHTS}, "max_sample_weight"),
        ({"max_sample_weight": 1.0}, {"sample_weight": WEIGHTS[:7]}, "one number per row"),
        ({"class_weight": {2: 1.0}}, {}, "not one of the classes"),
        ({"class_weight": {0: 0.0, 1: 0.0}}, {}, "above 0"),
        ({"class_weight": {0: -1.0}}, {}, "class_weight"),
        ({"class_weight": "even"}, {}, "dictionary"),
        ({"class_weight": "balanced", "solver": "sgd-ma"}, {}, "promises its whole budget"),
        ({"class_weight": {1: 2.0}, "epsilon": None}, {"budgets": np.ones(3000)}, "budgets weigh"),
    ],
)
def test_wrong_weights_are_refused_before_anything_is_charged(options, fitted, said):
    with pytest.raises((InvalidValue, Unsupported), match=said):
        ft.LogisticRegression(**{**SMALL, **options}).fit(X, Y, **fitted)


def test_totals_are_bought_from_the_budget_of_the_fit():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    model = ft.LogisticRegression(bounds=(0, 1), ledger=ledger, class_weight="balanced").fit(X, Y)
    assert ledger.share <= 1
    assert model.privacy_.epsilon == 1.0
    with pytest.raises(BudgetSpent):
        model.fit(X, Y)


def test_a_class_that_is_not_there_gets_no_weight_beyond_the_noise():
    shares, codes = np.ones(1000), np.zeros(1000)
    given = weights.RecordWeights(shares, 1.0, codes, 2, None)
    method = CLASSIFIERS["auto"]
    found, records, largest = given.settled(ft.Ledger(ft.Budget(1.0, 1e-6)), method, 1000)
    assert np.isfinite(largest)
    assert 0 < found.max() < 1
    assert 1 <= records <= 1000


def test_later_fits_begin_at_released_weights_and_are_each_charged():
    ledger = ft.Ledger(ft.Budget(4.0, 1e-5))
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1), ledger=ledger, warm_start=True).fit(X, Y)
    first, cost = model.coef_, ledger.share
    model.fit(X, Y)
    assert ledger.share == pytest.approx(2 * cost)
    assert model.privacy_ == ledger.guarantee  # of both fits, not of the last alone
    assert np.abs(model.history_[0].w[0] - first[0]).max() < 5  # one step away from where it began
    assert np.abs(model.history_[0].w[0]).max() > 0.5


def test_going_on_without_a_ledger_is_refused():
    model = ft.LogisticRegression(**SMALL, warm_start=True).fit(X, Y)
    with pytest.raises(InvalidValue, match="paid from one budget"):
        model.fit(X, Y)
    with pytest.raises(InvalidValue, match="paid from one budget"):
        model.partial_fit(X, Y)
    regression = ft.LinearRegression(**SMALL, target_bounds=(0, 1), warm_start=True).fit(X, X[:, 0])
    with pytest.raises(Unsupported, match="warm_start needs solver"):
        regression.fit(X, X[:, 0])


def test_parts_of_a_table_are_averaged_by_their_rows():
    ledger = ft.Ledger(ft.Budget(8.0, 1e-3))
    model = ft.LinearRegression(2.0, 1e-4, bounds=(0, 1), target_bounds=(0, 1), ledger=ledger)
    model.partial_fit(X[:1000], X[:1000, 0])
    before, cost = model.coef_, ledger.share
    model.partial_fit(X[1000:], X[1000:, 0])
    alone = model._outward(*model.history_[-1].w)[0]
    np.testing.assert_allclose(model.coef_, before / 3 + alone * 2 / 3)
    assert ledger.share == pytest.approx(2 * cost)
    assert model.privacy_ == ledger.guarantee
    with pytest.raises(InvalidValue, match="features"):
        model.partial_fit(X[:, :2], X[:, 0])


def test_a_part_that_does_not_fit_leaves_the_model_as_it_was():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    model = ft.LogisticRegression(classes=[0, 1], bounds="private", ledger=ledger).partial_fit(X, Y)
    weights_before, share = model.coef_.copy(), ledger.share
    with pytest.raises(BudgetSpent):
        model.partial_fit(X, Y)
    np.testing.assert_array_equal(model.coef_, weights_before)
    assert ledger.share == share


def test_going_on_from_weights_that_another_ledger_or_nobody_paid_for_is_refused():
    """The guarantee of the ledger would say less than what the model tells."""
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    model = ft.LogisticRegression(0.1, 1e-7, bounds=(0, 1), ledger=ledger, solver="nonprivate")
    model.partial_fit(X, Y)
    for parameters in ({}, {"solver": "auto"}):
        with pytest.raises(InvalidValue, match="another ledger paid"):
            model.set_params(**parameters).partial_fit(X, Y)
    assert model.privacy_.epsilon == np.inf
    model = ft.LogisticRegression(**SMALL, warm_start=True).fit(X, Y)
    with pytest.raises(InvalidValue, match="another ledger paid"):
        model.set_params(ledger=ledger, epsilon=None, delta=None).fit(X, Y)
    assert ledger.share == 0.0


@pytest.mark.parametrize("weight", [1e308, -1e308, np.inf, 5e-324])
def test_a_weight_beyond_floats_is_clamped_without_a_warning(weight):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shares, most = weights.read(np.array([0.25, weight]), 0.5, 2)
    assert most == 0.5
    assert shares[0] == 0.5
    assert shares[1] in (0.0, 1.0, 1e-323)
