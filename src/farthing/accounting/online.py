"""An accountant for long, mixed plans: a step costs microseconds, whatever came before.

Composition is kept in the Fourier domain: log M(λ + iu_k) of everything so far, at K frequencies and in
both directions, on a few lines λ a factor of two apart. A step adds one cached vector; δ(ε) is a dot
product; what is returned is the certified upper bound of `inversion`. Lines are brought up to date only
when a question needs them, all steps since the last question in one matrix product.

As for every tight price: the *prices* must not depend on the answers. Use it to account for a plan or to
watch a countdown; spending through prices chosen on the way is what `filters` are for.

>>> from farthing.events import GaussianEvent, PoissonEvent
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

from farthing import validate
from farthing.accounting import pld
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.pairs import Pair, of_event
from farthing.accounting.pld import TOO_MUCH
from farthing.accounting.transform import Complex, Contour, Real, Transform, log_moment, steepest, transform
from farthing.budget import Adjacency
from farthing.events import ComposedEvent, Event, RepeatedEvent, flatten

_LOWEST, _HIGHEST = -3, 24  # lines at λ = 2^_LOWEST ... 2^_HIGHEST
_VARIANCE_AT = 0.05
_FARTHEST = 12.0  # standard deviations: a δ of 1e-33
_TINY = math.log(1e-14)  # lines a factor of two apart are too coarse for a smaller δ
_FEW = 64  # distinct events up to which `pld` is asked where the lines are weak
_RECENT = 64  # steps added one by one; more than that are summed in one product
_REFRESH = 4096  # steps after which sums are formed anew, so that rounding does not pile up

Question = Callable[[list[Line]], float]


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
        self._steepest = math.inf  # tilts beyond see only the far tails of some step
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._adds = 0
        self._tables: dict[int, _Table] = {}
        self._weak = False  # whether the last answer had to be smoothed
        self._habits: dict[int, tuple[float, int]] = {}  # first guess -> variance then, and the best line

    def add(self, event: Event, count: int = 1) -> None:
        """Compose ``count`` more of ``event``."""
        row = self._rows.get(event)
        if row is None:
            for part, times in flatten(event):
                self._add(self._row(part), times * count)
        else:
            self._add(row, count)

    def delta(self, epsilon: float) -> float:
        """A certified upper bound on δ(ε); with few steps `pld.delta` is tighter and slower."""
        epsilon = validate.non_negative(epsilon=epsilon)
        if self._variance == 0.0:
            return 0.0
        tilt = min(epsilon / self._variance - 0.5, _FARTHEST / math.sqrt(self._variance))
        return math.exp(self._ask(tilt, lambda lines: max(line.log_delta(epsilon) for line in lines)))

    def epsilon(self, delta: float) -> float:
        """The smallest ε whose certified δ is at most ``delta``."""
        goal = math.log(validate.probability(delta=delta))
        if self._variance == 0.0:
            return 0.0
        tilt = min(math.sqrt(-2 * goal), _FARTHEST) / math.sqrt(self._variance)
        found = self._ask(tilt, lambda lines: _epsilon(lines, goal))
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
        self._recent.append((row, count))
        self._adds += 1

    def _row(self, event: Event) -> int:
        if event not in self._rows:
            pairs = of_event(event, self.adjacency)
            moment = max(log_moment(pair, _VARIANCE_AT) for pair in pairs)
            self._rows[event] = len(self._pairs)
            self._pairs.append(pairs)
            self._counts.append(0)
            self._variances.append(moment / (0.5 * _VARIANCE_AT * (1 + _VARIANCE_AT)))
            self._steepest = min(self._steepest, *(steepest(pair) for pair in pairs))
        return self._rows[event]

    def _ask(self, tilt: float, question: Question) -> float:
        """The answer on the line nearest to ``tilt``, or on one next to it where that is better.

        Any line gives a valid bound. The walk to the best one is repeated when the variance has grown
        by a tenth; in between, its outcome is kept.
        """
        tilt = min(tilt, self._steepest)
        power = _clamped(round(math.log2(tilt)) if tilt > 0 else _LOWEST)
        walked, best = self._habits.get(power, (0.0, power))
        if self._variance > 1.1 * walked:
            answers = {power: question(self._lines(power))}
            for side in (-1, 1):
                at = power
                while at + side == _clamped(at + side):
                    at += side
                    answers[at] = question(self._lines(at))
                    if answers[at] >= answers[at - side]:
                        break
            best = min(answers, key=lambda power: answers[power])
            self._habits[power] = self._variance, best
        lines = self._lines(best)
        answer = question(lines)
        self._weak = any(line.weak for line in lines)
        return answer

    def _lines(self, power: int) -> list[Line]:
        if power not in self._tables:
            tilt = 2.0**power
            self._tables[power] = _Table(Contour(tilt, 0.15 * tilt, self._frequencies))
        table = self._tables[power]
        table.extend(self._pairs)
        behind = self._adds - table.adds
        if behind > _RECENT or table.adds // _REFRESH != self._adds // _REFRESH:
            table.sum(self._counts)
        else:
            table.step(list(self._recent)[len(self._recent) - behind :])
        table.adds = self._adds
        return table.lines


class _Table:
    """The transforms of every event on one contour, both directions, and their sums."""

    def __init__(self, contour: Contour) -> None:
        self.contour = contour
        self.adds = 0
        self.lines = [Line.empty(contour), Line.empty(contour)]
        self._steps: tuple[list[Transform], list[Transform]] = ([], [])
        self._stacks: list[tuple[Complex, Real, Real]] | None = None

    def extend(self, pairs: list[tuple[Pair, ...]]) -> None:
        """Transform the events that are new since the last time."""
        for both in pairs[len(self._steps[0]) :]:
            found = [transform(pair, self.contour) or _UNKNOWN for pair in both]
            self._steps[0].append(found[0])
            self._steps[1].append(found[-1])
            self._stacks = None

    def step(self, recent: list[tuple[int, int]]) -> None:
        """Add a few steps."""
        for line, steps in zip(self.lines, self._steps, strict=True):
            for row, count in recent:
                line.add(steps[row], count)

    def sum(self, counts: list[int]) -> None:
        """Form the sums anew."""
        if self._stacks is None:
            self._stacks = [_stack(steps, self.contour.count + 1) for steps in self._steps]
        weights = np.array(counts, float)
        self.lines = [
            Line(self.contour, weights @ log, float(weights @ error), float(weights @ beyond), len(counts))
            for log, error, beyond in self._stacks
        ]


def _stack(steps: list[Transform], width: int) -> tuple[Complex, Real, Real]:
    logs = np.array([np.broadcast_to(step.log, width) for step in steps])
    return logs, np.array([step.error for step in steps]), np.array([step.log_beyond for step in steps])


_UNKNOWN = Transform(np.zeros(1, complex), math.inf, math.inf)  # beyond quadrature: this line is useless


def _clamped(power: int) -> int:
    return min(max(power, _LOWEST), _HIGHEST)


def _epsilon(lines: list[Line], goal: float) -> float:
    worst = 0.0
    for line in lines:
        tilt = line.contour.tilt
        ceiling = max(worst, (line.log_mass + log_factor(tilt) - goal) / tilt * (1 + 1e-12))
        if not ceiling < TOO_MUCH:
            return math.inf
        worst = smallest(partial(_excess, line, goal), worst, ceiling, 1e-9)
    return worst


def _excess(line: Line, goal: float, epsilon: float) -> float:
    return line.log_delta(epsilon) - goal
