"""Counts, histograms and means: exact sums, terms within their bounds, errors that cover."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from scipy.special import ndtr

import farthing as ft
from farthing.budget import Adjacency
from farthing.noise.lattice import SeededStream
from farthing.queries.arrays import column
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.query import Rows
from farthing.statistics.cells import Cells, Sums

codes = st.lists(st.integers(-3, 6), max_size=30)
values = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(-2, 5), st.integers(-2, 5)), max_size=20), st.floats(0.1, 5))
def test_counts_are_those_of_a_loop_within_any_bound(rows: list[tuple[int, int]], clip: float) -> None:
    cells = Cells(2, 4)
    for bound in (ClipNorm(clip), ClipNorm(clip, order=1)):
        expected = np.zeros((2, 4))
        term = min(1.0, clip / (2 if bound.order == 1 else math.sqrt(2)))
        for row in rows:
            for place, code in enumerate(row):
                if 0 <= code < 4:
                    expected[place, code] += term
        assert np.allclose(cells.bounded_sum(Rows(np.array(rows).reshape(-1, 2)), None, bound), expected)


@given(st.integers(-2, 5), values, st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_one_record_adds_no_more_than_its_norm(code: int, value: float, low: float, width: float) -> None:
    sums = Sums(4, low, low + width)
    record = Rows(np.array([code]), np.array([value]))
    for order in (1, 2):
        made_for = ClipNorm(sums.norms[order - 1], order=order)
        for bound in (made_for, ClipNorm(0.3, order=order)):
            term = sums.bounded_sum(record, None, bound).ravel()
            assert np.linalg.norm(term, order) <= bound.clip * (1 + 1e-12)
    none = not 0 <= code < 4 or not math.isfinite(value)
    assert (not term.any()) == none


def test_sums_are_exact_in_any_order_and_over_any_parts() -> None:
    rng = np.random.default_rng(0)
    sums = Sums(3, -5.0, 11.0)
    groups, numbers = rng.integers(0, 3, 20_000), rng.normal(3, 9, 20_000)
    bound = ClipNorm(sums.norms[1])
    whole = sums.bounded_sum(Rows(groups, numbers), None, bound)
    order = rng.permutation(20_000)
    for parts in (1, 7, 100):
        pieces = np.array_split(order, parts)
        added = sum(sums.bounded_sum(Rows(groups[p], numbers[p]), None, bound) for p in pieces)
        assert np.array_equal(added, whole)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("rule", ["own", "shared"])
def test_a_statistic_spends_its_part_and_no_more(delta: float, adjacency: Adjacency, rule: str) -> None:
    ledger = ft.Ledger(ft.Budget(1.0, delta, adjacency))
    part = {} if rule == "own" else {"epsilon": 0.5, "delta": delta}
    ft.mean(range(100), (0, 100), by=["a", "b"] * 50, groups=["a", "b"], ledger=ledger, **part)
    assert ledger.share <= 1
    assert ledger.share > 0.999 if rule == "own" else 0.1 < ledger.share < 0.6
    if rule == "own":
        with pytest.raises(ft.BudgetSpent):
            ft.count(range(100), epsilon=0.1, delta=delta, ledger=ledger)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.5, 1e-6), (30.0, 1e-2)])
def test_errors_cover_what_noise_does(epsilon: float, delta: float) -> None:
    ages, sexes = np.arange(300) % 90, np.array(["f", "m", "?"])[np.arange(300) % 3]
    inside, runs = np.zeros(3), 120
    for seed in range(runs):
        rule = {"epsilon": epsilon, "delta": delta}
        budget = ft.Budget(epsilon, delta)
        rule = {"ledger": ft.Ledger(budget, stream=SeededStream(seed))}
        counted = ft.count(ages, by=sexes, groups=["f", "m"], **rule)  # type: ignore[arg-type]
        rule = {"ledger": ft.Ledger(budget, stream=SeededStream(runs + seed))}
        averaged = ft.mean(ages, (0, 90), **rule)  # type: ignore[arg-type]
        inside[:2] += np.abs(counted.value - 100) <= counted.error
        inside[2] += abs(averaged.value - ages.mean()) <= averaged.error + 90 * 2.0**-20
    assert (inside >= 0.85 * runs).all()  # seeds are fixed; else binomial(120, 0.95): 5e-6


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 1.3, 5.0, 30.0])
def test_errors_of_counts_cover_their_rounding(epsilon: float, delta: float) -> None:
    """A count is a whole number: it is within k of the truth where its noise is below k + 1/2."""
    mu = ft.Ledger(ft.Budget(epsilon, delta)).filter.mu if delta else 0.0
    for ask in (ft.count, partial(ft.histogram, bins=[0, 9])):
        error = float(np.max(ask(range(9), ledger=ft.Ledger(ft.Budget(epsilon, delta))).error))
        below = math.floor(error) + 0.5
        inside = 2 * ndtr(below * mu) - 1 if delta else -math.expm1(-below * epsilon)
        assert inside >= 0.95 - 1e-6
        assert error <= 1 + (2 / mu if delta else 3 / epsilon)


def test_missing_values_and_other_groups_count_as_nothing() -> None:
    ledger = ft.Ledger(ft.Budget(1e4, 1e-6))
    cells = [1.0, None, float("nan"), "x", 5, float("inf"), 3]
    assert round(ft.count(cells, epsilon=50.0).value) == 4
    found = ft.mean(cells, (0, 10), by=["a", "a", "a", "b", "b", "b", "c"], groups=["a", "b"], epsilon=2000.0)
    assert found.value.tolist() == pytest.approx([1.0, 5.0], abs=0.2)
    assert ledger.share == 0
    days = np.array(["2000-01-01", "NaT"], dtype="datetime64[D]")
    assert round(ft.count(days, epsilon=50.0).value) == 1


def test_a_public_number_of_records_leaves_all_of_the_budget_to_the_sum() -> None:
    ages = np.arange(1000) % 90
    ledger = ft.Ledger(ft.Budget(1.0, 0.0))
    found = ft.mean(ages, (0, 90), records=1000, ledger=ledger)
    assert 0.999 < ledger.share <= 1
    assert found.error < ft.mean(ages, (0, 90), epsilon=1.0).error / 1.4
    assert abs(found.value - ages.mean()) < 10 * found.error  # 30 scales of Laplace noise: 1e-13
    with pytest.raises(ft.InvalidValue, match="groups are counted"):
        ft.mean(ages, (0, 90), records=1000, by=ages, groups=[1], epsilon=1.0)


def test_bins_are_those_of_numpy() -> None:
    numbers = np.concatenate([np.linspace(-1, 12, 999), [0, 5, 10, 10, np.nan]])
    found = ft.histogram(numbers, [0, 5, 7, 10], epsilon=100.0)
    assert np.round(found.value).tolist() == np.histogram(numbers[:-1], [0, 5, 7, 10])[0].tolist()
    texts = ft.histogram(["a", "b", "a", "secret"], ["a", "b"], epsilon=100.0)
    assert np.round(texts.value).tolist() == [2, 1]
    assert texts.groups == ("a", "b")


def test_a_mean_that_drowns_is_the_middle_and_says_so() -> None:
    found = ft.mean([1.0], (0, 10), epsilon=0.01)
    assert (found.value, found.error) == (5.0, 5.0) or found.error > 2


@pytest.mark.filterwarnings("ignore:the noise hides")
def test_the_smaller_noise_is_taken_by_public_numbers() -> None:
    assert ft.count([1], epsilon=1.0, delta=1e-6).privacy.accountant == "basic"
    assert ft.bounds(np.ones((50, 60)), epsilon=1.0, delta=1e-6)[0].shape == (60,)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    assert ft.count([1], ledger=ledger).privacy.accountant == "gdp"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ft.count(np.array([[1]]), epsilon=1.0),
        lambda: ft.count("secret", epsilon=1.0),
        lambda: ft.count({"age": [1]}, epsilon=1.0),  # type: ignore[arg-type]
        lambda: ft.count(iter([1]), epsilon=1.0),  # type: ignore[arg-type]
        lambda: ft.count([1]),
        lambda: ft.count([1], epsilon=-1.0),
        lambda: ft.count([1], by=[1], epsilon=1.0),
        lambda: ft.count([1], by=[1, 2], groups=[1], epsilon=1.0),
        lambda: ft.count([1], by=[1], groups=[1, 1], epsilon=1.0),
        lambda: ft.mean([1], (1, 1), epsilon=1.0),
        lambda: ft.mean([1], (0, math.inf), epsilon=1.0),
        lambda: ft.mean([1], 5, epsilon=1.0),  # type: ignore[arg-type]
        lambda: ft.histogram([1], [1], epsilon=1.0),
        lambda: ft.histogram([1], [2, 1], epsilon=1.0),
        lambda: ft.histogram([1], [0, math.nan], epsilon=1.0),
        lambda: ft.quantiles([1], 1.5, (0, 1), epsilon=1.0),
        lambda: ft.quantiles([1], [], (0, 1), epsilon=1.0),
        lambda: ft.quantiles([1], "x", (0, 1), epsilon=1.0),
        lambda: ft.quantiles([1], 0.5, (0, 1)),
        lambda: ft.bounds(np.array([["a"]]), epsilon=1.0),
        lambda: ft.bounds(np.zeros((3, 0)), epsilon=1.0),
    ],
)
def test_nonsense_is_refused(wrong: object) -> None:
    with pytest.raises(ft.InvalidValue):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize("bounds", [(0, 5e-324), (0, 1e-300), (-1e308, 1e308), (1, 1), (0, math.nan)])
def test_bounds_between_which_a_share_is_no_number_are_refused(bounds: tuple[float, float]) -> None:
    numbers = [1.0, 0.0, 1.0]
    for statistic in (ft.mean, partial(ft.quantiles, q=0.5)):
        with pytest.raises(ft.InvalidValue, match=r"bounds|high"):
            statistic(numbers, bounds=bounds, epsilon=1.0)
    with pytest.raises(ft.InvalidValue, match=r"target_bounds|high"):
        ft.LinearRegression(1.0, 1e-5, target_bounds=bounds).fit(np.ones((3, 1)), numbers)
    if not math.isnan(bounds[1]):  # which is bought
        with pytest.raises(ft.InvalidValue, match="bounds must be finite"):
            ft.LogisticRegression(1.0, 1e-5, bounds=bounds).fit(np.ones((3, 1)), numbers)


def test_bounds_of_a_sparse_table_are_declared() -> None:
    with pytest.raises(ft.InvalidValue, match="sparse table must be declared"):
        ft.bounds(sparse.csr_array(np.eye(3)), epsilon=1.0)


def test_nothing_is_charged_for_nonsense() -> None:
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    with pytest.raises(ft.InvalidValue):
        ft.mean([1], (1, 0), ledger=ledger)
    with pytest.raises(ft.InvalidValue):
        ft.quantiles(np.array([[1]]), 0.5, (0, 1), ledger=ledger)
    with pytest.raises(ft.InvalidValue):
        ft.count([1], by=[1], groups=[], ledger=ledger)
    with pytest.raises(ft.InvalidValue, match="must hold numbers"):
        ft.mean(np.array(["2000-01-01"], "M8[D]"), (0, 1), ledger=ledger)
    assert ledger.share == 0


ODD: list[Any] = [
    None,
    math.nan,
    math.inf,
    "x",
    "",
    True,
    2,
    0.5,
    10**17 + 1,
    10**5000,
    1e22,
    1 + 2j,
    [1],
    b"x",
]
ODD += ["nan", "7", " 2 ", np.float32(0.5), np.datetime64("2000-01-01"), np.array([1.0]), np.complex64(1)]
GROUPS = [True, 2, 0.5, "x", 10**17 + 1, 1e22, "2000-01-01"]
ASKED: dict[str, Callable[[Any], Any]] = {
    "count": lambda v: ft.count(v, epsilon=1.0),
    "count by": lambda v: ft.count(np.ones(len(v)), by=v, groups=GROUPS, epsilon=1.0),
    "bins": lambda v: ft.histogram(v, [0, 0.5, 1, 3], epsilon=1.0),
    "values": lambda v: ft.histogram(v, ["True", "x", "nan", "2"], epsilon=1.0),
    "mean": lambda v: ft.mean(v, (0, 1), epsilon=1.0, delta=1e-6),
    "mean by": lambda v: ft.mean(v, (0, 1), by=v, groups=GROUPS, epsilon=1.0),
    "bounds": lambda v: ft.bounds(v, epsilon=1.0, delta=1e-6),
    "bounds of a table": lambda v: ft.bounds(
        np.stack([column(v).astype(object)] * 2, 1), epsilon=1.0, delta=1e-6
    ),
    "choices": lambda v: ft.quantiles(v, 0.25, (0, 3), epsilon=1.0),
}


class AskedError(Exception):
    """What a ledger would be asked for: the exact sum and its bound."""


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Any]:
    """The first sum that a statistic asks for, without noise, and its bound."""

    def ask(records: Any, query: ft.Query) -> None:
        raise AskedError(query.contribution.bounded_sum(records, None, query.bound).ravel(), query.bound)

    def over(ledger: ft.Ledger, records: Any) -> Any:
        return SimpleNamespace(ask=partial(ask, records))

    def first(name: str, values: Any) -> Any:
        with pytest.raises(AskedError) as asked:
            ASKED[name](values)
        return asked.value.args

    monkeypatch.setattr(ft.Ledger, "over", over)
    return first


@pytest.mark.parametrize("name", ASKED)
def test_a_record_of_any_kind_moves_a_sum_by_its_bound_at_most(
    name: str, exact: Callable[[str, Any], Any]
) -> None:
    for base in ODD:
        before, bound = exact(name, [base] * 40)
        for odd in ODD:
            after, _ = exact(name, [base] * 20 + [odd] + [base] * 20)
            if isinstance(bound, ClipValue):
                assert np.abs(after - before).max() <= bound.high + 1e-9, (base, odd)
            else:
                assert np.linalg.norm(after - before, bound.order) <= bound.clip + 1e-9, (base, odd)


@pytest.mark.parametrize("name", ASKED)
def test_a_typed_array_and_a_list_of_the_same_values_count_alike(
    name: str, exact: Callable[[str, Any], Any]
) -> None:
    typed = [
        np.array([cell] * 9) for cell in ODD if np.ndim(cell) == 0 and np.array(cell).dtype.kind in "biufUS"
    ]
    typed += [
        np.array([0.1, 2, math.nan], np.float32),
        np.array(["a", "", "2"]),
        np.array([2**63, 2], np.uint64),
    ]
    assert len(typed) > 12
    for values in typed:
        found = exact(name, values)[0]
        for same in (list(values), values.tolist(), values.astype(object)):
            assert np.array_equal(exact(name, same)[0], found), values


def test_a_null_changes_no_other_cell_of_a_column_of_arrow() -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    large = 10**17 + 1
    for nulls in ([], [None]):
        assert column(arrow.array([large, 2, *nulls])).tolist() == [large, 2, *nulls]
        assert column(arrow.array([True, False, *nulls])).tolist() == [True, False, *nulls]


def test_masked_cells_are_missing() -> None:
    ages = np.ma.array([1, 2, 3], mask=[False, True, False])
    assert round(ft.count(ages, epsilon=50.0).value) == 2
