"""Draw from the records of many clients at once: rows sorted by client, and the client of each row.

`Indicators` are rows of zeros and ones, stored as the positions of their ones: a byte each for at most 255
features.

A million clients with 100 records of 14 ones among 123 features take 1.4 GB, a ninth of a dense byte table.

>>> rows = Indicators(np.array([[0, 2], [1, 3]], dtype=np.uint8), 3, np.array([1, 0]))  # 3 is no place
>>> [block.margins(np.array([1.0, 2.0, 4.0]), np.array(0.5)) for block in rows.blocks(Features(3))]
[array([5.5, 2.5])]

This module also adds up uploads: in one sum over all records, or each with its own noise. If clients share a
clipping norm and a weight, the sum of their clipped contributions is one bounded sum over all drawn records,
because clipping is per record. Other clients are summed in groups of equal clipping norms and weights, and
linear gradients in one pass with a clipping norm per row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features, Parts
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.terms import Invitation, Terms
from farthing.ledger import answers
from farthing.linear.losses import LinearGradient
from farthing.noise import lattice, summing
from farthing.noise.lattice import Stream
from farthing.queries import arrays
from farthing.queries.bounds import ClipNorm
from farthing.queries.correlated import BandedGaussian
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Contribution
from farthing.queries.samplers import Indices

Integers = NDArray[np.int64]


class ClientRows(NamedTuple):
    """Public numbers of records, true numbers, and first rows; one entry per client."""

    sizes: Integers
    counts: Integers
    starts: Integers


def ranges(starts: Integers, counts: Integers) -> Integers:
    """Return starts[0], ..., starts[0] + counts[0] - 1, starts[1], ..."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def present(clients: ClientRows, places: Integers) -> tuple[Integers, Integers]:
    """Return one position per client, without the blank records beyond those that exist."""
    who = np.flatnonzero(places < clients.counts)
    return clients.starts[who] + places[who], who


def exactly(size: int, clients: ClientRows, stream: Stream) -> tuple[Integers, Integers]:
    """Draw ``size`` of each client's records without replacement, uniformly (all if it has fewer)."""
    of = np.maximum(clients.sizes, clients.counts)
    if size == 1:
        return present(clients, below(of, stream))
    rows, who = [], []
    for many in np.unique(of):
        those = np.flatnonzero(of == many)
        chosen = subsets(min(size, int(many)), int(many), len(those), stream)
        mine, places = np.nonzero(chosen)
        there = places < clients.counts[those[mine]]
        who.append(those[mine[there]])
        rows.append(clients.starts[who[-1]] + places[there])
    order = np.argsort(np.concatenate(who), kind="stable")
    return np.concatenate(rows)[order], np.concatenate(who)[order]


def subsets(size: int, of: int, clients: int, stream: Stream) -> NDArray[np.bool_]:
    """Draw a uniform subset of 0 .. of - 1 for each client, as a mask of the smallest random keys."""
    chosen = np.ones((clients, of), np.bool_)
    if size == of:
        return chosen
    open_ = np.arange(clients)
    while len(open_):  # draw again after a tie
        keys = stream.integers(len(open_) * of).reshape(-1, of)
        ordered = np.partition(keys, (size - 1, size), axis=1)
        chosen[open_] = keys <= ordered[:, size - 1, None]
        open_ = open_[ordered[:, size - 1] == ordered[:, size]]
    return chosen


def below(bounds: Integers, stream: Stream) -> Integers:
    """Draw an exactly uniform number below each bound; words past the last multiple are rejected."""
    limit = bounds.astype(np.uint64)
    beyond = (np.uint64(0) - limit) % limit  # 2^64 mod bound
    words = stream.integers(len(limit))
    while len(again := np.flatnonzero(words > np.uint64(2**64 - 1) - beyond)):
        words[again] = stream.integers(len(again))
    return (words % limit).astype(np.int64)


Array = NDArray[np.float64]

_BLOCK = 2**15  # rows


