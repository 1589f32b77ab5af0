"""Add noise that is correlated over all turns of a plan, with a constant number of buffers.

If each record takes part once per pass, in a fixed order, sampling does not amplify, and bands
(`farthing.queries.correlated`) would need as many arrays as a pass has turns. `BufferedGaussian` also
releases X = G + C⁻¹Z, for a Toeplitz matrix C given by a recurrence: its first column is c_0 = 1 and c_j =
Σ_i ω_i λ_i^(j-1), so C⁻¹Z needs one array per pair of a weight ω and a decay λ (buffered linear Toeplitz
matrices: Dvijotham, McMahan, Pillutla, Steinke & Thakurta, "Efficient and Near-Optimal Noise Generation for
Streaming Differential Privacy", FOCS 2024). Two pairs are nearly as good as more
(`farthing.accounting.correlated`).

**Theorem.** Let ω_i > 0, Σ ω_i <= 1, 0 < λ_i < 1, and let the participations of a record be at least b turns
apart, out of T turns. Let N² be the largest |Σ_{i<k} C e_{ib}|² / k over k <= ⌈T / b⌉, over T rows, and let Z
have standard deviation σ N times the bound of one contribution. Then T turns on draws in which every record
takes part once in b turns cost at most ⌈T / b⌉ answers with Gaussian noise σ, under add-remove, zero-out and
replace-one, per record, against the budget's observer, at any stopping time, and for sums that depend on all
earlier releases.

Proof. Revealing X is equivalent to revealing CX = CG + Z. A record that takes part at turns s_0 < s_1 < ...
with g_0, g_1, ... moves CG by Σ C e_{s_i} ⊗ g_i, whose squared norm is Σ_ij <C e_{s_i}, C e_{s_j}> <g_i,
g_j>. The coefficients are positive and decreasing (c_1 = Σ ω_i <= 1 = c_0, and every later power decreases),
s_i >= ib and s_j - s_i >= (j - i) b, so <C e_{s_i}, C e_{s_j}> = Σ_{l < T - s_j} c_{l + s_j - s_i} c_l is at
most <C e_{ib}, C e_{jb}>, and all of these are positive: the squared norm is at most |Σ_{i<k} C e_{ib}|² <= k
N² for k participations, times the squared bound (Kalinin & Lampert, NeurIPS 2024, Theorem 2, for one norm).
After t turns there were at most ⌈t / b⌉ participations, the number of answers that are charged. Shifts that
depend on earlier rows cost no more (the total is bounded: fully adaptive Gaussian composition, Smith &
Thakurta 2022). ∎

**On the lattice** the noise of turn t is the integer M_t = Z_t - K_t with K_t = round(Σ_i ω_i B_i). After the
turn each buffer becomes round(λ_i B_i) + M_t, in units of 2^-f cells, which float64 represents exactly. Two
neighbours with the same answers have M that differ by integers Δ where the record takes part, so their Z
differ by C Δ and an error. The error is 1 for the rounding of K and, on each side, at most (d + 1) 2^(-f-1)
for its sum over d buffers; each buffer adds at most 2 units per turn (the product and its rounding, on each
side), which decay by λ and so amount to 2^(1-f) / (1 - λ_i). Noise is clamped at 64 standard deviations where
it enters a buffer, and buffers at 2^52 units. Both reduce the difference of two neighbours in each
coordinate, and as all coefficients are positive the bound above holds for absolute values. The noise is
enlarged by the error of √T rows.

**Lost state.** As with bands, buffers are kept in memory only, and a new process, a fork or a skipped turn
begins with empty ones: this is the noise of a block diagonal C. Columns of different blocks are orthogonal
and the others have fewer rows, so a block with k participations moves by at most √k N, for any distance
between participations in different blocks. The price does not change.

>>> noise = BufferedGaussian(1.0, weights=(0.12, 0.33), decays=(0.993, 0.83), steps=1000, groups=500)
>>> round(noise.column_norm, 3)
1.695
>>> Cyclic(1 / 500, groups=500).plan(noise.unit_event(), 1000)
RepeatedEvent(event=PoissonEvent(rate=1.0, event=GaussianEvent(noise=1.0)), count=2)
"""

import functools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.queries.arrivals import Arrivals
from farthing.queries.bounds import Bound
from farthing.queries.correlated import FAR, Cyclic
from farthing.queries.mechanisms import Array, Gaussian, enlarged, refuse_width
from farthing.queries.plan_lock import PlanLock
from farthing.queries.samplers import Sampler
from farthing.queries.truncation import TruncatedCyclic

