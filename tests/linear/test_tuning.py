"""Tuning of estimators: what is released is the best fit, and everything is within one budget."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import BasicFilter, RdpFilter
from farthing.linear.tuning import search, tune
from farthing.queries.events import PoissonEvent

RNG = np.random.default_rng(1)
X = RNG.uniform(size=(3000, 2))
Y = (X[:, 0] > X[:, 1]).astype(int)
BOUNDS = {"bounds": [(0, 1), (-1000, 1000)]}


def _ledger(**options) -> ft.Ledger:
    return ft.Ledger(ft.Budget(3.0, 1e-5), **options)


@pytest.mark.usefixtures("twenty_runs")
def test_the_better_candidate_wins_and_its_model_states_the_price_of_all_runs():
    ledger = _ledger()
    tuned = tune(ft.LogisticRegression(), BOUNDS, X, Y, ledger, runs=30)
    assert tuned.candidate == {"bounds": (0, 1)}
    assert tuned.model.score(X, Y) > 0.8
    assert abs(tuned.score - tuned.model.score(X, Y)) < 0.05
    assert tuned.model.privacy_ == tuned.privacy
    assert tuned.privacy.epsilon == pytest.approx(3.0, abs=1e-5)
    assert "number of records" in tuned.privacy.note
    assert tuned.model.ledger is ledger


def test_a_sample_is_tuned_on_for_less_and_everything_is_fitted_on_afterwards():
    ledger = _ledger(filter=BasicFilter)
    tuned = tune(ft.LogisticRegression(), BOUNDS, X, Y, ledger, 0.5, 5e-6, sampling_rate=0.2, records=3000)
    assert isinstance(tuned.receipt.event, PoissonEvent)
    assert tuned.privacy.epsilon <= 0.5
    assert tuned.privacy.epsilon == pytest.approx(0.5, abs=1e-4)
    assert tuned.privacy.delta == pytest.approx(5e-6)
    model = ft.LogisticRegression(ledger=ledger, **tuned.candidate).fit(X, Y)
    assert model.privacy_.epsilon == pytest.approx(2.5, abs=1e-3)


def test_a_sample_needs_basic_composition():
    ledger = _ledger()
    with pytest.raises(ft.Unsupported, match="BasicFilter"):
        tune(ft.LogisticRegression(), BOUNDS, X, Y, ledger, sampling_rate=0.2)
    assert ledger.share == 0


@pytest.mark.usefixtures("twenty_runs")
def test_a_regressor_is_scored_by_the_value_that_is_given():
    y = 8 * X[:, 0]
    model, wide = (
        ft.LinearRegression(target_bounds=(0, 8), bounds=(0, 1)),
        {"target_bounds": [(0, 8), (0, 1)]},
    )

    def value(truth, predicted):
        return 1 - np.abs(truth - predicted) / 8

    tuned = tune(model, wide, X, y, _ledger(), runs=30, value=value)
    assert tuned.candidate == {"target_bounds": (0, 8)}
    with pytest.raises(ft.InvalidValue, match="value="):
        tune(model, wide, X, y, _ledger())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"candidates": {"depth": [1]}}, "depth"),
        ({"candidates": [{"solver": "nonsense"}]}, "solver"),
        ({"score_share": 0.0}, "score_share"),
        ({"sampling_rate": 2.0}, "sampling_rate"),
        ({"runs": math.inf}, "runs"),
        ({"y": Y[:5]}, "targets"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_charged(options, said):
    ledger = _ledger()
    given = {"estimator": ft.LogisticRegression(), "candidates": BOUNDS, "X": X, "y": Y, "ledger": ledger}
    with pytest.raises(ft.FarthingError, match=said):
        tune(**{**given, **options})
    assert ledger.share == 0


def test_a_solver_that_promises_a_plan_is_refused_before_anything_is_charged():
    ledger = _ledger()
    with pytest.raises(ft.Unsupported, match="solver"):
        tune(ft.LogisticRegression(solver=ft.DPSGD()), [{}], X, Y, ledger)
    assert ledger.share == 0


SOME = np.ones((20, 2))


@pytest.mark.parametrize("rows", [SOME, SOME.tolist()], ids=["array", "list"])
@pytest.mark.parametrize("solver", ["auto", "sgd-maj"], ids=["fitted", "refused"])
def test_nothing_tells_whether_a_sample_is_empty(rows, solver):
    """Whether somebody was drawn is private, before the charge and after it."""
    outcomes = []
    for rate in (1e-9, 1.0):
        ledger = ft.Ledger(ft.Budget(4.0, 1e-4), filter=BasicFilter)
        estimator, labels = ft.LogisticRegression(solver=solver), np.ones(20)
        try:
            tuned = ft.tune(
                *(estimator, {"bounds": [(0, 1)]}, rows, labels, ledger, 1.0, 1e-6),
                runs=2.0,
                sampling_rate=rate,
            )
            outcomes.append(tuned.model.coef_.shape)
        except ft.FarthingError as error:
            outcomes.append(str(error))
        assert (ledger.share > 0) == (solver == "auto")
    assert outcomes[0] == outcomes[1]


GOOD, BAD = {"bounds": (0, 1)}, {"bounds": (-1000, 1000)}


def test_it_goes_on_while_trials_fit_and_fits_the_best_with_what_was_kept():
    ledger = _ledger()
    found = search(ft.LogisticRegression(), [BAD, GOOD] * 50, X, Y, ledger, 0.8, 1e-5)
    mu = ft.Budget(0.8, 1e-5).mu
    assert len(found.trials) == int(0.5 * ledger.filter.mu**2 / mu**2)
    assert found.candidate == GOOD
    assert found.model.score(X, Y) > 0.8
    assert ledger.share == pytest.approx(1.0)
    assert found.privacy.epsilon == 3.0
    assert "number of records" in found.privacy.note


def test_the_next_candidate_and_the_end_may_follow_from_the_scores():
    def following(trials):
        return None if len(trials) == 2 else (GOOD, BAD)[len(trials)]

    ledger = _ledger()
    found = search(ft.LogisticRegression(), following, X, Y, ledger, 0.5, 1e-5, keep=0.1)
    assert [trial.candidate for trial in found.trials] == [GOOD, BAD]
    assert found.trials[0].score > found.trials[1].score
    assert ledger.share == pytest.approx(1.0)  # the last fit takes what the trials left


def test_basic_composition_pays_for_it_as_well():
    ledger = _ledger(filter=BasicFilter)
    found = search(ft.LogisticRegression(), [GOOD] * 50, X, Y, ledger, 0.5, 1e-6)
    assert len(found.trials) == 3
    assert ledger.share == pytest.approx(1.0)


def test_where_not_one_trial_fits_nothing_is_charged():
    ledger = _ledger()
    with pytest.raises(ft.BudgetSpent, match="not one trial"):
        search(ft.LogisticRegression(), [GOOD], X, Y, ledger, 2.9, 1e-5)
    assert ledger.share == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"candidates": [{"depth": 1}]}, "depth"),
        ({"candidates": 3}, "candidates"),
        ({"keep": 1.0}, "keep"),
        ({"delta": 0.0}, "delta"),
        ({"y": Y[:3]}, "targets"),
        ({"ledger": ft.Ledger(ft.Budget(1.0, 1e-5), filter=RdpFilter)}, "rdp"),
    ],
)
def test_wrong_arguments_of_a_search_are_refused_before_anything_is_charged(options, said):
    ledger = _ledger()
    given = {"candidates": [GOOD], "X": X, "y": Y, "ledger": ledger, "epsilon": 0.5, "delta": 1e-5}
    with pytest.raises(ft.FarthingError, match=said):
        search(ft.LogisticRegression(), **{**given, **options})
    assert ledger.share == 0


@pytest.mark.parametrize("candidate", [{"solver": "nonsense"}, {"bounds": (1, 0)}, {"depth": 3}])
def test_a_candidate_that_is_refused_costs_nothing(candidate):
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    with pytest.raises(ft.InvalidValue):
        search(ft.LogisticRegression(), [candidate], np.zeros((50, 2)), np.zeros(50), ledger, 0.3, 1e-6)
    assert ledger.share == 0
