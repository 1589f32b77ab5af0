"""Add noise that is correlated over the turns of a plan, and draw the records that it needs.

Training adds gradients up, so the noise that matters is that of their running sums. It is smaller if later
noise cancels a part of earlier noise. `BandedGaussian` releases X = G + C⁻¹Z, where the rows of G are the
sums of the turns, Z is independent noise and C is a lower triangular Toeplitz matrix with ``bands`` bands and
ones on its diagonal. `Cyclic` makes each record eligible in one of ``groups`` turns.

**Theorem** (Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS 2023, Theorem 4, on the
lattice). Let c be the first column of C and let Z have standard deviation σ |c| times the bound of one
contribution. If two eligible turns of a record are at least ``bands`` turns apart, T turns on `Cyclic` draws
cost at most ⌈T / groups⌉ answers with Gaussian noise σ on Poisson samples of rate ``sampling_rate · groups``,
under add-remove, zero-out and replace-one, per record, against the budget's observer, at any stopping time,
and for sums that depend on all earlier releases.

Proof. Revealing X is equivalent to revealing CX = CG + Z. Condition on the groups (they do not depend on the
records; under add-remove those of the other records are coupled). A record that takes part at turn s with g
moves row s + j of CG by c_j g, and no row from s + ``bands`` on, before which it is not eligible again. The
rows from one of its eligible turns to the next are therefore one Gaussian mechanism, whose shift c ⊗ g has
norm |c| |g| <= |c| C, on a Poisson sample; rows before its first eligible turn do not depend on it. Shifts in
later rows may depend on earlier rows without a higher price (the total is bounded: fully adaptive Gaussian
composition, Smith & Thakurta 2022), and subsampling preserves domination (Zhu, Dong & Wang 2022, Theorem 11).

On the lattice the noise of turn t is the integer M_t = Z_t - K_t with K_t = round(Σ_{1 <= j < bands} c_j
M_{t-j}), and the answer is round(G_t) + M_t cells. Two neighbours with the same answers have M that differ,
at turn s only, by the integers Δ; so their Z differ in row s by Δ and in row s + j by c_j Δ + e, where |e| <=
2 in each coordinate: 1 for rounding, and at most ½ for the float64 sum on each side (`_grid` allows no more
bits than this needs; noise beyond 64 standard deviations is clamped where it enters K, which never increases
a difference). The noise is enlarged accordingly.

**Lost history.** The noise of earlier turns is kept in memory only, because it reveals the sums. A new
process, a fork or a skipped turn begins without it, which is the noise of a block diagonal C: its columns are
parts of those of C, and rows of different blocks have independent noise. So the price does not change. Draws
start again at the first turn that is a multiple of ``groups`` and at least ``groups`` turns after the last
draw; until then nothing is drawn. A process thus draws in a cycle only if it had the first turn of that
cycle, and each turn is given to one answer. So each cycle has one division into groups and a record is
eligible once in it, for any number of processes and threads.

**Shares.** The noise on a sum over clients may consist of shares, each C⁻¹Z_i with its own history
(`BandedShare`). If at least n honest clients release the same turn s of a plan, a record that is drawn at s
pays as for one share of √n times the noise. This holds for any clients at other turns, for clients that lose
their history, and if all of this depends on earlier sums.

Proof. Divide the record's shift g evenly among n shares of turn s: the sum of the shares moves by g, and an
observer of every share can compute the sum. Share i moves Z_i by C_i e_s ⊗ g / n, where C_i is block diagonal
with parts of C, so by at most |c| |g| / n, and all n together by |c| |g| / √n. Rows of turns outside s to s +
``bands`` - 1 do not move, and within them the record is not eligible again: hence the condition that all
shares of a sum have the same turn. A client that missed a turn has lost its history. On the lattice a shift Δ
is divided into integers, each at most 1 off Δ / n in a coordinate. So all shares move by at most |c| |Δ| / √n
+ √(nd) (|c| + 2 √(bands - 1)), and the noise is enlarged accordingly. ∎

>>> query_noise = BandedGaussian(1.0, bands=8)
>>> [round(c, 3) for c in query_noise.coefficients[:4]]
[1.0, 0.5, 0.375, 0.312]
>>> Cyclic(0.01, groups=8).plan(query_noise.unit_event(), 800)
RepeatedEvent(event=PoissonEvent(rate=0.08, event=GaussianEvent(noise=1.0)), count=100)
"""

