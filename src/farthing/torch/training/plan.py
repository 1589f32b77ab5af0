"""Choose batch size, number of batches and noise, by rules of public numbers only.

Two facts decide (Dong, Roth & Su 2022, Cor. 5.4: T batches of rate q at noise σ are μ-GDP in the limit, with
μ = q √(T (e^(1/σ²) - 1)); De et al. 2022 and Sander et al. 2023 measure the same on images):

* The noise on a mean gradient, σ/(q n), falls with the batch until σ is about 2, and hardly after: at σ = 2
  it is 7 % above that of batches of everybody, at σ = 1 31 %. So a batch is as small as leaves σ at
  `SAFE_NOISE`, and never smaller than `SMALLEST_BATCH` records, which a machine takes in one stride anyway.
* More batches cost no accuracy by themselves (steps get shorter, noise averages out), but a larger budget
  carries training further: T = `TYPICAL` √ε, within `FEWEST` and `MOST`. De et al. found 875 batches best on
  CIFAR-10 at ε = 1 and 2,468 at ε = 8.

Then the noise is what makes T batches spend the whole budget, by tight accounting.

>>> from farthing.budget import Budget
>>> plan = planned(Budget(2.0, 1e-5), 60_000)
>>> plan.steps, round(plan.expected_batch_size), round(plan.noise_multiplier(0), 2)
(1131, 1790, 2.16)

This module also settles examples, ledger and promise before a run begins. Nothing is charged here.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farthing import validate
from farthing.accounting import calibrate, gaussian
from farthing.budget import Budget, Unit
from farthing.errors import InvalidValue, PromiseBroken, Unsupported
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.queries import mechanisms
from farthing.queries.bounds import Bound
from farthing.queries.events import (
    ComposedEvent,
    DrawnEvent,
    Event,
    GaussianEvent,
    PoissonEvent,
    RepeatedEvent,
    TruncatedEvent,
    decode,
)
from farthing.queries.personal import Personal
from farthing.queries.query import Query
from farthing.queries.samplers import Poisson, Sampler
from farthing.torch.checks.probe import Source
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.layout import Layout
from farthing.torch.gradients.tape import call
from farthing.torch.training import sharding
from farthing.torch.training.randomness import OwnRandomness
from farthing.torch.training.records import Examples
from farthing.torch.training.schedules import Bounds

TYPICAL, FEWEST, MOST = 800, 200, 3000
SMALLEST_BATCH = 1024
SAFE_NOISE = 2.0
USELESS = 1e4  # a noise multiplier that only what rounding leaves of a budget asks for
NOTHING = ComposedEvent(())
LEVELS = 32  # different noises of one plan: each is a promise of its own

Noise = float | Sequence[float] | NDArray[np.float64] | Callable[[int], float]
Draws = Callable[[float], Sampler]  # from a sampling rate


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run: its batches, sampling rate and noise.

    Attributes
    ----------
    records : int
        The public number of examples.
    sampling_rate : float
        An example's chance to be in a batch.
    noise_multipliers : tuple of float
        One for all batches, or one a batch.
    steps : int or None
        The number of batches; None for as many as fit the budget.
    promised : bool, default True
        Whether the batches are promised ahead; if not, these are the terms of the first one, and ``steps`` is
        how many there are at most.
    bands : int, default 1
        Over how many batches noise is correlated; 1 for independent noise.
    exponent : float, default 0.5
        That of `farthing.BandedGaussian`.
    buffers : int, default 0
        Where above 0, noise is correlated over all batches by so many buffers, and ``bands`` is the number of
        batches of a pass, in each of which every example takes part once.
    bins : int, default 0
        Where above 0, draws are balanced (`farthing.Balanced`): a pass has ``bins`` times ``bands`` batches.

    Examples
    --------
    >>> plan = Plan(1000, 0.1, (2.0,), 30)
    >>> plan.expected_batch_size, plan.noise_multiplier(7)
    (100.0, 2.0)
    """

    records: int
    sampling_rate: float
    noise_multipliers: tuple[float, ...]
    steps: int | None
    promised: bool = True
    bands: int = 1
    exponent: float = 0.5
    buffers: int = 0
    bins: int = 0

    @property
    def expected_batch_size(self) -> float:
        """Return the expected batch size, by which every sum is divided."""
        return self.sampling_rate * self.records

    def noise_multiplier(self, place: int) -> float:
        """Return the noise of the batch at ``place``, counted from 0."""
        return self.noise_multipliers[place] if len(self.noise_multipliers) > 1 else self.noise_multipliers[0]

    def levels(self) -> dict[float, int | None]:
        """Return each noise with how often it is asked for, in the order of their first use."""
        if len(self.noise_multipliers) == 1:
            return {self.noise_multipliers[0]: self.steps}
        return {noise: self.noise_multipliers.count(noise) for noise in dict.fromkeys(self.noise_multipliers)}


