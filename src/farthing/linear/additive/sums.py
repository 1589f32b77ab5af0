"""Compute a record's contribution to an additive model: bounded sums over coordinates and coded groups.

A record has z = [A (x - c); b; M₁[k₁]; M₂[k₂]; ...]: linear coordinates and a constant (`Features`), and for
each group the row of a public matrix that its code names. Its margin is z·w, which takes one look into a
table a group, and its gradient is residual · z, whose norm is |residual| |z|. Sums over groups are sums over
codes, times the matrices: z is never held.

Rounding: a sum over codes has parts of at most half the terms that `farthing.noise.summing` allows, and the
product with a matrix adds at most 256 roundings to each term, fewer than the other half for `bins.MOST`
records.

>>> import farthing as ft
>>> from farthing.data.tables import Table
>>> from farthing.linear.additive.basis import Cell, Binned, CELLS, codes_of
>>> from farthing.linear.losses import squared
>>> X, high = np.array([[0.0], [0.5], [1.0]]), np.ones(1)
>>> step = (np.arange(CELLS) > 70).astype(float)[:, None]  # 1 from 0.5 on
>>> space = GroupedSpace(Features(1, intercept=1.0), (Cell(0, step),))
>>> rows = Binned(Table(X, np.ones(3)), codes_of(X, 0 * high, high))
>>> GroupGradient(squared, space).bounded_sum(rows, np.zeros(3), ft.ClipNorm(9.0)).tolist()
[-1.5, -3.0, -2.0]
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features, Weighted
from farthing.ledger.ledger import Ledger
from farthing.linear.additive.basis import CELLS, HIGHEST, LOWEST, Binned, Coded
from farthing.linear.losses import Loss
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, ClipValue, Kind
from farthing.queries.query import Answer, Query

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedSpace:
    """A public map of records: linear features and coded groups. All of it is public or released."""

    features: Features
    groups: tuple[Coded, ...] = ()

    @property
    def size(self) -> int:
        """Return the length of z."""
        return self.features.size + sum(len(group.matrix.T) for group in self.groups)

    def unfold(self, w: Array) -> tuple[Array, Array, list[Array]]:
        """Return weights and constant on x, and the table of every group."""
        place, tables = self.features.size, []
        for group in self.groups:
            width = group.matrix.shape[1]
            tables.append(group.matrix @ w[place : place + width])
            place += width
        return *self.features.unfold(w[: self.features.size]), tables

    def shifts(self, records: Binned, tables: list[Array], outputs: tuple[int, ...]) -> Array:
        """Return what the groups add to the margins of all records, one column an output."""
        shifts: Array = np.zeros((len(records), *outputs))
        for group, table in zip(self.groups, tables, strict=True):
            shifts += table[records.codes(group)]
        return shifts

    def margins(self, records: Binned, w: Array) -> Array:
        """Return z·w of all records."""
        u, constant, tables = self.unfold(w)
        blocks = [block.margins(u, constant) for block in records.table.blocks(self.features)]
        return np.asarray(np.concatenate(blocks) + self.shifts(records, tables, w.shape[1:]))

    def squares(self, records: Binned) -> Array:
        """Return what the groups add to |z|² of all records."""
        squares = np.zeros(len(records))
        for group in self.groups:
            squares += np.square(group.matrix).sum(axis=1)[records.codes(group)]
        return squares


def counted(records: Binned, codes: Any, v: Array, cells: int) -> Array:
    """Return the sum of v over the records of each code."""
    total = Sum(len(records), (cells, *v.shape[1:]))
    for place in records.parts():
        if v.ndim == 1:
            part = np.bincount(codes[place], v[place], minlength=cells)
        else:
            columns = [np.bincount(codes[place], column, minlength=cells) for column in v[place].T]
            part = np.stack(columns, axis=1)
        total.add(part, len(v[place]))
    return total.value


def _added(records: Binned, each: Array) -> Array:
    """Return the sum of bounded terms, one row a record."""
    total = Sum(len(records), each.shape[1:])
    for place in records.parts():
        total.add(each[place].sum(axis=0), len(each[place]))
    return total.value


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """Σ residual z, each record's term clipped (`ClipNorm`)."""

    loss: Loss
    space: GroupedSpace
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Binned, w: Array, bound: ClipNorm) -> Array:
        space, features = self.space, self.space.features
        u, constant, tables = space.unfold(w)
        shifts, squares = space.shifts(records, tables, w.shape[1:]), records.measured(space)
        linear, start = Weighted(len(records), features, w.shape[1:]), 0
        v: Array = np.empty((len(records), *w.shape[1:]))
        for block in records.table.blocks(features):
            place = slice(start, start + len(block.norm))
            with np.errstate(over="ignore", invalid="ignore"):
                residual = self.loss.residual(block.margins(u, constant) + shifts[place], block.y)
                size = np.abs(residual) if residual.ndim == 1 else np.sqrt(np.square(residual).sum(axis=1))
                factors = bound.factors(size * np.sqrt(np.square(block.norm) + squares[place]))
                clipped = residual * (factors if residual.ndim == 1 else factors[:, None])
            clipped[factors == 0] = 0.0  # NaN and infinity count as zero
            linear.add(block, clipped)
            v[place], start = clipped, place.stop
        sums = [counted(records, records.codes(group), v, len(group.matrix)) for group in space.groups]
        parts = [group.matrix.T @ total for group, total in zip(space.groups, sums, strict=True)]
        return np.concatenate([linear.value, *parts])


