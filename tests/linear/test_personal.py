"""Estimators with budgets of the records' own: what holds for whom, and what is refused."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.base import clone

import farthing as ft
from farthing.data.tables import Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger import levels, verifier
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.linear.weights import over

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(3000, 3))
Y = (X[:, 0] > X[:, 1]).astype(int)
BUDGETS = RNG.choice([0.2, 1.0, 2.0], 3000, p=[0.54, 0.37, 0.09])


@pytest.mark.parametrize("solver", ["auto", "sgd-ma"])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "zero-out"])
def test_a_classifier_spends_every_level_to_its_end(solver, adjacency):
    model = ft.LogisticRegression(delta=1e-6, bounds=(0, 1), solver=solver, adjacency=adjacency)
    model.fit(X, Y, budgets=BUDGETS)
    for level, said in model.guarantees_.items():
        assert said.epsilon == pytest.approx(level, rel=1e-5)
        assert said.adjacency == adjacency
    assert model.privacy_.epsilon == pytest.approx(2.0, rel=1e-5)
    assert "taken as public" in model.privacy_.note
    assert model.score(X, Y) > 0.85


@pytest.mark.parametrize("solver", ["auto", "sufficient", "gradient"])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_regression_spends_every_level_to_its_end(solver, adjacency):
    target = X[:, 0] + X[:, 2]
    model = ft.LinearRegression(
        delta=1e-6, bounds=(0, 1), target_bounds=(0, 2), solver=solver, adjacency=adjacency
    )
    model.fit(X, target, budgets=BUDGETS)
    assert [said.epsilon for said in model.guarantees_.values()] == pytest.approx([0.2, 1.0, 2.0], rel=1e-5)
    assert model.score(X, target) > 0.5


def test_weights_are_those_of_the_budgets_and_the_answer_is_the_weighted_mean():
    """Two kinds of records that disagree: the larger budgets decide by their weights."""
    rows = np.tile([[1.0]], (4000, 1))
    labels = np.repeat([0, 1], 2000)
    for small, verdict in ((0, 1), (1, 0)):
        budgets = np.where(labels == small, 0.05, 2.0)
        model = ft.LogisticRegression(delta=1e-5, bounds=(0, 1)).fit(rows, labels, budgets=budgets)
        assert (model.predict(rows[:5]) == verdict).all()


def test_a_problem_counts_records_by_their_weights_and_batches_count_them_all():
    people, table = ft.PersonalBudgets(BUDGETS), Table(X, Y * 1.0)
    ledger = ft.Ledger(people.budget(1e-6), filter=people)
    problem = Problem(logistic, 3000, 3)
    _, weighed = over(ledger, table, problem, people, True)
    mus = np.array([ft.Budget(epsilon, 1e-6).mu for epsilon in people.epsilons])
    assert weighed.records == pytest.approx(np.dot(mus / mus[-1], people.sizes), rel=0.01)
    door, drawn = over(ledger, table, problem, people, False)
    assert (drawn.records, drawn.sizes) == (3000, people.sizes)
    assert door._records.levels.tolist() == people.levels.tolist()


def test_sparse_rows_have_budgets_too():
    model = ft.LogisticRegression(delta=1e-6).fit(csr_matrix(X), Y, budgets=BUDGETS)
    assert list(model.guarantees_) == [0.2, 1.0, 2.0]


def test_a_journal_holds_the_levels_and_the_verifier_agrees(tmp_path):
    people = ft.PersonalBudgets(BUDGETS)
    with ft.Ledger(people.budget(1e-6), filter=people, journal=tmp_path / "rows.ledger") as ledger:
        model = ft.LogisticRegression(bounds=(0, 1), ledger=ledger).fit(X, Y, budgets=BUDGETS)
        assert ledger.share == pytest.approx(1.0)
        assert {k: v.epsilon for k, v in levels.spent(ledger._books).items()} == pytest.approx(
            {0.2: 0.2, 1.0: 1.0, 2.0: 2.0}, rel=1e-5
        )
        found = verifier.verify(json.dumps(asdict(row)) for row in ledger.journal.rows())
        assert found.code == 0, found.reason
        with pytest.raises((BudgetSpent, Unsupported)):
            clone(model).fit(X, Y, budgets=BUDGETS)


@pytest.mark.parametrize("solver", ["dpagd", "objective", "output", "privgene", "majority", "sgd-adv"])
def test_solvers_that_treat_all_records_alike_refuse_budgets(solver):
    with pytest.raises(Unsupported, match="does not support personal budgets"):
        ft.LogisticRegression(delta=1e-6, solver=solver).fit(X, Y, budgets=BUDGETS)


@pytest.mark.parametrize("solver", ["adassp", "functional"])
def test_regressions_that_treat_all_records_alike_refuse_budgets(solver):
    with pytest.raises(Unsupported, match="does not support personal budgets"):
        ft.LinearRegression(delta=1e-6, target_bounds=(0, 1), solver=solver).fit(X, Y, budgets=BUDGETS)


@pytest.mark.parametrize(
    "budgets",
    [BUDGETS[:-1], np.append(BUDGETS[1:], np.nan), -BUDGETS, BUDGETS * 0, ["a"] * 3000, BUDGETS[:, None]],
)
def test_wrong_budgets_are_refused_without_quoting_one(budgets):
    with pytest.raises(InvalidValue, match="budgets must be") as refused:
        ft.LogisticRegression(delta=1e-6).fit(X, Y, budgets=budgets)
    assert "nan" not in str(refused.value)
    assert "2999" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epsilon": 1.0, "delta": 1e-6}, "epsilon must be None"),
        ({"delta": 1e-6, "records": 3000}, "records must be None"),
        ({}, "pass epsilon and delta"),
        ({"ledger": ft.Ledger(ft.Budget(2.0, 1e-6))}, "filter=people"),
    ],
)
def test_settings_that_budgets_replace_are_refused(settings, text):
    with pytest.raises(InvalidValue, match=text):
        ft.LogisticRegression(**settings).fit(X, Y, budgets=BUDGETS)


def test_a_given_noise_does_not_go_with_rates_of_their_own():
    with pytest.raises(Unsupported, match="leave out noise_multiplier"):
        ft.LogisticRegression(delta=1e-6, solver=ft.DPSGD(noise_multiplier=2.0)).fit(X, Y, budgets=BUDGETS)


def test_one_budget_for_all_is_an_ordinary_fit():
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1)).fit(X, Y)
    assert model.guarantees_ == {1.0: model.privacy_}