import functools
import math
import os
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Adjacency, Observer
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.queries.bounds import Bound
from farthing.queries.events import BalancedEvent, Event, RepeatedEvent
from farthing.queries.mechanisms import Array, Gaussian, enlarged, refuse_width
from farthing.queries.plan_lock import PlanLock
from farthing.queries.samplers import HasEvent, Indices, Poisson, event_of, one_turn

Integers = NDArray[np.int64]
InTurns = TypeVar("InTurns", "Cyclic", "Balanced")

MOST_BANDS = 1024
_GRID_SHARE = 2.0**-10  # the largest relative increase of the noise because of the grid
_FEWEST_BITS = 20
_CELLS = 2.0  # the most that rounding K moves a coordinate of two neighbours apart
FAR = 6  # noise is clamped at 2^6 standard deviations where it enters K
_NOBODY = np.empty(0, np.int64)


@functools.lru_cache(256)
def coefficients(bands: int, exponent: float) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^-exponent: the first column of C.

    Running sums are 1 / (1 - x), so with exponent 1/2 C is their square root, cut off after ``bands``
    (Kalinin & Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model Training",
    NeurIPS 2024). If there are many more steps than bands, larger exponents are better; the best one is
    within 1 % of the best banded Toeplitz matrix (`farthing.accounting.correlated`).
    """
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * ((exponent + j - 1) / j))
    return tuple(found)


@functools.lru_cache(64)
def spread(bands: int, exponent: float) -> float:
    """Return the norm of a column of C, rounded up."""
    return math.sqrt(math.fsum(c * c for c in coefficients(bands, exponent))) * (1 + 2.0**-50)


@functools.lru_cache(64)
def _grid(
    noise: float, norm: float, nearest: float, size: int, bands: int, exponent: float, survivors: int = 1
) -> tuple[int, float]:
    """Return the bits and the width of a cell: the standard deviation of Z is 2^bits cells."""
    column = spread(bands, exponent)
    cells = column + _CELLS * math.sqrt(bands - 1)
    if survivors > 1:
        cells, noise = column + survivors * cells, noise / math.sqrt(survivors)
    share = noise * norm / nearest * math.sqrt(size) * cells
    bits = max(_FEWEST_BITS, math.ceil(math.log2(share / _GRID_SHARE)))
    most = 52 - FAR - 2 * math.ceil(math.log2(bands)) if bands > 1 else 40  # bands² 2^(bits + 6 - 53) <= 1/2
    if bits > most:
        raise Unsupported(
            f"noise {noise:g} over {bands} bands on {size} coordinates needs a grid of 2^-{bits}, finer than "
            f"2^-{most}: take fewer bands or lower the noise multiplier"
        )
    exact = noise * norm * column * enlarged(norm, nearest) / (1 - share * 2.0**-bits)
    return bits, exact * 2.0**-bits


class _History:
    """The noise of the last turns of one plan, the latest first. It is as secret as the records."""

    def __init__(self, most: int) -> None:
        self.lock, self._kept = PlanLock(), deque[Any](maxlen=most)
        self._turn, self._kind = -1, None

    def before(self, turn: int, kind: Any) -> deque[Any]:
        """Return the noise of the turns before this one; empty if a turn is missing or the shape differs."""
        if turn != self._turn + 1 or kind != self._kind:
            self._kept.clear()
        return self._kept

    def keep(self, turn: int, kind: Any, noise: Any) -> None:
        self._kept.appendleft(noise)  # set first: an interruption here loses the history
        self._turn, self._kind = turn, kind


@dataclass(frozen=True, slots=True)
class BandedGaussian(Gaussian):
    """Gaussian noise whose later turns cancel a part of the noise of earlier turns of a plan.

    Parameters
    ----------
    noise_multiplier : float
        The standard deviation of independent noise with the price of one turn, over the bound. The noise of
        one turn is larger; the noise of sums over many turns is smaller.
    bands : int
        The number of turns over which noise is correlated, and of arrays that are kept; 1 is independent
        noise.
    exponent : float, default 0.5
        The exponent of (1 - x)^-exponent, whose coefficients are the first column of C; above 0 and at most
        1. `farthing.accounting.correlated.choose_bands` finds the best bands and exponent from public
        numbers.

    Raises
    ------
    InvalidValue
        If there are more than 1,024 bands, or the exponent is out of range.

    Notes
    -----
    The theorem is in `farthing.queries.correlated`. A query with more than one band needs a sampler that
    leaves as many turns between two eligible turns of a record (`Cyclic`). Without a promise every answer is
    a turn by itself, with independent noise.

    Examples
    --------
    >>> from farthing import ClipNorm, PerExample, Query
    >>> rows = PerExample(lambda rows, w: rows[0] - w)
    >>> query = Query(Cyclic(0.01, groups=8), rows, ClipNorm(1.0), BandedGaussian(1.0, bands=8))
    >>> query.remembers
    True
    """

    bands: int = 1
    exponent: float = 0.5
    _history: _History | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Gaussian.__post_init__(self)
        if validate.count(bands=self.bands) > MOST_BANDS:
            raise InvalidValue(f"bands must be at most {MOST_BANDS}, got {self.bands}")
        if validate.positive(exponent=self.exponent) > 1.0:  # a coefficient above 1 would need a wider slack
            raise InvalidValue(f"exponent must be above 0 and at most 1, got {self.exponent}")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The first column of C, which begins with 1.0."""
        return coefficients(self.bands, self.exponent)

    def begin(self) -> Self:
        """Return this mechanism with the state of a new plan."""
        begun = replace(self)
        object.__setattr__(begun, "_history", _History(self.bands - 1))
        return begun

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        norm = bound.norm()
        nearest = min(norm, bound.sensitivity(Adjacency.REPLACE_ONE))
        return _grid(self.noise_multiplier, norm, nearest, size, self.bands, self.exponent)

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        """Return the sum on a grid with the noise of this turn."""
        total = np.asarray(total, dtype=np.float64)
        refuse_width(bound, total.size)
        bits, cell = self.grid(bound, total.size)
        cells, drawn = lattice.on_grid(total, bound.scale, cell), lattice.gaussian(stream, total.size, bits)
        noise = drawn.reshape(total.shape)
        if self._history is not None:
            kind = total.shape, bits, os.getpid()  # a forked child begins anew
            with self._history.lock.held:
                noise -= correction(self._history.before(turn, kind), self.coefficients, bits, total.shape)
                self._history.keep(turn, kind, noise)
        released: Array = (cells + noise).astype(np.float64) * cell * bound.scale
        return released


