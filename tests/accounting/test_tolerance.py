"""The whole budget fits itself, on every processor, and nothing beyond it does."""

import itertools
import math
import os
import subprocess
import sys
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.accounting import calibrate, gaussian, sampling, zcdp
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.accounting.tolerance import DEPTH, MARGIN, TOLERANCE, inner, plus, times, within
from farthing.budget import Adjacency, Budget
from farthing.errors import BudgetSpent, Unsupported
from farthing.ledger.answers import whole_event
from farthing.ledger.ledger import Ledger
from farthing.linear.selection import equal_part
from farthing.queries.events import ApproximateEvent, GaussianEvent, PureEvent, RepeatedEvent, ZcdpEvent

EPSILONS = (0.001, 0.01, 0.03, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25)
EPSILONS += (1.5, 1.6, 2.0, 2.5, 3.0, 3.2, 4.0, 5.0, 6.0, 6.4, 7.0, 8.0, 9.0, 10.0, 12.0, 12.8, 15.0, 16.0)
EPSILONS += (20.0, 32.0, 50.0, 100.0)
DELTAS = (1e-3, 1e-4, 3e-5, 1e-5, 5e-6, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
GRID = list(itertools.product(EPSILONS, DELTAS))  # 440 budgets
FILTERS = (BasicFilter, GdpFilter, ZcdpFilter)


def test_the_grid_holds_more_than_four_hundred_budgets():
    assert len(set(GRID)) >= 400


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_the_whole_budget_fits_itself_and_then_nothing_is_left(kind, adjacency, part):
    for epsilon, delta in GRID[part::4]:
        ledger = Ledger(Budget(epsilon, delta, adjacency), filter=kind)
        whole = ledger.allot(epsilon, delta)
        assert ledger.share == pytest.approx(1.0, abs=1e-9)
        assert ledger.share <= 1
        if delta not in DELTAS[::5]:
            continue
        again = whole.allot(epsilon, delta)
        assert again.allot().budget == ledger.budget
        assert whole.share == pytest.approx(1.0, abs=1e-9)
        assert ledger.spent.epsilon <= epsilon
        with pytest.raises(BudgetSpent):
            ledger.allot(epsilon * 1e-6, delta * 1e-6)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("kind", FILTERS)
def test_equal_parts_fit_as_often_as_they_are_meant_to(kind, adjacency):
    for (epsilon, delta), parts in zip(GRID[::9], itertools.cycle((2, 2, 3, 7)), strict=False):
        ledger = Ledger(Budget(epsilon, delta, adjacency), filter=kind)
        part = equal_part(ledger, parts)
        for _ in range(parts):
            ledger.allot(part.epsilon, part.delta)
        assert 0.999 < ledger.share <= 1
        with pytest.raises(BudgetSpent):
            ledger.allot(part.epsilon, part.delta)


@pytest.mark.parametrize("parts", [2, 3, 6, 7, 10, 49, 1000])
def test_plain_fractions_add_up_to_the_whole_under_basic_composition(parts):
    for epsilon, delta in GRID[:: 9 if parts < 20 else 170]:
        ledger = Ledger(Budget(epsilon, delta), filter=BasicFilter)
        for _ in range(parts):
            ledger.allot(epsilon / parts, delta / parts, filter=BasicFilter)
        assert ledger.spent.epsilon <= epsilon
        with pytest.raises(BudgetSpent):
            ledger.allot(epsilon * 1e-6, 0.0)


def test_three_tenths_are_a_tenth_three_times():
    ledger = Ledger(Budget(0.3, 0.0))
    for _ in range(3):
        ledger.allot(0.1, 0.0)
    with pytest.raises(BudgetSpent):
        ledger.allot(1e-9, 0.0)


@pytest.mark.parametrize("kind", FILTERS)
def test_halves_fit_twice(kind):
    for epsilon, delta in GRID:
        ledger = Ledger(Budget(epsilon, delta), filter=kind)
        half = [total / 2 for total in ledger.filter.add(ledger.filter.start(), whole_event(ledger.filter))]
        rule = ledger.filter
        assert rule.fits([2 * total for total in half])
        assert rule.fits([plus(total, total) for total in half])
        if kind is BasicFilter:
            ledger.allot(epsilon / 2, delta / 2, filter=BasicFilter)
            ledger.allot(epsilon / 2, delta / 2, filter=BasicFilter)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_noise_that_the_library_chose_for_a_budget_fits_it(adjacency):
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    for epsilon, delta in GRID:
        budget = Budget(epsilon, delta, adjacency)
        for event in (
            GaussianEvent(shift * gaussian.noise(epsilon, delta)),
            GaussianEvent(shift / budget.mu),
        ):
            assert Ledger(budget).affords(event)
            assert calibrate.affordable(event, budget)
        if delta not in DELTAS[::4]:
            continue
        four = GaussianEvent(shift * 2 * gaussian.noise(epsilon, delta))
        assert Ledger(budget).affords(four, 4)
        assert not Ledger(budget).affords(four, 5)
        assert calibrate.steps(four, budget) == 4
        assert Ledger(budget, filter=ZcdpFilter).affords(ZcdpEvent(zcdp.rho_tight(epsilon, delta)))


def test_noise_chosen_for_a_sampled_plan_fits_it_when_it_is_promised():
    from farthing.queries.events import PoissonEvent

    for epsilon, delta in ((1.0, 1e-6), (4.0, 1e-5), (0.4, 1e-5)):
        budget = Budget(epsilon, delta)
        noise = calibrate.noise(lambda s: RepeatedEvent(PoissonEvent(0.01, GaussianEvent(s)), 500), budget)
        for nudged in (noise, math.nextafter(noise, 0.0), noise * (1 - 1e-13)):  # another processor's
            assert Ledger(budget).promise(PoissonEvent(0.01, GaussianEvent(nudged)), 500).times == 500


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_nothing_beyond_the_budget_and_its_tolerance_fits(adjacency):
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    more = 1 + 4 * MARGIN
    for epsilon, delta in GRID[::3]:
        budget = Budget(epsilon, delta, adjacency)
        beyond = GaussianEvent(shift / (gaussian.mu(epsilon, delta) * more))
        assert not Ledger(budget).affords(beyond)
        assert not Ledger(budget, filter=ZcdpFilter).affords(ZcdpEvent(zcdp.rho_tight(epsilon, delta) * more))
        basic = Ledger(budget, filter=BasicFilter)
        assert not basic.affords(ApproximateEvent(epsilon * more, 0.0))
        assert not basic.affords(ApproximateEvent(epsilon / 2, delta * more))
        assert not basic.affords(PureEvent(epsilon * (1 + 2 * TOLERANCE)))


def _true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        return mpmath.ncdf(-near) - mpmath.exp(epsilon) * mpmath.ncdf(-far)


def test_what_a_gaussian_filter_lets_through_is_inside_the_budget_in_sixty_digits():
    for epsilon, delta in GRID:
        rule = GdpFilter(Budget(epsilon, delta))
        most = rule.mu * math.sqrt((1 + TOLERANCE) ** (DEPTH + 1))  # parts of parts, each filled to the brim
        assert _true_delta(most, inner(epsilon)) <= inner(delta)
        assert _true_delta(most * (1 + 4 * MARGIN), epsilon) > delta  # and nothing is given away


def test_what_a_zcdp_filter_lets_through_is_inside_the_budget_in_sixty_digits():
    with mpmath.workdps(60):
        for epsilon, delta in GRID[::5]:
            rho = mpmath.mpf(ZcdpFilter(Budget(epsilon, delta)).rho) * (1 + mpmath.mpf(TOLERANCE)) ** (
                DEPTH + 1
            )
            gap = mpmath.sqrt(mpmath.log(1 / mpmath.mpf(delta)) / rho)  # of α - 1; any order is a bound

            allowed = mpmath.mpf(epsilon) * (1 - mpmath.mpf(MARGIN))

            def log_delta(x, rho=rho, epsilon=allowed):
                a = 1 + x
                return x * (a * rho - epsilon) + a * mpmath.log(1 - 1 / a) - mpmath.log(x)

            slope = lambda x: mpmath.diff(log_delta, x)  # noqa: E731
            best = mpmath.findroot(slope, gap)
            assert log_delta(best) <= mpmath.log(mpmath.mpf(inner(delta)))


@pytest.mark.parametrize("orders", [(2.0, 8.0, 32.0), None])
def test_limits_of_the_renyi_filter_are_inside_by_the_margin(orders):
    for epsilon, delta in GRID[::7]:
        rule = RdpFilter(Budget(epsilon, delta), *([orders] if orders else []))
        for order, limit in zip(rule.orders, rule.limits, strict=True):
            with mpmath.workdps(50):
                a = mpmath.mpf(order)
                weighted = mpmath.log(mpmath.mpf(delta) / len(rule.orders))
                log_c = (a - 1) * mpmath.log(1 - 1 / a) - mpmath.log(a)
                exact = mpmath.mpf(epsilon) - (log_c - weighted) / (a - 1)
                assert limit < exact
                assert limit <= 0 or limit * (1 + TOLERANCE) ** (DEPTH + 1) < exact
        if max(rule.limits) > 0:
            place = max(range(len(rule.limits)), key=lambda i: rule.limits[i])
            full = [1e300] * len(rule.limits)
            full[place] = rule.limits[place]
            assert rule.fits(full)
            full[place] *= 1 + 2 * TOLERANCE
            assert not rule.fits(full)


def test_a_reserve_for_approximate_zcdp_stays_inside_delta():
    for epsilon, delta in GRID[::11]:
        rule = ZcdpFilter(Budget(epsilon, delta), delta / 2)
        assert rule.fits([rule.rho, delta / 2])
        assert not rule.fits([rule.rho, delta / 2 * (1 + 1e-9)])
        most = Fraction(rule.approximate) * Fraction(1 + TOLERANCE) ** (DEPTH + 1)
        assert zcdp.delta(rule.rho * (1 + TOLERANCE) ** (DEPTH + 1), epsilon) + most <= delta


def test_parts_of_parts_end_somewhere():
    ledger = Ledger(Budget(1.0, 1e-6))
    for _ in range(DEPTH):
        ledger = ledger.allot(1.0, 1e-6)
    with pytest.raises(Unsupported, match="divided more than"):
        ledger.allot(1.0, 1e-6)


def test_rounds_that_noise_was_chosen_for_by_the_sampling_theorem_are_counted():
    from farthing.accounting.accountants import Accountant
    from farthing.queries.samplers import Poisson

    for epsilon, delta in GRID[::37]:
        budget = Budget(epsilon, delta, Adjacency.ZERO_OUT)
        noise = Accountant.SAMPLING.noise(20, budget, Poisson(0.1))
        assert sampling.delta(noise, 0.1, 20, epsilon) <= delta
        for nudged in (noise, noise * (1 - 1e-13)):
            assert Accountant.SAMPLING.rounds(nudged, 20, budget, Poisson(0.1)) >= 20


numbers = st.floats(1e-12, 1e12)


@given(numbers, numbers, st.integers(1, 10**9), st.integers(1, 10**9))
def test_sums_and_products_are_rounded_up(total, cost, count, back):
    assert Fraction(plus(total, cost)) >= Fraction(total) + Fraction(cost)
    assert plus(total, cost) <= (total + cost) * (1 + 2**-51)
    assert Fraction(times(count, cost)) >= count * Fraction(cost)
    assert Fraction(times(-count, cost)) >= -count * Fraction(cost)
    less = plus(plus(total, times(count, cost)), times(-min(back, count), cost))
    assert Fraction(less) >= Fraction(total) + (count - min(back, count)) * Fraction(cost)


def test_the_constants_leave_room_for_what_they_say():
    assert Fraction(1 + TOLERANCE) ** (DEPTH + 1) < 1 + Fraction(MARGIN) / 2
    assert (1 - Fraction(MARGIN)) * (1 + Fraction(MARGIN) / 2) < 1
    spare = Fraction(2) ** -21  # half of what noise is larger than its price
    assert Fraction(1 + TOLERANCE) ** (DEPTH + 1) < 1 + spare
    assert within(1 + TOLERANCE, 1.0)
    assert not within(1 + 2 * TOLERANCE, 1.0)


WHOLE = """
import numpy as np
from farthing import (Budget, Ledger)
refused = []
for epsilon in (0.1, 0.4, 1.0, 2.0, 3.0, 4.0, 8.0, 10.0):
    for delta in (1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        try:
            Ledger(Budget(epsilon, delta)).allot(epsilon, delta)
        except Exception:
            refused.append((epsilon, delta))
print(refused)
"""


@pytest.mark.parametrize("features", ["X86_V4 AVX512_SKX AVX512_ICL AVX512_SPR", "X86_V3 X86_V4 AVX2 FMA3"])
def test_the_whole_budget_fits_itself_whatever_the_processor_can_do(features):
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    named = [name for name in features.split() if name in __cpu_dispatch__ and __cpu_features__.get(name)]
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(named)}
    command = [sys.executable, "-c", WHOLE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
