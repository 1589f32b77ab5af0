"""Train by PrivGene, a genetic algorithm whose parents are chosen by the exponential mechanism.

Zhang, Xiao, Yang, Zhang & Winslett, "PrivGene: differentially private model fitting using genetic
algorithms", SIGMOD 2013. A generation of candidates is scored by its fit; the best, chosen privately, are its
parents; children mix the coordinates of two parents and are mutated with decreasing size. One candidate of
the last generation is selected.

* *Enhanced* exponential mechanism: the noise is calibrated to the change of the *gap* of two scores by one
  record. A record's score for a candidate is its largest loss over all candidates minus its loss. It lies in
  [0, R · diameter of the candidates], as losses have slope 1 at most and |z| <= R: when candidates converge,
  the noise shrinks.
* Parents are chosen by repeated exponential mechanisms without replacement, from scores of one pass over the
  table; each choice has independent noise.
* Parents stay among the candidates of the next generation, so that mutation does not lose good ones.
* The number of rounds grows with n ε, as in the paper, with another constant.
* Children are mixed and mutated with public randomness, expanded from ``seed``: it is independent of the
  records and not part of the guarantee, which relies on the ledger's stream.

Guarantee: each choice has log-ratios within an interval of length ε' (`NoisyMax`, Gumbel), with ε' = 1/noise
under add-remove and 2/noise under replace-one. `ZcdpFilter` charges ε'²/8 for each; `BasicFilter` gives the
paper's pure ε.

>>> import farthing as ft
>>> from farthing.accounting.filters import ZcdpFilter
>>> from farthing.linear.losses import logistic
>>> x = np.linspace(-1, 1, 2001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=ZcdpFilter).over(Table(x, 1.0 * (x[:, 0] > 0)))
>>> u, constant = ft.run(privgene(ledger, Problem(logistic, 2001, 1, unit=False))).w
>>> bool(u[0] > 0), ledger.share <= 1
(True, True)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Adjacency
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import choice_epsilon
from farthing.linear.losses import Loss
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream, Stream
from farthing.noise.summing import Sum
from farthing.queries.bounds import Bound, ClipValue, Kind
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.mechanisms import NoisyMax
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]

_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 64
_RECORDS_A_CHOICE = 200.0  # n ε over this, and over the parents, is the number of rounds


@until_spent
def privgene(
    ledger: Ledger,
    problem: Problem,
    *,
    candidates: int = 100,
    parents: int = 5,
    rounds: int | None = None,
    spread: float = 1.0,
    shrink: float = 0.05,
    seed: int = 0,
) -> Iterator[Step]:
    """Breed weights over generations, with parents selected by noisy choices.

    Parameters
    ----------
    candidates : int, default 100
        The number of weight vectors in a generation.
    parents : int, default 5
        The number of them that are chosen as parents of the next generation.
    rounds : int, optional
        The number of generations. None: a rule of the budget and the number of records.
    spread : float, default 1.0
        The first generation is uniform on [-spread, spread].
    shrink : float, default 0.05
        Mutations shrink from ``spread`` to ``shrink`` times it.
    seed : int, default 0
        The seed of the mutations, which are public.
    """
    if problem.outputs or not math.isfinite(problem.loss.slope):
        raise Unsupported("privgene fits weight vectors under a loss of bounded slope: use dpsgd otherwise")
    if not validate.count(parents=parents) < validate.count(candidates=candidates):
        raise InvalidValue(f"parents must be fewer than candidates={candidates}, got {parents}")
    validate.positive(spread=spread), validate.rate(shrink=shrink)
    features, public = problem.rows(), SeededStream(seed)
    if rounds is None:
        wanted = problem.records * ledger.budget.epsilon / (_RECORDS_A_CHOICE * parents)
        rounds = round(min(max(wanted, _FEWEST_ROUNDS), _MOST_ROUNDS))
    choices = (validate.count(rounds=rounds) - 1) * parents + 1
    shift = ledger.budget.adjacency.shift
    noise = shift / choice_epsilon(ledger, choices)
    generation = spread * _uniform(public, (features.size, candidates))
    for t in range(1, rounds + 1):
        bound = ClipValue(0.0, _reach(problem, features, generation))
        top = NoisyTop(noise, count=1 if t == rounds else parents)
        answer = ledger.ask(Query(Everyone(), Advantages(problem.loss, features), bound, top), generation)
        chosen = generation[:, answer.value]
        yield Step(t, features.unfold(chosen[:, 0]), (answer.receipt,))
        step = spread * shrink ** (t / rounds)
        generation = np.hstack([chosen, _children(public, chosen, candidates - chosen.shape[1], step)])


def _reach(problem: Problem, features: Features, generation: Array) -> float:
    """Return R times the diameter of the candidates, the largest spread of a record's losses."""
    squares = np.square(generation).sum(axis=0)
    apart = squares[:, None] + squares - 2 * generation.T @ generation
    radius = features.radius or problem.radius
    return problem.loss.slope * radius * math.sqrt(max(float(apart.max()), 0.0)) * (1 + 1e-9) + 1e-9


def _children(public: Stream, parents: Array, count: int, step: float) -> Array:
    """Return children with each coordinate from one of two parents, and a few coordinates mutated."""
    size, many = parents.shape
    first, second = (parents[:, public.uniform_below(many, count)] for _ in range(2))
    mixed = np.where(public.bernoulli(0.5, size * count).reshape(size, count), first, second)
    moved = public.bernoulli(min(1.0, 2 / math.sqrt(size)), size * count).reshape(size, count)
    return mixed + step * moved * _uniform(public, (size, count))


def _uniform(public: Stream, shape: tuple[int, int]) -> Array:
    """Return public random numbers in [-1, 1)."""
    words = public.integers(math.prod(shape)).astype(np.float64)
    return (words * 2.0**-63 - 1).reshape(shape)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Σ (largest loss of the record - loss) at the candidates, the columns of w."""

    loss: Loss
    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Table, w: Array, bound: ClipValue) -> Array:
        u, constant = self.features.unfold(w)
        total = Sum(len(records), w.shape[1:])
        for block in records.blocks(self.features):
            with np.errstate(over="ignore", invalid="ignore"):
                losses = self.loss.value(block.margins(u, constant), block.y)
                worse = bound.apply(losses.max(axis=1, keepdims=True) - losses)
            total.add(worse.sum(axis=0), len(worse))
        return total.value


@dataclass(frozen=True, slots=True)
class NoisyTop:
    """The indices of large scores, best first: `NoisyMax` ``count`` times without replacement."""

    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        validate.positive(noise_multiplier=self.noise_multiplier), validate.count(count=self.count)

    def unit_event(self) -> Event:
        return NoisyMax(self.noise_multiplier).unit_event()  # refused

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        NoisyMax(self.noise_multiplier).check(bound, shape)
        if shape is not None and shape[0] < self.count:
            raise InvalidValue(f"at least {self.count} scores are needed, got shape {shape}")

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        return RepeatedEvent(NoisyMax(self.noise_multiplier).event(bound, adjacency, sampled), self.count)

    def release(self, total: ArrayLike, bound: ClipValue, stream: Stream, turn: int = 0) -> NDArray[np.int64]:
        scores, choose = np.asarray(total, dtype=np.float64), NoisyMax(self.noise_multiplier)
        self.check(bound, scores.shape)
        left, chosen = np.arange(len(scores)), np.empty(self.count, np.int64)
        for n in range(self.count):
            place = choose.release(scores[left], bound, stream)
            chosen[n], left = left[place], np.delete(left, place)
        return chosen
