"""Play games against adaptive choices: the entries of a menu, and the scores of a tuning.

`MenuGame`: the adversary sees every answer and picks the next entry. All runs are vectorised. In each run a
canary moves one coordinate by 1 where it is drawn, and no other record moves that coordinate. After every
block the adversary knows the log-likelihood ratio of all answers so far, and buys the block that maximises
its expected payoff at the end, E[(1 - e^(ε - loss))₊], where ε is the claim's. The value of this game bounds
δ in `farthing.accounting.menu`; here the moves come from a separate table, in which the loss of a block is
approximated as Gaussian. The table need not be exact, because a sound filter holds against any strategy. The
filter says which entries still fit, block by block.

>>> from farthing.accounting.menu import Menu
>>> from farthing.queries.events import GaussianEvent, PoissonEvent
>>> noises = Menu((PoissonEvent(0.5, GaussianEvent(noise)) for noise in (3.0, 6.0)), units=16)
>>> game = MenuGame(noises, Budget(1.0, 0.01), runs=2000)
>>> [verdict.broken for verdict in game.verdicts(1.0, 0.999999, Stream(), lambda: None)]
[False, False]

Laws of menus, each a list of complaints: `games` plays every strategy against small menus of randomised
responses, where that is feasible exactly, `dominations` compares an event with the entry that it is charged
as, by integration, and `blocks` spends from a ledger on disk until it refuses.

`TuningGame`: a run is one Gaussian answer, with the noise of one run of a tuned budget, and the adversary
chooses the order of scores. Answers that speak most against the canary have the highest scores; among the
others, answers that speak more for the canary score higher. So an answer that speaks for the canary is the
best only if no run speaks against it. The attack tests the likelihood ratio of the best answer, which is
known: f'(F(y)) p(y), where F is the probability of a lower score (`farthing.accounting.tuning`).

Laws of tuning: `selections` takes mechanisms with a few outcomes, every order in which the outcomes can be
scored, and the distribution of K from which `best_of` draws, and compares both hockey-stick divergences of
the best run with the price in `farthing.accounting.tuning`. `gaussian_selections` does the same with Gaussian
runs, in cells, in the order of `TuningGame`. `runs` checks the number of runs of `best_of`, and that each
gets the budget that was paid for.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from farthing.accounting import tuning
from farthing.accounting.menu import Menu, MenuFilter
from farthing.accounting.tuning import RunCount
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import Verdict, judge
from farthing.audit.prices import worlds
from farthing.audit.steps import uniform
from farthing.budget import Adjacency, Budget
from farthing.errors import BudgetSpent, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.ledger.tuning import best_of
from farthing.noise.streams import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.events import Event, GaussianEvent, PoissonEvent, PureEvent, TuningEvent
from farthing.queries.mechanisms import Gaussian, Laplace, Mechanism
from farthing.queries.query import PerExample, Query, Rows
from farthing.queries.samplers import Everyone, Poisson, Sampler

Array = NDArray[np.float64]

_LINE = np.linspace(-12.0, 12.0, 4801)  # range of answers, in standard deviations of the noise
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_POINTS = 601
_AT_ONCE = 2**20
_BOUND = ClipNorm(1.0)


@dataclass(frozen=True, slots=True)
class GameBatch:
    """Poisson batches of one rate and noise, and the evidence that their answers give for the canary."""

    rate: float
    noise: float

    @classmethod
    def of(cls, event: Event) -> "GameBatch":
        """Return the batch of an entry."""
        match event:
            case PoissonEvent(rate, GaussianEvent(noise)):
                return cls(rate, noise)
            case GaussianEvent(noise):
                return cls(1.0, noise)
        raise Unsupported(f"the adversary plays Gaussian noise on Poisson batches, not {event}")

    def losses(self, answers: Array) -> Array:
        """Return the log-likelihood ratios of answers, "with" over "without"."""
        return np.log1p(self.rate * np.expm1((2 * answers - 1) / (2 * self.noise**2)))

    def play(self, present: bool, runs: int, times: int, stream: Stream) -> Array:
        """Return the losses of ``times`` answers, summed, in each of ``runs``."""
        parts, each = [], max(1, _AT_ONCE // times)
        for start in range(0, runs, each):
            size = min(each, runs - start) * times
            drawn = (uniform(stream, size) < self.rate) * 1.0 if present else np.zeros(size)
            answers = Gaussian(self.noise).release(drawn, _BOUND, stream)
            parts.append(self.losses(np.asarray(answers)).reshape(-1, times).sum(axis=1))
        return np.concatenate(parts)

    def moments(self, present: bool, times: int) -> tuple[float, float]:
        """Return mean and deviation of the losses of ``times`` answers, by integration."""
        answers = _LINE * self.noise
        density = np.exp(-np.square(_LINE) / 2)
        if present:
            moved = np.exp(-np.square((answers - 1) / self.noise) / 2)
            density = (1 - self.rate) * density + self.rate * moved
        density, losses = density / density.sum(), self.losses(answers)
        mean = float(density @ losses)
        return times * mean, math.sqrt(times * float(density @ np.square(losses - mean)))


@dataclass(frozen=True, slots=True)
class Strategy:
    """The values of each next block, by units left and by the evidence so far."""

    evidence: Array
    values: Array  # (units + 1, entries, evidence)

    @classmethod
    def against(cls, rule: MenuFilter, present: bool) -> "Strategy":
        """Return the strategy that gathers evidence for one of the worlds, by backward induction."""
        batches, sign = [GameBatch.of(event) for event in rule.events], 1.0 if present else -1.0
        sizes, prices = zip(*(charged(rule, event) for event in rule.events), strict=True)
        laws = [batch.moments(present, size) for batch, size in zip(batches, sizes, strict=True)]
        far = 3 * rule.budget.epsilon + 4
        evidence = np.linspace(-far, far, _POINTS)
        done = np.maximum(0.0, -np.expm1(rule.budget.epsilon - evidence))
        best, values = [done], np.full((rule.units + 1, len(batches), _POINTS), -1.0)
        for unit in range(1, rule.units + 1):
            for place, ((mean, spread), price) in enumerate(zip(laws, prices, strict=True)):
                if price <= unit:
                    ends = evidence[:, None] + sign * mean + spread * _NODES
                    after = np.interp(ends, evidence, best[unit - price])
                    values[unit, place] = after @ _WEIGHTS / _WEIGHTS.sum()
            best.append(np.maximum(best[-1], values[unit].max(axis=0)))
        return cls(evidence, values)

    def choose(self, left: int, allowed: list[int], evidence: Array) -> NDArray[np.int64]:
        """Return the entry of each run with the largest value among those ``allowed``."""
        place = np.searchsorted(self.evidence, evidence).clip(0, _POINTS - 1)
        worth = self.values[min(left, len(self.values) - 1)][allowed][:, place]
        chosen: NDArray[np.int64] = np.asarray(allowed, dtype=np.int64)[np.argmax(worth, axis=0)]
        return chosen


def played(
    rule: MenuFilter,
    strategy: Strategy,
    sign: float,
    present: bool,
    runs: int,
    stream: Stream,
    tick: Callable[[], None],
) -> Array:
    """Return the losses of whole runs, in each of which the adversary buys until nothing more fits."""
    batches, sizes = (
        [GameBatch.of(event) for event in rule.events],
        [charged(rule, e)[0] for e in rule.events],
    )
    losses, bought = np.zeros(runs), np.zeros((runs, len(batches)), np.int64)
    alive = np.arange(runs)
    while len(alive):
        moves = np.full(len(alive), -1)
        states, which = np.unique(bought[alive], axis=0, return_inverse=True)
        for place, counts in enumerate(states):
            left, allowed = _moves(rule, [*zip(rule.events, sizes, counts.tolist(), strict=True)])
            if allowed:
                here = which.ravel() == place
                moves[here] = strategy.choose(left, allowed, sign * losses[alive[here]])
        for entry, batch in enumerate(batches):
            chosen = alive[moves == entry]
            if len(chosen):
                losses[chosen] += batch.play(present, len(chosen), sizes[entry], stream)
                bought[chosen, entry] += 1
        alive = alive[moves >= 0]
        tick()
    return losses


def charged(rule: MenuFilter, event: Event) -> tuple[int, int]:
    """Return how many events the filter sells at once, and for how many units."""
    one = rule.add(rule.start(), event)
    return 1 + rule.free(one, event), max(1, round(rule.share(one) * rule.units))


def _moves(rule: MenuFilter, bought: list[tuple[Event, int, int]]) -> tuple[int, list[int]]:
    """Return the units left after so many blocks, and the entries of which one more fits."""
    total = rule.start()
    for event, size, count in bought:
        total = rule.add(total, event, count * size)
    allowed = [k for k, (event, size, _) in enumerate(bought) if rule.fits(rule.add(total, event, size))]
    return round((1 - rule.share(total)) * rule.units), allowed


@dataclass(frozen=True, slots=True)
class MenuGame:
    """A target, a menu of Gaussian batches: the adversary gathers evidence for one world, then the other."""

    menu: Menu
    claim: Budget
    runs: int = 40_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        rule, runs = self.menu(self.claim), max(200, round(self.runs * scale))
        found = []
        for toward, name in ((True, "with"), (False, "without")):
            strategy, sign = Strategy.against(rule, toward), 1.0 if toward else -1.0
            heard = [played(rule, strategy, sign, present, runs, stream, tick) for present in (False, True)]
            named = [(f'likelihood ratio of all answers, chosen to show "{name}"', test_statistics.value)]
            level = sign * self.claim.epsilon
            found.append(judge(heard[0], heard[1], self.claim, named, confidence, threshold=level))
        return found


def games() -> list[str]:
    """Check that no strategy in an exhaustive game gets more than δ from what a menu's filter allows."""
    cases = (((0.1, 0.8), 1.0, 0.05), ((0.2, 0.5, 1.2), 2.0, 0.05), ((0.3, 0.8), 1.5, 0.1))
    complaints = []
    for entries, epsilon, delta in cases:
        rule = Menu((PureEvent(one) for one in entries), units=12)(Budget(epsilon, delta))
        found = best_strategy(rule)
        if found > delta:
            complaints.append(f"a strategy gets δ={found:.3g} from a menu of {entries}, {delta} is claimed")
    return complaints


