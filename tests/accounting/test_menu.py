"""Spending from a menu: the bound against exhaustive games, exact Gaussians and tight fixed plans."""

import contextlib
import math
from itertools import islice
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import calibrate, gaussian, loss_masses, pairs, pld
from farthing.accounting.filters import RdpFilter
from farthing.accounting.menu import MenuFilter, worst_deltas
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.books import header_of, rule_of
from farthing.queries.events import (
    BoundedRangeEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)

BUDGET = ft.Budget(1.0, 1e-5)


def sampled(rate, *noises):
    return tuple(PoissonEvent(rate, GaussianEvent(noise)) for noise in noises)


def masses_delta(losses, epsilon):
    at = (losses.first + np.arange(len(losses.masses))) * losses.step
    return float(losses.masses @ np.maximum(0.0, -np.expm1(epsilon - at))) + losses.infinite


# --- losses


@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE])
@pytest.mark.parametrize(
    ("event", "count", "epsilon"),
    [
        (GaussianEvent(4.0), 1, 1.0),
        (PoissonEvent(0.01, GaussianEvent(4.0)), 11050, 1.0),
        (PoissonEvent(0.01, GaussianEvent(0.8)), 100, 1.0),
        (FixedSizeEvent(10, 1000, GaussianEvent(4.0)), 300, 0.5),
        (LaplaceEvent(50.0), 100, 1.0),
        (PureEvent(0.02), 200, 1.0),
    ],
)
def test_losses_on_a_grid_are_never_below_the_tight_profile_and_hardly_above(
    event, count, epsilon, adjacency
):
    ways = pairs.of_event(event, adjacency)
    step = loss_masses.repeated(ways[0], count, 1e-3, 1e-9).deviation() / 200
    found = max(masses_delta(loss_masses.repeated(way, count, step, 1e-14), epsilon) for way in ways)
    tight = pld.delta(RepeatedEvent(event, count), epsilon, adjacency)
    assert tight * (1 - 1.5e-3) <= found <= tight * 1.03  # the tight value itself may be 0.1 % above


@given(st.floats(1e-3, 1.0), st.floats(0.6, 8.0), st.floats(-1.0, 2.0), st.sampled_from([0, 1]))
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_one_sampled_gaussian_is_dominated_at_every_epsilon(rate, noise, epsilon, direction):
    event = PoissonEvent(rate, GaussianEvent(noise))
    ways = pairs.of_event(event, Adjacency.ADD_REMOVE)
    way = ways[min(direction, len(ways) - 1)]
    found = masses_delta(loss_masses.repeated(way, 1, 0.002 * rate, 1e-12), epsilon)
    # P(x > t) - e^ε Q(x > t) or the other way round, where the densities cross at t
    add = direction and len(ways) > 1
    odds = (math.exp(-epsilon if add else epsilon) - 1 + rate) / rate
    place = noise**2 * math.log(odds) + 0.5 if odds > 0 else -math.inf
    normal, mixture = NormalDist(0, noise), [(1 - rate, NormalDist(0, noise)), (rate, NormalDist(1, noise))]
    if add:
        below = sum(part * one.cdf(place) for part, one in mixture) if place > -math.inf else 0.0
        true = max(0.0, (normal.cdf(place) if place > -math.inf else 0.0) - math.exp(epsilon) * below)
    else:
        above = sum(part * (1 - one.cdf(place) if place > -math.inf else 1.0) for part, one in mixture)
        true = above - math.exp(epsilon) * (1 - normal.cdf(place) if place > -math.inf else 1.0)
    assert true - 1e-12 <= found <= true * 1.02 + 2e-5


# --- the theorem


def game(entries, prices, steps, units, epsilon):
    """The best of all strategies by playing every one of them: a history is a node, and nothing is merged."""
    outcomes = [
        (
            (math.exp(e) / (1 + math.exp(e)), 1 / (1 + math.exp(e))),
            (1 / (1 + math.exp(e)), math.exp(e) / (1 + math.exp(e))),
        )
        for e in entries
    ]

    def best(p, q, left, bought):
        value = max(0.0, p - math.exp(epsilon) * q)
        for place, pair in enumerate(outcomes):
            if bought[place]:
                rest, more = left, bought[place] - 1
            elif prices[place] <= left:
                rest, more = left - prices[place], steps[place] - 1
            else:
                continue
            after = (*bought[:place], more, *bought[place + 1 :])
            value = max(value, sum(best(p * a, q * b, rest, after) for a, b in pair))
        return value

    return best(1.0, 1.0, units, (0,) * len(entries))


