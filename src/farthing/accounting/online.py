"""An accountant for long, mixed plans: a step costs microseconds, whatever came before.

Composition is kept in the Fourier domain: M(λ + iu_k) of everything so far over M(λ), at K frequencies
and in both directions, on a few lines λ a factor of two apart. A step multiplies one cached vector in;
δ(ε) is a dot product; what is returned is the certified upper bound of `inversion`. Lines are brought up
to date only when a question needs them, and Gaussians on Poisson samples are transformed many at a time,
by one product with a table that all noises share (`transform.Chart`).

As for every tight price: the *prices* must not depend on the answers. Use it to account for a plan or to
watch a countdown; spending through prices chosen on the way is what `filters` are for.

>>> from farthing.queries.events import (GaussianEvent, PoissonEvent)
>>> accountant = OnlineAccountant()
>>> for t in range(10_000):
...     accountant.add(PoissonEvent(0.01, GaussianEvent(4.0)))
>>> round(accountant.epsilon(1e-5), 5)
0.94687
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from farthing import validate
from farthing.accounting import pld
from farthing.accounting.inversion import Sum, bound, log_factor, smallest, turned
from farthing.accounting.pairs import Pair, largest_loss, of_event
from farthing.accounting.pld import TOO_MUCH
from farthing.accounting.transform import (
    ROUNDING,
    Complex,
    Contour,
    Real,
    chart,
    log_moment,
    sampled,
    steepest,
    transform,
)
from farthing.budget import Adjacency
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent, flatten

_LOWEST, _HIGHEST = -3, 24  # lines at λ = 2^_LOWEST ... 2^_HIGHEST
_VARIANCE_AT = 0.05
_FARTHEST = 12.0  # standard deviations: a δ of 1e-33
_NOTHING = 40.0  # -log of a δ that nobody asks to know better; steeper lines only cost
_TINY = math.log(1e-14)  # lines a factor of two apart are too coarse for a smaller δ
_FEW = 64  # distinct events up to which `pld` is asked where the lines are weak
_ALIKE = 1  # the same for a δ, which is asked for after every step
_BELOW = 0.4  # octaves a line may lie above the saddle point: beyond, what wraps around shows
_RECENT = 64  # steps added one by one; more than that are multiplied all at once
_REFRESH = 4096  # steps after which sums are formed anew, so that rounding does not pile up
_CHUNK = 256  # steps transformed at a time

Question = Callable[["_Table"], float]


class OnlineAccountant:
    """Accounts for events as they come. ``frequencies`` (K) trades speed for reach."""

    def __init__(self, adjacency: Adjacency = Adjacency.ADD_REMOVE, frequencies: int = 128) -> None:
        self.adjacency = validate.choice(Adjacency, adjacency=adjacency)
        self._frequencies = validate.count(frequencies=frequencies)
        self._rows: dict[Event, int] = {}  # every simple event seen, and its place in the lists below
        self._pairs: list[tuple[Pair, ...]] = []
        self._counts: list[int] = []
        self._variances: list[float] = []
        self._variance = 0.0  # of the privacy loss so far, to choose a line by
        self._losses: list[float] = []
        self._most = 0.0  # the largest privacy loss possible
        self._steepest = math.inf  # tilts beyond see only the far tails of some step
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._adds = 0
        self._tables: dict[int, _Table] = {}
        self._highest = _HIGHEST  # line worth asking for the question at hand
        self._weak = False  # whether errors were a visible part of the last answer
        self._habits: dict[tuple[str, float], tuple[float, float, int]] = {}  # variances then, best line

    def add(self, event: Event, count: int = 1) -> None:
        """Compose ``count`` more of ``event``."""
        count = validate.count(count=count)
        row = self._rows.get(event)
        if row is None:
            for part, times in flatten(event):
                self._add(self._row(part), times * count)
        else:
            self._add(row, count)

    def delta(self, epsilon: float) -> float:
        """A certified upper bound on δ(ε), not sharpened below 1e-17; `pld.delta` is tighter and slower."""
        epsilon = validate.non_negative(epsilon=epsilon)
        if self._most * (1 + 1e-9) <= epsilon:
            return 0.0
        tilt = min(epsilon / self._variance - 0.5, _FARTHEST / math.sqrt(self._variance))
        self._highest = _clamped(math.ceil(math.log2(_NOTHING / epsilon))) if epsilon > 1e-6 else _HIGHEST
        question = partial(_log_delta, epsilon)
        found = math.exp(self._ask(tilt, question, lambda _: epsilon, ("delta", epsilon)))
        if self._weak and len(self._rows) <= _ALIKE:
            found = min(found, pld.delta(self.plan, epsilon, self.adjacency))
        return found

    def epsilon(self, delta: float) -> float:
        """The smallest ε whose certified δ is at most ``delta``."""
        goal = math.log(validate.probability(delta=delta))
        if self._most == 0.0:
            return 0.0
        tilt = min(math.sqrt(-2 * goal), _FARTHEST) / math.sqrt(self._variance)
        self._highest = _HIGHEST
        question = partial(_epsilon, goal)
        found = self._ask(tilt, question, lambda answer: answer, ("epsilon", delta))
        found = min(found, self._most * (1 + 1e-9))
        if (self._weak or goal < _TINY) and len(self._rows) <= _FEW:
            found = min(found, pld.epsilon(self.plan, delta, self.adjacency))
        return found

    @property
    def plan(self) -> ComposedEvent:
        """Everything composed so far."""
        parts = zip(self._rows, self._counts, strict=True)
        return ComposedEvent(tuple(RepeatedEvent(event, count) for event, count in parts if count))

    def _add(self, row: int, count: int) -> None:
        self._counts[row] += count
        self._variance += count * self._variances[row]
        self._most += count * self._losses[row]
        self._recent.append((row, count))
        self._adds += 1

    def _row(self, event: Event) -> int:
        if event not in self._rows:
            pairs = of_event(event, self.adjacency)
            self._rows[event] = len(self._pairs)
            self._pairs.append(pairs)
            self._counts.append(0)
            self._variances.append(_variance(pairs))
            self._losses.append(max(largest_loss(pair) for pair in pairs))
            self._steepest = min(self._steepest, *(steepest(pair) for pair in pairs))
        return self._rows[event]

    def _ask(
        self, tilt: float, question: Question, epsilon: Callable[[float], float], habit: tuple[str, float]
    ) -> float:
        """The answer on the best line, ``tilt`` being a first guess; ``epsilon`` says where an answer lies.

        Any line gives a valid bound. The choice is kept for the next such question (a ``habit``), looked
        at again when the variance has grown by a tenth, and made anew when it has grown fourfold (a tenth
        while events are few). Every line asked has to be told of all events, so with many of them only
        lines below are asked: as the variance grows the saddle point comes down.
        """
        tilt = min(tilt, self._steepest)
        power = min(_clamped(round(math.log2(tilt)) if tilt > 0 else _LOWEST), self._highest)
        if len(self._habits) > 256:
            self._habits.clear()
        chosen, seen, best = self._habits.get(habit, (0.0, 0.0, power))
        few = len(self._rows) <= _FEW
        if self._variance > (1.1 if few else 4.0) * chosen:
            best = self._best(best, question, (-1, 1) if few or chosen == 0.0 else (-1,))
            self._habits[habit] = self._variance, self._variance, best
        elif self._variance > 1.1 * seen:
            best = self._better(best, question, epsilon)
            self._habits[habit] = chosen, self._variance, best
        table = self._table(best)
        answer = question(table)
        self._weak = table.loose
        return answer

    def _best(self, power: int, question: Question, sides: tuple[int, ...]) -> int:
        """The line with the least answer, sought from ``power`` to these sides."""
        answers = {power: question(self._table(power))}
        for side in sides:
            at = power
            while at + side == min(_clamped(at + side), self._highest):
                at += side
                answers[at] = question(self._table(at))
                if answers[at] >= answers[at - side] and not math.isinf(answers[at]):
                    break
        return min(answers, key=lambda power: answers[power])

    def _better(self, power: int, question: Question, epsilon: Callable[[float], float]) -> int:
        """``power``, or the line next to it that it points to as closer to the saddle point."""
        answer = question(self._table(power))
        off = 0.0 if math.isinf(answer) else self._table(power).octaves_off(epsilon(answer))
        aim = min(_clamped(power + math.floor(off + _BELOW)), self._highest)
        return aim if aim != power and question(self._table(aim)) < answer else power

    def _table(self, power: int) -> "_Table":
        table = self._tables.get(power)
        if table is None:
            tilt = 2.0**power
            table = self._tables[power] = _Table(Contour(tilt, 0.15 * tilt, self._frequencies))
        if table.rows < len(self._pairs):
            table.extend(self._pairs)
        if behind := self._adds - table.adds:
            if behind > _RECENT or table.adds // _REFRESH != self._adds // _REFRESH:
                table.compose(self._counts)
            else:
                for back in range(behind, 0, -1):
                    table.step(*self._recent[-back])
            table.adds = self._adds
        return table


class _Table:
    """Every event's transform on one contour, in both directions, and what they multiply to.

    ``values`` are M(λ + iu)/M(λ). Columns of ``others``: log M(λ), the error, log G/M(λ) beyond the last
    frequency, and the turn and fall from u = 0 to the next frequency, which point to the saddle point.
    """

    def __init__(self, contour: Contour) -> None:
        self.contour = contour
        self.rows = 0
        self.adds = 0
        self.loose = False
        self._values: Complex = np.empty((16, 2, contour.count + 1), complex)
        self._others: Real = np.empty((16, 2, 5))
        self._product: Complex = np.ones((2, contour.count + 1), complex)
        self._sums: Real = np.zeros((2, 5))
        self._factors: dict[float, tuple[Complex, float]] = {}

    def extend(self, pairs: list[tuple[Pair, ...]]) -> None:
        """Transform the events that are new since the last time."""
        if len(pairs) > len(self._values):
            more = max(len(pairs), 2 * len(self._values)) - len(self._values)
            self._values = np.concatenate([self._values, np.empty((more, *self._values.shape[1:]), complex)])
            self._others = np.concatenate([self._others, np.empty((more, 2, 5))])
        charts: dict[tuple[float, int], list[tuple[int, float]]] = {}
        for row in range(self.rows, len(pairs)):
            if known := sampled(pairs[row]):
                charts.setdefault((known[0], math.frexp(known[1])[1] - 1), []).append((row, known[1]))
            else:
                self._transform(row, pairs[row])
        for (rate, octave), members in charts.items():
            self._chart(rate, octave, members, pairs)
        new = slice(self.rows, len(pairs))
        beside = self._values[new, :, min(1, self.contour.count)]
        self._others[new, :, 3] = np.arctan2(beside.imag, beside.real)
        self._others[new, :, 4] = -np.log(np.abs(beside) + 1e-300)
        self._others[new, :, 1] += 2 * ROUNDING  # of the product that every step costs
        self.rows = len(pairs)

    def _chart(
        self, rate: float, octave: int, members: list[tuple[int, float]], pairs: list[tuple[Pair, ...]]
    ) -> None:
        shared = chart(rate, octave, self.contour)
        if shared is None:
            for row, _ in members:
                self._transform(row, pairs[row])
            return
        for first in range(0, len(members), _CHUNK):
            rows, shifts = zip(*members[first : first + _CHUNK], strict=True)
            batch, at = shared(np.array(shifts)), list(rows)
            self._values[at] = batch.values
            self._others[at, :, 0], self._others[at, :, 1] = batch.log_mass, batch.error
            self._others[at, :, 2] = batch.log_beyond

    def _transform(self, row: int, pairs: tuple[Pair, ...]) -> None:
        for way in range(2):
            step = transform(pairs[min(way, len(pairs) - 1)], self.contour)
            if step is None:  # beyond quadrature: this line is useless
                self._values[row, way], self._others[row, way] = 1.0, (0.0, math.inf, 0.0, 0.0, 0.0)
                continue
            mass = float(step.log[0].real)
            self._values[row, way] = np.exp(step.log - mass)
            error = step.error + (4 * step.reach + 4) * ROUNDING
            self._others[row, way] = mass, error, step.log_beyond - mass + 4 * ROUNDING * abs(mass), 0.0, 0.0

    def step(self, row: int, count: int) -> None:
        """Compose ``count`` more of the event in ``row``."""
        if count == 1:
            self._product *= self._values[row]
            self._sums += self._others[row]
        else:
            self._product *= _power(self._values[row : row + 1], np.array([count]))
            self._sums += self._others[row] * count

    def compose(self, counts: list[int]) -> None:
        """Form the product anew."""
        times = np.array(counts)
        self._product = _power(self._values[: self.rows], times)
        self._sums = np.tensordot(times.astype(float), self._others[: self.rows], 1)

    def log_delta(self, epsilon: float, keep: bool = True) -> float:
        """log of a certified upper bound on δ(ε), the larger of both directions'."""
        factors, phase = self._kernel(epsilon, keep)
        totals = (self._product @ factors).real.tolist()
        self.loose, worst = False, -math.inf
        for way, (others, total) in enumerate(zip(self._sums.tolist(), totals, strict=True)):
            worst = max(worst, self._bound(way, others, total, epsilon, phase))
        return worst

    def log_delta_one(self, way: int, epsilon: float) -> float:
        """The same in one direction."""
        factors, phase = self._kernel(epsilon, False)
        total = float((self._product[way] @ factors).real)
        return self._bound(way, self._sums[way].tolist(), total, epsilon, phase)

    def _kernel(self, epsilon: float, keep: bool) -> tuple[Complex, float]:
        found = self._factors.get(epsilon)
        if found is None:
            found = turned(self.contour, epsilon)
            if keep:
                if len(self._factors) > 64:
                    self._factors.clear()
                self._factors[epsilon] = found
        return found

    def _bound(self, way: int, others: list[float], total: float, epsilon: float, phase: float) -> float:
        mass, error, beyond, *_ = others
        mass += (self.rows + _REFRESH) * ROUNDING * abs(mass)
        if not error < math.inf:
            self.loose = True
            return 0.0
        done = Sum(mass, error, beyond, total, phase)
        found = bound(self.contour, done, epsilon)
        log_delta = found.log_delta
        if found.excess > 0:
            log_delta = min(
                log_delta, bound(self.contour, done, epsilon, self._product[way], found.excess).log_delta
            )
        self.loose = self.loose or found.loose
        return log_delta

    def log_mass(self, way: int) -> float:
        """log M(λ), rounded up."""
        mass, error, *_ = self._sums[way].tolist()
        return float(mass + error + (self.rows + _REFRESH) * ROUNDING * abs(mass))

    def octaves_off(self, epsilon: float) -> float:
        """About log2 of the tilt of the saddle point over this one, by a Newton step; -1 if far below."""
        tilt, spacing = self.contour.tilt, self.contour.spacing
        *_, turn, fall = self._sums[0].tolist()  # fall: half the variance under the tilt, times h²
        if fall > 3.0:
            return -1.0
        slope = turn / spacing - epsilon - 1 / tilt - 1 / (tilt + 1)
        bend = 2 * max(fall, 0.0) / spacing**2 + 1 / tilt**2 + 1 / (tilt + 1) ** 2
        return math.log2(min(max(1 - slope / (bend * tilt), 0.5), 4.0))