def best_strategy(rule: MenuFilter) -> float:
    """Return δ of the best strategy against a menu of randomised responses, asking the filter each time."""
    sizes = [event.epsilon for event in rule.events]  # type: ignore[union-attr]
    coins = [1 / (1 + math.exp(-size)) for size in sizes]

    @functools.cache
    def allowed(counts: tuple[int, ...]) -> list[int]:
        total = rule.start()
        for event, count in zip(rule.events, counts, strict=True):
            total = rule.add(total, event, count)
        return [k for k, event in enumerate(rule.events) if rule.fits(rule.add(total, event))]

    @functools.cache
    def best(counts: tuple[int, ...], heads: tuple[int, ...]) -> float:
        """Return the largest expected (1 - e^(ε - loss))₊, after so many answers and heads."""
        loss = sum((2 * h - n) * size for h, n, size in zip(heads, counts, sizes, strict=True))
        worth = max(0.0, -math.expm1(rule.budget.epsilon - loss))
        for k in allowed(counts):
            more, won = _plus(counts, k), _plus(heads, k)
            worth = max(worth, coins[k] * best(more, won) + (1 - coins[k]) * best(more, heads))
        return worth

    nothing = (0,) * len(sizes)
    return best(nothing, nothing)


def _plus(counts: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*counts[:place], counts[place] + 1, *counts[place + 1 :])


