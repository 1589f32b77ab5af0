"""Losses of choices on a grid: against the worst two-point distributions, real elections and played games."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting.filters import RdpFilter
from farthing.accounting.loss_masses import WorstChoice, delta, repeated, ways
from farthing.budget import Adjacency
from farthing.errors import Unsupported
from farthing.queries.events import BoundedRangeEvent, GaussianEvent, PoissonEvent, PureEvent

BUDGET = ft.Budget(1.0, 1e-5)


def two_point(epsilon, t):
    """The worst choice whose losses are t and t - ε: its probabilities under P and Q."""
    first = (math.exp(epsilon) - math.exp(t)) / (math.exp(epsilon) - 1)
    p = np.array([first, 1 - first])
    return p, p * np.exp([-t, epsilon - t])


def apart(p, q, loss):
    return float(np.maximum(p - math.exp(loss) * q, 0).sum())


def on_grid(epsilon, rate, direction, loss):
    found = ways(PoissonEvent(rate, BoundedRangeEvent(epsilon)), Adjacency.ADD_REMOVE)
    return delta(repeated(found[min(direction, len(found) - 1)], 1, epsilon * rate / 1000, 1e-13), loss)


@given(
    st.floats(0.01, 4.0),
    st.one_of(st.just(1.0), st.floats(1e-3, 1.0)),
    st.floats(0.0, 1.0),
    st.floats(-1.1, 1.1),
    st.sampled_from([0, 1]),
)
@settings(max_examples=100, deadline=None)
def test_no_choice_of_a_range_tells_two_worlds_apart_better_than_its_pair(epsilon, rate, t, part, direction):
    p, q = two_point(epsilon, t * epsilon)
    mixed, loss = (1 - rate) * q + rate * p, part * epsilon * rate
    worlds = (mixed, q) if direction == 0 else (q, mixed)
    assert apart(*worlds, loss) <= on_grid(epsilon, rate, direction, loss) * (1 + 1e-12)


@pytest.mark.parametrize(("epsilon", "rate", "part"), [(1.0, 1.0, 0.3), (0.5, 0.1, 0.2), (2.0, 0.3, -0.4)])
@pytest.mark.parametrize("direction", [0, 1])
def test_the_pair_is_reached_by_the_worst_choice(epsilon, rate, part, direction):
    best, loss = 0.0, part * epsilon * rate
    for t in np.linspace(0, epsilon, 2001):
        p, q = two_point(epsilon, t)
        mixed = (1 - rate) * q + rate * p
        best = max(best, apart(*((mixed, q) if direction == 0 else (q, mixed)), loss))
    assert best <= on_grid(epsilon, rate, direction, loss) <= best * (1 + 1e-4)


@given(st.lists(st.floats(-1.0, 0.0), min_size=2, max_size=6), st.floats(0.2, 3.0), st.floats(-0.9, 0.9))
@settings(max_examples=60, deadline=None)
def test_an_exponential_mechanism_whose_scores_only_fall_is_dominated(moves, noise, part):
    """Scores of which one record lowers each by at most 1, with Gumbel noise: a range of 1 / noise."""
    scores = np.linspace(0, 2, len(moves))
    p, q = (np.exp(part / noise) for part in (scores, scores + np.array(moves)))
    p, q = p / p.sum(), q / q.sum()
    epsilon = 1 / noise
    for one, other in ((p, q), (q, p)):
        assert apart(one, other, part * epsilon) <= on_grid(epsilon, 1.0, 0, part * epsilon) + 1e-12


def test_the_variance_of_a_small_range_is_a_third_of_its_square():
    assert repeated(WorstChoice(0.01), 1, 1e-5, 1e-12).deviation() == pytest.approx(
        0.01 / math.sqrt(3), rel=1e-2
    )


def best_of_all(rule):
    """δ of the best strategy that may also choose, each time, which choice of the range it meets."""
    sizes, epsilon = [event.epsilon for event in rule.events], rule.budget.epsilon
    parts = np.linspace(0, 1, 5)[1:-1]

    @functools.cache
    def allowed(counts):
        total = rule.start()
        for event, count in zip(rule.events, counts, strict=True):
            total = rule.add(total, event, count)
        return [k for k, event in enumerate(rule.events) if rule.fits(rule.add(total, event))]

    @functools.cache
    def best(counts, loss):
        worth = max(0.0, -math.expm1(epsilon - loss))
        for k in allowed(counts):
            more = (*counts[:k], counts[k] + 1, *counts[k + 1 :])
            for part in parts:
                up = part * sizes[k]
                (first, second), _ = two_point(sizes[k], up)
                ends = round(loss + up, 9), round(loss + up - sizes[k], 9)
                worth = max(worth, first * best(more, ends[0]) + second * best(more, ends[1]))
        return worth

    return best((0,) * len(sizes), 0.0)


@pytest.mark.parametrize(
    ("entries", "epsilon", "spent"), [((0.8, 1.6), 1.5, 0.02), ((0.5,), 1.0, 0.02), ((0.6, 1.2), 1.0, 0.02)]
)
def test_no_strategy_against_choices_gets_more_than_delta(entries, epsilon, spent):
    rule = ft.Menu((BoundedRangeEvent(one) for one in entries), units=8)(ft.Budget(epsilon, spent))
    assert rule.most(rule.events[0]) >= 2
    assert 0.1 * spent < best_of_all(rule) <= spent


def test_choices_on_batches_get_more_from_a_menu_than_by_the_renyi_filter():
    event, renyi = PoissonEvent(0.1, BoundedRangeEvent(0.3)), RdpFilter(BUDGET)
    most = ft.Menu([event])(BUDGET).most(event)
    assert not renyi.fits(renyi.add(renyi.start(), event, round(most / 1.2)))


def test_an_entry_for_choices_pays_for_choices_only_and_a_pure_one_for_both():
    rule = ft.Menu([BoundedRangeEvent(0.05), PoissonEvent(0.1, BoundedRangeEvent(0.2))])(BUDGET)
    assert rule.cost(BoundedRangeEvent(0.04)) == [1.0, 0.0]
    assert rule.cost(PoissonEvent(0.05, BoundedRangeEvent(0.1))) == [0.0, 1.0]
    for event in (PureEvent(0.01), PoissonEvent(0.1, BoundedRangeEvent(0.21)), GaussianEvent(100.0)):
        with pytest.raises(Unsupported, match="not on the menu"):
            rule.cost(event)
    pure = ft.Menu([PureEvent(0.05)])(BUDGET)
    assert pure.cost(BoundedRangeEvent(0.05)) == pure.cost(PoissonEvent(0.1, BoundedRangeEvent(0.3))) == [1.0]


def test_under_replace_one_a_choice_on_a_batch_has_no_entry():
    event = PoissonEvent(0.1, BoundedRangeEvent(0.2))
    with pytest.raises(Unsupported):
        ft.Menu([event])(ft.Budget(1.0, 1e-5, "replace-one"))
    with pytest.raises(Unsupported):
        ways(event, Adjacency.REPLACE_ONE)
