"""The odometer: what it prints stands where the answers decide when to stop."""

import functools
import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import gaussian, odometer, pld
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.accounting.menu import Menu
from farthing.budget import Budget
from farthing.queries.events import (
    ApproximateEvent,
    ComposedEvent,
    GaussianEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
)

SIZES = (0.15, 0.4)
BUDGET = Budget(2.0, 0.1)


def _game(rule, printed, level: float) -> float:
    """The most of P(S) - e^level P'(S) over strategies and sets S of outcomes with at most ``level`` printed.

    Every move asks for one of two randomised responses that still fits, or stops: all of them are played out.
    """
    coins = [1 / (1 + math.exp(-size)) for size in SIZES]

    @functools.cache
    def total(counts):
        found = rule.start()
        for size, count in zip(SIZES, counts, strict=True):
            found = rule.add(found, PureEvent(size), count)
        return found

    @functools.cache
    def shows(counts):
        return printed(total(counts)) <= level

    @functools.cache
    def best(counts, heads):
        loss = sum((2 * h - n) * size for h, n, size in zip(heads, counts, SIZES, strict=True))
        worth = max(0.0, -math.expm1(level - loss)) if shows(counts) else 0.0
        for k, coin in enumerate(coins):
            more = tuple(n + (place == k) for place, n in enumerate(counts))
            won = tuple(h + (place == k) for place, h in enumerate(heads))
            if rule.fits(total(more)) and shows(more):
                worth = max(worth, coin * best(more, won) + (1 - coin) * best(more, heads))
        return worth

    return best((0, 0), (0, 0))


@pytest.mark.parametrize("kind", [GdpFilter, ZcdpFilter, RdpFilter, BasicFilter])
def test_no_strategy_gets_more_than_delta_from_what_is_printed(kind):
    rule = kind(BUDGET)
    printed = functools.partial(odometer.epsilon, rule)
    for level in (0.2, 0.5, 0.9, 1.3, 1.7, 2.0):
        assert _game(rule, printed, level) <= BUDGET.delta


def test_the_epsilon_of_a_fixed_stop_does_not_stand_at_one_that_was_chosen():
    """Gaussian answers until the loss is beyond what their number costs: more often than δ."""
    rng, delta, noise = np.random.default_rng(0), 0.05, 5.0
    losses = np.cumsum(rng.normal(1 / (2 * noise**2), 1 / noise, size=(20_000, 200)), axis=1)
    fixed = np.array([gaussian.epsilon(math.sqrt(t) / noise, delta) for t in range(1, 201)])
    rule = GdpFilter(Budget(20.0, delta))
    printed = np.array([odometer.epsilon(rule, [t / noise**2]) for t in range(1, 201)])
    beyond = [np.maximum(0.0, -np.expm1((shown - losses).min(axis=1))).mean() for shown in (fixed, printed)]
    assert beyond[0] > 1.5 * delta
    assert beyond[1] <= delta


@pytest.mark.parametrize("kind", [GdpFilter, ZcdpFilter, RdpFilter])
def test_it_prints_a_little_more_than_a_fixed_stop_costs_and_never_more_than_the_budget(kind):
    rule = kind(Budget(1.0, 1e-5))
    event = PoissonEvent(0.01, GaussianEvent(2.0)) if kind is RdpFilter else GaussianEvent(40.0)
    last = 0.0
    for count in (0, 1, 3, 10, 30, 100):
        total = rule.add(rule.start(), event, count)
        if not rule.fits(total):
            break
        shown, exact = odometer.epsilon(rule, total), rule.epsilon(total)
        assert last <= shown <= 1.0
        assert min(exact, 1.0) <= shown <= max(2.2 * exact, 1 / 32)
        last = shown


def test_basic_composition_is_an_odometer_as_it_stands():
    rule = BasicFilter(Budget(1.0, 1e-5))
    total = rule.add(rule.start(), ApproximateEvent(0.3, 1e-6), 2)
    assert odometer.epsilon(rule, total) == pytest.approx(0.6)
    assert "also if the stopping time depended" in odometer.said(rule, [], [], total)


def test_where_nothing_is_known_nothing_is_printed():
    approximate = ZcdpFilter(Budget(1.0, 1e-5), 1e-6)
    assert odometer.epsilon(approximate, [0.01, 0.0]) is None
    assert odometer.said(approximate, [], [], [0.01, 0.0]) == odometer.STOPPING


def test_no_strategy_gets_more_than_delta_from_what_is_printed_of_a_menu():
    rule = Menu([PureEvent(size) for size in SIZES], units=12)(BUDGET)
    for level in (0.5, 0.9, 1.3, 1.7, 2.0):
        assert _game(rule, functools.partial(odometer.epsilon, rule), level) <= BUDGET.delta


def test_a_plan_has_an_odometer_of_its_own():
    budget, event = Budget(1.0, 1e-5), PoissonEvent(0.01, GaussianEvent(4.0))
    plan = [(event, 10_000), (GaussianEvent(50.0), 10)]
    whole = pld.epsilon(ComposedEvent(tuple(RepeatedEvent(*one) for one in plan)), 1e-5)
    shown = [odometer.planned(plan, counts, budget) for counts in ([0, 0], [1, 0], [3000, 3], [100, 10])]
    assert shown[0] == 0 < shown[1] < shown[2] < shown[3] == whole
    assert shown[2] > pld.epsilon(RepeatedEvent(event, 3000), 1e-5)


def test_a_ledger_says_it_beside_what_was_spent():
    ledger = ft.Ledger(Budget(1.0, 1e-5))
    rows = ft.Rows(np.ones((10, 1)))
    query = ft.Query(ft.Everyone(), ft.PerExample(lambda r, w: r[0]), ft.ClipNorm(1.0), ft.Gaussian(20.0))
    ledger.over(rows).ask(query)
    shown = odometer.epsilon(ledger.filter, [1 / 400])
    assert ledger.spent.epsilon < shown
    assert f"if it depended on the answers, epsilon {shown:.6g} holds" in ledger.spent.note
    promised = ft.Ledger(Budget(1.0, 1e-5))
    promised.promise(query, 20)
    promised.over(rows).ask(query)
    assert "if it depended on the answers, epsilon" in promised.spent.note


def test_a_level_of_a_menu_allows_no_more_events_than_a_plan_of_that_level():
    event, level = PoissonEvent(0.1, GaussianEvent(4.0)), Budget(0.5, 1e-6)
    rule = Menu([event])(Budget(1.0, 1e-5))
    most = max(count for count in range(rule.most(event) + 1) if rule.fits_within(level, [float(count)]))
    assert 0 < most < rule.most(event)
    assert pld.delta(RepeatedEvent(event, most), level.epsilon) <= level.delta