def dominations() -> list[str]:
    """Check that no query separates two worlds better than the entry that it is charged as."""
    entries: list[tuple[Sampler, Mechanism]]
    asked: list[tuple[Sampler, Mechanism]]
    entries = [(Poisson(0.3), Gaussian(2.0)), (Poisson(0.1), Gaussian(1.0)), (Everyone(), Laplace(2.0))]
    asked = [(Poisson(rate), Gaussian(noise)) for rate in (0.05, 0.2, 0.6) for noise in (0.8, 1.5, 3.0)]
    asked += [(Everyone(), Laplace(noise)) for noise in (1.0, 3.0)]
    complaints = []
    for adjacency in (Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE):
        pairs = [worlds(*entry, adjacency) for entry in entries]
        rule = Menu([event for *_, event in pairs], units=16)(Budget(6.0, 0.05, adjacency))
        for query in asked:
            *ours, event = worlds(*query, adjacency)
            try:
                place = rule.cost(event).index(1.0)
            except Unsupported:
                continue
            if not _covered(ours, pairs[place][:2]):
                complaints.append(f"{event} is charged as {rule.events[place]}, which does not dominate it")
    return complaints


def _covered(ours: list[Array], entry: tuple[Array, Array]) -> bool:
    """Return whether no hockey-stick divergence of one pair, in either direction, is above the other's."""
    for epsilon in (-0.2, 0.0, 0.2, 0.5, 1.0):
        for (first, second), (p, q) in ((ours, entry), (ours[::-1], entry[::-1])):
            if _apart(first, second, epsilon) > 1.001 * _apart(p, q, epsilon) + 1e-9:
                return False
    return True


