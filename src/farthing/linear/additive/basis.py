"""Turn noisy histograms into coordinates: smooth shapes of one feature, and trees of several.

Everything here is computed from public numbers and released histograms.

**Shapes.** The prior of a shape is a sum of step functions on cells of width 2⁻ˡ, l = 0, 1, ..., 7, in two
grids half a cell apart, with variance 2⁻ˡ each (so that neighbouring cells have similar values); of the same
on octaves of x; and of the same on ranks, so that a value of many records can have a weight of its own.
Ranks follow from the histogram. A bound has a value of its own on top. `shape` removes the constant and the
linear part under the histogram, since linear coordinates are there already, and returns principal components
of what is left, with their variances.

**Trees.** A tree is oblivious: it asks `DEPTH` questions "is feature j above t?", the same in all its
branches, and the answers are the bits of its leaf. Its coordinates are products of two answers or more, of at
least two features, each answer standardised by its share under the histogram: what one feature can explain
alone is left to its shape. Which features are asked follows from how much their shapes vary (`grown`).

Cut declared bounds into public cells, and hold private rows as the cells that they lie in.

A feature in [0, 1] has one of `CELLS` codes: 0 for a row that counts as nothing, 1 at the lower bound, 2 to
`CELLS` - 2 between (cells of width 1/128 above 1/8, and 16 in each octave below, for features that pile up
above their bound), `CELLS` - 1 at the upper bound. Cells follow from the bounds alone, so they are public
and cost nothing; which cell a record lies in is private.

>>> cells_of(np.array([0.0, 0.001, 0.5, 1.0])).tolist(), CELLS
([1, 19, 179, 243], 244)
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.noise import summing
from farthing.queries import arrays

Array = NDArray[np.float64]

Codes = NDArray[np.uint8]

_EQUAL, _OCTAVES, _PARTS = 128, 8, 16
_COARSE = _EQUAL // 8  # cells of equal width begin at 1/8
EDGES: Array = np.concatenate(
    [
        [0.125 * 0.5**_OCTAVES],
        *(0.125 * 0.5**k * (1 + np.arange(1, _PARTS + 1) / _PARTS) for k in range(_OCTAVES, 0, -1)),
        np.arange(_COARSE + 1, _EQUAL) / _EQUAL,
    ]
)
BLOCKS: tuple[int, ...] = (0, *range(1, len(EDGES), 16))  # where octaves and eighths begin among inner cells
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


@arrays.quietly
def mapped(X: Any, low: Array, high: Array) -> Array:
    """Return rows with bounds mapped onto [0, 1] and values beyond them clipped; NaN stays."""
    dense = np.asarray(X.toarray() if sparse.issparse(X) else X, dtype=np.float64)
    return np.clip((dense - low) / (high - low), 0.0, 1.0)


@arrays.quietly
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


_DECAY = 0.5  # of the variance from one level to the next
_LEVELS, _OCTAVE_LEVELS, _RANK_LEVELS = 7, 4, 6
_OCTAVE, _RANK = 0.5, 0.5  # variances of level 0
_TRUSTED = 0.5  # deviations of noise by which shares of blocks are shortened
_SMALLEST = 1e-3  # principal components of less variance are left out
_FAR = 4.0  # deviations from the mean, at which a line of a shape ends
DEPTH = 4
_ORDER = 0.5  # of the variance of a product of one more answer
_BALANCED = (0.15, 0.85)  # the share of records on either side of a question


def _steps(place: Array, levels: int) -> Array:
    """Return the covariance of steps on cells of width 2⁻ˡ, in two grids, each of variance 2⁻ˡ."""
    total = np.zeros((len(place), len(place)))
    for level in range(levels + 1):
        for start in (0.0, 0.5) if level else (0.0,):
            cell = np.floor(place * 2**level + start)
            total += _DECAY**level * (cell[:, None] == cell)
    return total


def _prior() -> Array:
    inside = np.clip(VALUES[1:], VALUES[2], VALUES[-2])
    total = np.diag((np.isin(VALUES[1:], [0.0, 1.0])) * 1.0)
    total += _steps(inside, _LEVELS) + _OCTAVE * _steps(-np.log2(inside), _OCTAVE_LEVELS)
    prior = np.zeros((CELLS, CELLS))
    prior[1:, 1:] = total
    return prior


PRIOR = _prior()


def masses(counts: tuple[Array, Array], inside: float, noises: tuple[float, float], mean: float) -> Array:
    """Return the share of every code from noisy shares of the inner cells.

    ``counts`` are noisy shares of blocks of cells and of cells, ``noises`` the deviations of either,
    ``inside`` is a noisy share of all of them, ``mean`` a noisy mean. Cells are averaged with their
    neighbours in a block as far as noise requires.
    """
    inside = float(np.clip(inside, 0.0, 1.0))
    blocks = np.maximum(counts[0] - _TRUSTED * noises[0], 0.0)
    total = float(blocks.sum())
    shares = blocks * (inside / total) if total > 0 else np.full(len(blocks), inside / len(blocks))
    parts = zip(np.split(counts[1], BLOCKS[1:]), shares, strict=True)
    inner = np.concatenate([_spread(part, share, noises[1]) for part, share in parts])
    upper = float(np.clip(mean - inner @ VALUES[2:-1], 0.0, 1 - inside))
    return np.concatenate([[0.0, 1 - inside - upper], inner, [upper]])


def _spread(counts: Array, share: float, noise: float) -> Array:
    """Return the shares of cells that have this share together; neighbours are averaged as noise requires."""
    if share <= noise:
        return np.full(len(counts), share / len(counts))
    wide = 1 + int((len(counts) * noise / share) ** 2)
    starts = np.arange(0, len(counts), min(wide, len(counts)))
    sums = np.maximum(np.add.reduceat(counts, starts), 0.0)
    length = np.diff(np.append(starts, len(counts)))
    total = float(sums.sum())
    each = sums / length * (share / total) if total > 0 else np.full(len(sums), share / len(counts))
    return np.repeat(each, length)


def shape(mass: Array, scale: float = math.inf, strength: float = 1.0) -> tuple[Array, Array]:
    """Return coordinates of every code, orthogonal to 1 and x under ``mass``, and their variances.

    Where ``scale``, that of the linear coordinate, leaves x a variance below 1, a line is part of the shape,
    with the variance that is missing: moments of features that vary little are lost in noise, histograms are
    not. It ends `_FAR` deviations from the mean. The coordinates are to be multiplied by √``strength``; the
    line is as strong as it has to be whatever that is.
    """
    line = np.stack([np.ones(CELLS), VALUES], axis=1)
    moments = line.T @ (mass[:, None] * line) + 1e-12 * np.eye(2)
    away = np.eye(CELLS) - line @ np.linalg.solve(moments, line.T * mass)
    prior = PRIOR.copy()
    inner = mass[2:-1] / max(float(mass[2:-1].sum()), 1e-12)
    ranks = np.concatenate([[0.0], np.cumsum(inner) - inner / 2, [1.0]])
    prior[1:, 1:] += _RANK * _steps(np.minimum(ranks, 1 - 1e-9), _RANK_LEVELS)
    prior = away @ prior @ away.T
    prior += _missing_line(mass, scale) / strength
    root = np.sqrt(mass)
    used = np.flatnonzero(mass > 0)
    variances, vectors = np.linalg.eigh((prior * root * root[:, None])[np.ix_(used, used)])
    known = variances > _SMALLEST
    variances, vectors = variances[known][::-1], vectors[:, known][:, ::-1]
    matrix = (prior * root)[:, used] @ (vectors / np.sqrt(variances))
    matrix[0] = 0.0
    return matrix, variances


def _missing_line(mass: Array, scale: float) -> Array:
    """Return the covariance of a line with the variance that x times ``scale`` lacks to 1."""
    mean = float(mass @ VALUES) / max(float(mass.sum()), 1e-12)
    deviation = math.sqrt(float(mass @ np.square(VALUES - mean)) + 1e-12)
    line = np.clip((VALUES - mean) / deviation, -_FAR, _FAR)
    return max(0.0, 1 - (deviation * scale) ** 2) * np.outer(line, line)


@dataclass(frozen=True, slots=True, eq=False)
class ObliviousTree:
    """An oblivious tree: question k is whether the code of feature ``asked[k]`` is above ``above[k]``.

    Its codes are 1 + the leaf; a row that counts as nothing has code 0 and no coordinates.
    """

    asked: tuple[int, ...]
    above: tuple[int, ...]
    matrix: Array

    def codes(self, features: Codes) -> Codes:
        leaf = np.ones(features.shape[1], np.uint8)
        for bit, (feature, above) in enumerate(zip(self.asked, self.above, strict=True)):
            leaf += (features[feature] > above).astype(np.uint8) << bit
        leaf[features[self.asked[0]] == 0] = 0
        return leaf


def products(asked: tuple[int, ...], shares: tuple[float, ...]) -> tuple[Array, Array]:
    """Return the coordinates of every code of a tree, and their variances if answers were independent."""
    depth = len(asked)
    bits = (np.arange(2**depth)[:, None] >> np.arange(depth)) & 1
    share = np.asarray(shares)
    answers = (bits - share) / np.sqrt(share * (1 - share))
    columns, variances = [], []
    for order in range(2, depth + 1):
        for chosen in itertools.combinations(range(depth), order):
            if len({asked[k] for k in chosen}) > 1:
                columns.append(np.prod(answers[:, chosen], axis=1) * _ORDER ** ((order - 2) / 2))
                variances.append(_ORDER ** (order - 2))
    inner = np.stack(columns, axis=1) if columns else np.zeros((2**depth, 0))
    return np.vstack([np.zeros((1, inner.shape[1])), inner]), np.array(variances)


def grown(mass: Array, effects: Array, trees: int, part: float) -> tuple[list[ObliviousTree], Array, Array]:
    """Return trees whose questions are about features of large effect, and their principal components.

    The components are variances, and the directions as columns: trees that ask alike vary much in few
    directions of all their coordinates together, and hardly in most.

    ``mass`` holds the shares of every feature's codes, ``effects`` the deviation of its shape, and ``part``
    is what all coordinates together add to E|z|². The draws are public: always the same.
    """
    upper = 1 - np.cumsum(mass, axis=1)  # the share above every code
    low, high = _BALANCED
    able = ((upper > low) & (upper < high)).any(axis=1)
    chances = np.where(able, np.maximum(effects, 0.0), 0.0)
    if np.count_nonzero(chances) < 2:
        return [], np.zeros(0), np.zeros((0, 0))
    chances = chances / chances.sum()
    found = []
    features = np.searchsorted(np.cumsum(chances)[:-1], drawn("features", trees, DEPTH))
    for tree_features, levels in zip(features, drawn("levels", trees, DEPTH), strict=True):
        asked = tuple(int(j) for j in tree_features)
        shares = low + (high - low) * levels
        above = tuple(_question(upper[j], share) for j, share in zip(asked, shares, strict=True))
        matrix, variance = products(
            asked, tuple(float(upper[j, t]) for j, t in zip(asked, above, strict=True))
        )
        if len(variance):
            found.append(ObliviousTree(asked, above, matrix))
    if not found:
        return [], np.zeros(0), np.zeros((0, 0))
    values, directions = _components(found, mass)
    factor = part / max(float(values.sum()), 1.0)
    scaled = [ObliviousTree(tree.asked, tree.above, tree.matrix * math.sqrt(factor)) for tree in found]
    return scaled, factor * values, directions


def _components(trees: list[ObliviousTree], mass: Array) -> tuple[Array, Array]:
    """Return variances and directions of the coordinates of trees, were features independent."""
    cumulative = np.cumsum(mass, axis=1)
    places = zip(cumulative, drawn("rows", len(mass), 1000), strict=True)
    cells = [np.searchsorted(row / row[-1], place) for row, place in places]
    rows = np.minimum(np.array(cells), CELLS - 1).astype(np.uint8)
    z = np.hstack([tree.matrix[tree.codes(rows)] for tree in trees])
    z -= z.mean(axis=0)
    values, directions = np.linalg.eigh(z.T @ z / len(z))
    return np.maximum(values, 0.0), directions


def drawn(purpose: str, rows: int, columns: int) -> Array:
    """Return public numbers in [0, 1) that look random, the same for everybody.

    >>> drawn("features", 1, 2).round(3).tolist() == drawn("features", 2, 2)[:1].round(3).tolist()
    True
    """
    digest = hashlib.shake_256(purpose.encode()).digest(8 * rows * columns)
    return (np.frombuffer(digest, np.uint64) / 2.0**64).reshape(rows, columns)


def _question(upper: Array, share: float) -> int:
    """Return the code above which about this share of the records lie."""
    low, high = _BALANCED
    able = (upper > low) & (upper < high)
    return int(np.argmin(np.where(able, np.abs(upper - share), np.inf)))
