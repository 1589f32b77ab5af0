"""Add up the uploads of simulated clients: one sum over all their records, or each upload with its own noise.

Where clients share a clipping norm and a weight, the sum of their clipped contributions is one bounded sum
over all drawn records: clipping is record by record, so it does not matter whose record it is. Clients that
differ are summed in groups of equal clips and weights, and linear gradients in one pass with a clip a row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.federated.draws import PerRow, PlacesBlock, Round, own_noise
from farthing.linear.losses import Gradient
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Contribution

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_ENTRIES = 2**16  # entries of uploads held at once: half a megabyte, which fits the cache


def weighted_sum(contribution: Contribution, table: Any, owners: Integers, w: Array, now: Round) -> Any:
    """Return Σ weight · clipped contribution over the rows of a table, whose clients are ``owners``."""
    if now.bound is not None:
        return contribution.bounded_sum(table, w, now.bound) * now.weight
    clips, weights = now.clips[owners], now.weights[owners]
    if isinstance(contribution, Gradient):
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
    contribution: Contribution, table: Any, who: Integers, w: Array, now: Round, stream: Stream
) -> Array:
    """Return Σ weight · upload, each upload with its client's own noise."""
    if isinstance(contribution, Gradient):
        return _noisy_gradients(contribution, table, who, w, now, stream)
    total = np.zeros(w.shape if contribution.shape is None else contribution.shape)
    starts = np.searchsorted(who, np.arange(len(now.came) + 1))
    for client, which in enumerate(now.which.tolist()):
        term, rows = now.kinds[which], np.arange(starts[client], starts[client + 1])
        found = contribution.bounded_sum(table.take(rows), w, term.bound)
        total += now.weights[client] * own_noise(term).release(found, term.bound, stream)
    return total


def _noisy_gradients(
    contribution: Gradient, table: Any, who: Integers, w: Array, now: Round, stream: Stream
) -> Array:
    """Return Σ weight · upload of linear gradients, block by block of clients."""
    bits, cells = _lattice(w.size, now)
    features, total = contribution.features, np.zeros(w.size)
    u, constant = features.unfold(w)
    step = max(1, _ENTRIES // w.size)
    for first in range(0, len(now.came), step):
        last = min(first + step, len(now.came))
        low, high = np.searchsorted(who, (first, last))
        uploads = np.zeros((last - first, w.size))  # in cells
        place = int(low)
        for block in table.take(slice(place, int(high))).blocks(features):
            owners = who[place : place + len(block.norm)]
            clip: Any = now.bound or PerRow(now.clips[owners])
            factors = (contribution.factors(block, u, constant, clip).T / cells[owners]).T
            if isinstance(block, PlacesBlock) and features.plain and factors.ndim == 1:
                uploads += block.sums(features, factors, owners - first, last - first)
            else:
                _add_rows(uploads, block.rows(features), factors, owners - first)
            place += len(owners)
        uploads = lattice.noisy(stream, uploads, 1.0, 1.0, bits)  # whole cells, so that sums are exact
        total += (now.weights[first:last] * cells[first:last]) @ uploads
    return total.reshape(w.shape)


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
