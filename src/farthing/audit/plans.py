"""Attack plans of many turns: correlated noise, truncated batches, and personal budgets.

Each run has one canary. It moves a coordinate that no other record moves; with truncated batches all records
move one coordinate. The attacker sees every answer and tests the log-likelihood ratio of all turns.

Correlated noise: the code that training uses (`farthing.queries.correlated`) divides the canaries into
groups, draws them and releases. The attacker knows C, the noise and the group of each canary, and removes the
correlation: C times the answers has independent noise again.

Personal budgets: the code that training uses (`farthing.queries.personal`) draws the canaries and weights
them. The attacker knows rates, weights and noise; a canary of each level tests the claim of its own level.

>>> target = BandedTarget(groups=4, bands=4, steps=12, runs=2000)
>>> [verdict.broken for verdict in target.verdicts(1.0, 0.999999, Stream(), lambda: None)]
[False]
>>> target = PersonalTarget((0.5, 2.0), 0.01, 5, runs=2000)
>>> [verdict.broken for verdict in target.verdicts(1.0, 0.999999, Stream(), lambda: None)]
[False, False]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farthing.accounting import pld
from farthing.accounting.personal import PersonalBudgets, plan_rates, plan_weights
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import Verdict, judge
from farthing.audit.games import GameBatch
from farthing.budget import Budget
from farthing.noise.lattice import Stream
from farthing.queries import buffered
from farthing.queries.bounds import ClipNorm
from farthing.queries.buffered import BufferedGaussian
from farthing.queries.correlated import Balanced, BandedGaussian, Cyclic, coefficients, spread
from farthing.queries.events import Event, GaussianEvent, RepeatedEvent, for_level
from farthing.queries.mechanisms import Gaussian
from farthing.queries.personal import Leveled, PersonalCyclic
from farthing.queries.query import PerExample, Query, Rows
from farthing.queries.samplers import Indices, TruncatedPoisson
from farthing.queries.truncation import TruncatedCyclic

Array = NDArray[np.float64]

_BOUND, _CANARY = ClipNorm(1.0), PerExample(lambda rows, w: rows[0])


@dataclass(frozen=True, slots=True)
class BandedTarget:
    """A plan of correlated noise on cyclic draws. Bands beyond the groups break its claim."""

    groups: int
    bands: int
    steps: int
    sampling_rate: float = 0.15
    noise_multiplier: float = 1.0
    exponent: float = 0.7
    delta: float = 0.01
    runs: int = 160_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        claim, runs = self.claim(), max(200, round(self.runs * scale))
        heard = [self.played(present, runs, stream) for present in (False, True)]
        tick()
        named = [("canary whose group is known, likelihood ratio of all turns", test_statistics.value)]
        return [judge(heard[0], heard[1], claim, named, confidence)]

    def claim(self) -> Budget:
        """Return what the whole plan is charged as."""
        event = self.sampler().plan(GaussianEvent(self.noise_multiplier), self.steps)
        budget = Budget(1.0, self.delta)
        return budget.with_(pld.epsilon(event, self.delta, budget.adjacency), self.delta)

    def played(self, present: bool, runs: int, stream: Stream) -> Array:
        """Return the log-likelihood ratio of all answers, "with" over "without", of each run."""
        sampler = self.sampler().begin()
        noise, column = self.noise().begin(), self.column()
        answers, group = np.empty((self.steps, runs)), np.zeros(runs, np.int64)
        for turn in range(self.steps):
            drawn, totals = sampler.draw(runs, stream, turn), np.zeros(runs)
            group[sampler.members(turn)] = turn % self.groups
            if present:
                np.add.at(totals, np.asarray(drawn), 1.0)  # as often as it was drawn
            answers[turn] = noise.release(totals, _BOUND, stream, turn)
        return self._losses(self._independent(answers, column), column, group)

    def sampler(self) -> "Cyclic | Balanced | LevelDraws":
        """Return the draws that are attacked."""
        return Cyclic(self.sampling_rate, self.groups)

    def noise(self) -> BandedGaussian | BufferedGaussian:
        """Return the mechanism that is attacked."""
        return BandedGaussian(self.noise_multiplier, self.bands, self.exponent)

    def column(self) -> Array:
        """Return the first column of C."""
        return np.array(coefficients(self.bands, self.exponent))

    def deviation(self) -> float:
        """Return the standard deviation of Z, for a noise multiplier of 1."""
        return spread(self.bands, self.exponent)

    def _independent(self, answers: Array, column: Array) -> Array:
        """Return C times the answers: sums of shifts, with independent noise."""
        found = np.zeros_like(answers)
        for j, factor in enumerate(column):
            found[j:] += factor * answers[: len(answers) - j]
        return found

    def _losses(self, rows: Array, column: Array, group: NDArray[np.int64]) -> Array:
        """Return the log-likelihood ratio of all rows: exact where every chance is taken or none overlap."""
        variance = (self.noise_multiplier * self.deviation()) ** 2
        rate, losses = self.sampling_rate * self.groups, np.zeros(rows.shape[1])
        for own in range(self.groups):
            mine = group == own
            for shift in self._shifts(own, column, whole=rate >= 1):
                ratio = (shift @ rows[:, mine] - shift @ shift / 2) / variance
                losses[mine] += np.log1p(rate * np.expm1(np.minimum(ratio, 500.0)))
        return losses

    def _shifts(self, own: int, column: Array, whole: bool) -> list[Array]:
        """Return what each chance of a group adds to the rows, or all of them together."""
        shifts = [np.zeros(self.steps) for _ in range(own, self.steps, self.groups)]
        for turn, shift in zip(range(own, self.steps, self.groups), shifts, strict=True):
            shift[turn : turn + len(column)] = column[: self.steps - turn]
        return [np.sum(shifts, axis=0)] if whole and shifts else shifts


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedTarget(BandedTarget):
    """A plan of noise by buffers, every canary in each pass. Noise made for fewer passes breaks its claim."""

    bands: int = 0
    sampling_rate: float = 0.25
    passes: int = 3
    weights: tuple[float, ...] = (0.2, 0.4)
    decays: tuple[float, ...] = (0.95, 0.6)

    def noise(self) -> BufferedGaussian:
        return BufferedGaussian(
            self.noise_multiplier, self.weights, self.decays, self.steps, self.steps // self.passes
        )

    def column(self) -> Array:
        return buffered.column(self.weights, self.decays, self.steps)

    def deviation(self) -> float:
        return self.noise().column_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedTarget(BandedTarget):
    """A plan of correlated noise on balanced draws. A pass whose turns are drawn twice breaks its claim."""

    groups: int = 2
    bands: int = 2
    steps: int = 16
    bins: int = 4
    noise_multiplier: float = 1.5

    def sampler(self) -> Balanced:
        return Balanced(self.bins, self.groups)

    def _losses(self, rows: Array, column: Array, group: NDArray[np.int64]) -> Array:
        """Return the log-likelihood ratio of all rows: of each pass the mean over the turns of a canary."""
        variance, losses = (self.noise_multiplier * self.deviation()) ** 2, np.zeros(rows.shape[1])
        for own in range(self.groups):
            mine, shifts = group == own, np.array(self._shifts(own, column, whole=False))
            for first in range(0, len(shifts), self.bins):
                now = shifts[first : first + self.bins]
                ratios = (now @ rows[:, mine] - np.square(now).sum(axis=1, keepdims=True) / 2) / variance
                losses[mine] += np.log(np.exp(np.minimum(ratios, 500.0)).mean(axis=0))
        return losses


@dataclass(frozen=True, slots=True)
class LevelDraws:
    """The draws, and the price, of canaries of the first of two levels of budget, in turns."""

    both: PersonalCyclic

    def plan(self, event: Event, steps: int) -> Event:
        """Return what the first level pays."""
        return for_level(self.both.plan(event, steps), 0)

    def begin(self) -> "LevelDraws":
        """Return these draws for one plan."""
        return LevelDraws(self.both.begin())

    def draw(self, records: int, stream: Stream, turn: int) -> Indices:
        """Return which canaries are drawn."""
        canaries = Leveled(Rows(np.ones((records, 1))), np.zeros(records, np.int64), (1.0, 2.0))
        return self.both.draw_from(canaries, stream, turn)

    def members(self, turn: int) -> NDArray[np.int64]:
        """Return the canaries whose turn it is."""
        assert self.both._memory is not None
        return self.both._memory.members(turn)


@dataclass(frozen=True, slots=True)
class PersonalBandedTarget(BandedTarget):
    """A plan of correlated noise on draws at personal rates; the other level is drawn at ``other_rate``."""

    sampling_rate: float = 0.05
    other_rate: float = 0.25

    def sampler(self) -> LevelDraws:
        return LevelDraws(PersonalCyclic((self.sampling_rate, self.other_rate), groups=self.groups))


@dataclass(frozen=True, slots=True)
class TruncatedTarget:
    """Truncated Poisson batches of a canary and of ``others`` records that move the sum the other way.

    The canary is worst off in a full batch, where it pushes out one of the others.
    """

    others: int = 20
    sampling_rate: float = 0.9
    max_batch_size: int = 16
    noise_multiplier: float = 2.0
    steps: int = 3
    delta: float = 0.05
    runs: int = 60_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        claim, runs = self.claim(), max(200, round(self.runs * scale))
        heard = [self.played(present, runs, stream) for present in (False, True)]
        tick()
        named = [("canary among records that it pushes out, likelihood ratio", test_statistics.value)]
        return [judge(heard[0], heard[1], claim, named, confidence, threshold=0.65 * claim.epsilon)]

    def sampler(self) -> TruncatedPoisson:
        """Return the draws that are attacked."""
        return TruncatedPoisson(self.sampling_rate, self.max_batch_size, self.others + 1)

    def claim(self) -> Budget:
        """Return what the whole plan is charged as."""
        event = RepeatedEvent(self.sampler().amplify(GaussianEvent(self.noise_multiplier)), self.steps)
        budget = Budget(1.0, self.delta)
        return budget.with_(pld.epsilon(event, self.delta, budget.adjacency), self.delta)

    def played(self, present: bool, runs: int, stream: Stream) -> Array:
        """Return the log-likelihood ratio of all answers, "with" over "without", of each run."""
        values, sampler = np.array([1.0] * present + [-1.0] * self.others), self.sampler()
        drawn = (sampler.draw(len(values), stream, turn) for _ in range(runs) for turn in range(self.steps))
        sums = np.array([values[indices].sum() for indices in drawn])
        answers = np.asarray(Gaussian(self.noise_multiplier).release(sums, _BOUND, stream))
        ratio = np.log(self._density(True, answers)) - np.log(self._density(False, answers))
        return np.asarray(ratio.reshape(runs, self.steps).sum(axis=1))

    def _density(self, present: bool, answers: Array) -> Array:
        """Return the density of an answer, but for a factor: a mixture over who is kept."""
        rate, most, found = self.sampling_rate, self.max_batch_size, np.full_like(answers, 1e-300)
        for k in range(self.others + 1):
            chance = math.comb(self.others, k) * rate**k * (1 - rate) ** (self.others - k)
            kept = rate * present * min(1.0, most / (k + 1))  # the canary
            for part, total in ((1 - kept, -min(k, most)), (kept, 1.0 - min(k, most - 1))):
                found += chance * part * np.exp(-(((answers - total) / self.noise_multiplier) ** 2) / 2)
        return found


@dataclass(frozen=True, slots=True)
class TruncatedBandedTarget(TruncatedTarget):
    """Truncated batches of two groups in turns, with noise of two bands; the group of the canary is known.

    The attacker takes the correlation out: row t is the sum of turn t, a part of that before, and
    independent noise. Both sums are hidden, so that the likelihood is added up along the turns.
    """

    others: int = 41
    steps: int = 6
    exponent: float = 0.7
    runs: int = 36_000

    def sampler(self) -> TruncatedCyclic:  # type: ignore[override]
        return TruncatedCyclic(self.sampling_rate / 2, 2, self.max_batch_size, self.others + 1)

    def claim(self) -> Budget:
        event = self.sampler().plan(GaussianEvent(self.noise_multiplier), self.steps)
        budget = Budget(1.0, self.delta)
        return budget.with_(pld.epsilon(event, self.delta, budget.adjacency), self.delta)

    def played(self, present: bool, runs: int, stream: Stream) -> Array:
        values, own = np.array([1.0] * present + [-1.0] * self.others), np.zeros(runs, np.int64)
        sums, answers = np.zeros((self.steps, runs)), np.zeros((self.steps, runs))
        for one in range(runs):
            sampler = self.sampler().begin()
            for turn in range(self.steps):
                sums[turn, one] = values[sampler.draw(len(values), stream, turn)].sum()
            first = sampler.members(0)
            own[one] = 0 not in first if present else 2 * len(first) > self.others  # the group with a place
        noise = BandedGaussian(self.noise_multiplier, 2, self.exponent).begin()
        for turn in range(self.steps):
            answers[turn] = noise.release(sums[turn], _BOUND, stream, turn)
        rows = answers.copy()
        rows[1:] += coefficients(2, self.exponent)[1] * answers[:-1]
        return self._likelihood(rows, own, True) - self._likelihood(rows, own, False)

    def _likelihood(self, rows: Array, own: NDArray[np.int64], present: bool) -> Array:
        """Return the logarithm of the density of all rows, but for a factor."""
        totals = np.arange(-self.max_batch_size, 2.0)
        deviation = self.noise_multiplier * spread(2, self.exponent)
        mine = self._law((self.others - 1) // 2, present, totals)
        other = self._law((self.others + 1) // 2, False, totals)
        before, found = np.zeros((len(totals), rows.shape[1])), np.zeros(rows.shape[1])
        before[totals == 0] = 1.0  # nothing before the first turn
        for turn, row in enumerate(rows):
            chances = np.where(own == turn % 2, mine[:, None], other[:, None])
            ahead = totals[:, None, None] + coefficients(2, self.exponent)[1] * totals[None, :, None]
            dense = np.exp(-(((row - ahead) / deviation) ** 2) / 2) + 1e-300
            before = chances * np.einsum("nbr,br->nr", dense, before)
            scale = before.sum(axis=0)
            before, found = before / scale, found + np.log(scale)
        return found

    def _law(self, others: int, present: bool, totals: Array) -> Array:
        """Return the probabilities of these sums of one turn: of ``others`` at -1, and perhaps the canary."""
        rate, most, found = self.sampling_rate, self.max_batch_size, np.zeros(len(totals))
        for k in range(others + 1):
            chance = math.comb(others, k) * rate**k * (1 - rate) ** (others - k)
            kept = rate * present * min(1.0, most / (k + 1))
            found[totals == -min(k, most)] += chance * (1 - kept)
            found[totals == 1.0 - min(k, most - 1)] += chance * kept
        return found


_RATE, _EACH = 0.3, 1000  # the mean sampling rate, and how many are on each level


@dataclass(frozen=True, slots=True)
class PersonalTarget:
    """A target of Gaussian batches of records with personal budgets, by rates or by weights."""

    epsilons: tuple[float, ...]
    delta: float
    steps: int
    way: Literal["rates", "weights"] = "rates"
    runs: int = 40_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        query, budget = self.planned()
        runs, found = max(200, round(self.runs * scale)), []
        for level, epsilon in enumerate(self.epsilons):
            heard = [self.played(query, level, present, runs, stream) for present in (False, True)]
            tick()
            named = [(f"canary of budget {epsilon:g}, likelihood ratio", test_statistics.value)]
            claim = budget.with_(epsilon, self.delta)
            found.append(judge(heard[0], heard[1], claim, named, confidence, threshold=epsilon))
        return found

    def planned(self) -> tuple[Query, Budget]:
        """Return the query whose ``steps`` answers spend every level, and the largest budget."""
        people = PersonalBudgets(np.repeat(self.epsilons, _EACH))
        budget = people.budget(self.delta)
        if self.way == "weights":
            sampler, noise = plan_weights(people, budget, steps=self.steps, sampling_rate=_RATE)
        else:
            plan = plan_rates(people, budget, steps=self.steps, sampling_rate=_RATE)
            sampler, noise = plan.sampler, plan.noise_multiplier
        return Query(sampler, _CANARY, _BOUND, Gaussian(noise)), budget

    def played(self, query: Query, level: int, present: bool, runs: int, stream: Stream) -> Array:
        """Return the log-likelihood ratios of all answers, "with" over "without", of each run."""
        sampler, noise = query.sampler, query.mechanism.noise_multiplier  # type: ignore[attr-defined]
        canaries = Leveled(Rows(np.ones((runs, 1))), np.full(runs, level), self.epsilons)
        one = Leveled(Rows(np.ones((1, 1))), np.array([level]), self.epsilons)
        moved = float(query.total(one, np.array([0]), None)[0])
        batch = GameBatch(sampler.sampling_rates[level], noise / sampler.weights[level])  # type: ignore[attr-defined]
        losses = np.zeros(runs)
        for turn in range(self.steps):
            totals = np.zeros(runs)
            if present:
                totals[query.draw(canaries, stream, turn)] = moved
            answers = np.asarray(query.mechanism.release(totals, _BOUND, stream))
            losses += batch.losses(answers / sampler.weights[level])  # type: ignore[attr-defined]
        return losses
