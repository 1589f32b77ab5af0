"""Track the course of a run: the terms of each batch, the progress, and the released values.

A *promised* course has a fixed number of batches. A *filtered* one does not: every batch is charged to the
ledger's privacy filter, its terms may depend on released values (`adapting`), and the run ends when the
ledger refuses a batch. Its number of batches is not known in advance, so `Step.share` is the used share of
the budget, and `Training.steps` and the default learning rate use the number of further batches that would
fit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.accounting.menu import MenuFilter
from farthing.accounting.personal import PersonalBudgets
from farthing.errors import InvalidValue, PromiseBroken, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import Bound, ClipNorm
from farthing.queries.events import DrawnEvent, Event, GaussianEvent, PoissonEvent, TruncatedEvent
from farthing.queries.query import Receipt
from farthing.queries.samplers import TruncatedPoisson
from farthing.torch.gradients.layout import Layout
from farthing.torch.kernels.noise import beside
from farthing.torch.training import correlated, personal
from farthing.torch.training.adapting import Change, Rule
from farthing.torch.training.placing import PaddedExamples
from farthing.torch.training.plan import BatchKind, Noise, Plan, planned, planned_on, promised
from farthing.torch.training.records import Examples
from farthing.torch.training.schedules import Bounds
from farthing.torch.training.sharding import like
from farthing.torch.training.watching import TrainingStep

_OPEN = "open the ledger with a menu of the batches that may come up: Ledger(budget, filter=ft.Menu(...))"

_ANY = ClipNorm(1.0)  # a clip never changes the price of a batch


class BatchTerms(NamedTuple):
    """What a batch is asked for with, in public numbers."""

    sampling_rate: float
    noise_multiplier: float
    expected_batch_size: float


class Public(Protocol):
    """A way to numbers that rank 0 knows: what asks for batches (`distributed.Asks`)."""

    def public(self, numbers: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Return rank 0's numbers, at every rank."""


class Course(Protocol):
    """The batches of a run, one after the other."""

    @property
    def place(self) -> int:
        """Return the number of the batch that is asked for, from 1."""

    @property
    def steps(self) -> int:
        """Return the batches in all; where that is not known, as many as the present terms would make."""

    @property
    def progress(self) -> float:
        """Return the part of the run that lay behind when the last batch was asked for."""

    @property
    def share(self) -> float:
        """Return `Step.share`."""

    @property
    def left(self) -> int:
        """Return `Step.left`."""

    def __iter__(self) -> Iterator[BatchTerms]:
        """Yield the terms of the next batch until there is none."""

    def refused(self) -> None:
        """Take note that the ledger refused the last batch."""

    def released(self) -> None:
        """Take note that the last batch was released."""

    def learn(self, step: TrainingStep, bounds: Bounds) -> Bounds:
        """Return the bounds of the batches after a finished update."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return all that changes, for checkpoints."""

    def load_state_dict(self, state: dict[str, Any] | None, bounds: Bounds) -> Bounds:
        """Go on from a checkpoint; return the bounds of the batches to come."""


class Promised:
    """The batches of a promised plan, in its order, from ``place`` on."""

    def __init__(self, plan: Plan, place: int) -> None:
        assert plan.steps is not None
        self._plan, self._spent = plan, set[float]()
        self.steps, self.place = plan.steps, place

    def __iter__(self) -> Iterator[BatchTerms]:
        plan = self._plan
        for place in range(self.place, self.steps):
            noise = plan.noise_multiplier(place)
            if noise in self._spent:  # a crash forfeited some batches of this noise: others may be left
                continue
            self.place = place + 1
            yield BatchTerms(plan.sampling_rate, noise, plan.expected_batch_size)
        self.place = self.steps

    @property
    def progress(self) -> float:
        return (self.place - 1) / self.steps

    @property
    def share(self) -> float:
        return self.place / self.steps

    @property
    def left(self) -> int:
        return self.steps - self.place

    def refused(self) -> None:
        self._spent.add(self._plan.noise_multiplier(self.place - 1))

    def released(self) -> None:
        """Do nothing, because the plan is fixed."""

    def learn(self, step: TrainingStep, bounds: Bounds) -> Bounds:
        return bounds

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: dict[str, Any] | None, bounds: Bounds) -> Bounds:
        return bounds


