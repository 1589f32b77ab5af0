"""Describe all columns of a table at once: numbers by count, mean, quantiles and bounds, values by counts.

At most four answers, each over all columns it covers, so that its noise grows with the square root of their
number: bounds of columns without declared ones (`ranges`, two answers), counts in 64 equal cells between the
bounds, half counts with sums (`cells.Sums`, for every column), and counts of declared values. Each is a sum
of known norm, priced by the ledger, and their shares add up to the part. Means, quantiles and errors are
post-processing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from farthing.errors import InvalidValue
from farthing.queries.bounds import ClipNorm, Kind
from farthing.queries.query import Rows
from farthing.statistics import ranges
from farthing.statistics.cells import BLOCK, Cells, Sums, averages, shrunk
from farthing.statistics.spending import Allowance

Array = NDArray[np.float64]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_FEWEST = 3.0  # a column is described if its count is at least this many errors


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """A contribution that adds (1/2, z) for each column, where z is its number's position between the bounds.

    Records are ``Rows(table)``; a missing number adds nothing, for its column only.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM, Kind.L1_NORM)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sum."""
        return (2, len(self.low))

    @property
    def norms(self) -> tuple[float, float]:
        """The L1 and L2 norms of one record's term."""
        each = Sums(1, 0.0, 1.0).norms
        return each[0] * len(self.low), each[1] * math.sqrt(len(self.low))

    def bounded_sum(self, records: Any, w: Any, bound: ClipNorm) -> Array:
        """Return half of the count, and the sum of z, of each column."""
        total = np.zeros(self.shape)
        columns = [Sums(1, low, high) for low, high in zip(self.low, self.high, strict=True)]
        own = [ClipNorm(column.norms[1]) for column in columns]
        for start in range(0, len(records), BLOCK):
            block = np.asarray(records[0][start : start + BLOCK], dtype=np.float64)
            nobody = np.zeros(len(block), dtype=np.int64)
            for place, column in enumerate(columns):
                part = Rows(nobody, block[:, place])
                total[:, place] += column.bounded_sum(part, w, own[place])[:, 0]
        return total * shrunk(bound, self.norms)


@dataclass(frozen=True, slots=True)
class Summary:
    """A column of numbers in a few released figures; errors hold with probability 0.95 each."""

    name: str
    count: float
    count_error: float
    mean: float | None
    mean_error: float | None
    quantiles: tuple[float, ...]
    quantile_errors: tuple[float, ...]
    low: float
    high: float
    bought: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """A column of declared values in released counts; ``error`` holds with probability 0.95 for each."""

    name: str
    values: tuple[str, ...]
    counts: tuple[float, ...]
    error: float


def describe(
    numbers: Any,
    declared: Sequence[tuple[str, tuple[float, float] | None]],
    codes: Any,
    vocabularies: Sequence[tuple[str, tuple[str, ...]]],
    spend: Allowance,
) -> list[Summary | Tally]:
    """Return a summary of every column.

    ``numbers`` has one column for each of ``declared`` (name and bounds, None to buy them), ``codes`` one for
    each of ``vocabularies`` (name and values), -1 for an undeclared value.
    """
    if not declared and not vocabularies:
        raise InvalidValue("there is no column to describe")
    unknown = [place for place, (_, bounds) in enumerate(declared) if bounds is None]
    weights = {
        "bounds": 0.5 * len(unknown),
        "cells": float(len(declared)),
        "moments": float(len(declared)),
        "values": float(len(vocabularies)),
    }
    share = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    found: list[Summary | Tally] = []
    if declared:
        low, high = (np.array([(bounds or (0.0, 1.0))[end] for _, bounds in declared]) for end in (0, 1))
        hidden = np.zeros(len(declared), np.bool_)
        if unknown:
            some = ranges.Chosen(numbers, unknown)
            low[unknown], high[unknown], hidden[unknown] = ranges.of_table(some, spend, share["bounds"])
        found += _summaries(numbers, declared, ranges.FoundBounds(low, high, hidden), spend, share)
    if vocabularies:
        counts = Cells(len(vocabularies), max(len(values) for _, values in vocabularies))
        total, deviation = spend.ask(Rows(codes), counts, counts.norms, share["values"])
        error = deviation * spend.quantile
        found += [
            Tally(name, values, tuple(row[: len(values)].tolist()), error)
            for (name, values), row in zip(vocabularies, total, strict=True)
        ]
    return found


def _summaries(
    numbers: Any,
    declared: Sequence[tuple[str, tuple[float, float] | None]],
    between: ranges.FoundBounds,
    spend: Allowance,
    share: dict[str, float],
) -> list[Summary | Tally]:
    low, high, hidden = between
    cells = Cells(len(declared), ranges.FINE)
    shares = Rows(ranges.Shares(numbers, low, high))
    counts, noise = spend.ask(shares, cells, cells.norms, share["cells"])
    moments = ColumnSums(tuple(low.tolist()), tuple(high.tolist()))
    total, deviation = spend.ask(Rows(numbers), moments, moments.norms, share["moments"])
    spread, size_error = deviation * spend.quantile, 2 * deviation * spend.quantile
    found: list[Summary | Tally] = []
    for place, (name, bounds) in enumerate(declared):
        ends = float(low[place]), float(high[place])
        size = max(0.0, 2 * float(total[0, place]))
        known = size > _FEWEST * size_error and not hidden[place]
        mean, error = averages(total[:, place : place + 1], spread, *ends)
        quantiles, off = _quantiles(counts[place], noise * spend.quantile, *ends) if known else ((), ())
        found.append(
            Summary(
                name,
                size,
                size_error,
                float(mean[0]) if known else None,
                float(error[0]) if known else None,
                quantiles,
                off,
                *ends,
                bought=bounds is None,
            )
        )
    return found


def _quantiles(
    counts: Array, spread: float, low: float, high: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return quantiles of noisy counts, and their errors.

    A rank q n is off by the noise of the k cells below it, times 1 - q, and by that of the others, times q.
    Where it may lie, the quantile may be anywhere in a cell.
    """
    cells, wanted = len(counts), np.array(QUANTILES)
    edges = np.linspace(low, high, cells + 1)
    below = isotonic_regression(np.concatenate([[0.0], np.cumsum(counts)])).x
    below = np.maximum(below, 0.0) + np.linspace(0, 1e-9, cells + 1)
    ranks = wanted * below[-1]
    middle = np.interp(ranks, below, edges)
    under = np.searchsorted(edges, middle)
    off = spread * np.sqrt(under * (1 - wanted) ** 2 + (cells - under) * wanted**2)
    down, up = (np.interp(ranks + shift, below, edges) for shift in (-off, off))
    down = edges[np.searchsorted(edges, down, side="right") - 1]
    up = edges[np.searchsorted(edges, up)]
    return tuple(middle.tolist()), tuple(np.maximum(up - middle, middle - down).tolist())
