"""Compute principal components from one noisy matrix of second moments, about a noisy mean where that helps.

"Analyze Gauss" (Dwork, Talwar, Thakurta & Zhang 2014, Algorithm 1), AdaDP's DpPCA: rows z are clipped to a
radius R, Σ z zᵀ is released with symmetric Gaussian noise, and its eigenvectors are post-processing. One
answer, which is μ-GDP: the sensitivity is R² under add-remove and √2 R² under replace-one (`ClipOuter`).
Columns are not centred by their means, which would need another release.

A second release pays off if rows share much of their direction (images, counts). It needs the public number n
of ``records``. The mean m of z is released for a tenth of μ², rows are clipped to c about it, with c² = R² -
|m|² (an upper bound on their mean square about the mean), and the result is Σ (z - m)(z - m)ᵀ + noise + n m
mᵀ. The noise shrinks with c². Both answers are Gaussian, with parts 1/10 and 9/10 of μ²: μ-GDP by adaptive
composition (Dong, Roth & Su 2022, Cor. 3.3), since c and m are released values. A public rule leaves it out
if the noise is so small (√(2d) deviations below 1/500 of n R²) that clipping would do more harm, or so large
(above a tenth) that it would hide the mean. A mean shorter than R/4 is not used.

>>> import numpy as np
>>> import farthing as ft
>>> from farthing.data.tables import (Features, Table)
>>> X = np.random.default_rng(0).normal(size=(5000, 3)) * [1.0, 0.1, 0.1]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(X, unit=True))
>>> (step,) = dppca(ledger, Features(3, intercept=0.0))
>>> step.w.shape, bool(abs(step.w[0, 0]) > 0.5 * 5000)
((3, 3), True)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import Total
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, ClipOuter, Kind
from farthing.queries.mechanisms import SymmetricGaussian
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

_MEAN = 0.1  # share of μ² for the mean
_NOISE = (1 / 500, 1 / 10)  # noise over all second moments between which a mean pays off
_SHORTEST = 1 / 4  # a shorter mean saves less than it costs


@until_spent
def dppca(
    ledger: Ledger, features: Features, *, clip_norm: float = 1.0, records: int | None = None
) -> Iterator[Step]:
    """Release the second moments Σ z zᵀ with noise, in one step.

    Parameters
    ----------
    features : Features
        The map from rows to z.
    clip_norm : float, default 1.0
        Longer z are shrunk to this norm.
    records : int, optional
        The public number of records. None: moments about the origin only.
    """
    size, rows = features.size, replace(features, radius=validate.positive(clip_norm=clip_norm))
    public = 1 if records is None else validate.count(records=records)
    schedule = BudgetSchedule(ledger, public)
    part, centre, square = 1.0, np.zeros(size), 0.0
    noise = schedule.deviation(1.0, ClipOuter(1.0)) * math.sqrt(2 * size)
    if records is not None and _NOISE[0] < noise < _NOISE[1]:
        mean, deviation = schedule.mean(_MEAN, Total(rows), ClipNorm(clip_norm))
        part, square = 1 - _MEAN, float(mean @ mean) - size * deviation**2
        centre = mean if square > (_SHORTEST * clip_norm) ** 2 else centre
    # at least a tenth of clip_norm: a mean nearly as long as the rows may be due to noise
    reach = math.sqrt(max(clip_norm**2 - square, 0.01 * clip_norm**2)) if centre.any() else clip_norm
    moments, _ = schedule.mean(part, Scatter(rows, centre), ClipOuter(reach), mechanism=SymmetricGaussian)
    yield Step(1, public * (moments + np.outer(centre, centre)), schedule.receipts())


@dataclass(frozen=True, slots=True)
class Scatter:
    """Σ (z - centre)(z - centre)ᵀ of a table, with clipped rows (`ClipOuter`); a blank row adds nothing."""

    features: Features
    centre: Array
    honours: ClassVar[tuple[str, ...]] = (Kind.OUTER,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features.size, self.features.size)

    def bounded_sum(self, records: Table, w: Any, bound: ClipOuter) -> Array:
        total = Sum(len(records), (self.features.size, self.features.size))
        for block in records.blocks(self.features):
            rows = bound.rows.apply(block.rows(self.features) - self.centre)
            if block.shrink is not None:
                rows[block.shrink == 0] = 0.0
            total.add(rows.T @ rows, len(rows))
        return total.value


def components(moments: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the leading eigenvalues and eigenvectors (as rows), each with its largest entry positive."""
    values, vectors = np.linalg.eigh(moments)
    values, rows = values[::-1][:count], vectors.T[::-1][:count]
    largest = rows[np.arange(count), np.abs(rows).argmax(axis=1)]
    return values, rows * np.where(largest < 0, -1.0, 1.0)[:, None]