class PlacesBlock(NamedTuple):
    """Some rows of `Indicators`, with the interface of `farthing.data.tables.Block`."""

    places: NDArray[Any]
    y: Any
    unit: Array
    shrink: Array
    norm: Array
    width: int

    def margins(self, u: Array, constant: Array) -> Array:
        """Return z·w of every row, for weights that `Features.unfold` turned into weights on x."""
        known = np.concatenate([u, np.zeros((1, *u.shape[1:]))])
        inner = _times(known[self.places].sum(axis=1), self.unit) + constant
        return _times(inner, self.shrink)

    def weighted(self, v: Array, rows: int) -> Parts:
        """Return Σ v x and Σ v; no block exceeds the rows of one part of a sum."""
        v = _times(v, self.shrink)
        scaled, places = _times(v, self.unit), self.places.ravel()
        columns = scaled.reshape(len(v), math.prod(v.shape[1:])).T
        times = self.places.shape[1]
        sums = [np.bincount(places, np.repeat(column, times), self.width + 1) for column in columns]
        total = np.stack(sums, axis=-1, dtype=np.float64)[: self.width]
        return [(total.reshape(self.width, *v.shape[1:]), v.sum(axis=0))]

    def sums(self, features: Features, factors: Array, owners: Integers, clients: int) -> Array:
        """Return Σ factor · z of each client for a map that keeps features unchanged, without making rows."""
        factors, width = factors * self.shrink, self.width + 1
        at = owners[:, None] * width + self.places  # padding goes to the constant's column
        values = np.repeat(factors * self.unit, self.places.shape[1])
        found: Array = np.bincount(at.ravel(), values, clients * width).reshape(clients, width)  # type: ignore[assignment]
        if not features.intercept:
            return found[:, : self.width]
        found[:, self.width] = features.intercept * np.bincount(owners, factors, clients)
        return found

    def rows(self, features: Features) -> Array:
        """Return the mapped rows z."""
        x = np.zeros((len(self.places), self.width + 1))
        x[np.arange(len(x))[:, None], self.places] = 1.0
        return features.rows(x[:, : self.width], self.unit) * self.shrink[:, None]


def _times(values: Array, factors: Array) -> Array:
    return values * (factors if values.ndim == 1 else factors[:, None])