@dataclass(frozen=True, slots=True)
class BandedShare(BandedGaussian):
    """A client's share of correlated noise on a sum to which at least ``survivors`` clients add a share.

    Parameters
    ----------
    noise_multiplier, bands, exponent
        As for `BandedGaussian`: the parameters of the noise in the sum, which also set the price of a share.
    survivors : int, default 1
        The least number of honest clients in a round; all of them release the same turn.

    Notes
    -----
    The theorem is in `farthing.queries.correlated`, "Shares". The noise of a share is smaller by √survivors.

    Examples
    --------
    >>> BandedShare(6.0, bands=4, survivors=9).unit_event()
    GaussianEvent(noise=6.0)
    """

    survivors: int = 1

    def __post_init__(self) -> None:
        BandedGaussian.__post_init__(self)
        validate.count(survivors=self.survivors)

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        norm = bound.norm()
        nearest = min(norm, bound.sensitivity(Adjacency.REPLACE_ONE))
        banded = self.noise_multiplier, norm, nearest, size, self.bands, self.exponent
        return _grid(*banded, self.survivors)


def correction(
    before: deque[Integers], column: tuple[float, ...], bits: int, shape: tuple[int, ...]
) -> Integers:
    """Return K, the part of the earlier turns' noise that is subtracted from this turn's."""
    total, far = np.zeros(shape), 2 ** (bits + FAR)
    for factor, noise in zip(column[1:], before, strict=False):
        total += factor * np.clip(noise, -far, far)
    return np.rint(total).astype(np.int64)