def _variance(pairs: tuple[Pair, ...]) -> float:
    """About the variance of the privacy loss, to choose a line by."""
    if known := sampled(pairs):  # twice the divergence, which convexity and χ² bound
        rate, shift = known
        return max(min(rate * shift * shift, rate * rate * math.expm1(min(shift * shift, 700.0))), 1e-200)
    moment = max(log_moment(pair, _VARIANCE_AT) for pair in pairs)
    return moment / (0.5 * _VARIANCE_AT * (1 + _VARIANCE_AT))


def _power(values: Complex, counts: npt.NDArray[np.int64]) -> Complex:
    """Π values^counts, a binary digit of the counts at a time: no logarithms, so no branches to lose."""
    total: Complex = np.ones(values.shape[1:], complex)
    for digit in range(int(counts.max(initial=0)).bit_length() - 1, -1, -1):
        total *= total
        which = np.flatnonzero(counts >> digit & 1)
        if len(which):
            total *= np.multiply.reduce(values[which], axis=0)
    return total


def _clamped(power: int) -> int:
    return min(max(power, _LOWEST), _HIGHEST)


def _log_delta(epsilon: float, table: _Table) -> float:
    return table.log_delta(epsilon)


def _epsilon(goal: float, table: _Table) -> float:
    worst, tilt, loose = 0.0, table.contour.tilt, False
    for way in range(2):
        table.loose = False
        ceiling = max(worst, (table.log_mass(way) + log_factor(tilt) - goal) / tilt * (1 + 1e-12))
        if not ceiling < TOO_MUCH:
            table.loose = True
            return math.inf
        worst = smallest(partial(_excess, table, way, goal), worst, ceiling, 1e-9)
        table.loose = False
        table.log_delta_one(way, worst)
        loose = loose or table.loose
    table.loose = loose
    return worst


def _excess(table: _Table, way: int, goal: float, epsilon: float) -> float:
    return table.log_delta_one(way, epsilon) - goal
