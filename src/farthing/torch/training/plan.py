"""How large lots are, how many, and how much noise: rules of public numbers only.

Two facts decide (Dong, Roth & Su 2022, Cor. 5.4: T lots of rate q at noise σ are μ-GDP in the limit, with
μ = q √(T (e^(1/σ²) - 1)); De et al. 2022 and Sander et al. 2023 measure the same on images):

* The noise on a mean gradient, σ/(q n), falls with the lot until σ is about 2, and hardly after: at σ = 2 it
  is 7 % above that of lots of everybody, at σ = 1 31 %. So a lot is as small as leaves σ at `SAFE_NOISE`, and
  never smaller than `LOT` records, which a machine takes in one stride anyway.
* More lots cost no accuracy by themselves (steps get shorter, noise averages out), but a larger budget
  carries training further: T = `LOTS` √ε, within `FEWEST` and `MOST`. De et al. found 875 lots best on
  CIFAR-10 at ε = 1 and 2,468 at ε = 8.

Then the noise is what makes T lots spend the whole budget, by tight accounting.

>>> from farthing.budget import Budget
>>> plan = planned(Budget(2.0, 1e-5), 60_000)
>>> plan.steps, round(plan.lot), round(plan.noise(0), 2)
(1131, 1790, 2.16)
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate, gaussian
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.ledger.journal import Journal
from farthing.queries.events import (
    ComposedEvent,
    DrawnEvent,
    Event,
    GaussianEvent,
    PoissonEvent,
    RepeatedEvent,
    decode,
)
from farthing.queries.samplers import Poisson

LOTS, FEWEST, MOST = 800, 200, 3000
LOT = 1024
SAFE_NOISE = 2.0
NOTHING = ComposedEvent(())
LEVELS = 32  # different noises of one plan: each is a promise of its own

Noise = float | Sequence[float] | NDArray[np.float64] | Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will ask: ``steps`` lots (None: as many as fit), each of its noise."""

    records: int
    rate: float
    noises: tuple[float, ...]
    steps: int | None

    @property
    def lot(self) -> float:
        """The expected size of a lot: what sums are divided by, whatever lot came."""
        return self.rate * self.records

    def noise(self, place: int) -> float:
        """The noise of the lot at ``place``, counted from 0."""
        return self.noises[place] if len(self.noises) > 1 else self.noises[0]

    def levels(self) -> dict[float, int | None]:
        """Each noise with how often it is asked for, in the order of their first use."""
        if len(self.noises) == 1:
            return {self.noises[0]: self.steps}
        return {noise: self.noises.count(noise) for noise in dict.fromkeys(self.noises)}


def planned(
    budget: Budget,
    records: int,
    *,
    rate: float | None = None,
    noise: Noise | None = None,
    steps: int | None = None,
    before: Event = NOTHING,
) -> Plan:
    """What is not given follows from the budget and the public number of records.

    ``before`` is what else the budget has to pay for.
    """
    if budget.delta == 0:
        raise InvalidValue(f"Gaussian noise needs a delta above 0, got {budget}")
    count = validate.count(steps=steps) if steps is not None else None
    length = count if count is not None else _steps(budget)
    rate = _rate(budget, records, length) if rate is None else validate.rate(rate=rate)
    if isinstance(noise, np.ndarray):
        noise = noise.tolist()
    if noise is None:
        return Plan(records, rate, (fitted(lambda t: 1.0, rate, length, budget, before)[0],), length)
    if isinstance(noise, Sequence) or callable(noise):
        if count is None:
            if callable(noise):
                raise InvalidValue("a noise that follows the step needs steps, the length of its plan")
            count = len(noise)
        values = along(noise, count, "noise")
        for value in values:
            validate.positive(noise=value)
        return Plan(records, rate, _levelled(values), count)
    return Plan(records, rate, (validate.positive(noise=noise),), count)


def fitted(
    shape: Callable[[int], float], rate: float, steps: int, budget: Budget, before: Event = NOTHING
) -> tuple[float, ...]:
    """Noise in the shape of a public schedule t -> relative size, t = 1 … steps, that spends the budget.

    >>> from farthing.budget import Budget
    >>> falling = fitted(lambda t: 1.5 if t <= 50 else 1.0, 0.02, 100, Budget(1.0, 1e-5))
    >>> falling[0] / falling[-1], round(falling[0], 3)
    (1.5, 1.609)
    """
    lots, each = Poisson(rate), _levelled([validate.positive(shape=shape(t)) for t in range(1, steps + 1)])
    counts = {size: each.count(size) for size in dict.fromkeys(each)}

    def plan(sigma: float) -> Event:
        parts = (
            RepeatedEvent(lots.amplify(GaussianEvent(sigma * size), budget.observer), times)
            for size, times in counts.items()
        )
        return ComposedEvent((*parts, before))

    sigma = calibrate.noise(plan, budget)
    return tuple(sigma * size for size in each)


def promised(journal: Journal) -> list[tuple[Event, int]]:
    """The plan that a ledger already holds."""
    rows = (row.body for row in journal.rows() if row.kind == "promise")
    return [(decode(body["event"]), body["times"]) for body in rows]


def resumed(
    plan: list[tuple[Event, int]], records: int, rate: float | None, steps: int | None
) -> Plan | None:
    """The one promise of Gaussian lots in a ledger's plan, if it is what is asked for: a run that goes on."""
    lots = [
        Plan(records, event.rate, (event.event.noise,), times)
        for event, times in plan
        if isinstance(event, PoissonEvent | DrawnEvent) and isinstance(event.event, GaussianEvent)
    ]
    if len(lots) != 1 or rate not in (None, lots[0].rate) or steps not in (None, lots[0].steps):
        return None
    return lots[0]


def along(values: Sequence[float] | Callable[[int], float], steps: int, name: str) -> list[float]:
    """A schedule written out: one value for each of t = 1 … steps."""
    if callable(values):
        return [float(values(t)) for t in range(1, steps + 1)]
    if len(values) < steps:
        raise InvalidValue(f"{name} must have a value for each of {steps} steps, got {len(values)}")
    return [float(value) for value in itertools.islice(values, steps)]


def _steps(budget: Budget) -> int:
    return round(min(max(LOTS * math.sqrt(budget.epsilon), FEWEST), MOST))


def _rate(budget: Budget, records: int, steps: int) -> float:
    """The least rate that leaves the noise at `SAFE_NOISE` (over how far neighbours are apart): q √T / μ."""
    needed = SAFE_NOISE * gaussian.mu(budget.epsilon, budget.delta) / math.sqrt(steps)
    return min(1.0, max(needed, LOT / records))


def _levelled(values: list[float]) -> tuple[float, ...]:
    """At most `LEVELS` different values: more are rounded on a logarithmic grid between the extremes."""
    if len(set(values)) <= LEVELS:
        return tuple(values)
    low, high = math.log(min(values)), math.log(max(values))
    cell = (high - low) / (LEVELS - 1)
    return tuple(math.exp(low + cell * round((math.log(value) - low) / cell)) for value in values)