@pytest.mark.parametrize(
    ("entries", "prices", "steps", "units", "epsilon"),
    [
        ((0.5, 1.0), (1, 2), (1, 1), 5, 1.0),
        ((0.5, 1.0), (1, 3), (1, 1), 6, 1.4),
        ((0.3, 0.9), (1, 2), (2, 1), 3, 1.0),
        ((0.4, 0.7, 1.1), (1, 2, 4), (1, 1, 1), 4, 1.2),
        ((0.6,), (1,), (1,), 8, 2.0),
        ((0.2, 1.2), (1, 2), (3, 1), 3, 1.3),
    ],
)
def test_no_strategy_of_an_exhaustive_game_beats_the_bound_and_the_best_nearly_reaches_it(
    entries, prices, steps, units, epsilon
):
    true = game(entries, prices, steps, units, epsilon)
    budget = ft.Budget(epsilon, max(true, 1e-6))
    events = tuple(PureEvent(e) for e in entries)
    *_, bound = islice(worst_deltas(events, steps, prices, units, budget, 0), units)
    assert true > 0
    # At coarse prices a grid that is made for many units is coarse too: 5 % is what that costs here.
    assert true <= bound <= 1.05 * true


def test_bought_events_may_be_mixed_with_others_and_are_not_given_back():
    mixed = game((0.3, 0.9), (1, 2), (2, 1), 4, 1.2)
    *_, bound = islice(
        worst_deltas((PureEvent(0.3), PureEvent(0.9)), (2, 1), (1, 2), 4, ft.Budget(1.2, mixed), 0), 4
    )
    assert mixed <= bound


def test_gaussians_on_everybody_are_composed_exactly():
    """With rate 1 adapting is free (Smith & Thakurta 2022): the bound is δ of the summed μ²."""
    events, steps, prices = (GaussianEvent(10.0), GaussianEvent(20.0)), (1, 4), (1, 1)
    deltas = list(islice(worst_deltas(events, steps, prices, 12, BUDGET, 0), 12))
    for unit, found in enumerate(deltas, start=1):
        true = gaussian.delta(math.sqrt(unit) / 10.0, 1.0)
        assert true <= found <= 1.03 * true + 1e-9


def test_one_entry_alone_costs_what_a_fixed_plan_does():
    rule = ft.Menu(sampled(0.01, 4.0))(BUDGET)
    fixed = calibrate.steps(sampled(0.01, 4.0)[0], BUDGET)
    assert 0.98 * fixed <= rule.most(sampled(0.01, 4.0)[0]) <= fixed


@pytest.mark.parametrize(
    ("budget", "events"),
    [
        (BUDGET, sampled(0.01, 2.0, 4.0, 8.0, 16.0)),
        (ft.Budget(8.0, 1e-5), sampled(0.08, 1.5, 3.0, 6.0)),
        (ft.Budget(0.1, 1e-5), sampled(0.001, 2.0, 4.0, 8.0, 16.0)),
        (BUDGET, tuple(PoissonEvent(rate, GaussianEvent(4.0)) for rate in (0.005, 0.02, 0.08))),
        (ft.Budget(1.0, 1e-8), sampled(0.1, 8.0, 16.0, 32.0)),
        (ft.Budget(1.0, 1e-5, "replace-one"), sampled(0.01, 4.0, 8.0, 16.0)),
    ],
)
def test_every_entry_gets_nearly_what_a_fixed_plan_gets_and_never_more(budget, events):
    rule = ft.Menu(events)(budget)
    for event in events:
        fixed = calibrate.steps(event, budget)
        assert 0.96 * fixed <= rule.most(event) <= fixed
        renyi = RdpFilter(budget)
        assert rule.most(event) > fixed * 0.8 or not renyi.fits(
            renyi.add(renyi.start(), event, rule.most(event))
        )


