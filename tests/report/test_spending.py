"""What was spent after so many answers, and ε at every δ, against other ways to compute them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

import farthing as ft
from farthing.accounting import filters
from farthing.queries.events import GaussianEvent
from farthing.report import Subject, reading
from farthing.report.subject import Charge


def subject(ledger, history=(), **more):
    return Subject.of(ledger, title="t", method="m", steps=1, history=history, **more)


def test_a_filter_ends_at_what_its_ledger_says(filtered):
    ledger, history = filtered
    points = reading.spent(subject(ledger))
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (40.0, pytest.approx(ledger.spent.epsilon))
    assert points == reading.spent(subject(ledger, history))
    assert [epsilon for _, epsilon in points] == sorted(epsilon for _, epsilon in points)
    half = [epsilon for answers, epsilon in points if answers == 20]
    mu = math.sqrt(20) / 30
    assert gaussian_delta(mu, half[0]) == pytest.approx(1e-5, rel=1e-6)


def gaussian_delta(mu, epsilon):
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def test_a_plan_is_priced_tightly_and_from_what_was_charged(planned):
    ledger, history = planned
    points = reading.spent(subject(ledger, history))
    assert points[-1][0] == 40
    assert points[-1][1] == pytest.approx(
        ft.epsilon(ft.Poisson(0.1).amplify(ft.Gaussian(4.0)), steps=40, delta=1e-5)
    )
    at = dict(points)
    assert at[10] == pytest.approx(
        ft.epsilon(ft.Poisson(0.1).amplify(ft.Gaussian(4.0)), steps=10, delta=1e-5)
    )
    assert points[-1][1] < ledger.guarantee.epsilon  # twenty more are promised


def test_what_was_given_back_is_not_shown(tmp_path, queries, ledgers):
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=tmp_path / "a.ledger") as ledger:
        ledger.reserve(queries["whole"], 30)
        ledgers(ledger, queries["whole"], 12)
    with ft.Ledger.open(tmp_path / "a.ledger") as ledger:
        found = subject(ledger)
    assert found.charges == (Charge(GaussianEvent(30.0), 12),)
    assert reading.spent(found)[-1][0] == 12


@pytest.mark.parametrize(
    "rule", [filters.BasicFilter, filters.ZcdpFilter, filters.GdpFilter, filters.RdpFilter]
)
def test_every_filter_ends_at_its_own_total(rule, ledgers, queries):
    query = queries["whole"]
    if rule is filters.BasicFilter:
        query = replace(query, bound=ft.ClipNorm(1.0, order=1), mechanism=ft.Laplace(50.0))
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=rule)
    ledgers(ledger, query, 10)
    points = reading.spent(subject(ledger))
    assert len(points) == 11
    assert points[-1][1] == pytest.approx(ledger.spent.epsilon, rel=1e-9)


def test_a_part_is_shown_by_its_own_answers():
    """A fit that takes its part in one charge: the pictures follow the answers that it paid for."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(500, 3))
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    model = ft.LogisticRegression(1.0, 1e-5, bounds=(0, 1), ledger=ledger).fit(X, (X[:, 0] > 0.5) * 1)
    found = subject(ledger, model.history_, guarantee=model.privacy_)
    points = reading.spent(found)
    assert points[-1][0] == sum(len(step.receipts) for step in model.history_) > 40
    assert points[-1][1] == pytest.approx(1.0, rel=1e-3)
    assert found.share < 0.5  # of the ledger, whose budget is larger
    assert reading.curve(found)[-1][1] < 1e-9
    assert len(found.clips) == len(found.charges)


def test_the_curve_of_a_filter_is_that_of_its_limit(filtered):
    found = subject(filtered[0])
    points = reading.curve(found)
    mu = found.rule.mu
    for epsilon, delta in points:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-4)
    assert any(delta == 1e-5 and epsilon == pytest.approx(1.0) for epsilon, delta in points)


def test_the_curve_of_a_plan_is_that_of_all_that_was_promised(planned):
    points = reading.curve(subject(planned[0]))
    step = ft.Poisson(0.1).amplify(ft.Gaussian(4.0))
    for epsilon, delta in points[::8]:
        assert ft.delta(step, steps=60, epsilon=epsilon) <= delta * (1 + 1e-6)
        assert ft.delta(step, steps=60, epsilon=0.98 * epsilon) > delta


@pytest.mark.parametrize("rule", [filters.BasicFilter, filters.RdpFilter])
def test_where_one_pair_is_proven_there_is_no_curve(rule):
    assert reading.curve(subject(ft.Ledger(ft.Budget(1.0, 1e-5), filter=rule))) == []


def test_nothing_is_priced_where_nothing_is_promised(seeded):
    from farthing.ledger.journal import Journal

    with Journal(seeded) as journal:
        found = subject(journal)
    assert not found.guaranteed
    assert math.isinf(found.guarantee.epsilon)
    assert reading.spent(found) == reading.curve(found) == []
