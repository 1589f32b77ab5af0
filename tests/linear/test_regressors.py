"""Huber, quantile and Poisson regression: their optimum without privacy, their habits and their bounds."""

import warnings

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

import farthing as ft
from farthing.errors import InvalidValue

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(4000, 4))
LINE = 20 + X @ [10.0, -6, 3, 0]
REAL = LINE + 2 * RNG.standard_t(3, size=4000)
COUNTS = RNG.poisson(np.exp(0.5 + X @ [1.0, -0.5, 0.3, 0])).astype(float)
AMPLE = {"epsilon": 1e5, "delta": 1e-3, "bounds": (0, 1)}
SMALL = {"epsilon": 1.0, "delta": 1e-6, "bounds": (0, 1)}
KINDS = {
    ft.HuberRegressor: (REAL, (0, 50)),
    ft.QuantileRegressor: (REAL, (0, 50)),
    ft.PoissonRegressor: (COUNTS, (0, 20)),
}


def pinball(y, found, quantile):
    off = y - found
    return np.maximum(quantile * off, (quantile - 1) * off).mean()


def test_with_an_ample_budget_huber_meets_its_optimum():
    model = ft.HuberRegressor(**AMPLE, target_bounds=(0, 50), threshold=3.0).fit(X, REAL)
    best = ft.HuberRegressor(
        **AMPLE, target_bounds=(0, 50), threshold=3.0, solver=ft.NonPrivate(penalty=0.0, tolerance=1e-8)
    ).fit(X, REAL)
    np.testing.assert_allclose(model.predict(X), best.predict(X), atol=0.02)
    # its residuals, cut at the threshold, are orthogonal to the features: the definition of the optimum
    cut = np.clip(REAL - model.predict(X), -3, 3)
    assert np.abs(np.column_stack([X, np.ones(4000)]).T @ cut / 4000).max() < 0.01


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_with_an_ample_budget_quantiles_meet_scikit_learns(quantile):
    model = ft.QuantileRegressor(**AMPLE, target_bounds=(0, 50), quantile=quantile).fit(X, REAL)
    plain = linear_model.QuantileRegressor(quantile=quantile, alpha=0.0).fit(X[:1500], REAL[:1500])
    found, best = (pinball(REAL, each.predict(X), quantile) for each in (model, plain))
    assert found < best * 1.002
    assert (model.predict(X) > REAL).mean() == pytest.approx(quantile, abs=0.01)


@pytest.mark.parametrize("kind", [ft.HuberRegressor, ft.QuantileRegressor, ft.PoissonRegressor])
def test_noise_on_the_constant_stays_within_the_spread_of_the_target(kind):
    """Of a budget worth few records a model predicts about the mean, and no bound of the target."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(300, 5))
    y = 0.5 + 0.1 * rng.normal(size=300)
    off = []
    for seed in range(20):
        model = kind(0.5, 1e-6, bounds=(0, 1), target_bounds=(0, 1), random_state=seed).fit(X, y)
        off.append(np.abs(model.predict(X) - 0.5).mean())
    assert np.median(off) < 0.1  # 0.5 at the bounds


def test_with_an_ample_budget_counts_meet_scikit_learns():
    model = ft.PoissonRegressor(**AMPLE, target_bounds=(0, 50)).fit(X, COUNTS)
    plain = linear_model.PoissonRegressor(alpha=0.0).fit(X, COUNTS)
    np.testing.assert_allclose(model.predict(X), plain.predict(X), rtol=0.01)
    assert model.score(X, COUNTS) == pytest.approx(plain.score(X, COUNTS), abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [None, (0, 1)])
def test_exported_models_predict_the_same_within_the_bounds(kind, bounds):
    y, (_, high) = KINDS[kind]
    model = kind(**{**SMALL, "bounds": bounds}, target_bounds=(0, high / 4)).fit(X, y)
    found = model.predict(5 * X - 2)
    assert found.min() >= 0
    assert found.max() <= high / 4
    np.testing.assert_allclose(model.to_sklearn().predict(5 * X - 2), found)
    assert clone(model).get_params().keys() == model.get_params().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_budgets_and_parts(kind):
    y, range_ = KINDS[kind]
    ledger = ft.Ledger(ft.Budget(4.0, 1e-4))
    model = kind(
        0.5, 1e-6, bounds=(0, 1), target_bounds=range_, ledger=ledger, max_sample_weight=2, warm_start=True
    )
    model.fit(X, y, np.ones(4000))
    cost = ledger.share
    model.fit(X, y).partial_fit(X[:1000], y[:1000])
    assert ledger.share == pytest.approx(3 * cost)
    budgets = np.where(np.arange(4000) % 2, 0.5, 1.0)
    levels = kind(delta=1e-6, bounds=(0, 1), target_bounds=range_).fit(X, y, budgets=budgets)
    assert sorted(levels.guarantees_) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (ft.HuberRegressor, {"target_bounds": (0, 1), "threshold": 0.0}, "threshold"),
        (ft.QuantileRegressor, {"target_bounds": (0, 1), "quantile": 1.0}, "quantile"),
        (ft.QuantileRegressor, {}, "target_bounds"),
        (ft.PoissonRegressor, {"target_bounds": (1, 9)}, r"\(0, high\)"),
        (ft.PoissonRegressor, {"target_bounds": (0, 9), "fit_intercept": False}, "constant"),
        (ft.PoissonRegressor, {"target_bounds": (0, 9), "solver": "sgd-ma"}, "solver must be one of"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_charged(kind, options, said):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    with pytest.raises(InvalidValue, match=said):
        kind(bounds=(0, 1), ledger=ledger, **options).fit(X, COUNTS)
    assert ledger.share == 0


# Rows that are not finite count as nothing, fits differ by their noise, and no ledger pays for going on.
UNLIKE = {
    "check_estimators_nan_inf",
    "check_dtype_object",
    "check_supervised_y_no_nan",
    "check_all_zero_sample_weights_error",
    "check_sample_weight_equivalence_on_dense_data",
    "check_sample_weight_equivalence_on_sparse_data",
    "check_fit_score_takes_y",
    "check_regressors_train",  # of unlike units, on unit rows
}
ESTIMATORS = [kind(1e4, 1e-3, target_bounds=(0, 300), max_sample_weight=10.0) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "check"),
    [pair for estimator in ESTIMATORS for pair in estimator_checks_generator(estimator)],
    ids=lambda part: getattr(part, "func", type(part)).__name__,
)
def test_scikit_learns_own_checks(estimator, check):
    if getattr(check, "func", check).__name__ in UNLIKE:
        pytest.skip("asks for what a private estimator cannot do, as of LinearRegression")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some checks warn on purpose
        check(estimator)