class Indicators:
    """Private rows of zeros and ones, stored as the positions of their ones.

    It can replace a `farthing.data.tables.Table` for public maps that scale features one by one.

    Parameters
    ----------
    places : array_like of int
        The positions of the ones, one row per record; ``width`` as padding.
    width : int
        The number of features.
    y : array_like, optional
        The targets.
    unit : bool, default False
        Whether each row is divided by its norm.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> rows = ft.federated.Indicators.of(np.array([[1, 0, 1], [0, 1, 0]]), [1.0, 0.0])
    >>> len(rows), rows.places.tolist()
    (2, [[0, 2], [1, 3]])
    """

    __slots__ = ("_unit", "places", "width", "y")

    def __init__(self, places: Any, width: int, y: Any = None, *, unit: bool = False) -> None:
        places = arrays.attempt(np.asanyarray, places, said="places must be a table of integers")
        if places.ndim != 2 or places.dtype.kind not in "iu":
            raise InvalidValue(f"places must be a table of integers, got {places.dtype.type.__name__}")
        validate.count(width=width)
        for start in range(0, len(places), _BLOCK):
            part = places[start : start + _BLOCK]
            if part.size and not 0 <= part.min() <= part.max() <= width:
                raise InvalidValue(f"places must lie between 0 and width={width}")
        y = None if y is None else arrays.target(y)
        if y is not None and len(y) != len(places):
            raise InvalidValue("there must be one target per row")
        self.places, self.width, self.y, self._unit = places, width, y, unit

    @classmethod
    def of(cls, X: Any, y: Any = None, *, unit: bool = False) -> "Indicators":
        """Return the rows of a dense or sparse table of zeros and ones."""
        X = arrays.features(X)
        X = X.toarray() if hasattr(X, "indptr") else X
        if not np.isin(X, (0, 1)).all():
            raise InvalidValue("indicators must be a table of zeros and ones")
        width, counts = X.shape[1], np.count_nonzero(X, axis=1)
        kind = np.uint8 if width < 2**8 else np.uint16 if width < 2**16 else np.uint32
        places = np.full((len(X), int(counts.max(initial=1))), width, dtype=kind)
        rows, columns = np.nonzero(X)
        places[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
        return cls(places, width, y, unit=unit)

    def __len__(self) -> int:
        return len(self.places)

    def take(self, indices: Indices) -> "Indicators":
        """Return the rows at ``indices``; a full slice makes no copy."""
        if isinstance(indices, slice) and indices == slice(None):
            return self
        taken = object.__new__(Indicators)
        taken.places, taken.y = self.places[indices], None if self.y is None else self.y[indices]
        taken.width, taken._unit = self.width, self._unit
        return taken

    def blocks(self, features: Features) -> Iterator[PlacesBlock]:
        """Yield all rows, block by block."""
        if np.ndim(features.scale) == 2:
            raise Unsupported("indicators are scaled feature by feature: use a Table for a matrix of scales")
        squares, centre = np.square(features.scale), np.asarray(features.centre)
        ones = np.append(squares * np.ones(self.width), 0.0)
        crossed = np.append(squares * centre * np.ones(self.width), 0.0)
        rest = float(np.sum(squares * np.square(centre))) + features.intercept**2
        step = max(2**5, min(_BLOCK, summing.chain(len(self), features.spread) // 4))
        for start in range(0, max(len(self), 1), step):  # an empty batch has one empty block
            places = self.places[start : start + step]
            if self._unit:
                unit = 1 / np.sqrt(np.maximum(np.count_nonzero(places < self.width, axis=1), 1))
            else:
                unit = np.ones(len(places))
            square = np.square(unit) * ones[places].sum(axis=1) + rest
            if centre.any():
                square = square - 2 * unit * crossed[places].sum(axis=1)
            norm = np.sqrt(np.maximum(square, 0.0))
            if features.spread > 1:  # near the centre squares and sums cancel: see Features.at_least
                length = unit * np.sqrt(ones[places].sum(axis=1)) + math.sqrt(rest)
                norm = np.maximum(norm, length / features.spread)
            shrink = np.ones_like(norm)
            if features.radius is not None:
                shrink = features.radius / np.maximum(norm, features.radius)
            y = None if self.y is None else self.y[start : start + step]
            yield PlacesBlock(places, y, unit, shrink, norm * shrink, self.width)


class PerRow:
    """A clipping norm and a weight per row, where `ClipNorm` has one for all; rows come in blocks."""

    scale, order = 1.0, 2

    def __init__(self, clips: Array, weights: Array | None = None) -> None:
        self._clips, self._weights, self._place = clips, weights, 0

    def factors(self, norms: Array) -> Array:
        place = slice(self._place, self._place + len(norms))
        self._place = place.stop
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factors = np.minimum(1.0, self._clips[place] / norms)
        if self._weights is not None:
            factors = factors * self._weights[place]
        result: Array = np.where(np.isfinite(norms) & (factors > 1e-290), factors, 0.0)
        return result


def distinct(columns: Array) -> tuple[Array, Integers]:
    """Return the distinct columns and the index of each; fast if all are equal."""
    if (columns == columns[:, :1]).all():
        return columns[:, :1], np.zeros(columns.shape[1], np.int64)
    distinct, which = np.unique(columns, axis=1, return_inverse=True)
    return distinct, which.reshape(-1).astype(np.int64)


def own_noise(term: Terms) -> Gaussian:
    """Return the noise that a client adds: all of it, or its share."""
    return Gaussian(math.sqrt(term.variance) / term.bound.clip)


@dataclass(slots=True, eq=False)
class Round:
    """The clients of a round and the figures that depend on them, valid for ``lasts`` rounds."""

    came: Integers
    lasts: int
    clips: Array
    weights: Array
    divisor: float
    deviation: float  # of the noise in the weighted sum
    reach: float  # the sensitivity of the weighted sum to one record
    bound: ClipNorm | None  # if all clipping norms and weights are equal
    owned: ClientRows
    kinds: list[Terms]  # the distinct terms, and which of them each client has
    which: Integers
    table: Any = None
    who: Integers | None = None
    lattice: tuple[int, int, Array] | None = None
    noise: tuple[Gaussian, ClipNorm] | None = None  # the noise of the sum

    @property
    def same(self) -> bool:
        return self.lasts > 0

    @property
    def weight(self) -> float:
        return float(self.weights[0])


_ENTRIES = 2**16  # entries of uploads held at once: half a megabyte, which fits the cache


def owned(rows: Integers, offsets: Integers, came: Integers) -> tuple[Integers, Integers]:
    """Return the rows whose clients take part, and the index of each row's client among those."""
    owners = np.searchsorted(offsets, rows, side="right") - 1
    if len(came) == len(offsets) - 1:
        return rows, owners
    place = np.full(len(offsets) - 1, -1)
    place[came] = np.arange(len(came))
    who = place[owners]
    return rows[who >= 0], who[who >= 0]


def refuse_many(contribution: Contribution, drawn: float, secret: bool) -> None:
    """Refuse draws of more records than the rounding bound allows; by 9 deviations if they are ``secret``."""
    most, reach = getattr(contribution, "most", math.inf), drawn + 9 * math.sqrt(drawn)
    if reach > most and (drawn > most or secret):
        raise InvalidValue(
            f"a round draws {drawn:,.0f} records on average, and sums of this network are proven for "
            f"{most:,}: make it with most={int(reach) + 1}"
        )


def sum_noise(now: Round, invitation: Invitation) -> Gaussian:
    """Return the noise of the sum over the clients of a round.

    The sum of their correlated noise has the same correlation. Noise of a client that left is in no later
    sum: correlated noise then starts again, at no cost (`farthing.queries.correlated`, lost history).
    """
    multiplier = now.deviation / now.reach
    if invitation.bands == 1:
        return Gaussian(multiplier)
    correlation = now.kinds[0].correlation  # the same for all terms: the invitation sets bands and exponent
    return BandedGaussian(multiplier / correlation, invitation.bands, invitation.exponent).begin()


def weighted_sum(contribution: Contribution, table: Any, owners: Integers, w: Array, now: Round) -> Any:
    """Return Σ weight · clipped contribution over the rows of a table with clients ``owners``."""
    if now.bound is not None:
        return contribution.bounded_sum(table, w, now.bound) * now.weight
    clips, weights = now.clips[owners], now.weights[owners]
    if isinstance(contribution, LinearGradient):
        by_row: Any = PerRow(clips, weights)
        return contribution.bounded_sum(table, w, by_row)
    total = 0.0 * contribution.bounded_sum(
        table.take(np.empty(0, np.int64)), w, ClipNorm(float(now.clips[0]))
    )
    for clip, weight in sorted(set(zip(clips.tolist(), weights.tolist(), strict=True))):
        group = np.flatnonzero((clips == clip) & (weights == weight))
        total = total + weight * contribution.bounded_sum(table.take(group), w, ClipNorm(clip))
    return total


def noisy_uploads(
    contribution: Contribution,
    table: Any,
    who: Integers,
    w: Array,
    now: Round,
    stream: Stream,
    failing: bool = False,
) -> Array:
    """Return Σ weight · upload, each upload with its client's own noise.

    With ``failing``, records on which the contribution fails count as zero. Every upload stays on its own
    lattice then: the lattice of another noise would reveal that a record failed.
    """
    starts = np.searchsorted(who, np.arange(len(now.came) + 1))

    def upload(client: int) -> Any:
        rows, bound = np.arange(starts[client], starts[client + 1]), now.kinds[now.which[client]].bound

        def sums(places: Integers) -> Any:
            return contribution.bounded_sum(table.take(places), w, bound)

        return answers.without_failing(sums, rows, sums(rows[:0])) if failing else sums(rows)

    if isinstance(contribution, LinearGradient):
        return _noisy_gradients(contribution, table, who, w, now, stream, upload if failing else None)
    total = np.zeros(w.shape if contribution.shape is None else contribution.shape)
    for client, which in enumerate(now.which.tolist()):
        term, found = now.kinds[which], upload(client)
        total += now.weights[client] * own_noise(term).release(found, term.bound, stream)
    return total


def _noisy_gradients(
    contribution: LinearGradient,
    table: Any,
    who: Integers,
    w: Array,
    now: Round,
    stream: Stream,
    upload: Callable[[int], Any] | None,
) -> Array:
    """Return Σ weight · upload of linear gradients, block by block of clients; by ``upload`` if given."""
    bits, cells = _lattice(w.size, now)
    total = np.zeros(w.size)
    step = max(1, _ENTRIES // w.size)
    for first in range(0, len(now.came), step):
        last = min(first + step, len(now.came))
        if upload is None:
            uploads = _gradients(contribution, table, who, w, now, first, last)
        else:
            uploads = np.array([np.ravel(upload(client)) for client in range(first, last)])
        uploads /= cells[first:last, None]
        uploads = lattice.noisy(stream, uploads, 1.0, 1.0, bits)  # integers, so that sums are exact
        total += (now.weights[first:last] * cells[first:last]) @ uploads
    return total.reshape(w.shape)


def _gradients(
    contribution: LinearGradient, table: Any, who: Integers, w: Array, now: Round, first: int, last: int
) -> Array:
    """Return the sums of the clipped gradients of the clients from ``first`` to ``last``, a row each."""
    features, uploads = contribution.features, np.zeros((last - first, w.size))
    u, constant = features.unfold(w)
    low, high = np.searchsorted(who, (first, last))
    place = int(low)
    for block in table.take(slice(place, int(high))).blocks(features):
        owners = who[place : place + len(block.norm)]
        clip: Any = now.bound or PerRow(now.clips[owners])
        factors = contribution.factors(block, u, constant, clip)
        if isinstance(block, PlacesBlock) and features.plain and factors.ndim == 1:
            uploads += block.sums(features, factors, owners - first, last - first)
        else:
            _add_rows(uploads, block.rows(features), factors, owners - first)
        place += len(owners)
    return uploads


def _add_rows(uploads: Array, rows: Array, factors: Array, owners: Integers) -> None:
    """Add factor · row to each row's upload; owners are sorted."""
    terms = rows * factors[:, None] if factors.ndim == 1 else rows[:, :, None] * factors[:, None]
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    summed = terms if len(starts) == len(owners) else np.add.reduceat(terms, starts)
    uploads[owners[starts]] += summed.reshape(len(starts), uploads.shape[1])


def _lattice(size: int, now: Round) -> tuple[int, Array]:
    """Return the bits of the finest lattice that any client needs, and each client's cell width on it."""
    if now.lattice is None or now.lattice[0] != size:
        grids = [own_noise(term).grid(term.bound, size) for term in now.kinds]
        bits = max(bits for bits, _ in grids)
        cells = np.array([cell * 2.0 ** (own - bits) for own, cell in grids])[now.which]
        now.lattice = size, bits, cells
    return now.lattice[1:]
