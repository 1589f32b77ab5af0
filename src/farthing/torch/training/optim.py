"""Provide optimisers: Adam corrected for the noise in its gradients, and a trial before the first charge.

Adam divides by √v, v the mean square of gradients; under differential privacy v is mostly the variance of
the noise, the same for every coordinate, and Adam turns into SGD with momentum. The noise is public, so it
can be taken off: Tang, Shpilevskiy & Lécuyer 2024, "DP-AdamBC: your DP-Adam is actually DP-SGD (unless you
apply bias correction)", Algorithm 1,

    w ← w - rate · m̂ / √max(v̂ - Φ̂, floor² Φ̂),

with Φ̂ the mean variance of the noise over the same steps as v̂, so that noise may follow a schedule and
differ by coordinate. Their floor is an absolute number, tuned; here it is relative to the noise. All of this
is post-processing.

`chosen` is what training takes where no optimiser is given: SGD with momentum, or DP-Adam for models with
embeddings, attention or normalisation, whose gradients differ most in size. Its learning rate falls linearly
to 0 and begins at a rule of public numbers. Noise moves a weight like a random walk, so the walk's length is
what a rate decides: `WALK` √μ, with μ = sampling rate √T / noise multiplier, about the plan's Gaussian-DP
budget. (On MNIST and Adult, networks of 32 to 512 units, ε from 0.3 to 4, the best were 0.3 to 1 √μ.) Where
noise is small the limit is what a deterministic step bears: `STEEPEST` / clip, less with depth, as deep
networks want (De et al. 2022), or `ADAM`.

>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> adam = DPAdam([weight], lr=0.1)
>>> adam.expect(0.5)  # the standard deviation of the noise on a mean gradient; training does this
>>> weight.grad = torch.tensor([3.0, 0.0])
>>> adam.step()
>>> [round(value, 3) for value in weight.tolist()]
[-0.101, 0.0]

**Trial.** Some of torch's optimisers and schedules need more than a gradient: LBFGS evaluates the loss
several times a step, SparseAdam wants sparse gradients, ReduceLROnPlateau a metric, OneCycleLR ends after a
number of steps. In a run each would fail after the first batch is charged, or after the last but one. So
copies of both take their steps first, on parameters of one element each (`rehearse`).

>>> weight = nn.Parameter(torch.ones(3, 2))
>>> sgd = torch.optim.SGD([weight], 0.1)
>>> rehearse(sgd, torch.optim.lr_scheduler.StepLR(sgd, 10), updates=100)
>>> weight.tolist(), sgd.param_groups[0]["lr"]
([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 0.1)
"""

import copy
import inspect
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import InvalidValue, Unsupported
from farthing.torch.training.plan import Plan, refuse_other
from farthing.torch.training.watching import ProgressLine, TrainingStep

WALK = 0.4
MOMENTUM = 0.9
STEEPEST, LAYERS = 1.0, 4  # the largest learning rate of SGD at clip 1, up to so many layers
ADAM = 2e-3