@dataclass(frozen=True, slots=True)
class Length:
    """Σ residual · margin, each term clamped: by how much the loss grows if all weights do."""

    loss: Loss
    space: GroupedSpace
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[tuple[int, ...]] = (1,)

    def bounded_sum(self, records: Binned, w: Array, bound: ClipValue) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            margins = self.space.margins(records, w)
            moved = self.loss.residual(margins, records.table.y) * margins
            each = bound.apply(moved[:, None] if moved.ndim == 1 else moved.sum(axis=1, keepdims=True))
        return _added(records, each)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Σ (residual / scale)², each term clamped."""

    loss: Loss
    space: GroupedSpace
    scale: float
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[tuple[int, ...]] = (1,)

    def bounded_sum(self, records: Binned, w: Array, bound: ClipValue) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            residual = self.loss.residual(self.space.margins(records, w), records.table.y)
            each = bound.apply(np.square(residual / self.scale)[:, None])
        return _added(records, each)


@dataclass(frozen=True, slots=True)
class FactorSlopes:
    """Σ [residual · f₁; ...; residual · f_K; residual] of margins Σ aₖ fₖ + c, clipped together.

    A query is about the factors and the constant, [a; c]. ``parts`` holds the weights of each f in the space
    as columns.
    """

    loss: Loss
    space: GroupedSpace
    parts: Array
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.parts.shape[1] + 1,)

    def bounded_sum(self, records: Binned, w: Array, bound: ClipNorm) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            effects = self.space.margins(records, self.parts)
            margins = effects @ w[:-1] + w[-1]
            residual = self.loss.residual(margins, records.table.y)
            each = bound.apply(np.column_stack([residual[:, None] * effects, residual]))
        return _added(records, each)


@dataclass(frozen=True, slots=True)
class Whole:
    """A contribution of `Table`s, asked of the table of `Binned` records."""

    contribution: Any

    @property
    def honours(self) -> Any:
        return self.contribution.honours

    @property
    def shape(self) -> Any:
        return self.contribution.shape

    def bounded_sum(self, records: Binned, w: Any, bound: Any) -> Array:
        return np.asarray(self.contribution.bounded_sum(records.table, w, bound))


class TablesOf:
    """A ledger over `Binned` records that answers queries of their tables: for the linear models' methods."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def ask(self, query: Query, w: Any = None) -> Answer:
        """Ask a query of tables: charged, computed and released by the ledger itself."""
        return self._ledger.ask(replace(query, contribution=Whole(query.contribution)), w)


def inner(codes: Any) -> Any:
    """Return which codes are those of values between their bounds."""
    return (codes > LOWEST) & (codes < HIGHEST)


@dataclass(frozen=True, slots=True)
class Crowded:
    """The number of records by how many of their features lie between the bounds: one cell a record."""

    grid: tuple[int, ...]
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.grid),)

    def bounded_sum(self, records: Binned, w: Any, bound: ClipNorm) -> Array:
        inside = _inside(records)
        cells = np.minimum(np.searchsorted(self.grid, inside), len(self.grid) - 1)
        known = (records.features[0] > 0).astype(np.float64) * min(1.0, bound.clip)
        return counted(records, cells, known, len(self.grid))


@dataclass(frozen=True, slots=True)
class Histograms:
    """The number of records in each block of inner cells of each feature, by default in each cell.

    A record with many features between their bounds is shrunk (`ClipNorm`). It lies in one block a feature.
    """

    features: int
    starts: tuple[int, ...] = tuple(range(CELLS - 3))
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features, len(self.starts))

    def bounded_sum(self, records: Binned, w: Any, bound: ClipNorm) -> Array:
        weights = _weights(records, bound)
        rows = [counted(records, codes, weights, CELLS)[2:-1] for codes in records.features]
        return np.add.reduceat(np.stack(rows), self.starts, axis=1)


@dataclass(frozen=True, slots=True)
class Inside:
    """The number of records between the bounds of each feature; a record with many is shrunk (`ClipNorm`)."""

    features: int
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features,)

    def bounded_sum(self, records: Binned, w: Any, bound: ClipNorm) -> Array:
        weights = _weights(records, bound)
        return np.array([counted(records, inner(codes), weights, 2)[1] for codes in records.features])


def _weights(records: Binned, bound: ClipNorm) -> Array:
    """Return the factors of rows with one entry of 1 a feature that lies between its bounds."""
    return np.asarray(bound.factors(np.sqrt(_inside(records))))


def _inside(records: Binned) -> Array:
    """Return how many features of each record lie between their bounds."""
    inside = np.zeros(len(records))
    for codes in records.features:
        inside += inner(codes)
    return inside


def most_inside(features: int) -> tuple[int, ...]:
    """Return a grid of numbers of features, up to all of them.

    >>> most_inside(10)
    (0, 1, 2, 3, 4, 6, 8, 10)
    """
    grid = [0, *(round(2 ** (k / 2)) for k in range(2 * math.ceil(math.log2(features + 1)) + 1))]
    return tuple(sorted({min(number, features) for number in grid}))
