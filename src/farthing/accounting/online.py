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
from farthing.accounting.pairs import Pair, largest_loss, of_event
from farthing.accounting.pld import TOO_MUCH
from farthing.accounting.transform import Complex, Contour, Real, Transform, log_moment, steepest, transform
from farthing.budget import Adjacency
from farthing.events import ComposedEvent, Event, RepeatedEvent, flatten

_LOWEST, _HIGHEST = -3, 24  # lines at λ = 2^_LOWEST ... 2^_HIGHEST
_VARIANCE_AT = 0.05
_FARTHEST = 12.0  # standard deviations: a δ of 1e-33
_NOTHING = 40.0  # -log of a δ that nobody asks to know better; steeper lines only cost
_TINY = math.log(1e-14)  # lines a factor of two apart are too coarse for a smaller δ
_FEW = 64  # distinct events up to which `pld` is asked where the lines are weak
_BELOW = 0.4  # octaves a line may lie above the saddle point: beyond, what wraps around shows
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
        return math.exp(self._ask(tilt, question, lambda _: epsilon, ("delta", epsilon)))

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
            moment = max(log_moment(pair, _VARIANCE_AT) for pair in pairs)
            self._rows[event] = len(self._pairs)
            self._pairs.append(pairs)
            self._counts.append(0)
            self._variances.append(moment / (0.5 * _VARIANCE_AT * (1 + _VARIANCE_AT)))
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
        lines = self._lines(best)
        answer = question(lines)
        self._weak = any(line.loose for line in lines)
        return answer

    def _best(self, power: int, question: Question, sides: tuple[int, ...]) -> int:
        """The line with the least answer, sought from ``power`` to these sides."""
        answers = {power: question(self._lines(power))}
        for side in sides:
            at = power
            while at + side == min(_clamped(at + side), self._highest):
                at += side
                answers[at] = question(self._lines(at))
                if answers[at] >= answers[at - side] and not math.isinf(answers[at]):
                    break
        return min(answers, key=lambda power: answers[power])

    def _better(self, power: int, question: Question, epsilon: Callable[[float], float]) -> int:
        """``power``, or the line next to it that it points to as closer to the saddle point."""
        answer = question(self._lines(power))
        off = 0.0 if math.isinf(answer) else self._lines(power)[0].octaves_off(epsilon(answer))
        aim = min(_clamped(power + math.floor(off + _BELOW)), self._highest)
        return aim if aim != power and question(self._lines(aim)) < answer else power

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
        self._stacks: list[tuple[Complex, Real]] | None = None

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
        self.lines = []
        for logs, others in self._stacks:
            error, beyond, reach = (weights @ others).tolist()
            self.lines.append(Line(self.contour, weights @ logs, error, beyond, len(counts), reach))


def _stack(steps: list[Transform], width: int) -> tuple[Complex, Real]:
    logs = np.array([np.broadcast_to(step.log, width) for step in steps])
    return logs, np.array([(step.error, step.log_beyond, step.reach) for step in steps])


_UNKNOWN = Transform(np.zeros(1, complex), math.inf, math.inf)  # beyond quadrature: this line is useless


def _clamped(power: int) -> int:
    return min(max(power, _LOWEST), _HIGHEST)


def _log_delta(epsilon: float, lines: list[Line]) -> float:
    return max(line.log_delta(epsilon) for line in lines)


def _epsilon(goal: float, lines: list[Line]) -> float:
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
