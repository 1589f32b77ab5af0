"""Quantiles: scores and trees within their bounds, consistent sums, errors in ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.query import Rows
from farthing.statistics.ranks import _NORMS, BRANCHES, LEAVES, LEVELS, QuantileScores, Tree, cumulative

numbers = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=12)


@given(numbers, st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1))
def test_one_record_moves_every_score_by_no_more_than_the_bound(
    rows: list[float], one: float, q: float
) -> None:
    scores = QuantileScores(q, -3.0, 5.0)
    bound = ClipValue(*scores.interval)
    with_one, without = (
        scores.bounded_sum(Rows(np.array(some)), None, bound) for some in ([*rows, one], rows)
    )
    assert np.abs(with_one - without).max() <= scores.interval[1] * (1 + 1e-12)


@given(numbers, st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1))
def test_a_replaced_record_moves_two_scores_apart_by_no_more_than_is_priced(
    rows: list[float], one: float, q: float
) -> None:
    scores = QuantileScores(q, -3.0, 5.0)
    bound = ClipValue(*scores.interval)
    moved = scores.bounded_sum(Rows(np.array([*rows, one])), None, bound)
    moved = moved - scores.bounded_sum(Rows(np.array([*rows, 1.0])), None, bound)
    assert np.ptp(moved) <= 4 * scores.interval[1] * (1 + 1e-12)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_one_record_is_in_one_node_of_each_level(one: float) -> None:
    for order in (1, 2):
        bound = ClipNorm(_NORMS[order - 1], order=order)
        term = Tree(-3.0, 5.0).bounded_sum(Rows(np.array([one])), None, bound)
        assert np.linalg.norm(term, order) <= bound.clip * (1 + 1e-12)
        assert term.sum() == (LEVELS if np.isfinite(one) else 0)
        small = Tree(-3.0, 5.0).bounded_sum(Rows(np.array([one])), None, ClipNorm(0.5, order=order))
        assert np.linalg.norm(small, order) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize("bound", [ClipValue(-0.5, 0.5), ClipValue(0.0, 1.0), ClipValue(-1.0, 0.0)])
def test_a_bound_that_scores_go_beyond_is_refused(bound: ClipValue) -> None:
    with pytest.raises(ft.InvalidValue, match=r"ClipValue.* does not contain"):
        ft.Query(ft.Everyone(), QuantileScores(0.9, 0.0, 1.0), bound, ft.NoisyMax(1.0))


def test_consistent_counts_are_the_least_squares_ones() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=Tree.shape[0])
    rows = []
    for level in range(1, LEVELS + 1):
        rows.append(np.kron(np.eye(BRANCHES**level), np.ones(LEAVES // BRANCHES**level)))
    few = slice(0, 2 * LEAVES // BRANCHES)  # the first two subtrees are a problem of their own
    design = np.vstack([part[:, few][part[:, few].any(axis=1)] for part in rows])
    ends = np.cumsum([0, *(BRANCHES**level for level in range(1, LEVELS + 1))])
    part = np.concatenate([noise[a : a + (b - a) * 2 // BRANCHES] for a, b in itertools.pairwise(ends)])
    expected = np.linalg.lstsq(design, part + 1000, rcond=None)[0]
    whole = cumulative(noise + 1000)  # so large that nothing decreases
    assert np.allclose(np.diff(whole)[few], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("delta", "q"), [(0.0, 0.5), (1e-6, [0.05, 0.25, 0.5, 0.75, 0.95]), (0.0, [0.0, 1.0])]
)
@pytest.mark.parametrize("shared", [False, True])
def test_quantiles_are_within_their_ranks(delta: float, q: object, shared: bool) -> None:
    values = np.random.default_rng(0).permutation(20_000) / 20_000 * 7
    outside = 0
    for seed in range(20):
        stream = {"stream": SeededStream(seed)}
        ledger = ft.Ledger(ft.Budget(2.0, delta), **stream) if shared else None
        rule = {"ledger": ledger} if shared else {"epsilon": 2.0, "delta": delta}
        found = ft.quantiles(values, q, (0, 7), **rule)  # type: ignore[arg-type]
        ranks = np.atleast_1d(found.value) / 7 * 20_000
        off = np.abs(ranks - np.atleast_1d(q) * 20_000)  # type: ignore[operator]
        outside += int((off > np.atleast_1d(found.error) + 20_000 / LEAVES).sum())
    # each is outside with probability below 0.05: of 100, more than 25 with less than 1e-9
    assert outside <= 20 * np.size(q) * 0.25 + 4


def test_replaced_records_cost_more_noise_and_no_more_budget() -> None:
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6, "replace-one"))
    ft.quantiles(range(100), 0.5, (0, 100), ledger=ledger)
    assert 0.2 < ledger.share <= 1
    pure = ft.Ledger(ft.Budget(1.0, 0.0, "replace-one"))
    ft.quantiles(range(100), [0.5, 0.9], (0, 100), ledger=pure)
    assert 0.2 < pure.share <= 1


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-3, 1e-300), (1e-5, 1e-9), (1e4, 1e-9), (1e6, 0.5)])
@pytest.mark.parametrize("adjacency", ft.Adjacency)
def test_a_choice_fits_budgets_of_any_size(epsilon, delta, adjacency):
    ledger = ft.Ledger(ft.Budget(epsilon, delta, adjacency))
    found = ft.quantiles(np.linspace(0, 1, 2001), 0.5, (0, 1), ledger=ledger)
    assert 0 <= found.value <= 1
    assert 0.99 < ledger.share <= 1


@pytest.mark.parametrize("rule", [BasicFilter, GdpFilter, ZcdpFilter])
def test_choices_spend_all_of_a_ledger_and_no_more(rule: type) -> None:
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=rule)
    found = ft.quantiles(np.arange(1000.0), [0.5, 0.9], (0, 1000), ledger=ledger)
    assert found.value.shape == (2,)
    assert 0.99 < ledger.share <= 1
