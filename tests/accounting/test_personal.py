"""Personal budgets: levels, rates and weights against dp-accounting and exact Gaussians."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian, personal
from farthing.accounting.filters import GdpFilter
from farthing.accounting.personal import PersonalBudgets, PersonalFilter, everyone, largest_rate, plan_rates
from farthing.budget import Adjacency, Budget
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.books import header_of, rule_of
from farthing.queries.events import (
    NOTHING,
    ComposedEvent,
    GaussianEvent,
    PersonalEvent,
    PoissonEvent,
    RepeatedEvent,
    for_level,
    levels,
)

DELTA = 1e-5
BOENISCH = PersonalBudgets(np.repeat([1.0, 2.0, 3.0], [340, 430, 230]))


def independent_epsilon(rate, noise, steps):
    """ε of a sampled Gaussian by dp-accounting itself, from above, on a fine grid."""
    one = privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-4, sampling_prob=rate, use_connect_dots=True
    )
    return one.self_compose(steps).get_epsilon_for_delta(DELTA)


# --- budgets


def test_everybody_is_on_the_level_of_the_own_budget():
    people = PersonalBudgets([3, 1, 2, 1])
    assert people.epsilons == (1.0, 2.0, 3.0)
    assert people.levels.tolist() == [2, 0, 1, 0]
    assert people.sizes == (2, 1, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200))
def test_a_level_is_never_above_the_own_budget_and_there_are_at_most_32(budgets):
    people = PersonalBudgets(budgets)
    rounded = np.array(people.epsilons)[people.levels]
    assert len(people.epsilons) <= 32
    assert (rounded <= np.array(budgets)).all()
    least, most = min(budgets), max(budgets)
    assert (rounded >= np.array(budgets) * (least / most) ** (1 / 31) * (1 - 1e-9)).all()
    assert people.epsilons[-1] == most, "the largest budget is not lost"


@pytest.mark.parametrize(
    "budgets",
    [[1.0, math.nan], [1.0, -2.0], [0.0, 1.0], [math.inf], [], [[1.0]], "many", [1.0, "two"], [None], None],
)
def test_budgets_that_are_none_are_refused_without_quoting_one(budgets):
    with pytest.raises(InvalidValue) as refused:
        PersonalBudgets(budgets)
    assert "budgets must be" in str(refused.value)
    assert "two" not in str(refused.value)
    assert "-2" not in str(refused.value)


def test_a_budget_below_the_ledgers_smallest_level_is_refused():
    with pytest.raises(InvalidValue, match=r"smallest level, epsilon 0\.5, and some are"):
        PersonalBudgets([0.4, 2.0], epsilons=(0.5, 1.0))


@pytest.mark.parametrize("epsilons", [(), (1.0, 1.0), (2.0, 1.0), tuple(range(1, 34)), (0.0, 1.0)])
def test_levels_ascend_and_are_at_most_32(epsilons):
    with pytest.raises(InvalidValue):
        PersonalBudgets([50.0], epsilons=epsilons)


# --- rates


@pytest.mark.parametrize(("steps", "sampling_rate"), [(200, 0.05), (1131, 0.03)])
def test_each_level_ends_at_its_budget_by_dp_accountings_own_composition(steps, sampling_rate):
    plan = plan_rates(BOENISCH, DELTA, steps=steps, sampling_rate=sampling_rate)
    for epsilon, rate in zip(BOENISCH.epsilons, plan.sampling_rates, strict=True):
        found = independent_epsilon(rate, plan.noise_multiplier, steps)
        assert 0.997 * epsilon <= found <= 1.003 * epsilon, "its grid is 0.3 % coarse"
    mean = plan.sampler.expected(BOENISCH.sizes) / len(BOENISCH)
    assert 0.98 * sampling_rate <= mean <= 1.02 * sampling_rate


def test_the_rdp_accountant_of_dp_accounting_is_no_tighter_than_a_levels_budget():
    plan = plan_rates(BOENISCH, DELTA, steps=500, sampling_rate=0.02)
    for epsilon, rate in zip(BOENISCH.epsilons, plan.sampling_rates, strict=True):
        event = dp_accounting.PoissonSampledDpEvent(
            rate, dp_accounting.GaussianDpEvent(plan.noise_multiplier)
        )
        tight = PLDAccountant(value_discretization_interval=1e-3).compose(event, 500).get_epsilon(DELTA)
        assert tight >= 0.99 * epsilon


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_largest_rate_fits_and_a_larger_one_does_not(epsilon, adjacency):
    budget = Budget(epsilon, DELTA, adjacency)
    rate = largest_rate(budget, 1.5, 300)

    def fits(rate):
        return personal.affordable(
            RepeatedEvent(PoissonEvent(rate, GaussianEvent(1.5)), 300), GdpFilter(budget)
        )

    assert 0 < rate < 1
    assert fits(rate)
    assert not fits(rate * (1 + 1e-5))


def test_a_rate_is_1_where_everybody_fits():
    assert largest_rate(Budget(3.0, DELTA), 100.0, 10) == 1.0


def test_a_level_that_would_never_be_drawn_has_rate_0():
    people = PersonalBudgets([0.1] + [2.0] * 2000)
    plan = plan_rates(people, DELTA, steps=50, sampling_rate=0.01)
    assert plan.sampling_rates[0] == 0.0 < plan.sampling_rates[1]
    assert plan.sampler.amplify(GaussianEvent(1.0)).events[0] == NOTHING


def test_where_nobody_can_take_part_the_budget_does_not_allow_a_plan():
    with pytest.raises(BudgetSpent, match="at any rate"):
        plan_rates(PersonalBudgets([0.1]), DELTA, steps=10, noise_multiplier=1.0)


@pytest.mark.parametrize("given", [{}, {"sampling_rate": 0.1, "noise_multiplier": 1.0}])
def test_a_plan_wants_a_rate_or_a_noise(given):
    with pytest.raises(InvalidValue, match="pass either"):
        plan_rates(BOENISCH, DELTA, steps=10, **given)


# --- weights


def test_weights_spend_every_level_of_gaussian_answers_exactly():
    budget = BOENISCH.budget(DELTA)
    sampler, noise = everyone(BOENISCH(budget)), 40 / GdpFilter(budget).mu
    event = sampler.amplify(GaussianEvent(noise))
    for level, epsilon in enumerate(BOENISCH.epsilons):
        mu = 40 / event.events[level].noise
        assert gaussian.epsilon(mu, DELTA) == pytest.approx(epsilon, rel=1e-6)
    rule = BOENISCH(budget)
    assert rule.fits(rule.add(rule.start(), event, 1600))
    assert not rule.fits(rule.add(rule.start(), event, 1601))


# --- the filter


def test_the_filter_has_one_balance_a_level_and_no_level_passes_its_own():
    rule = PersonalFilter(Budget(2.0, DELTA), (1.0, 2.0))
    mus = [GdpFilter(Budget(epsilon, DELTA)).mu for epsilon in (1.0, 2.0)]
    event = PersonalEvent((GaussianEvent(10 / mus[0]), GaussianEvent(20 / mus[1])))
    total = rule.add(rule.start(), event, 100)
    assert rule.fits(total)
    assert rule.share(total) == pytest.approx(1.0)
    assert rule.each(total)[0] == pytest.approx(1.0)
    assert rule.each(total)[1] < 1.0
    assert not rule.fits(rule.add(total, event)), "the first level is spent, whatever the second has left"
    assert not rule.fits(rule.add(total, GaussianEvent(1e3))), "a plain answer costs every level"


def test_a_personal_answer_goes_to_a_ledger_of_its_levels_only():
    event = PersonalEvent((GaussianEvent(5.0), GaussianEvent(9.0)))
    with pytest.raises(InvalidValue, match="2 levels of budget pay differently"):
        PersonalFilter(Budget(3.0, DELTA), (1.0, 2.0, 3.0)).cost(event)
    with pytest.raises(InvalidValue, match="2 levels of budget pay differently"):
        personal.affordable(event, GdpFilter(Budget(3.0, DELTA)))
    with pytest.raises(Unsupported):
        GdpFilter(Budget(3.0, DELTA)).cost(event)


def test_sampled_answers_have_no_price_by_the_filter_and_are_promised_instead():
    rule = PersonalFilter(Budget(1.0, DELTA), (0.5, 1.0))
    with pytest.raises(Unsupported, match="promise"):
        rule.cost(PersonalEvent((PoissonEvent(0.1, GaussianEvent(2.0)),) * 2))


def test_a_header_brings_the_levels_back():
    rule = PersonalFilter(Budget(2.0, DELTA), (1.0, 2.0))
    assert rule_of(header_of(rule, "noise")) == rule


def test_the_largest_level_is_the_budget():
    with pytest.raises(InvalidValue, match="largest level, epsilon 2"):
        PersonalFilter(Budget(3.0, DELTA), (1.0, 2.0))


# --- events


def test_what_a_level_pays_is_found_inside_repetitions_and_compositions():
    own = PersonalEvent((GaussianEvent(1.0), GaussianEvent(2.0)))
    event = ComposedEvent((RepeatedEvent(own, 3), GaussianEvent(7.0)))
    assert levels(event) == 2
    assert for_level(event, 1) == ComposedEvent((RepeatedEvent(GaussianEvent(2.0), 3), GaussianEvent(7.0)))


def test_events_of_different_numbers_of_levels_do_not_add_up():
    mixed = ComposedEvent(tuple(PersonalEvent((GaussianEvent(1.0),) * count) for count in (2, 3)))
    with pytest.raises(InvalidValue):
        levels(mixed)
    with pytest.raises(InvalidValue):
        for_level(PersonalEvent((GaussianEvent(1.0),)), 1)
    with pytest.raises(InvalidValue):
        PersonalEvent(())
