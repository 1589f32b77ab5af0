"""Place rows in blocks of one public shape, so that nobody's last bits depend on who else is there.

A library multiplies matrices of other sizes, and other rows of one matrix, by other kernels: the last bits of
what is computed of a row depend on how many rows there are and on its place among them. For weights that
training has found that is rounding. For weights that somebody has chosen against the records it is not: a
sign may hang on a last bit, and one record more turns the clipped gradients of others around (2.3 clipping
norms in all were seen, where one is declared).

So every record gets a place of its own in a block of so many places, drawn evenly and independently of all
else, and kept secret; other places are blank and count as nothing. As many such blocks as it takes are summed
up, one by one.

**Theorem.** Let a record's term follow from the record, its place and the public number of places (rows of a
product have nothing to do with each other's values). Then the noisy sum of the clipped terms has the price of
its mechanism. Proof: given the places, neighbours have the same terms but for the record that comes, goes or
is replaced, and sums within the bound of each other. Places are independent of the records, and divergences
are jointly convex, so that the mixture over places costs no more. ∎

Rows of sparse tables are multiplied one by one in any case.

>>> [block.tolist() for block in rounds(np.array([5, 0, 5, 5, 2]))]
[[1, 4, 0], [2], [3]]
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.data.tables import Table
from farthing.data.weighted import WeightedTable
from farthing.errors import Unsupported
from farthing.noise.lattice import Stream

Integers = NDArray[np.int64]

PLACES = 64


def rounds(at: Integers) -> Iterator[Integers]:
    """Yield the first member of every place, then the second, and so on."""
    order = np.argsort(at, kind="stable")
    ranks = np.arange(len(at)) - np.searchsorted(at[order], at[order])
    for rank in range(int(ranks.max(initial=-1)) + 1):
        yield order[ranks == rank]


def drawn_places(count: int) -> Integers:
    """Return a secret place for each record."""
    return Stream().uniform_below(PLACES, count)


def placed(table: Table) -> Iterator[Table | WeightedTable]:
    """Yield the rows of a table in blocks of `PLACES`, blank ones of weight 0; a sparse table as it is."""
    if table._map is not None or table._unit:
        raise Unsupported("only rows that are taken as they are can be placed: Table(X, y)")
    X, y = table.X, table.y
    if sparse.issparse(X):
        yield table
        return
    at = drawn_places(len(table))
    for members in rounds(at):
        rows, targets, there = np.zeros((PLACES, X.shape[1]), X.dtype), np.zeros(PLACES), np.zeros(PLACES)
        rows[at[members]], targets[at[members]], there[at[members]] = X[members], y[members], 1.0
        yield WeightedTable(Table(rows, targets), there)
