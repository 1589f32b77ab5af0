"""A method's steps as they are taken: watched, ended early when asked to, and what was asked for noted."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from farthing.errors import BudgetSpent
from farthing.ledger.ledger import Ledger
from farthing.linear.methods.privgene import NoisyTop
from farthing.linear.problem import Problem
from farthing.queries.mechanisms import Laplace, Mechanism, NoisyMax
from farthing.queries.query import Answer, Query, Step
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler

Watch = Callable[[Step, Ledger], bool]  # sees a step and the door it came through; True ends the training


class Followed:
    """An algorithm that takes another's steps, and shows each to ``watch`` before the next is asked for."""

    def __init__(self, name: str, algorithm: Callable[[Ledger, Problem], Iterator[Step]]) -> None:
        self.name, self.algorithm = name, algorithm
        self.watch: Watch | None = None
        self.stopped = False
        self.door: Ledger | None = None  # what the last run spent from
        self.asked: dict[tuple[str, str, str], Asked] = {}

    def __call__(self, ledger: Ledger, problem: Problem) -> Iterator[Step]:
        self.door, self.stopped, self.asked = _Noting(ledger, self._note), False, {}
        step = None
        for step in self.algorithm(self.door, problem):
            yield step
            if self.watch is not None and self.watch(step, self.door):
                self.stopped = True
                return
        if step is None:
            raise BudgetSpent(f"{ledger.budget} does not allow a single step of {self.name!r}")

    def _note(self, query: Query) -> None:
        what = type(query.contribution).__name__.lower()
        kind = what, drawn(query.sampler), type(query.mechanism).__name__
        self.asked.setdefault(kind, Asked()).add(query)


@dataclass(slots=True)
class Asked:
    """Answers of one kind: how many, and between which ends their clips and their noise lie."""

    times: int = 0
    clip: tuple[float, float] = (math.inf, 0.0)
    deviation: tuple[float, float] = (math.inf, 0.0)  # of a coordinate, a standard one
    noise: tuple[float, float] = (math.inf, 0.0)  # the same over the clip

    def add(self, query: Query) -> None:
        """One more."""
        order = 1 if isinstance(query.mechanism, Laplace) else 2
        clip = query.bound.norm(order) * float(np.max(query.bound.scale))
        noise = float(getattr(query.mechanism, "noise", math.nan)) * _spread(query.mechanism)
        self.times += 1
        self.clip = _stretched(self.clip, clip)
        self.noise = _stretched(self.noise, noise)
        self.deviation = _stretched(self.deviation, noise * clip)


class _Noting(Ledger):
    """The same door, which notes what is asked."""

    def __init__(self, door: Ledger, note: Callable[[Query], None]) -> None:
        vars(self).update(vars(door))
        self._note = note

    def ask(self, query: Query, w: Any = None, *, key: str | None = None) -> Answer:
        answer = super().ask(query, w, key=key)
        self._note(query)
        return answer


def drawn(sampler: Sampler) -> str:
    """A sampler in words.

    >>> drawn(Poisson(0.01))
    'poisson, rate 0.01'
    """
    match sampler:
        case Everyone():
            return "everyone"
        case Poisson(rate=rate):
            return f"poisson, rate {rate:.3g}"
        case FixedSize(size=size, of=of):
            return f"{size} of {of}"
    return repr(sampler)


def _spread(mechanism: Mechanism) -> float:
    """The standard deviation of its noise at scale 1."""
    match mechanism:
        case Laplace() | NoisyMax(kind="laplace"):
            return math.sqrt(2)
        case NoisyMax() | NoisyTop():
            return math.pi / math.sqrt(6)
    return 1.0


def _stretched(ends: tuple[float, float], value: float) -> tuple[float, float]:
    return min(ends[0], value), max(ends[1], value)