def planned(
    budget: Budget,
    records: int,
    *,
    sampling_rate: float | None = None,
    noise_multiplier: Noise | None = None,
    steps: int | None = None,
    before: Event = NOTHING,
    sampler: Draws = Poisson,
) -> Plan:
    """Return a plan; what is not given follows from the budget and the public number of records.

    ``before`` is what else the budget has to pay for, ``sampler`` makes the draws of a rate.
    """
    if budget.delta == 0:
        raise InvalidValue(f"Gaussian noise needs a delta above 0, got {budget}")
    count = validate.count(steps=steps) if steps is not None else None
    length = count if count is not None else default_steps(budget)
    if sampling_rate is None:
        sampling_rate = default_rate(budget, records, length)
    validate.rate(sampling_rate=sampling_rate)
    if isinstance(noise_multiplier, np.ndarray):
        noise_multiplier = noise_multiplier.tolist()
    if noise_multiplier is None:
        noise = fitted(lambda t: 1.0, sampling_rate, length, budget, before, sampler)[0]
        return Plan(records, sampling_rate, (noise,), length)
    if isinstance(noise_multiplier, Sequence) or callable(noise_multiplier):
        if count is None:
            if callable(noise_multiplier):
                raise InvalidValue(
                    "a noise_multiplier that follows the step needs steps, the length of its plan"
                )
            count = len(noise_multiplier)
        values = along(noise_multiplier, count, "noise_multiplier")
        for value in values:
            validate.positive(noise_multiplier=value)
        return Plan(records, sampling_rate, _levelled(values), count)
    return Plan(records, sampling_rate, (validate.positive(noise_multiplier=noise_multiplier),), count)


def fitted(
    shape: Callable[[int], float],
    sampling_rate: float,
    steps: int,
    budget: Budget,
    before: Event = NOTHING,
    sampler: Draws = Poisson,
) -> tuple[float, ...]:
    """Return noise multipliers in the shape of a public schedule that together spend a budget.

    Parameters
    ----------
    shape : callable
        From t = 1, …, steps to the relative size of the noise of batch t.
    sampling_rate : float
        An example's chance to be in a batch.
    steps : int
        The number of batches.
    budget : Budget
        The budget they spend.
    before : Event, optional
        What else the budget has to pay for; nothing by default.
    sampler : callable, default Poisson
        From the sampling rate to a sampler.

    Returns
    -------
    tuple of float
        One a batch, with at most 32 different values.

    Examples
    --------
    >>> from farthing.budget import Budget
    >>> falling = fitted(lambda t: 1.5 if t <= 50 else 1.0, 0.02, 100, Budget(1.0, 1e-5))
    >>> falling[0] / falling[-1], round(falling[0], 3)
    (1.5, 1.609)
    """
    draws = sampler(sampling_rate)
    each = _levelled([validate.positive(shape=shape(t)) for t in range(1, steps + 1)])
    counts = {size: each.count(size) for size in dict.fromkeys(each)}

    def plan(sigma: float) -> Event:
        parts = (
            RepeatedEvent(draws.amplify(GaussianEvent(sigma * size), budget.observer), times)
            for size, times in counts.items()
        )
        return ComposedEvent((*parts, before))

    sigma = calibrate.noise(plan, budget)
    return tuple(sigma * size for size in each)


def promised(journal: Journal) -> list[tuple[Event, int]]:
    """Return the plan that a ledger already holds."""
    rows = (row.body for row in journal.rows() if row.kind == "promise")
    return [(decode(body["event"]), body["times"]) for body in rows]


def resumed(
    plan: list[tuple[Event, int]],
    records: int,
    sampling_rate: float | None,
    steps: int | None,
    draws: type[Event] = PoissonEvent,
) -> Plan | None:
    """Return the plan of a run that goes on: a ledger's one promise of Gaussian batches, if it fits."""
    found = [
        Plan(records, event.rate, (event.event.noise,), times)
        for event, times in plan
        if isinstance(event, PoissonEvent | TruncatedEvent | DrawnEvent)
        and isinstance(event, draws | DrawnEvent)
        and isinstance(event.event, GaussianEvent)
    ]
    if (
        len(found) != 1
        or sampling_rate not in (None, found[0].sampling_rate)
        or steps not in (None, found[0].steps)
    ):
        return None
    return found[0]


