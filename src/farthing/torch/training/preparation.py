"""What is settled before a run begins: its examples, ledger, plan and promise. Nothing is charged here."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farthing.budget import Budget, Unit
from farthing.errors import InvalidValue, PromiseBroken
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import Bound
from farthing.queries.events import ComposedEvent, RepeatedEvent
from farthing.queries.query import Query
from farthing.queries.samplers import Poisson
from farthing.torch.checks.probe import Source
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.calls import call
from farthing.torch.kernels.noise import Gaussian
from farthing.torch.training import plan as plans
from farthing.torch.training.flat import Layout
from farthing.torch.training.plan import Noise, Plan
from farthing.torch.training.randomness import OwnRandomness
from farthing.torch.training.records import Examples
from farthing.torch.training.schedules import Bounds

FIRST = np.zeros(1, dtype=np.int64)  # the record whose shape stands for all
_IGNORED = -100, -1  # what losses leave out, if they do


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What every lot of a run is asked for."""

    contribution: OwnRandomness
    layout: Layout
    mechanism: Callable[[float], Gaussian]

    def query(self, rate: float, bound: Bound, noise: float) -> Query:
        """A Poisson lot at this bound and noise."""
        return Query(Poisson(rate), self.contribution, bound, self.mechanism(noise))


def examples_of(
    data: Any,
    users: Any,
    records_per_user: int | None,
    augment: Callable[[Any], Any] | None,
    views: int,
    device: torch.device,
) -> Examples:
    """The records as examples whose batches come on ``device``."""
    if not isinstance(data, Examples):
        return Examples(
            data,
            users=users,
            records_per_user=records_per_user,
            augment=augment,
            views=views,
            device=device,
        )
    if users is not None or records_per_user is not None or augment is not None or views != 1:
        raise InvalidValue("users, records_per_user, augment and views belong to Examples, which is given")
    return data.on(device)


def checked(gradient: Gradient, examples: Examples, public: tuple[Any, Any] | None = None) -> Examples:
    """The examples of a model that was checked, with targets that its loss can take.

    Of the first example only its shape is used. Where the loss takes whole numbers below the number of
    outputs, as the made-up ones show, targets out of that range are refused, or count as zero
    (`Examples.within`): the loss would say which one it was, and on a GPU nothing would work any more.
    """
    first = examples.batch(FIRST)
    assert first is not None
    gradient.check(*first)
    source = Source(*examples.plain(FIRST)) if public is None else Source(*public, public=True)
    found = target_range(gradient.model, gradient.loss, source)
    return examples if found is None else examples.within(*found)


@torch.no_grad()
def target_range(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], source: Source
) -> tuple[int, tuple[int, ...]] | None:
    """The number of classes that a loss takes, and which negative numbers; None where it is not like that."""
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
    """The given ledger, if it protects what an example is, or one in memory."""
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
    ledger: Ledger, records: int, rate: float | None, noise: Noise | None, steps: int | None
) -> Plan:
    """The plan that the ledger already holds, or one that leaves room for what it holds."""
    held = plans.promised(ledger.journal)
    if noise is None and (found := plans.resumed(held, records, rate, steps)) is not None:
        return found
    before = ComposedEvent(tuple(RepeatedEvent(event, times) for event, times in held))
    return plans.planned(ledger.budget, records, rate=rate, noise=noise, steps=steps, before=before)


def promised_on(door: Ledger, kind: Kind, bounds: Bounds, plan: Plan) -> tuple[Plan, int]:
    """The plan with its number of lots, promised, and how many of them were asked before."""
    bounds.covers(plan.steps or 1)
    first = bounds.at(1, plan.noise(0), plan.lot)
    used = steps = 0
    for noise, times in plan.levels().items():
        try:
            countdown = door.promise(kind.query(plan.rate, first, noise), times)
        except PromiseBroken as error:
            raise PromiseBroken(
                f"{error}; training promises all its lots ahead: begin a new ledger for it, or take a part, "
                "ledger.allot(epsilon, delta), of one that spends by basic composition"
            ) from None
        used, steps = used + countdown.times - countdown.left, steps + countdown.times
    bounds.covers(steps)
    return Plan(plan.records, plan.rate, plan.noises, steps), used


def refuse_other(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Refuses an optimiser of other parameters than exactly those that get a gradient."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
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
    """Weights are public, so a NaN may be named; every gradient would count as zero, at full price."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise InvalidValue(
                f"weights must be finite, {name} holds NaN or infinity; nothing was charged for this step. "
                "Lower the learning rate and restore a checkpoint: the ledger goes on with what is left"
            )