class Beginnings:
    """The public rule that says when draws begin: with a cycle or pass, and again after lost turns."""

    def __init__(self) -> None:
        self._last: int | None = None
        self.first = 0

    def begins(self, turn: int, sampler: Any, whole: bool = True) -> bool:
        """Record a turn; return whether groups are drawn anew, as after a draw that was not ``whole``."""
        groups, last, period = sampler.groups, self._last, sampler.period
        self._last = turn if last is None else max(turn, last)
        if last is not None and turn == last + 1 and whole:
            return False
        first = turn if last is None else max(turn, last + groups)
        self.first = -(-first // period) * period
        return True

    def idle(self, turn: int, sampler: Any) -> bool:
        """Record a turn; return whether nothing is drawn in it."""
        self.begins(turn, sampler)
        return turn < self.first


class TurnGroups:
    """The division of one plan's records into groups, and the turns of past draws."""

    def __init__(self) -> None:
        self._lock, self._beginnings = PlanLock(), Beginnings()
        self._members, self._places = list[Integers](), _NOBODY
        self._whole = True  # whether the last draw was completed

    def draw(self, sampler: Any, records: int, stream: Stream, turn: int) -> Integers:
        """Return the positions drawn; none where a division into groups would begin within a cycle or pass.

        After a draw that failed or was interrupted, groups and turns are drawn anew, as after a skipped turn:
        otherwise those of the last pass would be used twice.
        """
        with self._lock.held:
            if self._beginnings.begins(turn, sampler, self._whole):
                self._members = []
            self._whole = False
            first = self._beginnings.first
            drawn = self._drawn(sampler, records, stream, turn) if turn >= first else _NOBODY
            self._whole = True
            return drawn

    def _drawn(self, sampler: Any, records: int, stream: Stream, turn: int) -> Integers:
        if not self._members:
            self._members = _divided(stream, records, sampler.groups)
        members = self._members[turn % sampler.groups]
        if isinstance(sampler, Cyclic):
            return np.asarray(members[stream.poisson_indices(sampler.rate, len(members))])
        if turn % sampler.period == 0:
            self._places = stream.uniform_below(sampler.bins, records)
        return np.asarray(members[self._places[members] == turn % sampler.period // sampler.groups])

    def members(self, group: int) -> Integers:
        """Return the members of a group; none if the records are not divided yet."""
        with self._lock.held:
            return self._members[group] if self._members else _NOBODY


def _begun(sampler: InTurns) -> InTurns:
    """Return the sampler of one plan, whose groups are fixed."""
    begun = replace(sampler)
    object.__setattr__(begun, "_memory", TurnGroups())
    return begun


def _drawn(sampler: "Cyclic | Balanced", records: int, stream: Stream, turn: int) -> Integers:
    if sampler._memory is not None:
        return sampler._memory.draw(sampler, records, stream, turn)
    if turn:
        raise InvalidValue("draws of one plan must share their groups: draw from begin()")
    return TurnGroups().draw(sampler, records, stream, 0)


def _divided(stream: Stream, records: int, groups: int) -> list[Integers]:
    """Return the positions of each group; a record is in each with the same probability, independently."""
    group = stream.uniform_below(groups, records)
    return np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group, minlength=groups))[:-1])