class DPAdam(torch.optim.Optimizer):
    """An Adam that subtracts the noise's variance from its second moment, with decoupled weight decay.

    Without noise (`expect` never called, or 0) it is AdamW.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them, as for any optimiser of torch.
    lr : float, default 1e-3
        Learning rate.
    betas : tuple of float, default (0.9, 0.999)
        Decays of the mean and of the mean square.
    floor : float, default 1.0
        The least root of the second moment, over the noise's standard deviation.
    eps : float, default 1e-8
        Added to the root.
    weight_decay : float, default 0.0
        Decoupled weight decay.

    Notes
    -----
    Tang, Shpilevskiy & Lécuyer 2024, "DP-AdamBC", Algorithm 1. Post-processing of released gradients.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> adam = DPAdam([weight], lr=0.1)
    >>> adam.expect(0.5)
    >>> weight.grad = torch.tensor([3.0, 0.0])
    >>> adam.step()
    >>> [round(value, 3) for value in weight.tolist()]
    [-0.101, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        validate.positive(lr=lr)
        validate.non_negative(floor=floor)
        validate.positive(eps=eps)
        validate.non_negative(weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise InvalidValue(f"betas must be two numbers in [0, 1), got {betas!r}")
        defaults = {"lr": lr, "betas": betas, "floor": floor, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._noise: dict[Tensor, float | Tensor] = {}

    def expect(self, deviation: float | Sequence[float | Tensor]) -> None:
        """Take note of the noise's standard deviation: one number, or a number or tensor a parameter."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        each = [deviation] * len(parameters) if isinstance(deviation, float | int) else list(deviation)
        if len(each) != len(parameters):
            raise InvalidValue(
                f"deviation must have one part a parameter, {len(parameters)}, got {len(each)}"
            )
        self._noise = dict(zip(parameters, each, strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update from the gradients; ``closure`` is torch's, and is not needed."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._move(parameters, group)
        return found

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], parameter.grad.float()
        deviation = self._noise.get(parameter, 0.0)
        scalar = not isinstance(deviation, Tensor)
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(gradient)
            state["square"] = torch.zeros_like(gradient)
            state["noise"] = 0.0 if scalar else torch.zeros_like(gradient)
        first, second = group["betas"]
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        state["noise"] = second * state["noise"] + (1 - second) * deviation**2
        young = 1 - second ** state["step"]
        variance = state["noise"] / young
        square = state["square"] / young
        least = group["floor"] ** 2 * variance
        if scalar and not isinstance(variance, Tensor):
            square.sub_(variance).clamp_(min=least)
        else:
            square = torch.maximum(square - variance, torch.as_tensor(least, device=square.device))
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        size = group["lr"] / (1 - first ** state["step"])
        parameter.add_((state["mean"] / square.sqrt_().add_(group["eps"]) * -size).to(parameter.dtype))


def chosen(model: nn.Module, plan: Plan, norm: float) -> torch.optim.Optimizer:
    """Return an optimiser of the model's trained parameters, for gradients clipped at ``norm``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps, noise = plan.steps or 1, max(plan.noise_multipliers)
    walk = WALK * math.sqrt(plan.sampling_rate * math.sqrt(steps) / noise) / math.sqrt(steps / 3)
    uneven = any(isinstance(module, _UNEVEN) for module in model.modules())
    if uneven and not any(parameter.is_complex() for parameter in trained):
        return DPAdam(trained, min(walk, ADAM))
    layers = sum(parameter.ndim > 1 for parameter in trained)
    steepest = STEEPEST / norm * min(1.0, LAYERS / max(layers, 1))
    rate = min(walk * (1 - MOMENTUM) * plan.expected_batch_size / (noise * norm), steepest)
    return torch.optim.SGD(trained, rate, momentum=MOMENTUM)


_UNEVEN = (nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Scheduler(Protocol):
    """A schedule of learning rates, as in torch.optim.lr_scheduler."""

    def step(self) -> None:
        """Move on, after every update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""


@dataclass(slots=True, eq=False)
class UpdateParts:
    """The parts of an update, all of them public and post-processing."""

    optimizer: torch.optim.Optimizer | None
    scheduler: Scheduler | None
    average: float | None
    accumulate: int
    callbacks: tuple[Callable[[TrainingStep], object], ...]
    line: ProgressLine | None


class Together:
    """Several optimisers, or several schedules, as one.

    >>> layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])
    >>> both = Together([torch.optim.SGD(layers[0].parameters(), 0.1), DPAdam(layers[1].parameters())])
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.001]
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def expect(self, deviation: float | Sequence[float | Tensor]) -> None:
        """Tell those that ask how much noise there is: one number, or one a parameter of all groups."""
        start = 0
        for part in self.parts:
            end = start + sum(len(group["params"]) for group in part.param_groups)
            if expect := getattr(part, "expect", None):
                expect(deviation if isinstance(deviation, float | int) else deviation[start:end])
            start = end

    def step(self) -> None:
        """Take a step of each."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by its number."""
        return {str(n): part.state_dict() for n, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each."""
        for n, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(n)])


def joined(given: Any) -> Any:
    """Return one optimiser or schedule as it is, and several as one."""
    return Together(given) if isinstance(given, list | tuple) else given


def joined_for(model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """Return a model's optimiser and schedule, each as one; refuses those that do not fit or cannot step."""
    taking, following = joined(optimizer), joined(scheduler)
    if taking is not None:
        refuse_other(parts_of(taking), [p for p in model.parameters() if p.requires_grad])
        rehearsed(taking, following)
    elif following is not None:
        raise InvalidValue("a scheduler needs the optimizer it was made for: give optimizer= as well")
    return taking, following


def parts_of(given: Any) -> tuple[Any, ...]:
    """Return the optimisers or schedules that were given."""
    return given.parts if isinstance(given, Together) else () if given is None else (given,)


def rehearsed(optimizer: Any, scheduler: Any, updates: int = 1) -> None:
    """Refuse optimisers and schedules that cannot take their steps from gradients alone."""
    for one in parts_of(optimizer):
        mine = [each for each in parts_of(scheduler) if getattr(each, "optimizer", one) is one]
        for schedule in mine or [None]:
            rehearse(one, schedule, updates)


_MOST = 10_000  # steps of a schedule that are tried


def rehearse(optimizer: torch.optim.Optimizer, scheduler: Any = None, updates: int = 1) -> None:
    """Refuse an optimiser or schedule that cannot take ``updates`` steps from gradients alone."""
    try:
        twin, memo = _twin(optimizer)
        following = None if scheduler is None else copy.deepcopy(scheduler, memo)
    except Exception:  # one that cannot be copied shows in the run what it needs
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _step(twin)
        except Exception as error:
            raise Unsupported(_unfit(optimizer, error)) from None
        try:
            for _ in range(min(updates, _MOST)):
                if following is not None:
                    following.step()
        except Exception as error:
            raise Unsupported(_ended(scheduler, error, updates)) from None


def _step(twin: torch.optim.Optimizer) -> None:
    """Take a step of torch's own optimisers; of others, which may do more, only check the signature."""
    kind = type(twin)
    if kind.__module__.startswith("torch."):
        kind.step(twin)
    else:
        inspect.signature(kind.step).bind(twin)


def _twin(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, dict[int, Any]]:
    """Return a copy for parameters of one element each, and the map from old objects to new ones.

    Its state is the optimiser's own, cut to one element: some optimisers fill theirs when they are made.
    """
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        memo[id(p)] = small = nn.Parameter(torch.zeros([1] * p.ndim, dtype=p.dtype, device=p.device))
        small.grad = torch.full_like(small, 1e-3)
    for name, value in optimizer.__dict__.items():
        if "hooks" in name:
            twin.__dict__[name] = OrderedDict[Any, Any]()
        elif name not in ("state", "step"):  # a schedule puts its own step there, of the optimiser itself
            twin.__dict__[name] = copy.deepcopy(value, memo)
    state = defaultdict[Any, Any](dict)
    for p, held in optimizer.state.items():
        if id(p) in memo:
            state[memo[id(p)]] = {name: _cut(value) for name, value in held.items()}
    twin.__dict__["state"] = state
    return twin, memo


def _cut(value: Any) -> Any:
    """Return the first element of a tensor along every dimension, and anything else as a copy."""
    if isinstance(value, torch.Tensor):
        return value[tuple(slice(0, 1) for _ in value.shape)].clone()
    return copy.deepcopy(value)


def _unfit(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    name = type(optimizer).__name__
    ways = {
        "LBFGS": "it evaluates the loss several times a step, each a release: use SGD, Adam or DPAdam",
        "SparseAdam": "released gradients are dense, noise is everywhere: use Adam or DPAdam",
    }
    advice = ways.get(name, "use an optimizer whose step() needs nothing but the gradients")
    return f"{name} cannot take a step from released gradients ({type(error).__name__}: {error}); {advice}"


def _ended(scheduler: Any, error: Exception, updates: int) -> str:
    name = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return (
            f"{name} needs a metric, and one of the training records would be a release that nobody paid "
            "for: use a schedule of steps, or call its step yourself with a metric of public data, "
            "plateau.step(ft.torch.evaluate(model, public))"
        )
    return (
        f"{name} cannot take the {updates} steps of this run ({type(error).__name__}: {error}); its step() "
        "is called after every update, without arguments"
    )