def along(values: Sequence[float] | Callable[[int], float], steps: int, name: str) -> list[float]:
    """Return a schedule written out: one value for each of t = 1 … steps."""
    if callable(values):
        return [float(values(t)) for t in range(1, steps + 1)]
    if len(values) < steps:
        raise InvalidValue(f"{name} must have a value for each of {steps} steps, got {len(values)}")
    return [float(value) for value in itertools.islice(values, steps)]


def default_steps(budget: Budget) -> int:
    """Return how many batches a run has where nobody says."""
    return round(min(max(TYPICAL * math.sqrt(budget.epsilon), FEWEST), MOST))


def default_rate(budget: Budget, records: int, steps: int) -> float:
    """Return the least rate at which the noise q √T / μ is `SAFE_NOISE` times the distance of neighbours."""
    needed = SAFE_NOISE * gaussian.mu(budget.epsilon, budget.delta) / math.sqrt(steps)
    return min(1.0, max(needed, SMALLEST_BATCH / records))


def _levelled(values: list[float]) -> tuple[float, ...]:
    """Return at most `LEVELS` different values; more are rounded to a logarithmic grid."""
    if len(set(values)) <= LEVELS:
        return tuple(values)
    low, high = math.log(min(values)), math.log(max(values))
    cell = (high - low) / (LEVELS - 1)
    return tuple(math.exp(low + cell * round((math.log(value) - low) / cell)) for value in values)


_IGNORED = -100, -1  # labels that losses may ignore


@dataclass(frozen=True, slots=True, eq=False)
class BatchKind:
    """The parts of a query that all batches of a run share."""

    contribution: OwnRandomness
    layout: Layout
    mechanism: Callable[[float], mechanisms.Gaussian]
    personal: Personal | None = None  # rates by level of budget, in place of one for all
    sampler: Draws = Poisson

    def query(self, sampling_rate: float, bound: Bound, noise_multiplier: float) -> Query:
        """Return a batch at this bound and noise."""
        draws = self.personal or self.sampler(sampling_rate)
        return Query(draws, self.contribution, bound, self.mechanism(noise_multiplier))


def examples_of(
    data: Any,
    users: Any,
    records_per_user: int | None,
    augment: Callable[[Any], Any] | None,
    views: int,
    device: torch.device,
    public: Any = None,
) -> Examples:
    """Return the records as examples whose batches come on ``device``, in the shape of ``public`` ones."""
    if not isinstance(data, Examples):
        made = {"users": users, "records_per_user": records_per_user, "augment": augment, "views": views}
        examples = Examples(data, device=device, **made)
    elif users is not None or records_per_user is not None or augment is not None or views != 1:
        raise InvalidValue("users, records_per_user, augment and views belong to Examples, which is given")
    else:
        examples = data.on(device)
    if isinstance(public, list | tuple) and len(public) == 2 and examples.augment is None:
        return examples.like(*public)
    return examples


def checked(
    gradient: Gradient, examples: Examples, public: tuple[Any, Any] | None = None, records: int = 0
) -> Examples:
    """Return the examples of a model that was checked, with targets that its loss can take.

    Of the records only their form is used. Where the loss takes whole numbers below the number of
    outputs, as the made-up ones show, targets out of that range count as zero (`Examples.within`): the loss
    would say which one it was, and on a GPU nothing would work any more.
    """
    gradient.expected_batch_size = records or None  # a batch may have as many, as far as is known here
    try:
        gradient.check(*examples.made_up_batch())
    finally:
        gradient.expected_batch_size = None
    source = Source(*examples.made_up_view()) if public is None else Source(*public, public=True)
    with gradient.plain.running():
        found = target_range(gradient.model, gradient.loss, source)
    return examples if found is None else examples.within(*found)


@torch.no_grad()
def target_range(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], source: Source
) -> tuple[int, tuple[int, ...]] | None:
    """Return the number of classes that a loss accepts, and the negative labels; None for other losses."""
    inputs, targets = source.batch(1)
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.uint8, torch.int32, torch.int64):
        return None
    outputs = call(model, inputs)
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or not outputs.is_floating_point():
        return None
    own = copy.deepcopy(loss).cpu() if isinstance(loss, nn.Module) else loss
    given, asked = outputs.float().cpu(), targets.cpu()

    def takes(value: int) -> bool:
        try:  # on a CPU: a GPU does not come back from a number out of range
            own(given, torch.full_like(asked, value))
        except Exception:
            return False
        return True

    for classes in (given.shape[1], given.shape[-1]):
        if takes(0) and takes(classes - 1) and not takes(classes):
            others = () if targets.dtype is torch.uint8 else _IGNORED
            return classes, tuple(value for value in others if takes(value))
    return None


