"""Weigh the rows of a table: every record's clipped term is multiplied by its share of the largest weight.

Guarantee. A weight is a fraction v from 0 to 1, and belongs to its record like a feature. A term t within its
bound becomes v t. Bounds on norms, coordinates and outer products hold for v t whenever they hold for t, and
so do bounds on values whose interval contains 0 (`weighed` refuses others). Under add-remove and zero-out the
sum then changes by |v t| <= |t| at most. Under replace-one it changes by twice the norm; by high - low for
values; and for outer products |v x xᵀ - v' x' x'ᵀ|² = v²|x|⁴ + v'²|x'|⁴ - 2 v v' (x·x')² <= 2 clip⁴, the
sensitivity of `ClipOuter`. So sensitivity, noise and price are those of the table without weights, under
every adjacency; in units of the weights the sensitivity is the clipping norm times the largest weight.

>>> table = WeightedTable(Table(np.ones((2, 1)), np.ones(2)), np.array([0.25, np.nan]))
>>> [block.weight.tolist() for block in table.blocks(Features(1))]
[[0.25, 0.0]]

**Placement.** This module also places rows in blocks of one public shape, so that no record's last bits
depend on the other records. Linear algebra libraries use different kernels for matrices of other sizes, and
for other rows of one matrix: the last bits of a row's result depend on the number of rows and on its position
among them. For weights from training this is rounding. For weights that an adversary chose against the
records it is not: a sign may depend on a last bit, and one more record reverses the clipped gradients of
others (2.3 clipping norms in all were seen, where one is declared).

So every record gets a position in a block of a fixed number of positions, drawn uniformly and independently
of everything else, and kept secret; other positions are blank and count as zero. As many such blocks as
needed are added up, one by one.

**Theorem.** Let a record's term depend on the record, its position and the public number of positions only
(rows of a matrix product do not depend on the values of other rows). Then the noisy sum of the clipped terms
has the price of its mechanism. Proof: given the positions, neighbours have the same terms except for the
record that differs, so their sums are within the bound of each other. Positions are independent of the
records, and divergences are jointly convex, so the mixture over positions costs no more. ∎

Rows of sparse tables are always multiplied one by one.

>>> [block.tolist() for block in rounds(np.array([5, 0, 5, 5, 2]))]
[[1, 4, 0], [2], [3]]
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.data.tables import Block, Features, Table
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipValue
from farthing.queries.samplers import Indices

Array = NDArray[np.float64]


class WeightedTable:
    """A table of private rows, each with its fraction of the largest weight.

    Parameters
    ----------
    table : Table
        The rows.
    shares : array of shape (records,)
        Numbers from 0 to 1; those beyond are clamped, and values that are not finite count as 0.

    Examples
    --------
    >>> len(WeightedTable(Table(np.ones((2, 1))), np.ones(2)))
    2
    """

    __slots__ = ("shares", "table")

    def __init__(self, table: Table, shares: Array) -> None:
        if np.shape(shares) != (len(table),):
            raise InvalidValue("there must be one weight per row")  # the lengths are private
        values = np.asarray(shares, dtype=np.float64)
        self.table, self.shares = table, np.where(np.isfinite(values), np.clip(values, 0.0, 1.0), 0.0)

    @property
    def y(self) -> Any:
        """Return the targets."""
        return self.table.y

    def __len__(self) -> int:
        return len(self.table)

    def take(self, indices: Indices) -> "WeightedTable":
        """Return the rows at ``indices`` with their weights."""
        return WeightedTable(self.table.take(indices), self.shares[indices])

    def blocks(self, features: Features) -> Iterator[Block]:
        """Yield all rows in blocks, with their weights."""
        start = 0
        for block in self.table.blocks(features):
            rows = len(block.norm)
            yield block._replace(weight=self.shares[start : start + rows])
            start += rows


def weighed(terms: Array, weight: Array | None, bound: Any = None) -> Array:
    """Return clipped terms, one row per record, times the weights of their records (None: all 1)."""
    if weight is None:
        return terms
    if isinstance(bound, ClipValue) and not bound.low <= 0 <= bound.high:
        raise Unsupported(f"terms with weights may be 0, which {bound} does not contain")
    return terms * (weight if terms.ndim == 1 else weight[:, None])


def root(block: Any) -> Array | None:
    """Return √weight of the rows of a block, which gives weighted outer products."""
    return None if block.weight is None else np.sqrt(block.weight)


Integers = NDArray[np.int64]

PLACES = 64


def rounds(at: Integers) -> Iterator[Integers]:
    """Yield the first member of every position, then the second, and so on."""
    order = np.argsort(at, kind="stable")
    ranks = np.arange(len(at)) - np.searchsorted(at[order], at[order])
    if len(at):
        yield from np.split(order[np.argsort(ranks, kind="stable")], np.cumsum(np.bincount(ranks))[:-1])


def drawn_places(count: int, places: int = PLACES) -> Integers:
    """Return a secret position for each record."""
    return Stream().uniform_below(places, count)


def placed(table: Table) -> Iterator[Table | WeightedTable]:
    """Yield rows in blocks of `PLACES`, with blank rows of weight 0; a sparse table unchanged."""
    if table._map is not None or table._unit:
        raise Unsupported("only rows without bounds or scaling can be placed: use Table(X, y)")
    X, y = table.X, table.y
    if sparse.issparse(X):
        yield table
        return
    at = drawn_places(len(table))
    for members in rounds(at):
        rows, targets, there = np.zeros((PLACES, X.shape[1]), X.dtype), np.zeros(PLACES), np.zeros(PLACES)
        rows[at[members]], targets[at[members]], there[at[members]] = X[members], y[members], 1.0
        yield WeightedTable(Table(rows, targets), there)
