"""Laws of sums: neighbours stay as far apart as their bound says, whatever their records' values round to.

>>> terms = badly_rounded(2**10)
>>> float(terms.max()), bool(abs(terms.sum() - 2**9) < 1)
(1.0, True)
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features, Table
from farthing.linear.losses import Gradient, squared
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import PerExample, Rows

Array = NDArray[np.float64]

_RECORDS = 2**20
_MOST = 2.0**-18  # beyond the bound: a sequential sum is 2⁻¹⁵ beyond it at so many records


def badly_rounded(records: int, apart: int = 1, bits: int = 52) -> Array:
    """Numbers of at most 1 that add up to a power of two and stay there, every ``apart``-th one rounded.

    Sums that begin with 1 instead of 0 stay just above the power and round to twice the cell of those that
    stay below: they drift away from these by half a cell at every addition. Floats have so many ``bits``.
    """
    half = records // 2
    cell, terms = 2.0**-bits * half, np.zeros(records)
    terms[1 : half + 1] = 1.0
    rest = terms[half + 1 :][::apart]
    rest[0::2] = -1.0 + cell / 2 + cell / 16
    rest[1::2] = 1.0 - cell / 2 + cell / 16
    return terms


def moved(total: Callable[[Array], Array], terms: Array) -> float:
    """How far apart two sums are whose first record contributes 1 or nothing."""
    one = terms.copy()
    one[0] = 1.0
    return float(np.linalg.norm(np.asarray(total(one)) - np.asarray(total(terms))))


def sums(stream: Stream) -> list[str]:
    """Sums of examples and of gradients move by one record's bound; `farthing.noise.summing` has the
    theorem."""
    bound, beside = ClipNorm(1.0), np.column_stack([np.ones(_RECORDS), np.zeros(_RECORDS)])
    examples = PerExample(lambda rows, w: rows[0][:, None] * np.array([1.0, 0.0]))
    gradient = Gradient(squared, Features(2, intercept=0.0))
    ways: dict[str, Callable[[Array], Array]] = {
        "examples": lambda terms: examples.bounded_sum(Rows(terms), None, bound),
        "gradients": lambda terms: gradient.bounded_sum(Table(beside, -terms), np.zeros(2), bound),
    }
    return [
        f"a sum of {name} moves by more than its bound"
        for name, total in ways.items()
        if any(moved(total, badly_rounded(_RECORDS, apart)) > 1 + _MOST for apart in (1, 4))
    ] + _cancelling(stream)


def _cancelling(stream: Stream, records: int = 2**12) -> list[str]:
    """Rows near a centre that is far from zero, all clipped: Σ v x and c Σ v are huge, and cancel."""
    words = stream.integers(4 * records).astype(np.float64) * 2.0**-63 - 1
    centre = np.full(3, 1e7 + 0.1)
    X, y = centre + words[: 3 * records].reshape(-1, 3) * 1e-6, words[3 * records :] * 1e10
    gradient = Gradient(squared, Features(3, centre, intercept=0.0))
    ends = [gradient.bounded_sum(Table(X[i:], y[i:]), np.zeros(3), ClipNorm(1.0)) for i in range(8)]
    apart = max(float(np.linalg.norm(a - b)) for a, b in pairwise(ends))
    return ["a sum of rows near their centre moves by more than its bound"] if apart > 1 + _MOST else []