class Filtered:
    """Batches that are charged to a privacy filter one by one, on terms that a rule may change.

    Rank 0 has the ledger and the rule; the others are told what it knows and decides.
    """

    def __init__(
        self, plan: Plan, asks: Public, kind: BatchKind, ledger: Ledger | None, rule: Rule | None
    ) -> None:
        self._records, self._most, self._kind = plan.records, plan.steps, kind
        self._asks, self._ledger, self._rule = asks, ledger, rule
        self._terms = BatchTerms(plan.sampling_rate, plan.noise_multiplier(0), plan.expected_batch_size)
        self._clip: float | None = None  # the clipping norm that a rule chose
        self._asked, self._over, self._ahead = 0, False, 1.0
        self.share, self.left, self.progress = 0.0, 0, 0.0
        self._look()

    def __iter__(self) -> Iterator[BatchTerms]:
        while not self._over and self._asked != self._most:
            self.progress = 1 - self._rest()
            yield self._terms
        self._settle()

    @property
    def place(self) -> int:
        return self._asked + 1

    @property
    def steps(self) -> int:
        return self._asked + self.left

    def refused(self) -> None:
        self._over, self.left = True, 0

    def released(self) -> None:
        """Count the batch down; `_look` counts anew when terms change."""
        self._asked += 1
        self.share = self._asks.public(lambda: (self._charged(),))[0]
        self.left = max(self.left - 1, 0)

    def learn(self, step: TrainingStep, bounds: Bounds) -> Bounds:
        """Change the terms as rank 0's rule says; refuse, before any charge, what has no price."""
        told = self._asks.public(lambda: self._decided(step))
        noise, rate, clip = (None if math.isnan(number) else number for number in told)
        if noise is None and rate is None and clip is None:
            return bounds
        self._settle()
        self._take(noise, rate)
        self._ahead = self._rest()
        self._look()
        self._clip = self._clip if clip is None else clip
        return bounds if clip is None else bounds.at_norm(clip)

    def _decided(self, step: TrainingStep) -> tuple[float, float, float]:
        change = None if self._rule is None else self._rule(step)
        if change is None:
            return math.nan, math.nan, math.nan
        if not isinstance(change, Change):
            raise InvalidValue(f"adapt must return a Change or None after each step, got {change!r}")
        found = (change.noise_multiplier, change.sampling_rate, change.clip_norm)
        one, two, three = (math.nan if number is None else float(number) for number in found)
        return one, two, three

    def _take(self, noise: float | None, rate: float | None) -> None:
        rate = self._terms.sampling_rate if rate is None else rate
        self._terms = BatchTerms(
            rate, self._terms.noise_multiplier if noise is None else noise, rate * self._records
        )

    def _settle(self) -> None:
        """Give back what is reserved on terms that do not come again."""
        if self._ledger is not None:
            self._ledger.refund()

    def _charged(self) -> float:
        assert self._ledger is not None
        return min(self._ledger.share, 1.0)

    def _rest(self) -> float:
        """Return the part of the run that is ahead: it falls with every batch, and never jumps."""
        return self._ahead * self.left / max(self._fitted, 1)

    def _look(self) -> None:
        """Find how much is charged, and how many more batches would fit on the present terms."""
        self.share, left = self._asks.public(lambda: (self._charged(), float(self._fitting())))
        self._fitted = int(left) if self._most is None else min(int(left), self._most - self._asked)
        self.left = self._fitted

    def _fitting(self) -> int:
        assert self._ledger is not None
        terms = self._terms
        event = price(self._ledger, self._kind, terms.sampling_rate, terms.noise_multiplier)
        return fitting(self._ledger, event)

    def state_dict(self) -> dict[str, Any]:
        """Return the terms and what the rule remembers; never the spend."""
        remembers = getattr(self._rule, "state_dict", None)
        return {
            "noise_multiplier": self._terms.noise_multiplier,
            "sampling_rate": self._terms.sampling_rate,
            "clip_norm": self._clip,
            "rule": remembers() if remembers is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any] | None, bounds: Bounds) -> Bounds:
        """Go on with the terms of a checkpoint."""
        if state is None:
            return bounds
        self._take(state["noise_multiplier"], state["sampling_rate"])
        self._clip = state["clip_norm"]
        remember = getattr(self._rule, "load_state_dict", None)
        if state["rule"] is not None and remember is not None:
            remember(state["rule"])
        self._look()
        return bounds if self._clip is None else bounds.at_norm(self._clip)


