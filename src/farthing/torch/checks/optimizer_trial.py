"""A step of an optimiser and a schedule of learning rates, tried on made-up parameters before any charge.

Some of torch's optimisers and schedules need more than a gradient: LBFGS evaluates the loss several times a
step, SparseAdam wants sparse gradients, ReduceLROnPlateau a metric, OneCycleLR ends after a number of steps.
In a run each would fail after the first batch is charged, or after the last but one. So copies of both take
their steps here, on parameters of one element each.

>>> weight = nn.Parameter(torch.ones(3, 2))
>>> sgd = torch.optim.SGD([weight], 0.1)
>>> rehearse(sgd, torch.optim.lr_scheduler.StepLR(sgd, 10), updates=100)
>>> weight.tolist(), sgd.param_groups[0]["lr"]
([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 0.1)
"""

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

from farthing.errors import Unsupported

_MOST = 10_000  # steps of a schedule that are tried


def rehearse(optimizer: torch.optim.Optimizer, scheduler: Any = None, updates: int = 1) -> None:
    """Refuses what cannot take ``updates`` steps from gradients alone; both stay as they are."""
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
    """A step of torch's own optimisers; of others, which may do more, only what it asks for is looked at."""
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
