"""PrivGene: bounded advantages, choices of parents, prices, and learning."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue, Unsupported
from farthing.linear.losses import huber_hinge, logistic, multinomial, squared
from farthing.linear.methods import privgene as module
from farthing.linear.methods.privgene import Advantages, NoisyTop, privgene
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import BoundedRangeEvent, RepeatedEvent


def table(n=2000, d=3):
    x = (np.arange(n * d).reshape(n, d) * 0.6180339887) % 1.0
    return Table(x, (x[:, 0] > x[:, 1]).astype(float), unit=True)


def generation(seed, spread, candidates=7, size=4):
    return spread * module._uniform(SeededStream(seed), (size, candidates))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    spread=st.floats(1e-3, 100),
    loss=st.sampled_from([logistic, huber_hinge]),
    place=st.integers(0, 19),
)
def test_the_gap_of_two_scores_moves_by_at_most_the_bound(seed, spread, loss, place):
    """So nothing is clipped, and the bound is what the price says."""
    records, problem, w = table(20), Problem(loss, 20, 3), generation(seed, spread)
    features = problem.rows()
    reach = module._reach(problem, features, w)
    scores, unclipped = (
        Advantages(loss, features).bounded_sum(records, w, bound)
        for bound in (ft.ClipValue(0.0, reach), ft.ClipValue(0.0, 1e9))
    )
    assert scores == pytest.approx(unclipped, rel=1e-9)
    fewer = Table(np.delete(records.X, place, axis=0), np.delete(records.y, place), unit=True)
    moved = scores - Advantages(loss, features).bounded_sum(fewer, w, ft.ClipValue(0.0, reach))
    assert moved.min() >= -1e-9
    assert moved.max() <= reach * (1 + 1e-9)


def test_advantages_rank_candidates_as_losses_do():
    records, w = table(), generation(3, 2.0)
    features = Features(3, intercept=0.3, radius=2.0)
    scores = Advantages(logistic, features).bounded_sum(records, w, ft.ClipValue(0.0, 100.0))
    x = records.X / np.linalg.norm(records.X, axis=1, keepdims=True)
    losses = logistic.value(np.column_stack([x, np.full(len(x), 0.3)]) @ w, records.y).sum(axis=0)
    assert np.ptp(scores + losses) == pytest.approx(0, abs=1e-6)


def test_no_records_and_rows_that_are_not_finite_count_nothing():
    features = Features(3)
    empty = Table(np.zeros((0, 3)), np.zeros(0))
    assert not Advantages(logistic, features).bounded_sum(empty, generation(0, 1.0), ft.ClipValue(0, 1)).any()
    odd = Table(np.ones((1, 3)), np.array([math.nan]))
    assert not Advantages(logistic, features).bounded_sum(odd, generation(0, 1.0), ft.ClipValue(0, 1)).any()


def test_the_top_is_the_exponential_mechanism_without_replacement():
    """Two of three scores: the chance of an ordered pair is p_i p_j / (1 - p_i)."""
    scores, bound, noise = np.array([0.0, 1.0, 1.5]), ft.ClipValue(0.0, 1.0), 0.8
    stream, runs = SeededStream(11), 4000
    seen = [tuple(NoisyTop(noise, 2).release(scores, bound, stream)) for _ in range(runs)]
    p = np.exp(scores / noise) / np.exp(scores / noise).sum()
    for i, j in itertools.permutations(range(3), 2):
        expected = p[i] * p[j] / (1 - p[i])
        spread = math.sqrt(expected * (1 - expected) / runs)
        assert abs(seen.count((i, j)) / runs - expected) < 4.5 * spread


@pytest.mark.parametrize(("adjacency", "gap"), [("add-remove", 1.0), ("zero-out", 1.0), ("replace-one", 2.0)])
def test_each_parent_is_one_exponential_mechanism(adjacency, gap):
    event = NoisyTop(4.0, 3).event(ft.ClipValue(0.0, 5.0), ft.Adjacency(adjacency), False)
    assert event == RepeatedEvent(BoundedRangeEvent(gap / 4.0), 3)
    with pytest.raises(ft.Unsupported, match="adjacency"):
        NoisyTop(4.0, 3).unit_event()


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
@pytest.mark.parametrize(("rule", "delta"), [(ZcdpFilter, 1e-6), (GdpFilter, 1e-6), (BasicFilter, 0.0)])
def test_all_rounds_fit_and_use_the_budget(adjacency, rule, delta):
    ledger = ft.Ledger(ft.Budget(0.5, delta, adjacency), filter=rule).over(table())
    steps = list(privgene(ledger, Problem(logistic, 2000, 3), candidates=12, rounds=6))
    assert [step.t for step in steps] == list(range(1, 7))
    assert 0.999 < ledger.share <= 1


def test_it_learns_and_a_seed_of_its_own_does_not_void_the_guarantee():
    ledger = ft.Ledger(ft.Budget(5.0, 1e-6), filter=ZcdpFilter).over(table())
    u, constant = ft.run(privgene(ledger, Problem(logistic, 2000, 3), seed=1)).w
    assert ledger.guarantee.epsilon == 5.0
    records = table()
    x = records.X / np.linalg.norm(records.X, axis=1, keepdims=True)
    assert np.mean((x @ u + constant > 0) == records.y) > 0.85


def test_children_come_from_their_parents_but_for_mutations():
    parents = generation(0, 1.0, candidates=2, size=50)
    children = module._children(SeededStream(1), parents, 40, 1e-9)
    nearest = np.minimum(abs(children - parents[:, :1]), abs(children - parents[:, 1:]))
    assert nearest.max() <= 1e-9
    moved = module._children(SeededStream(1), parents, 40, 0.5) - children
    assert 0.1 < np.mean(moved != 0) < 0.5
    assert abs(moved).max() <= 0.5


def test_seeds_decide_a_run():
    def weights(seed):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=ZcdpFilter, stream=SeededStream(0)).over(table())
        return ft.run(privgene(ledger, Problem(logistic, 2000, 3), seed=seed)).w[0]

    assert (weights(1) == weights(1)).all()
    assert (weights(1) != weights(2)).any()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"parents": 100}, "parents"),
        ({"rounds": 0}, "rounds"),
        ({"shrink": 2.0}, "shrink"),
        ({"spread": 0}, "spread"),
    ],
)
def test_bad_options_are_named(options, named):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=ZcdpFilter).over(table())
    with pytest.raises(InvalidValue, match=named):
        list(privgene(ledger, Problem(logistic, 2000, 3), **options))


def test_what_has_no_bound_is_refused():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=ZcdpFilter).over(table())
    for problem in (Problem(squared, 2000, 3), Problem(multinomial, 2000, 3, outputs=3)):
        with pytest.raises(Unsupported, match="bounded slope"):
            list(privgene(ledger, problem))
    with pytest.raises(InvalidValue, match="at least 3"):
        NoisyTop(1.0, 3).release(np.zeros(2), ft.ClipValue(0, 1), SeededStream(0))
