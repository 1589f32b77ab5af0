"""DP-AGD on batches, spending from a menu: what it asks is on it, more is bought, nothing past it."""

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import RdpFilter
from farthing.data.tables import Table
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import logistic
from farthing.linear.methods.dpagd import dpagd
from farthing.linear.methods.dpagd_menu import dpagd_menu
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import BoundedRangeEvent, GaussianEvent

pytestmark = pytest.mark.slow  # to price such a menu takes seconds
BUDGET, RATE, SPLITS = ft.Budget(1.0, 1e-5), 0.2, 12


@pytest.fixture(scope="module")
def rule():
    return dpagd_menu(BUDGET, RATE, splits=SPLITS)(BUDGET)


@pytest.fixture(scope="module")
def table():
    X = np.repeat([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], 2000, axis=0)
    return Table(X, X[:, 0], unit=True)


def spent(rule, table, **options):
    ledger = Ledger(BUDGET, filter=lambda _: rule, stream=SeededStream(1))
    steps = list(dpagd(ledger.over(table), Problem(logistic, len(table), 2), sampling_rate=RATE, **options))
    return ledger, steps


def test_a_run_spends_from_the_menu_and_its_charges_are_entries(rule, table):
    ledger, steps = spent(rule, table)
    events = [receipt.event for step in steps for receipt in step.receipts]
    assert len(steps) >= SPLITS // 2
    assert {type(getattr(event, "event", event)) for event in events} == {GaussianEvent, BoundedRangeEvent}
    total = rule.start()
    for event in events:
        total = rule.add(total, event)
    assert rule.fits(total)
    assert ledger.share <= 1


def test_so_many_rounds_have_less_noise_than_by_the_renyi_filter(rule, table):
    ledger = Ledger(BUDGET, filter=RdpFilter, stream=SeededStream(1))
    problem = Problem(logistic, len(table), 2)
    step = next(iter(dpagd(ledger.over(table), problem, sampling_rate=RATE, splits=SPLITS)))
    noises = [
        one.event.event.noise
        for one in step.receipts
        if hasattr(one.event, "event") and hasattr(one.event.event, "noise")
    ]
    assert rule.events[0].event.noise < 0.95 * noises[0]


def test_gradients_stay_as_exact_as_the_last_entry_when_they_are_bought_again_and_again(rule, table):
    """Rows without a signal: no step helps, and every round buys again."""
    noise = np.random.default_rng(0).integers(0, 2, 6000) * 1.0
    ledger, _ = spent(rule, Table(np.ones((6000, 2)), noise, unit=True), momentum=0.0)
    assert 0.8 < ledger.share <= 1


def test_an_estimator_spends_from_a_ledger_with_such_a_menu(rule, table):
    ledger = Ledger(BUDGET, filter=lambda _: rule)
    solver = ft.DPAGD(sampling_rate=RATE)
    model = ft.LogisticRegression(ledger=ledger, solver=solver, records=6000).fit(table.X, table.y)
    assert model.privacy_.accountant == "menu"
    assert 0 < ledger.share <= 1


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"sampling_rate": 0.1}, Unsupported, "dpagd_menu"),
        ({"sampling_rate": None}, InvalidValue, "pass the sampling_rate"),
        ({"sampling_rate": RATE, "opening": 0.5}, Unsupported, "not on the menu"),
    ],
)
def test_a_menu_for_something_else_is_refused_before_any_charge(rule, table, options, error, says):
    ledger = Ledger(BUDGET, filter=lambda _: rule)
    with pytest.raises(error, match=says):
        list(dpagd(ledger.over(table), Problem(logistic, len(table), 2), **options))
    assert ledger.share == 0


@pytest.mark.parametrize(
    ("budget", "options", "error"),
    [
        (ft.Budget(1.0, 1e-5, "replace-one"), {}, Unsupported),
        (BUDGET, {"search": 1.5}, InvalidValue),
        (BUDGET, {"opening": 1.0}, InvalidValue),
        (BUDGET, {"levels": 0}, InvalidValue),
        (BUDGET, {"splits": -1}, InvalidValue),
    ],
)
def test_menus_of_nonsense_are_refused(budget, options, error):
    with pytest.raises(error):
        dpagd_menu(budget, RATE, **options)