def ledger_of(ledger: Ledger | None, epsilon: float | None, delta: float | None, unit: Unit) -> Ledger:
    """Return the given ledger, if it protects what an example is, or one in memory."""
    if ledger is None:
        if epsilon is None or delta is None:
            raise InvalidValue("give a ledger, or epsilon and delta for one in memory")
        return Ledger(Budget(epsilon, delta, unit=unit))
    if epsilon is not None or delta is not None:
        raise InvalidValue("epsilon and delta are those of the ledger: leave them out")
    if ledger.budget.unit is not unit:
        fix = "give users=" if unit is Unit.RECORD else f"open it with Budget(…, unit={unit.value!r})"
        raise InvalidValue(
            f"the ledger protects a {ledger.budget.unit}, an example here is a {unit}: {fix}, "
            "so that the guarantee says what holds"
        )
    return ledger


def planned_on(
    ledger: Ledger,
    records: int,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
    sampler: Draws = Poisson,
) -> Plan:
    """Return the plan that the ledger already holds, or one that leaves room for what it holds."""
    held = promised(ledger.journal)
    draws = type(sampler(0.5).amplify(GaussianEvent(1.0)))
    found = None if noise_multiplier is not None else resumed(held, records, sampling_rate, steps, draws)
    if found is not None:
        return found
    before = ComposedEvent(tuple(RepeatedEvent(event, times) for event, times in held))

    def plan(before: Event) -> Plan:
        return planned(
            ledger.budget,
            records,
            sampling_rate=sampling_rate,
            noise_multiplier=noise_multiplier,
            steps=steps,
            before=before,
            sampler=sampler,
        )

    try:
        found = plan(before)
    except InvalidValue:
        plan(NOTHING)  # raises where an argument is wrong
        found = None
    useless = found is not None and noise_multiplier is None and found.noise_multiplier(0) > USELESS
    if found is None or (held and useless):
        raise PromiseBroken(
            f"this ledger's {ledger.budget} is promised to {sum(times for _, times in held)} answers "
            "already, and leaves no room for more batches: begin a new ledger for another training, or go on "
            "with this one, train(…) without steps, sampling_rate and noise_multiplier"
        )
    return found


def promised_on(door: Ledger, kind: BatchKind, bounds: Bounds, plan: Plan) -> tuple[Plan, int]:
    """Return the plan with its number of batches, promised, and how many of them were asked before."""
    bounds.covers(plan.steps or 1)
    first = bounds.at(1, plan.noise_multiplier(0), plan.expected_batch_size)
    used = steps = 0
    for noise, times in plan.levels().items():
        try:
            countdown = door.promise(kind.query(plan.sampling_rate, first, noise), times)
        except PromiseBroken as error:
            raise PromiseBroken(
                f"{error}; training promises all its batches ahead: begin a new ledger for it, or take a "
                "part, ledger.allot(epsilon, delta), of one that spends by basic composition"
            ) from None
        used, steps = used + countdown.times - countdown.left, steps + countdown.times
    bounds.covers(steps)
    return replace(plan, steps=steps), used


def refuse_other(optimizers: Sequence[torch.optim.Optimizer], trained: list[nn.Parameter]) -> None:
    """Refuse optimisers of other parameters than exactly those that get a gradient."""
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise InvalidValue(f"optimizer must be one of torch.optim, or several, got {one!r}")
    listed = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    given = set(listed)
    if len(listed) > len(given):
        raise InvalidValue("a parameter is in two of the optimizers: it would be moved twice by one gradient")
    if any(p.is_complex() for p in trained):
        for optimizer in optimizers:
            if not type(optimizer).__module__.startswith("torch."):
                raise Unsupported(
                    f"{type(optimizer).__name__} keeps real numbers only, and the model has complex weights: "
                    "use an optimizer of torch, such as SGD or Adam"
                )
    wanted = {id(p) for p in trained}
    if given - wanted:
        raise InvalidValue(
            f"the optimizer has {len(given - wanted)} parameters that are not trained ones of the model; "
            "make it from [p for p in model.parameters() if p.requires_grad], on the model's final device"
        )
    if wanted - given:
        raise InvalidValue(
            f"the optimizer leaves out {len(wanted - given)} parameters that noise would be added for: "
            "freeze them, parameter.requires_grad_(False), or give them to the optimizer"
        )


@torch.no_grad()
def refuse_nan(model: nn.Module) -> None:
    """Refuse NaN in weights, which are public: every gradient would count as zero, at full price."""
    if sharding.sharded(model):
        if not sharding.finite(model):
            raise InvalidValue(f"weights must be finite, a shard holds NaN or infinity; {_NAN}")
        return
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise InvalidValue(f"weights must be finite, {name} holds NaN or infinity; {_NAN}")


_NAN = (
    "nothing was charged for this step. Lower the learning rate and restore a checkpoint: the ledger goes on "
    "with what is left"
)