def fitting(ledger: Ledger, event: Event) -> int:
    """Return how many more answers of a price fit a ledger, by bisection."""
    low, high = 0, 1
    while high < 2**30 and ledger.affords(event, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ledger.affords(event, middle) else (low, middle)
    return low


def price(ledger: Ledger, kind: BatchKind, sampling_rate: float, noise_multiplier: float) -> Event:
    """Return the event of a batch; raise `Unsupported` where the ledger's filter has no price for it."""
    event = kind.query(sampling_rate, _ANY, noise_multiplier).price(ledger.budget)
    try:
        ledger.filter.cost(event)
    except Unsupported as error:
        fix = "" if isinstance(ledger.filter, MenuFilter) else f"; {_OPEN}"
        raise Unsupported(f"{error}{fix}; nothing was charged") from None
    return event


def filters(ledger: Ledger, rule: Rule | None) -> bool:
    """Return whether batches are charged to the filter: on a menu, or where a rule changes their price."""
    held = promised(ledger.journal)
    if rule is not None and held:
        raise PromiseBroken(
            f"adapt= changes prices on the way, and this ledger holds {len(held)} promises; {_OPEN}"
        )
    if rule is not None and not callable(rule):
        raise InvalidValue(f"adapt must be a function of a Step, got {rule!r}")
    return not held and (rule is not None or isinstance(ledger.filter, MenuFilter))


def begun(
    ledger: Ledger,
    kind: BatchKind,
    records: int,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
) -> Plan:
    """Return the terms that a filtered run begins with: given, of the menu, or by the rules of `plan`."""
    if noise_multiplier is not None and not isinstance(noise_multiplier, int | float):
        raise InvalidValue(
            "noise_multiplier must be a number where nothing is promised, the first one: adapt= changes it"
        )
    found = _entry(ledger, sampling_rate, noise_multiplier)
    if found is not None:
        rate, noise = found
    elif sampling_rate is None or noise_multiplier is None:
        plan = planned(
            ledger.budget,
            records,
            sampling_rate=sampling_rate,
            noise_multiplier=noise_multiplier,
            steps=steps,
            sampler=kind.sampler,
        )
        rate, noise = plan.sampling_rate, plan.noise_multiplier(0)
    else:
        rate, noise = sampling_rate, noise_multiplier
    most = None if steps is None else validate.count(steps=steps)
    begin = Plan(
        records, validate.rate(sampling_rate=rate), (validate.positive(noise_multiplier=noise),), most
    )
    price(ledger, kind, rate, noise)
    return replace(begin, promised=False)


def chosen_plan(
    ledger: Ledger,
    people: PersonalBudgets | None,
    kind: BatchKind,
    records: int,
    terms: tuple[float | None, Noise | None, int | None],
    rule: Rule | None,
    bands: int | str,
    sampling: str | None,
) -> tuple[Plan, BatchKind]:
    """Return the plan of a run, and batches of its draws and noise.

    ``terms`` are sampling rate, noise multiplier and steps as far as they are given.
    """
    if people is not None:
        return personal.personal_plan(ledger, people, kind, *terms, bands)
    if filters(ledger, rule):
        correlated.refuse_menu(ledger, bands, sampling)
        return begun(ledger, kind, records, *terms), kind
    if bands == 1 and sampling != "balanced":
        return planned_on(ledger, records, *terms, kind.sampler), kind
    draws = correlated.draws_in_groups(kind)
    plan = correlated.correlated_plan(ledger, records, bands, *terms, sampling, draws)
    return plan, correlated.correlated_kind(kind, plan)


def truncated(
    kind: BatchKind, examples: Examples, records: int, max_batch_size: int | None
) -> tuple[BatchKind, Examples | PaddedExamples]:
    """Return batches, and the examples they are drawn from, of a largest size, if there is one."""
    if max_batch_size is None:
        return kind, examples
    sampler = partial(TruncatedPoisson, max_batch_size=max_batch_size, of=records)
    return replace(kind, sampler=sampler), PaddedExamples(examples, max_batch_size)


def _entry(ledger: Ledger, rate: float | None, noise: float | None) -> tuple[float, float] | None:
    """Return rate and noise of the first entry of a menu that agrees with what is given."""
    if not isinstance(ledger.filter, MenuFilter) or (rate is not None and noise is not None):
        return None
    for event in ledger.filter.events:
        drawn = isinstance(event, PoissonEvent | TruncatedEvent | DrawnEvent)
        inner, own = (event.event, event.rate) if drawn else (event, 1.0)  # type: ignore[union-attr]
        if isinstance(inner, GaussianEvent) and rate in (None, own) and noise in (None, inner.noise):
            return own, inner.noise
    raise InvalidValue(
        f"no entry of the menu has sampling_rate {rate} and noise_multiplier {noise}: give both, or those of "
        f"an entry: {', '.join(map(str, ledger.filter.events))}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedSum:
    """A released sum of gradients, with the bound and terms that it was asked for with."""

    gradient: Tensor
    bound: Bound
    terms: BatchTerms
    receipts: tuple[Receipt, ...]


def in_order(
    deviation: float | list[Tensor], trained: list[nn.Parameter], groups: list[dict[str, Any]]
) -> float | list[Tensor]:
    """Return deviations by parameter in the order of an optimiser's groups."""
    if isinstance(deviation, float):
        return deviation
    of = {id(p): like(p, part) for p, part in zip(trained, deviation, strict=True)}
    return [of[id(p)] for group in groups for p in group["params"]]


def mean_of(held: list[ReleasedSum]) -> Tensor:
    """Return the mean gradient of released sums, by the public sizes of their batches."""
    total = held[0].gradient if len(held) == 1 else torch.stack([one.gradient for one in held]).sum(0)
    return total.div_(sum(one.terms.expected_batch_size for one in held))  # nobody else has it


class Deviations:
    """The standard deviation of the noise on a mean gradient, computed once for batches asked for alike."""

    def __init__(self, layout: Layout, device: torch.device, factor: float = 1.0) -> None:
        self._layout, self._device, self._factor = layout, device, factor
        self._last: tuple[list[tuple[Bound, BatchTerms]], float | list[Tensor]] | None = None

    def of(self, held: list[ReleasedSum]) -> float | list[Tensor]:
        """Return one number, or by parameter where coordinates differ."""
        asked = [(one.bound, one.terms) for one in held]
        last = self._last
        if last is None or len(last[0]) != len(asked) or any(map(_differ, last[0], asked)):
            self._last = last = asked, self._deviation(held)
        return last[1]

    def norm(self, held: list[ReleasedSum], size: int) -> Tensor | float:
        """Return the root mean square norm of the noise on a mean gradient of ``size`` coordinates."""
        deviation = self.of(held)
        if isinstance(deviation, float):
            return deviation * math.sqrt(size)
        whole: Tensor = torch.linalg.vector_norm(torch.cat([part.flatten() for part in deviation]))
        return whole

    def _deviation(self, held: list[ReleasedSum]) -> float | list[Tensor]:
        variance: Any = 0.0
        for one in held:
            scale: Any = one.bound.scale
            each = scale if isinstance(scale, float) else beside(scale, self._device)
            variance = variance + (self._factor * one.terms.noise_multiplier * one.bound.norm() * each) ** 2
        spread = variance**0.5 / sum(one.terms.expected_batch_size for one in held)
        return self._layout.views(spread) if isinstance(spread, Tensor) and len(spread) > 1 else float(spread)


def _differ(one: tuple[Bound, BatchTerms], other: tuple[Bound, BatchTerms]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]