MOST_BUFFERS = 8
_MOST_WORK = 2**28  # turns times passes: the products that the norm of the columns takes
_GRID_SHARE = 2.0**-10  # the largest relative increase of the noise because of the grid
_BITS = range(20, 33)
_HEADROOM = 52 - 14  # bits of cell and units: buffers reach 2^14 standard deviations of the noise


def column(weights: Iterable[float], decays: Iterable[float], steps: int) -> NDArray[np.float64]:
    """Return the first column of C."""
    found, powers = np.zeros(steps), np.arange(steps - 1)
    found[0] = 1.0
    for weight, decay in zip(weights, decays, strict=True):
        found[1:] += weight * np.exp(math.log(decay) * powers)
    return found


def overlapped(first: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    """Return the sum of the columns 0, ``groups``, 2 ``groups``, ... of a Toeplitz matrix."""
    passes = -(-len(first) // groups)
    padded = np.zeros(passes * groups)
    padded[: len(first)] = first
    return np.cumsum(padded.reshape(passes, groups), axis=0).ravel()[: len(first)]


@functools.lru_cache(256)
def column_norm(weights: tuple[float, ...], decays: tuple[float, ...], steps: int, groups: int) -> float:
    """Return N of the theorem, rounded up."""
    every = overlapped(column(weights, decays, steps), groups)
    largest, passes = 0.0, -(-steps // groups)
    for chances in range(1, passes + 1):
        some = every.copy()
        some[chances * groups :] -= every[: max(0, steps - chances * groups)]
        largest = max(largest, float(some @ some) / chances)
    return math.sqrt(largest) * (1 + 2.0**-30)  # exceeds 2^28 relative roundings of 2^-53


class _Grid(NamedTuple):
    bits: int
    cell: float
    units: float  # of a buffer, per cell


@functools.lru_cache(64)
def _grid(noise: "BufferedGaussian", norm: float, nearest: float, size: int) -> _Grid:
    """Return a lattice on which the error of the theorem enlarges the noise only slightly."""
    least = noise.noise_multiplier * norm / nearest * math.sqrt(size)
    for bits in _BITS:
        units = 2.0 ** (_HEADROOM - bits)
        drift = sum(w / (1 - decay) for w, decay in zip(noise.weights, noise.decays, strict=True))
        error = 1 + (len(noise.weights) + 1 + 2 * drift) / units
        share = least * (noise.column_norm + error * math.sqrt(noise.steps)) * 2.0**-bits
        if share <= _GRID_SHARE:
            exact = noise.noise_multiplier * norm * noise.column_norm * enlarged(norm, nearest) / (1 - share)
            return _Grid(bits, exact * 2.0**-bits, units)
    raise Unsupported(
        f"noise {noise.noise_multiplier:g} over {noise.steps} turns on {size} coordinates needs a finer grid "
        "than buffers have: take fewer steps or lower the noise multiplier"
    )


class _Buffers:
    """The buffers of one plan, which are as secret as the records."""

    def __init__(self) -> None:
        self.lock = PlanLock()
        self._turn, self._kind, self._kept = -1, None, list[Any]()

    def before(self, turn: int, kind: Any) -> list[Any]:
        """Return the buffers of the turns before this one; empty if a turn is missing or the shape
        differs."""
        return self._kept if turn == self._turn + 1 and kind == self._kind else []

    def keep(self, turn: int, kind: Any, kept: list[Any]) -> None:
        self._turn, self._kind, self._kept = turn, kind, kept


@dataclass(frozen=True, slots=True)
class BufferedGaussian(Gaussian):
    """Gaussian noise whose later turns cancel a part of the noise of all earlier turns of a plan.

    Parameters
    ----------
    noise_multiplier : float
        The standard deviation of independent noise with the price of one pass, over the bound. The noise of
        one turn is larger; the noise of sums over many turns is much smaller.
    weights, decays : tuple of float
        One pair per buffer: weights above 0 that add up to at most 1, decays between 0 and 1.
        `choose_buffers` finds the best ones.
    steps : int
        The largest number of turns of a plan.
    groups : int
        The turns of a pass; a record takes part in one of them.

    Raises
    ------
    InvalidValue
        If a weight or a decay is out of range, there are more than 8 pairs, or the norm of the columns takes
        more than 2^28 products because of the number of steps and passes.

    Notes
    -----
    The theorem is in `farthing.queries.buffered`. The sampler is ``Cyclic(1 / groups, groups)``, with which
    every record takes part in every pass: there is no amplification and no need for a random sample.

    Examples
    --------
    >>> from farthing import ClipNorm, PerExample, Query
    >>> rows = PerExample(lambda rows, w: rows[0] - w)
    >>> noise = BufferedGaussian(1.0, weights=(0.3,), decays=(0.95,), steps=100, groups=100)
    >>> Query(Cyclic(1 / 100, groups=100), rows, ClipNorm(1.0), noise).remembers
    True
    """

    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    steps: int = 1
    groups: int = 1
    _memory: _Buffers | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Gaussian.__post_init__(self)
        for name in ("weights", "decays"):
            object.__setattr__(
                self, name, tuple(validate.finite(**{name: one}) for one in getattr(self, name))
            )
        if not 1 <= len(self.weights) == len(self.decays) <= MOST_BUFFERS:
            raise InvalidValue(
                f"weights and decays must form 1 to {MOST_BUFFERS} pairs: {self.weights!r}, {self.decays!r}"
            )
        if min(self.weights) <= 0 or sum(self.weights) > 1:
            raise InvalidValue(f"weights must be above 0 and add up to at most 1, got {self.weights!r}")
        if not all(0.0 < decay < 1.0 for decay in self.decays):
            raise InvalidValue(f"decays must lie between 0 and 1, got {self.decays!r}")
        passes = -(-validate.count(steps=self.steps) // validate.count(groups=self.groups))
        if passes * self.steps > _MOST_WORK:
            raise InvalidValue(f"{self.steps} steps in {passes} passes are too many: use fewer steps")

    @property
    def column_norm(self) -> float:
        """An upper bound of N of the theorem, the root mean square shift a participation for a bound of 1."""
        return column_norm(self.weights, self.decays, self.steps, self.groups)

    def suits(self, sampler: Sampler) -> None:
        """Refuse samplers for which the theorem does not hold."""
        if isinstance(sampler, Arrivals):
            return
        whole = isinstance(sampler, Cyclic) or (isinstance(sampler, TruncatedCyclic) and not sampler.cuts)
        if not whole or sampler.rate < 1 or sampler.groups < self.groups:  # type: ignore[attr-defined]
            raise Unsupported(
                f"noise for records that take part once in {self.groups} turns has no price on draws of "
                f"{sampler!r}: sample with Cyclic(1 / {self.groups}, groups={self.groups})"
            )

    def begin(self) -> Self:
        """Return this mechanism with the state of a new plan."""
        begun = replace(self)
        object.__setattr__(begun, "_memory", _Buffers())
        return begun

    def lattice(self, bound: Bound, size: int) -> _Grid:
        """Return the bits and the width of a cell, and the units of a buffer per cell."""
        norm = bound.norm()
        return _grid(self, norm, min(norm, bound.sensitivity(Adjacency.REPLACE_ONE)), size)

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        return self.lattice(bound, size)[:2]

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        """Return the sum on a grid with the noise of this turn."""
        total = np.asarray(total, dtype=np.float64)
        refuse_width(bound, total.size)
        self.refuse_turn(turn)
        bits, cell, units = self.lattice(bound, total.size)
        cells, drawn = lattice.on_grid(total, bound.scale, cell), lattice.gaussian(stream, total.size, bits)
        noise = drawn.reshape(total.shape)
        if self._memory is not None:
            kind = total.shape, bits, os.getpid()  # a forked child begins anew
            with self._memory.lock.held:
                kept = self._memory.before(turn, kind)
                noise -= correction(kept, self.weights, units, total.shape)
                self._memory.keep(turn, kind, followed(kept, self.decays, noise, bits, units))
        released: Array = (cells + noise).astype(np.float64) * cell * bound.scale
        return released

    def refuse_turn(self, turn: int) -> None:
        if turn >= self.steps:
            raise InvalidValue(f"this noise covers {self.steps} turns, counted from 0: got turn {turn}")


def correction(
    kept: list[Array], weights: tuple[float, ...], units: float, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return K, the part of the earlier turns' noise that is subtracted from this turn's."""
    total = np.zeros(shape)
    for weight, buffer in zip(weights, kept, strict=False):
        total += weight * buffer
    return np.rint(total / units).astype(np.int64)


def followed(
    kept: list[Array], decays: tuple[float, ...], noise: NDArray[np.int64], bits: int, units: float
) -> list[Array]:
    """Return the buffers after a turn, in integer units."""
    own = units * np.clip(noise, -(2 ** (bits + FAR)), 2 ** (bits + FAR)).astype(np.float64)
    if not kept:
        return [own.copy() for _ in decays]
    after: list[Array] = [
        np.clip(np.rint(decay * buffer) + own, -(2.0**52), 2.0**52)
        for decay, buffer in zip(decays, kept, strict=True)
    ]
    return after
