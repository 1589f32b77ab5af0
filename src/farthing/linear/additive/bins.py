"""Cut declared bounds into public cells, and hold private rows as the cells that they lie in.

A feature in [0, 1] has one of `CELLS` codes: 0 for a row that counts as nothing, 1 at the lower bound, 2 to
`CELLS` - 2 between (128 cells of equal width, the first cut five times more by halves, for features that pile
up above their bound), `CELLS` - 1 at the upper bound. Cells follow from the bounds alone, so they are public
and cost nothing; which cell a record lies in is private.

>>> cells_of(np.array([0.0, 0.001, 0.5, 1.0])).tolist(), CELLS
([1, 5, 71, 135], 136)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.noise import summing

Array = NDArray[np.float64]
Codes = NDArray[np.uint8]

_EQUAL, _HALVED = 128, 5
EDGES: Array = np.sort(
    np.concatenate([np.arange(1, _EQUAL) / _EQUAL, 0.5 ** np.arange(1, _HALVED + 1) / _EQUAL])
)
CELLS = len(EDGES) + 4
LOWEST, HIGHEST = 1, CELLS - 1  # the codes of values at the bounds
_LEFT = np.concatenate([[0.0], EDGES])
_RIGHT = np.concatenate([EDGES, [1.0]])
VALUES: Array = np.concatenate([[0.0, 0.0], (_LEFT + _RIGHT) / 2, [1.0]])  # what a code stands for
MOST = 2**26  # records: beyond, sums over cells would need more roundings than `summing` allows
_ROWS = 2**16  # rows that are looked up at once


def cells_of(x: Array) -> Codes:
    """Return the codes of values in [0, 1], of any shape; NaN is 0."""
    codes = np.asarray(np.searchsorted(EDGES, x, side="right") + 2)
    codes[x <= 0] = LOWEST
    codes[x >= 1] = HIGHEST
    codes[np.isnan(x)] = 0
    return codes.astype(np.uint8)


def mapped(X: Any, low: Array, high: Array) -> Array:
    """Return rows with bounds mapped onto [0, 1] and values beyond them clipped; NaN stays."""
    dense = np.asarray(X.toarray() if sparse.issparse(X) else X, dtype=np.float64)
    return np.clip((dense - low) / (high - low), 0.0, 1.0)


def codes_of(X: Any, low: Array, high: Array) -> Codes:
    """Return the codes of a table, one row a feature; a row that is not finite has codes 0."""
    codes = np.zeros((X.shape[1], X.shape[0]), np.uint8)
    for start in range(0, X.shape[0], _ROWS):
        part = X[start : start + _ROWS]
        dense = np.asarray(part.toarray() if sparse.issparse(part) else part, dtype=np.float64)
        known = np.asarray(np.isfinite(dense).all(axis=1, keepdims=True))
        found = cells_of(np.clip((dense - low) / (high - low), 0.0, 1.0))
        codes[:, start : start + _ROWS] = np.where(known, found, 0).T
    return codes


class Coded(Protocol):
    """A public map from the codes of a row's features to one code, below the length of ``matrix``."""

    @property
    def matrix(self) -> Array:
        """One row a code: the coordinates of a record with that code. Code 0 has none."""

    def codes(self, features: Codes) -> Codes:
        """Return one code a record."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The cell of one feature, and the coordinates of each cell."""

    feature: int
    matrix: Array

    def codes(self, features: Codes) -> Codes:
        return np.asarray(features[self.feature])


class Binned:
    """Private rows as a `Table`, with the codes of their features beside it."""

    __slots__ = ("_codes", "_kept", "_measured", "table")

    def __init__(self, table: Table, codes: Codes) -> None:
        if len(table) != codes.shape[1]:
            raise InvalidValue("there must be one code a row")
        if len(table) > MOST:
            raise InvalidValue(f"additive models are proven for at most 2^26 = {MOST:,} records")
        self.table, self._codes = table, codes
        self._kept: dict[int, tuple[Coded, Codes]] = {}
        self._measured: tuple[Any, Array] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def take(self, indices: Any) -> "Binned":
        """Return the rows at ``indices``; all of them cost no copy."""
        if isinstance(indices, slice) and indices == slice(None):
            return self
        return Binned(self.table.take(indices), self._codes[:, indices])

    @property
    def features(self) -> Codes:
        """Return the codes of all features, one row a feature."""
        return self._codes

    def codes(self, group: Coded) -> Codes:
        """Return the codes of a group; computed once."""
        if id(group) not in self._kept:
            self._kept[id(group)] = group, group.codes(self._codes)
        return self._kept[id(group)][1]

    def measured(self, space: Any) -> Array:
        """Return the squares of a space; those of the last one are kept."""
        if self._measured is None or self._measured[0] is not space:
            self._measured = space, space.squares(self)
        return self._measured[1]

    def parts(self) -> Iterator[slice]:
        """Yield places of rows that may be added up in one part of a sum over cells."""
        step = max(1, min(_ROWS, summing.Sum(len(self)).rows // 2))
        return (slice(start, start + step) for start in range(0, max(1, len(self)), step))