@dataclass(frozen=True, slots=True)
class Cyclic:
    """A Poisson sample from one of ``groups`` groups of the records, which take turns.

    Parameters
    ----------
    sampling_rate : float
        The expected fraction of all records in a batch; at most 1 / ``groups``. At 1 / ``groups`` every
        record is in one batch of each cycle.
    groups : int
        The number of groups: a record is eligible in one of as many turns.

    Raises
    ------
    InvalidValue
        If ``sampling_rate`` times ``groups`` is above 1.

    Notes
    -----
    The ledger divides the records when a promise begins, independently of their values, so that the guarantee
    also holds under add-remove. One eligible turn costs a Poisson sample of the group.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Cyclic(0.01, groups=4).plan(GaussianEvent(1.1), 400)
    RepeatedEvent(event=PoissonEvent(rate=0.04, event=GaussianEvent(noise=1.1)), count=100)
    """

    sampling_rate: float
    groups: int
    _memory: TurnGroups | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate.rate(sampling_rate=self.sampling_rate)
        if self.sampling_rate * validate.count(groups=self.groups) > 1 + 2.0**-40:
            raise InvalidValue(
                f"sampling_rate * groups must be at most 1, got {self.sampling_rate} * {self.groups}: "
                f"take at most {int((1 + 2.0**-40) / self.sampling_rate)} groups"
            )

    @property
    def rate(self) -> float:
        """The probability that a record is drawn when its group is eligible."""
        return min(1.0, self.sampling_rate * self.groups)

    @property
    def period(self) -> int:
        """The turns of a cycle, after which the records may be divided anew."""
        return self.groups

    @property
    def separation(self) -> int:
        """The least number of turns between two eligible turns of a record."""
        return self.groups

    def begin(self) -> "Cyclic":
        """Return this sampler with the groups of a new plan."""
        return _begun(self)

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        return _drawn(self, records, stream, turn)

    def members(self, turn: int) -> Integers:
        """Return the records that may be drawn at this turn; none if the records are not divided yet."""
        return self._memory.members(turn % self.groups) if self._memory is not None else _NOBODY

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return Poisson(self.rate).amplify(event_of(step, self), observer)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of turns 0 to ``steps`` - 1: a record is eligible in one of ``groups`` turns."""
        one = self.amplify(event_of(step, self, validate.count(steps=steps)), observer)
        return RepeatedEvent(one, -(-steps // self.groups))


@dataclass(frozen=True, slots=True)
class Balanced:
    """A sampler with every record in exactly one batch per pass, at a secret turn drawn for it.

    Parameters
    ----------
    bins : int
        The number of turns of a pass that a record may be drawn for, with equal probability.
    groups : int, default 1
        The number of groups that take turns, and the most bands; a pass has ``bins`` times ``groups`` turns.

    Notes
    -----
    Each record's turn is drawn independently, so the guarantee holds under add-remove. Unless noise is small,
    a pass costs less than as many Poisson samples: `farthing.accounting.allocation` has the theorem, for
    add-remove and zero-out; there is none for replace-one. With banded noise the rows of different eligible
    turns of a record do not overlap, so its shifts are orthogonal, like those of independent noise, and the
    theorem holds with σ in place of the noise. After lost turns nothing is drawn until a pass begins.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Balanced(25, groups=4).plan(GaussianEvent(1.1), 400)
    RepeatedEvent(event=BalancedEvent(bins=25, event=GaussianEvent(noise=1.1)), count=4)
    """

    bins: int
    groups: int = 1
    _memory: TurnGroups | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", validate.count(bins=self.bins))
        object.__setattr__(self, "groups", validate.count(groups=self.groups))

    @property
    def period(self) -> int:
        """The turns of a pass."""
        return self.bins * self.groups

    @property
    def sampling_rate(self) -> float:
        """The expected fraction of all records in a batch."""
        return 1 / self.period

    @property
    def separation(self) -> int:
        """The least number of turns between two eligible turns of a record."""
        return self.groups

    def begin(self) -> "Balanced":
        """Return this sampler with the groups and turns of a new plan."""
        return _begun(self)

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        return _drawn(self, records, stream, turn)

    def members(self, turn: int) -> Integers:
        """Return the group of this turn; none if the records are not divided yet."""
        return self._memory.members(turn % self.groups) if self._memory is not None else _NOBODY

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return Poisson(1 / self.bins).amplify(one_turn(step, self), observer)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of turns 0 to ``steps`` - 1: a record is in one turn per pass."""
        one, seen = event_of(step, self, steps), observer is Observer.COORDINATOR
        event = Poisson(1.0).amplify(one, observer) if seen else BalancedEvent(self.bins, one)
        return RepeatedEvent(event, -(-validate.count(steps=steps) // self.period))
