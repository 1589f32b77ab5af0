"""Noise and steps for a budget: what is returned fits, the next does not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import calibrate, gaussian, pld
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue
from farthing.queries.events import (
    ComposedEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
)


def poisson(rate, noise, steps=1):
    return RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps)


def test_reference_digits():
    budget = Budget(1.0, 1e-5)
    assert calibrate.noise(lambda s: poisson(0.01, s, 10_000), budget) == pytest.approx(3.812817, abs=1e-6)
    assert calibrate.steps(PoissonEvent(0.01, GaussianEvent(0.9)), Budget(4.0, 1e-5)) == 3044
    event = PoissonEvent(0.01, GaussianEvent(899.480224))
    assert calibrate.steps(event, Budget(0.1, 1e-8)) == 3_833_979
    event = PoissonEvent(0.01, GaussianEvent(64.920159))
    assert calibrate.steps(event, Budget(1.6, 1e-8)) == 3_937_953


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(("rate", "steps"), [(0.01, 1000), (0.2, 50), (1.0, 10), (0.03, 1)])
@pytest.mark.parametrize("epsilon", [0.2, 3.0])
def test_noise_fits_and_less_does_not(rate, steps, epsilon, adjacency):
    budget = Budget(epsilon, 1e-6, adjacency)
    found = calibrate.noise(lambda s: poisson(rate, s, steps), budget)
    assert pld.delta(poisson(rate, found, steps), epsilon, adjacency) <= budget.delta * (1 + 1e-6)
    assert pld.delta(poisson(rate, found * (1 - 1e-6), steps), epsilon, adjacency) > budget.delta * (1 - 2e-6)
    assert pld.epsilon(poisson(rate, found, steps), 1e-6, adjacency) <= epsilon * (1 + 1e-6)
    assert pld.epsilon(poisson(rate, found * (1 - 1e-4), steps), 1e-6, adjacency) > epsilon * (1 - 1e-5)


def test_noise_of_a_gaussian_is_exact():
    found = calibrate.noise(lambda s: RepeatedEvent(GaussianEvent(s), 100), Budget(1.0, 1e-6))
    assert found == pytest.approx(10 * gaussian.noise(1.0, 1e-6), rel=2e-9)
    assert found >= 10 * gaussian.noise(1.0, 1e-6) * (1 - 1e-12)
    assert found == pytest.approx(42.25, abs=0.005)


def test_noise_of_other_events():
    budget = Budget(1.0, 1e-5)
    pure = calibrate.noise(lambda s: PureEvent(1 / s), budget)
    assert 1 - 2e-5 < pure <= 1 + 1e-8
    laplace = calibrate.noise(lambda s: RepeatedEvent(LaplaceEvent(s), 10), budget)
    assert 5 < laplace <= 10 * (1 + 1e-8)
    replace = Budget(1.0, 1e-5, Adjacency.REPLACE_ONE)
    fixed = calibrate.noise(lambda s: RepeatedEvent(FixedSizeEvent(1, 100, GaussianEvent(s)), 100), replace)
    plan = RepeatedEvent(FixedSizeEvent(1, 100, GaussianEvent(fixed)), 100)
    assert pld.epsilon(plan, 1e-5, Adjacency.REPLACE_ONE) <= 1 + 1e-5


@given(
    st.floats(0.01, 0.5),
    st.integers(500, 3000),
    st.floats(0.05, 10),
    st.sampled_from([1e-3, 1e-6, 1e-10]),
    st.sampled_from([Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE]),
)
@settings(max_examples=25, deadline=None)
def test_noise_then_steps(rate, steps, epsilon, delta, adjacency):
    budget = Budget(epsilon, delta, adjacency)
    noise = calibrate.noise(lambda s: poisson(rate, s, steps), budget)
    event = PoissonEvent(rate, GaussianEvent(noise * (1 + 1e-5)))
    back = calibrate.steps(event, budget)
    assert back >= steps * 0.999 - 1
    assert back <= steps * 1.001 + 1


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "delta", "most"),
    [(1e-4, 2, 0.1, 1e-5, 0.4), (1e-3, 3, 0.03, 1e-5, 1.0), (1e-3, 10, 0.03, 1e-9, 1.8)],
)
def test_a_few_rare_draws_have_noise_that_fits(rate, steps, epsilon, delta, most):
    """A line through a first guess may show nothing for any noise."""

    def step(noise):
        return ft.Poisson(rate).amplify(ft.Gaussian(noise))

    budget = Budget(epsilon, delta)
    noise = ft.noise_for(step, budget, steps=steps)
    assert (
        ft.epsilon(step(noise), steps=steps, delta=delta)
        <= epsilon
        < ft.epsilon(step(0.7 * noise), steps=steps, delta=delta)
    )
    assert ft.Ledger(budget).promise(step(noise), steps).times == steps
    assert noise < most


def test_so_few_draws_that_little_noise_will_do():
    budget = Budget(0.05, 1e-3)
    assert calibrate.noise(lambda s: poisson(1e-4, s, 2), budget) < 0.5
    assert calibrate.noise(lambda s: poisson(1e-3, s, 2), budget) < 1
    assert calibrate.steps(PoissonEvent(0.03125, GaussianEvent(5.0)), Budget(1.0, 1e-3)) > 100


@pytest.mark.parametrize("before", [None, GaussianEvent(8.0), poisson(0.05, 2.0, 20), PureEvent(0.2)])
@pytest.mark.parametrize(
    "event",
    [
        GaussianEvent(10.0),
        PoissonEvent(0.02, GaussianEvent(1.5)),
        ComposedEvent((PoissonEvent(0.1, GaussianEvent(3.0)), GaussianEvent(30.0))),
        FixedSizeEvent(2, 100, GaussianEvent(4.0)),
    ],
)
def test_steps_fit_and_one_more_does_not(event, before):
    budget = Budget(1.5, 1e-6)
    count = calibrate.steps(event, budget, before)
    parts = () if before is None else (before,)
    if count:
        fits = ComposedEvent((RepeatedEvent(event, count), *parts))
        assert pld.delta(fits, 1.5) <= 1e-6 * (1 + 1e-6)
    exceeds = ComposedEvent((RepeatedEvent(event, count + 1), *parts))
    assert pld.delta(exceeds, 1.5) > 1e-6 * (1 - 1e-6)
    assert count > 3


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (8.0, 1e-6)])
def test_noise_for_few_draws_affords_them_by_every_count(epsilon, delta):
    """Lines are short of frequencies here: noise, count and promise must choose theirs alike."""
    budget, event = Budget(epsilon, delta), lambda s: FixedSizeEvent(1, 100, GaussianEvent(s))
    noise = calibrate.noise(lambda s: RepeatedEvent(event(s), 20), budget)
    assert calibrate.steps(event(noise), budget) >= 20
    assert calibrate.affordable(RepeatedEvent(event(noise), 20), budget)
    few = pld.epsilon(RepeatedEvent(event(noise), 20), delta, budget.adjacency)
    assert few == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize(
    ("epsilon", "delta", "adjacency", "rate", "steps"),
    [(0.3, 1e-3, Adjacency.REPLACE_ONE, 0.001, 2), (8.0, 1e-3, Adjacency.ADD_REMOVE, 0.001, 2)],
)
def test_noise_that_only_a_rough_bound_holds_by_is_raised(epsilon, delta, adjacency, rate, steps):
    """The line on which noise was sought shows less than those on which a promise is priced."""
    budget = Budget(epsilon, delta, adjacency)
    found = calibrate.noise(lambda s: poisson(rate, s, steps), budget)
    assert pld.delta(poisson(rate, found, steps), epsilon, adjacency) <= delta * (1 + 1e-6)
    assert calibrate.affordable(poisson(rate, found, steps), budget)


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize("records", [22, 40, 188])
def test_a_count_is_one_that_a_ledger_accepts(records, adjacency):
    """Counts are bounded on several lines, and a plan as a whole on a line of its own."""
    event, budget = FixedSizeEvent(1, records, GaussianEvent(100.0)), Budget(3.0, 1e-6, adjacency)
    count = calibrate.steps(event, budget)
    assert calibrate.affordable(RepeatedEvent(event, count), budget)
    assert not calibrate.affordable(RepeatedEvent(event, math.ceil(count * 1.0002)), budget)


def test_gaussian_steps_are_exact():
    for k in (1, 2, 7, 1000):
        budget = Budget(1.0, 1e-6)
        noise = gaussian.noise(1.0, 1e-6) * math.sqrt(k) * (1 + 1e-12)
        assert calibrate.steps(GaussianEvent(noise), budget) == k
        assert pld.epsilon(RepeatedEvent(GaussianEvent(noise), k), 1e-6) <= 1.0
        assert calibrate.steps(GaussianEvent(noise * (1 - 1e-9)), budget) == k - 1


def test_extremes():
    budget = Budget(1.0, 1e-5)
    assert calibrate.steps(GaussianEvent(1e-3), budget) == 0
    assert calibrate.steps(PoissonEvent(0.5, GaussianEvent(1e-3)), budget) == 0
    assert calibrate.steps(PoissonEvent(0.5, GaussianEvent(1e-200)), budget) == 0
    assert calibrate.steps(PureEvent(0.1), budget, before=GaussianEvent(0.1)) == 0
    assert calibrate.steps(PureEvent(1e-9), budget) == calibrate.MOST_STEPS
    assert calibrate.steps(GaussianEvent(1e12), budget) == calibrate.MOST_STEPS
    assert calibrate.steps(PureEvent(0.1), budget) == 10
    for epsilon, delta in ((1e-6, 1e-5), (1.0, 1e-300), (200.0, 1e-5), (1.0, 0.5)):
        noise = calibrate.noise(lambda s: poisson(0.1, s, 100), Budget(epsilon, delta))
        assert pld.delta(poisson(0.1, noise, 100), epsilon) <= delta * (1 + 1e-4)
    with pytest.raises(InvalidValue, match="no noise"):
        calibrate.noise(lambda s: RepeatedEvent(GaussianEvent(s), 2**61), Budget(1e-3, 1e-9))
    with pytest.raises(InvalidValue, match="delta must be"):
        calibrate.noise(GaussianEvent, Budget(1.0, 0.0))
    with pytest.raises(InvalidValue, match="tolerance must be"):
        calibrate.noise(GaussianEvent, budget, tolerance=-1.0)


def test_affordable():
    budget = Budget(1.0, 1e-5)
    assert calibrate.affordable(poisson(0.01, 4.0, 11_050), budget)
    assert not calibrate.affordable(poisson(0.01, 4.0, 11_060), budget)
    assert calibrate.affordable(poisson(0.01, 4.0, 3), budget)  # ε beyond the largest loss one way
    assert calibrate.epsilon(poisson(0.01, 4.0, 10_000), budget) == pytest.approx(0.946867, abs=1e-6)


@pytest.mark.slow
def test_noise_that_a_line_chosen_on_the_way_lets_through_is_shown_to_fit_in_the_end():
    """Few steps at tiny rates: the line of the search is short of frequencies where the answer lies."""
    budget = Budget(0.040556787719280216, 2.7403131148768618e-08, Adjacency.ZERO_OUT)

    def plan(sigma):
        return RepeatedEvent(FixedSizeEvent(2, 10_000, GaussianEvent(sigma)), 3469)

    found = plan(calibrate.noise(plan, budget))
    assert pld.delta(found, budget.epsilon, budget.adjacency) <= budget.delta * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: ft.epsilon("x", delta=1e-5), "step must be a mechanism such as ft.Gaussian"),
        (lambda: ft.delta(1.0, epsilon=1.0), "step must be a mechanism such as ft.Gaussian"),
        (lambda: ft.noise_for(3, ft.Budget(1.0, 1e-5)), "step must be a function of σ"),
        (lambda: ft.noise_for(ft.Gaussian, 1.0), "budget must be ft.Budget"),
        (lambda: ft.steps_for(ft.Gaussian(1.0), 1.0), "budget must be ft.Budget"),
    ],
)
def test_what_is_no_step_and_no_budget_is_named(ask, says):
    with pytest.raises(InvalidValue, match=says):
        ask()
