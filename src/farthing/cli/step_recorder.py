"""Record a method's steps and queries as they are made, and end it early when asked to."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from farthing.errors import BudgetSpent
from farthing.ledger.ledger import Ledger
from farthing.linear.additive.sums import Whole
from farthing.linear.methods.privgene import NoisyTop
from farthing.linear.problem import Problem
from farthing.queries.mechanisms import Laplace, Mechanism, NoisyMax
from farthing.queries.personal import Personal
from farthing.queries.query import Answer, Query, Step
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler

Watch = Callable[[Step, Ledger], bool]  # sees a step and the ledger that paid for it; True ends the training


class StepRecorder:
    """A recorder of an algorithm's steps and queries, which may end it after any step.

    Each step is shown to ``watch`` before the next is asked for. ``notes`` are written into the ledger first.
    """

    def __init__(self, name: str, algorithm: Callable[[Ledger, Problem], Iterator[Step]]) -> None:
        self.name, self.algorithm = name, algorithm
        self.watch: Watch | None = None
        self.notes: tuple[str, ...] = ()
        self.stopped = False
        self.ledger: Ledger | None = None  # the ledger of the last run
        self.asked: dict[tuple[str, str, str], Asked] = {}

    def __call__(self, ledger: Ledger, problem: Problem) -> Iterator[Step]:
        self.ledger, self.stopped, self.asked = ledger, False, {}
        for text in self.notes:
            ledger.note(text)
        step = None
        for step in self.algorithm(ledger.with_listener(self._note), problem):
            yield step
            if self.watch is not None and self.watch(step, ledger):
                self.stopped = True
                return
        if step is None:
            raise BudgetSpent(f"{ledger.budget} does not allow a single step of {self.name!r}")

    def _note(self, query: Query, w: Any, answer: Answer) -> None:
        asked = query.contribution
        while isinstance(asked, Whole):
            asked = asked.contribution
        what = type(asked).__name__.removeprefix("Linear").removeprefix("Group").lower()
        kind = what, drawn(query.sampler), type(query.mechanism).__name__
        self.asked.setdefault(kind, Asked()).add(query)


@dataclass(slots=True)
class Asked:
    """Answers of one kind: how many, and between which ends their clips and their noise lie."""

    times: int = 0
    clip_norm: tuple[float, float] = (math.inf, 0.0)
    deviation: tuple[float, float] = (math.inf, 0.0)  # of a coordinate, a standard one
    noise_multiplier: tuple[float, float] = (math.inf, 0.0)  # deviation over clip

    def add(self, query: Query) -> None:
        """Add one answer."""
        order = 1 if isinstance(query.mechanism, Laplace) else 2
        clip = query.bound.norm(order) * float(np.max(query.bound.scale))
        noise = float(getattr(query.mechanism, "noise_multiplier", math.nan)) * _spread(query.mechanism)
        self.times += 1
        self.clip_norm = _stretched(self.clip_norm, clip)
        self.noise_multiplier = _stretched(self.noise_multiplier, noise)
        self.deviation = _stretched(self.deviation, noise * clip)


def drawn(sampler: Sampler) -> str:
    """Return a sampler as text.

    >>> drawn(Poisson(0.01))
    'poisson, sampling rate 0.01'
    """
    match sampler:
        case Everyone():
            return "everyone"
        case Poisson(sampling_rate=rate):
            return f"poisson, sampling rate {rate:.3g}"
        case FixedSize(size=size, of=of):
            return f"{size} of {of}"
        case Personal(sampling_rates=rates, weights=weights):
            if min(rates) == 1:
                return f"everyone, weights {min(weights):.3g} to 1 by budget"
            return f"poisson, sampling rates {min(rates):.3g} to {max(rates):.3g} by budget"
    return repr(sampler)


def _spread(mechanism: Mechanism) -> float:
    """Return the standard deviation of a mechanism's noise at scale 1."""
    match mechanism:
        case Laplace() | NoisyMax(kind="laplace"):
            return math.sqrt(2)
        case NoisyMax() | NoisyTop():
            return math.pi / math.sqrt(6)
    return 1.0


def _stretched(ends: tuple[float, float], value: float) -> tuple[float, float]:
    return min(ends[0], value), max(ends[1], value)
