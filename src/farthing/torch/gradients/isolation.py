"""Compute per-example gradients in isolation: every example is a batch of one, by construction.

Book-keeping runs a whole batch through the model and *checks* on made-up examples that they stay apart. Here
nothing has to be checked. With ``route="vmap"`` every example runs in a lane of its own of torch.func.vmap,
with ``route="loop"`` in a forward pass of its own. The claim: a row of `per_example` is a function of the
weights, the buffers, that example and randomness that is drawn for it or for all alike, so that a sum of rows
bounded by C moves by at most C when an example comes or goes. Why nothing else can enter a row:

* Tensors. The code in a lane is written for one example and sees tensors of one example: their sizes do not
  tell how many lanes there are, no index reaches another lane, and every operation on them is defined as the
  one on each lane alone (torch's batching rules; where there is none, torch loops). An operation whose course
  would depend on values (``if x.max() > 1``, ``x.item()``, ``x[x > 0]``) raises, and is refused in the check;
  in a loop it is an ordinary one, on one example.
* Weights and buffers. The model runs on copies that are dropped with the batch. A lane's value cannot be
  written into a tensor that all lanes share: vmap raises.
* Randomness. Lanes draw apart (``randomness="different"``); numbers from Python's or numpy's generators are
  the same for all lanes. Both are independent of the examples.
* Python. A tensor kept in an attribute, a list or a closure would reach the same lane of the *next* batch: so
  whatever the model and the loss hold is put back after each batch (`farthing.torch.checks.leftovers`). In
  lanes there are no numbers that could be kept; in a loop there are, and all is put back after each example.
* A batching rule written by hand (``vmap`` of a torch.autograd.Function) does see all lanes: refused.

Left out is code that means to escape: a module global, a file, `torch.library.register_vmap`, torch's
internals. Rounding is not part of the claim: a product of another size may round a lane otherwise.

Every row is a whole gradient, so memory grows with examples × parameters and time with it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from farthing.errors import InvalidValue, Unsupported
from farthing.torch.checks.leftovers import Wall
from farthing.torch.gradients.layout import dense, real
from farthing.torch.gradients.tape import Loss, call, mapped


class Isolation(StrEnum):
    """How examples are kept from meeting: in lanes of vmap, or one after the other."""

    VMAP = "vmap"
    LOOP = "loop"


_COST = {
    Isolation.VMAP: "in full precision in a lane of torch.func.vmap, which is usually 2 to 10 times slower",
    Isolation.LOOP: "in full precision through the model alone, which is slower by about the size of a batch",
}


def told(how: Isolation, error: Exception, rows: int, size: int) -> str:
    """Return one sentence on why gradients are made in isolation, and what that costs.

    >>> told(Isolation.VMAP, Unsupported("Odd is used past its module; call it"), 512, 1000)[:66]
    'Odd is used past its module, so each example goes in full precisio'
    """
    why = str(error).partition(";")[0]
    if "mixes examples" in why:
        why = "examples meet where book-keeping copies a parameter of the model for each"
    return (
        f"{why}, so each example goes {_COST[how]} and takes up to {rows * size * 4 / 2**20:,.0f} MiB for "
        f'the gradients of {rows} at a time; route="{how}" asks for this, route="fast" refuses instead'
    )


def per_example(
    how: Isolation,
    model: nn.Module,
    loss: Loss,
    names: tuple[str, ...],
    inputs: Any,
    targets: Any,
    weights: Tensor | None,
) -> Tensor:
    """Return the gradients of the named parameters in float32, one a row.

    With ``weights`` of two dimensions an example is a group of records along the second one, of which each is
    a batch of one as well.
    """
    found = _found(how, model, loss, names, inputs, targets, weights)
    return torch.cat([real(found[name]).reshape(len(found[name]), -1) for name in names], 1)


def losses(
    how: Isolation, model: nn.Module, loss: Loss, weights: dict[str, Tensor], inputs: Any, targets: Any
) -> Tensor:
    """Return each record's loss under ``weights``, which are named as the model's parameters."""
    own = {name: p.detach() for name, p in model.named_parameters()} | _buffers(model) | weights

    def one(x: Any, y: Any) -> Tensor:
        return _loss(model, loss, own, x, y).detach()

    wall = Wall(model, loss, everything=True)
    if how is Isolation.VMAP:
        with wall, _without_rules(), _traced():
            found: Tensor = vmap(one, randomness="different")(inputs, targets)
        return found
    each = []
    for n in range(_length(inputs)):
        with wall:
            each.append(one(_at(inputs, n), _at(targets, n)))
    return torch.stack(each)


def _found(
    how: Isolation,
    model: nn.Module,
    loss: Loss,
    names: tuple[str, ...],
    inputs: Any,
    targets: Any,
    weights: Tensor | None,
) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name: parameters[name] for name in names}
    fixed = {name: p for name, p in parameters.items() if name not in trained} | _buffers(model)
    grouped = weights is not None and weights.ndim == 2

    def objective(trained: dict[str, Tensor], x: Any, y: Any, weight: Tensor | None) -> Tensor:
        if not grouped:
            value = _loss(model, loss, trained | fixed, x, y)
        elif how is Isolation.VMAP:
            value = vmap(lambda *given: _loss(model, loss, trained | fixed, *given), randomness="different")(
                x, y
            )
        else:
            records = range(_length(x))
            value = torch.stack([_loss(model, loss, trained | fixed, _at(x, n), _at(y, n)) for n in records])
        return (value if weight is None else value * weight).sum()

    wall = Wall(model, loss, everything=True)
    if how is Isolation.VMAP:
        where = (None, 0, 0, None if weights is None else 0)
        with wall, _without_rules(), _traced():
            own = {name: p.clone() for name, p in trained.items()}
            return dict(
                vmap(grad(objective), in_dims=where, randomness="different")(own, inputs, targets, weights)
            )
    each = []
    for n in range(_length(inputs)):
        with wall:
            weight = None if weights is None else weights[n]
            each.append(_gradient(objective, trained, _at(inputs, n), _at(targets, n), weight))
    return {name: torch.stack([row[name] for row in each]) for name in names}


def _gradient(
    objective: Callable[..., Tensor], trained: dict[str, Tensor], x: Any, y: Any, weight: Tensor | None
) -> dict[str, Tensor]:
    """Return the gradient of one example by ordinary autograd."""
    own = {name: p.clone().requires_grad_() for name, p in trained.items()}
    with torch.enable_grad():
        value = objective(own, x, y, weight)
        if not value.requires_grad:
            return {name: torch.zeros_like(p) for name, p in own.items()}
        found = torch.autograd.grad(value, list(own.values()), allow_unused=True)
    return {name: dense(g, p) for (name, p), g in zip(own.items(), found, strict=True)}


def _loss(model: nn.Module, loss: Loss, weights: dict[str, Tensor], x: Any, y: Any) -> Tensor:
    """Return the loss of one record, which the model and the loss see as a batch of one."""
    x, y = mapped(x, lambda t: t[None]), mapped(y, lambda t: t[None])
    own = {name: p if p.requires_grad else p.clone() for name, p in weights.items()}
    found = loss(call(lambda *args: functional_call(model, own, args), x), y)
    if found.shape != (1,):
        raise InvalidValue(
            f"loss must return one value a record, shape (1,) for a batch of one, got {tuple(found.shape)}: "
            'use reduction="none" and sum over what belongs to one record'
        )
    return found[0] if found.dtype is torch.float64 else found[0].float()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach() for name, buffer in model.named_buffers()}


def _length(value: Any) -> int:
    while isinstance(value, list | tuple):
        value = value[0]
    return len(value)


def _at(value: Any, place: int) -> Any:
    return mapped(value, lambda t: t[place])


@contextmanager
def _traced() -> Iterator[None]:
    """Tell libraries, as torch.compile does, that values decide nothing: they then leave short cuts out."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _without_rules() -> Iterator[None]:
    """Make hand-written batching rules raise for a while, because they see all lanes at once."""
    own = [kind for kind in _functions(torch.autograd.Function) if "vmap" in kind.__dict__]
    rules = {kind: kind.__dict__["vmap"] for kind in own if not kind.__module__.startswith("torch.")}
    for kind in rules:
        kind.vmap = staticmethod(functools.partial(_refused, kind.__name__))
    try:
        yield
    finally:
        for kind, rule in rules.items():
            kind.vmap = rule


def _functions(kind: Any) -> Iterator[Any]:
    for below in kind.__subclasses__():
        yield below
        yield from _functions(below)


def _refused(name: str, *_: Any) -> Any:
    raise Unsupported(
        f"{name} (torch.autograd.Function) has a vmap rule of its own, which is given all examples at once: "
        'use route="loop", or leave the rule to torch, generate_vmap_rule = True'
    )