def test_an_entry_that_costs_more_leaves_more_to_the_others():
    events = sampled(0.01, 1.2, 4.0)
    plain, weighted = ft.Menu(events)(BUDGET), ft.Menu(events, weights=(2.0, 1.0))(BUDGET)
    assert weighted.most(events[1]) > plain.most(events[1])
    assert weighted.most(events[0]) < plain.most(events[0])


# --- the filter


@pytest.fixture(scope="module")
def rule():
    return ft.Menu(sampled(0.01, 2.0, 4.0, 8.0))(BUDGET)


def test_a_block_is_paid_when_it_is_begun(rule):
    event, (size, *_), (price, *_) = sampled(0.01, 2.0)[0], rule.steps, rule.prices
    one, block, more = (rule.add(rule.start(), event, count) for count in (1, size, size + 1))
    assert rule.share(one) == rule.share(block) == price / rule.units
    assert rule.share(more) == 2 * price / rule.units


def test_the_rest_of_a_block_that_is_begun_is_free_and_of_one_that_is_not_nothing(rule):
    event, size = sampled(0.01, 2.0)[0], rule.steps[0]
    free = [
        rule.free(rule.add(rule.start(), event, count), event) for count in (0, 1, size - 1, size, size + 1)
    ]
    assert free == [0, size - 1, 1, 0, size - 1]


def test_draws_that_are_seen_more_often_are_not_dominated():
    budget = ft.Budget(1.0, 1e-5, "zero-out")
    rule = ft.Menu([DrawnEvent(0.1, GaussianEvent(40.0))], units=32)(budget)
    assert rule.cost(DrawnEvent(0.05, GaussianEvent(50.0))) == [1.0]
    with pytest.raises(Unsupported, match="not on the menu"):
        rule.cost(DrawnEvent(0.2, GaussianEvent(50.0)))


def test_what_did_not_happen_is_given_back(rule):
    event = sampled(0.01, 2.0)[0]
    total = rule.add(rule.start(), event, 5 * rule.steps[0])
    assert rule.add(rule.add(total, event, 3), event, -3) == total


def test_all_units_fit_and_not_one_event_more(rule):
    event = sampled(0.01, 8.0)[0]
    full = rule.add(rule.start(), event, rule.most(event))
    assert rule.fits(full)
    assert not rule.fits(rule.add(rule.add(full, event, rule.steps[2]), sampled(0.01, 2.0)[0], rule.steps[0]))


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        (PoissonEvent(0.01, GaussianEvent(5.0)), 1),
        (PoissonEvent(0.005, GaussianEvent(2.0)), 0),
        (PoissonEvent(0.001, GaussianEvent(100.0)), 2),
    ],
)
def test_an_event_that_is_no_entry_is_charged_as_the_cheapest_that_dominates_it(rule, asked, place):
    assert rule.cost(asked) == [float(place == k) for k in range(3)]


@pytest.mark.parametrize(
    "asked",
    [
        PoissonEvent(0.01, GaussianEvent(1.9)),
        PoissonEvent(0.02, GaussianEvent(9.0)),
        PureEvent(0.1),
        ZcdpEvent(0.1),
        GaussianEvent(50.0),
    ],
)
def test_an_event_that_no_entry_dominates_is_refused(rule, asked):
    with pytest.raises(Unsupported, match="not on the menu"):
        rule.cost(asked)


def test_pure_entries_dominate_choices_and_laplace_noise():
    rule = ft.Menu([PureEvent(0.05)])(BUDGET)
    assert rule.cost(BoundedRangeEvent(0.05)) == rule.cost(LaplaceEvent(20.0)) == [1.0]
    with pytest.raises(Unsupported):
        rule.cost(LaplaceEvent(19.0))


def test_a_journal_brings_the_prices_back_and_wrong_ones_are_refused(rule):
    header = header_of(rule, "noise")
    assert rule_of(header) == rule
    dear = header["filter"]["steps"]
    header["filter"]["steps"] = [2 * count for count in dear]
    with pytest.raises(InvalidValue, match="exceed the budget"):
        rule_of(header)


