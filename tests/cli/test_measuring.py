"""Figures on held-out records: one noisy sum within the budget, whatever the records hold."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import gaussian
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.cli import measuring
from farthing.queries.events import ApproximateEvent, Event, GaussianEvent, PoissonEvent, PureEvent


def charged(epsilon: float, event: Event | None = None, rule: type[Filter] = GdpFilter) -> ft.Ledger:
    """A ledger that paid for a training: by ``event``, or all of it by one Gaussian answer."""
    ledger = ft.Ledger(ft.Budget(epsilon, 1e-6), filter=rule)
    ledger._books.take(event or GaussianEvent((1 + 1e-9) / ledger.budget.mu))
    return ledger


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(0).uniform(size=(20_000, 2))
    return X, (X[:, 0] > 0.4).astype(np.float64)


def test_a_noisy_accuracy_is_near_the_exact_one(rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = rows
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1)).fit(X, y)
    found = measuring.held_out(model, X, y, charged(2.0))
    exact = measuring.measured(model, X, y.astype(int))
    # 20 deviations of the noise, which is about 6 records
    assert found is not None
    assert abs(found["accuracy"] - exact["accuracy"]) < 0.01
    assert abs(found["guessing"] - exact["guessing"]) < 0.01
    assert abs(found["records"] - 20_000) < 200
    assert measuring.verdict(found) == {}


def test_records_that_are_no_numbers_count_as_nothing(rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = rows[0].copy(), rows[1].copy()
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1)).fit(X, y)
    X[:5000, 0], y[5000:10_000] = np.inf, np.nan
    found = measuring.held_out(model, X, y, charged(2.0))
    assert found is not None
    assert abs(found["records"] - 10_000) < 200
    assert found["accuracy"] > 0.9


def test_a_noisy_error_of_a_regression_is_near_the_exact_one(rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, _ = rows
    y = 10 * X[:, 0] + np.random.default_rng(1).normal(size=len(X))
    model = ft.LinearRegression(1.0, 1e-6, target_bounds=(-5, 15), bounds=(0, 1)).fit(X, y)
    found = measuring.held_out(model, X, y, charged(20.0))
    exact = measuring.measured(model, X, y)  # 10 % of either is more than 15 deviations of the noise
    assert found is not None
    assert found["rmse"] == pytest.approx(exact["rmse"], rel=0.1)
    assert found["rmse_of_mean"] == pytest.approx(exact["rmse_of_mean"], rel=0.1)
    assert measuring.verdict(found) == {}
    said = measuring.verdict({"rmse": 3.0, "rmse_of_mean": 2.9, "records": 9})
    assert "always predicting the mean" in said["verdict"]
    noisy = measuring.verdict({"rmse": 0.0, "rmse_of_mean": 2.9, "records": 9, "standard_error": 6.0})
    assert "hold out more records" in noisy["verdict"]


@pytest.mark.parametrize(
    ("rule", "event"),
    [
        (GdpFilter, GaussianEvent(9.0)),
        (GdpFilter, PureEvent(0.1)),
        (ZcdpFilter, GaussianEvent(9.0)),
        (ZcdpFilter, PureEvent(0.1)),
        (RdpFilter, GaussianEvent(9.0)),
        (RdpFilter, PoissonEvent(0.1, GaussianEvent(2.0))),
    ],
)
def test_figures_cost_no_more_than_the_training_in_any_total(rule: type[Filter], event: Event) -> None:
    ledger = charged(1.0, event, rule)
    mu = measuring.paid_mu(ledger)
    costs = ledger.filter.cost(GaussianEvent((1 + 2.0**-30) / mu)), ledger.filter.cost(event)
    assert all(figures <= training for figures, training in zip(*costs, strict=True))
    if event == GaussianEvent(9.0):
        assert mu == pytest.approx(1 / 9)


def test_figures_meet_the_epsilon_of_a_plan_or_of_basic_composition() -> None:
    basic = charged(1.0, ApproximateEvent(0.3, 1e-7), BasicFilter)
    assert gaussian.delta(measuring.paid_mu(basic), 0.3) <= 1e-6
    plan = ft.Ledger(ft.Budget(1.0, 1e-6))
    plan.promise(GaussianEvent(10.0), 4)
    assert measuring.paid_mu(plan) == 0
    plan._books.take(GaussianEvent(10.0))
    plan.refund()
    assert measuring.paid_mu(plan) == pytest.approx(0.1)  # of the answer that was asked, not of the plan
    assert plan.spent.epsilon >= gaussian.epsilon(measuring.paid_mu(plan), 1e-6)


def test_a_ledger_that_others_may_ask_covers_no_figures(tmp_path: object) -> None:
    with ft.Ledger(ft.Budget(1.0, 1e-6), journal=f"{tmp_path}/a.ledger") as ledger:
        ledger._books.take(GaussianEvent(10.0))
        assert measuring.paid_mu(ledger) == 0
        part = ledger.allot(0.1, 1e-6)
        assert measuring.paid_mu(part) == 0  # nothing is spent of it yet
        part._books.take(GaussianEvent(50.0))
        assert measuring.paid_mu(part) == pytest.approx(1 / 50)
        model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1)).fit(np.eye(2), [0, 1])
        assert measuring.held_out(model, np.eye(2), np.arange(2.0), ledger) is None
    assert math.isfinite(measuring.paid_mu(charged(1.0)))


@pytest.mark.parametrize("place", [0, 3, 6])
def test_figures_of_a_record_are_clipped_wherever_it_lies(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_BLOCK", 4)  # seven records: two blocks
    X, y = np.linspace(0, 1, 14).reshape(7, 2), np.full(7, 0.5)
    model = ft.LinearRegression(10.0, 1e-6, bounds=(0, 1), target_bounds=(0, 1)).fit(X, y)
    figures, bound = measuring._Figures(model, measuring._errors), ft.ClipNorm(2.0)
    far = y.copy()
    far[place] = 1e6  # beyond the bounds of the target
    missing = far.copy()
    missing[place] = np.nan
    sums = [figures.bounded_sum(ft.Rows(X, part), None, bound) for part in (far, missing)]
    assert np.linalg.norm(sums[0] - sums[1]) <= 2.0 + 1e-9