def _apart(first: Array, second: Array, epsilon: float) -> float:
    p, q = first / first.sum(), second / second.sum()
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def all_of(ask: Callable[[], Any], most: int = 500) -> int:
    """Return how many answers the ledger gives before it refuses, ``most`` at most."""
    given = 0
    while given < most:
        try:
            ask()
        except BudgetSpent:
            return given
        given += 1
    return given


def blocks(folder: str) -> list[str]:
    """Check that a ledger gives as many answers as it has units for, across closing and reopening."""
    path, budget, given = f"{folder}/menu.ledger", Budget(2.0, 0.01), [0, 0]
    total, bound = PerExample(lambda part, w: part[0]), ClipNorm(1.0, order=1)
    queries = [Query(Everyone(), total, bound, Laplace(noise)) for noise in (5.0, 20.0)]
    rule = Menu([query.price(budget) for query in queries], units=16)(budget)
    for visit in ((3, 5), (1, 1), (1, 1), (0, 10_000)):
        with Ledger(budget, journal=path, filter=lambda _: rule) as ledger:
            attached = ledger.over(Rows(np.ones((3, 1))))
            for place, (query, most) in enumerate(zip(queries, visit, strict=True)):
                given[place] += all_of(partial(attached.ask, query), most)
    used = [-(-n // size) * price for n, size, price in zip(given, rule.steps, rule.prices, strict=True)]
    if sum(used) > rule.units:
        return [f"{given} answers take {sum(used)} units of a menu's {rule.units}"]
    return [] if sum(used) + min(rule.prices) > rule.units else [f"units are left after {given} answers"]


_FAR = 1000.0  # above every score
SHAPES = (-0.5, 0.0, 1.0, None)
_CELLS = 60
_LEVELS = (0.0, 0.2, 0.5, 1.0, 1.5)
_BUDGET = Budget(1.0, 1e-3)
_AGAINST = -1.06  # deviations; with it the exact ε of `TuningGame` is largest, 1.88 of 2


def selections() -> list[str]:
    """Check that no order of the outcomes of randomised response makes the best of K exceed its price."""
    complaints = []
    for shape, (epsilon, mean) in itertools.product(SHAPES, ((0.3, 4.0), (1.0, 2.5))):
        event = TuningEvent(PureEvent(epsilon), mean, shape, 1e-3)
        pmf = distribution(RunCount(mean, shape))
        for law, order in itertools.product(_mechanisms(epsilon), itertools.permutations(range(3))):
            one, other = (best(world, order, pmf) for world in law)
            for level in _LEVELS:
                found = max(apart(one, other, level), apart(other, one, level))
                if found > tuning.delta(event, level, Adjacency.ADD_REMOVE) * (1 + 1e-9):
                    complaints.append(f"{event} reaches δ={found:.3g} at ε={level}, more than it is priced")
    return complaints


def gaussian_selections() -> list[str]:
    """Check that Gaussian runs in the order of `TuningGame`, in cells, do not exceed the price of tuning.

    The best of these orders has 0.53 to 0.88 of the δ that is priced.
    """
    complaints = []
    for shape, mu in itertools.product((0.0, 1.0), (0.5, 1.0)):
        event = TuningEvent(GaussianEvent(1 / mu), 10.0, shape, 1e-3)
        pmf, levels = distribution(RunCount(10.0, shape)), [mu * factor for factor in (4.0, 5.0, 6.0)]
        ends = np.concatenate([[-np.inf], np.linspace(-4.5, 4.5 + mu, _CELLS - 1), [np.inf]])
        worlds = [np.diff(ndtr(ends - shift)) for shift in (mu, 0.0)]
        priced = [tuning.delta(event, level, Adjacency.ADD_REMOVE) for level in levels]
        for top in range(0, _CELLS // 2, 2):
            order = (*range(top, _CELLS), *range(top))
            one, other = (best(world, order, pmf) for world in worlds)
            for level, most in zip(levels, priced, strict=True):
                found = max(apart(one, other, level), apart(other, one, level))
                if found > most * (1 + 1e-9):
                    complaints.append(f"{event} reaches δ={found:.3g} at ε={level}, more than it is priced")
    return complaints


def _mechanisms(epsilon: float) -> list[tuple[Array, Array]]:
    """Return ε-DP mechanisms of three outcomes: randomised response, and two with a weaker outcome."""
    high = math.exp(epsilon)
    told = np.array([high, 1.0, 0.0]) / (1 + high)
    rest = np.array([high, 1.0, math.sqrt(high)]) / (1 + high + math.sqrt(high))
    return [(law, law[[1, 0, 2]]) for law in (told, rest, 0.1 * told + np.array([0.0, 0.0, 0.9]))]


def distribution(runs: RunCount) -> Array:
    """Return the distribution of K that is drawn from."""
    totals = tuning._totals(runs)
    return np.diff([total / totals[-1] for total in totals], prepend=0.0)


def best(law: Array, order: tuple[int, ...], pmf: Array) -> Array:
    """Return the distribution of the best of K outcomes, ordered from worst to best; no outcome is last."""
    below = np.concatenate([[0.0], np.cumsum(law[list(order)])]).clip(0.0, 1.0)
    found = np.zeros(len(law) + 1)
    found[list(order)] = np.diff([float((x ** np.arange(len(pmf))) @ pmf) for x in below])
    found[-1] = pmf[0]
    return found


def apart(first: Array, second: Array, epsilon: float) -> float:
    """Return the hockey-stick divergence."""
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def runs(stream: Stream) -> list[str]:
    """Check that `best_of` draws its number of runs as stated, and that no run exceeds its charge."""
    counts, shares = [], []
    for _ in range(120):
        seen: list[float] = []

        def run(candidate: int, own: Ledger, seen: list[float] = seen) -> tuple[None, float]:
            seen.append(own.filter.mu)  # type: ignore[attr-defined]
            return None, 0.0

        ledger = Ledger(_BUDGET, stream=stream)
        tuned = best_of(run, [0], ledger, runs=4.0)
        counts.append(len(seen) - 1)  # the first is a rehearsal
        event = tuned.receipt.event
        assert isinstance(event, TuningEvent)
        assert isinstance(event.event, GaussianEvent)
        shares.append(max(seen) * event.event.noise)
    complaints = []
    pmf = distribution(RunCount(4.0))
    gap = max(abs(np.mean(np.array(counts) <= k) - pmf[: k + 1].sum()) for k in range(1, 40))
    if gap > math.sqrt(math.log(2e9) / 2 / len(counts)):  # Dvoretzky, Kiefer & Wolfowitz: one in 1e9
        complaints.append(f"the number of runs has another distribution: they are {gap:.2f} apart")
    if max(shares) > 1 + 1e-9:
        complaints.append(f"a run gets {max(shares):.3f} times what it was paid for")
    if tuning.epsilon(event, _BUDGET.delta) > _BUDGET.epsilon:
        complaints.append(f"{event} is charged to {_BUDGET}, and costs more")
    return complaints


@dataclass(frozen=True, slots=True)
class TuningGame:
    """The best of K Gaussian answers to attack, in an order of scores that the adversary chose."""

    claim: Budget
    mean: float = 10.0
    runs: int = 20_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        runs, law = max(200, round(self.runs * scale)), RunCount(self.mean)
        mu, heard = tuning.largest_mu(self.claim, law), []
        for present in (0.0, 1.0):
            heard.append(released(law, mu, present, runs, stream))
            tick()
        named: list[tuple[str, test_statistics.Scores]] = [
            ("likelihood ratio of the best run's answer", partial(best_ratio, law, mu))
        ]
        return [judge(heard[0], heard[1], self.claim, named, confidence, threshold=0.9 * self.claim.epsilon)]


def best_ratio(law: RunCount, mu: float, answers: Array) -> Array:
    """Return the log-likelihood ratios of the best runs' answers, with the canary over without."""
    z, slopes = answers * mu, []
    for shift in (mu, 0.0):
        worse = np.where(z < _AGAINST, 1 + ndtr(z - shift), ndtr(z - shift)) - ndtr(_AGAINST - shift)
        slopes.append(law.log_slope(worse))
    return np.asarray(slopes[0] - slopes[1] + mu * z - mu**2 / 2)


def released(law: RunCount, mu: float, present: float, times: int, stream: Stream) -> Array:
    """Return the best runs' answers, so many times; a canary that is ``present`` moves answers by 1."""
    counts = np.array([law.draw(stream) for _ in range(times)])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    answers = np.asarray(Gaussian(1 / mu).release(np.full(counts.sum(), present), ClipNorm(1.0), stream))
    z = answers * mu
    scores = np.where(z < _AGAINST, z + _FAR, z)
    best = np.maximum.reduceat(scores, starts)
    return np.asarray(np.where(best > _FAR / 2, best - _FAR, best) / mu)