def test_a_ledger_spends_adaptively_from_a_menu_and_stops(tmp_path):
    def ask(noise):
        return ft.Query(
            ft.Poisson(0.2), ft.PerExample(lambda rows, w: rows[0]), ft.ClipNorm(1.0), ft.Gaussian(noise)
        )

    menu = ft.Menu(ft.Poisson(0.2).amplify(ft.Gaussian(noise)) for noise in (4.0, 8.0))
    path, records = tmp_path / "my.ledger", ft.Rows(np.zeros((20, 2)))
    with ft.Ledger(BUDGET, filter=menu, journal=path) as ledger:
        asked = [4.0 if ledger.over(records).ask(ask(8.0)).value[0] > 0 else 8.0 for _ in range(10)]
        for noise in asked:
            ledger.over(records).ask(ask(noise))
    with ft.Ledger.open(path) as ledger:
        counts = [asked.count(4.0), 10 + asked.count(8.0)]
        assert ledger.spent.epsilon == pytest.approx(ledger.filter.epsilon([float(n) for n in counts]))
        answered = 0
        with contextlib.suppress(ft.BudgetSpent):
            while True:
                ledger.over(records).ask(ask(4.0))
                answered += 1
        rule = ledger.filter
        assert rule._used([counts[0] + answered, counts[1]]) <= rule.units
        assert rule._used([counts[0] + answered + rule.steps[0], counts[1]]) > rule.units
        assert "menu" in str(ledger.guarantee)


def test_a_promise_and_a_menu_do_not_mix():
    query = ft.Query(
        ft.Poisson(0.2), ft.PerExample(lambda rows, w: rows[0]), ft.ClipNorm(1.0), ft.Gaussian(8.0)
    )
    ledger = ft.Ledger(BUDGET, filter=ft.Menu([ft.Poisson(0.2).amplify(ft.Gaussian(8.0))]))
    ledger.over(ft.Rows(np.zeros((20, 2)))).ask(query)
    with pytest.raises(ft.PromiseBroken):
        ledger.promise(query)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ft.Menu([]), "at least one event"),
        (lambda: ft.Menu([GaussianEvent(4.0), GaussianEvent(4.0)]), "must differ"),
        (lambda: ft.Menu([GaussianEvent(4.0)], weights=(1.0, 2.0)), "must be 1 weights, one per event"),
        (lambda: ft.Menu([GaussianEvent(4.0)], weights=(0.0,)), "weight must be"),
        (lambda: ft.Menu([GaussianEvent(4.0)], units=0), "units must be"),
        (lambda: ft.Menu([GaussianEvent(1.0)])(BUDGET), "does not pay for one"),
        (lambda: MenuFilter(BUDGET, (GaussianEvent(50.0),), (1, 2), (1,), 10), "steps must have"),
    ],
)
def test_a_menu_that_makes_no_sense_is_refused(make, says):
    with pytest.raises(InvalidValue, match=says):
        make()


def test_an_event_without_a_pair_cannot_be_on_a_menu():
    with pytest.raises(Unsupported, match="no dominating pair"):
        ft.Menu([ZcdpEvent(0.1)])(BUDGET)


def test_a_menu_needs_a_delta():
    with pytest.raises(InvalidValue, match="delta"):
        ft.Menu([PureEvent(0.1)])(ft.Budget(1.0, 0.0))


def test_a_part_of_a_menus_budget_is_refused_and_nothing_is_charged():
    ledger = ft.Ledger(BUDGET, filter=ft.Menu([GaussianEvent(40.0)]))
    with pytest.raises(Unsupported, match="cannot be divided into parts"):
        ledger.allot(0.1, 1e-6)
    assert ledger.share == 0


@pytest.mark.parametrize("excess", [1.0001, 1.003])
def test_an_entry_that_fits_just_once_costs_the_whole_budget(excess):
    once = GaussianEvent(gaussian.noise(1.0, 1e-5) * excess)
    rule = ft.Menu([once, GaussianEvent(20.0)])(ft.Budget(1.0, 1e-5))
    assert rule.most(once) == 1
    assert rule.most(GaussianEvent(20.0)) > 20
    assert not rule.fits(rule.add(rule.add(rule.start(), once), GaussianEvent(20.0)))
