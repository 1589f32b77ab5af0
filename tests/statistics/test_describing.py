"""Descriptions of whole tables: one record's term within its norm, one budget for all columns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Rows
from farthing.statistics import describing
from farthing.statistics.describing import QUANTILES, ColumnSums, Summary, describe
from farthing.statistics.spending import Allowance

number = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(number, min_size=3, max_size=3))
def test_one_record_adds_no_more_than_its_norm(row: list[float]) -> None:
    moments = ColumnSums((-1.0, 0.0, 5.0), (1.0, 1e6, 6.0))
    for order in (1, 2):
        for clip in (moments.norms[order - 1], 0.3):
            term = moments.bounded_sum(Rows(np.array([row])), None, ClipNorm(clip, order=order)).ravel()
            assert np.linalg.norm(term, order) <= clip * (1 + 1e-12)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_all_answers_together_fit_the_part(delta: float) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(1000, 3))
    codes = rng.integers(-1, 2, size=(1000, 2))
    ledger = ft.Ledger(ft.Budget(1.0, delta))
    found = describe(
        numbers,
        [("a", None), ("b", (-3.0, 3.0)), ("c", None)],
        codes,
        [("d", ("x", "y")), ("e", ("x",))],
        Allowance(ledger),
    )
    assert [one.name for one in found] == ["a", "b", "c", "d", "e"]
    assert 0.8 < ledger.share <= 1
    assert [one.bought for one in found[:3]] == [True, False, True]  # type: ignore[union-attr]
    with pytest.raises(ft.InvalidValue, match="no column"):
        describe(numbers, [], codes, [], Allowance(ft.Ledger(ft.Budget(1.0, delta))))


def test_of_a_column_without_bounds_nothing_is_told_but_its_size() -> None:
    """A mean between bounds that were not found would look exact, and be one of other numbers."""
    signs = np.where(np.arange(1000) % 2, -1.0, 1.0)
    numbers = np.column_stack([signs * np.geomspace(1e-6, 1e11, 1000), np.linspace(0, 1, 1000)])
    spend = Allowance(ft.Ledger(ft.Budget(0.5, 1e-6), stream=SeededStream(0)))
    thin, plain = describe(numbers, [("thin", None), ("plain", (0.0, 1.0))], None, [], spend)
    assert isinstance(thin, Summary)
    assert isinstance(plain, Summary)
    assert (thin.mean, thin.quantiles, thin.bought) == (None, (), True)
    assert thin.count > 700
    assert plain.mean is not None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_without_noise_the_errors_of_quantiles_hold_the_whole_cell(numbers: list[float]) -> None:
    counts = np.histogram(numbers, np.linspace(0, 1, 65))[0].astype(float)
    found, errors = describing._quantiles(counts, 0.0, 0.0, 1.0)
    for q, value, error in zip(QUANTILES, found, errors, strict=True):
        lower, upper = (np.quantile(numbers, q, method=way) for way in ("inverted_cdf", "higher"))
        assert lower - 1e-6 <= value + error
        assert value - error <= upper + 1e-6


@pytest.mark.parametrize("first", [0.94, 0.5, 1 / 64])
def test_errors_of_quantiles_cover_the_noise_wherever_the_numbers_lie(first: float) -> None:
    """With most numbers in one cell, the rank of a high quantile has the noise of all others."""
    counts = 200_000 * np.append(first, np.full(63, (1 - first) / 63))
    below, rng = np.concatenate([[0.0], np.cumsum(counts)]), np.random.default_rng(0)
    exact = np.interp(np.array(QUANTILES) * below[-1], below, np.linspace(0, 1, 65))
    inside = np.zeros(len(QUANTILES))
    for _ in range(1000):
        noisy = counts + 60 * rng.normal(size=64)
        found, errors = describing._quantiles(noisy, 60 * 1.96, 0.0, 1.0)
        inside += np.abs(np.array(found) - exact) <= errors
    assert (inside >= 0.94 * 1000).all(), inside
