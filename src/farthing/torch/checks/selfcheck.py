"""Check before the first batch that examples stay apart and that book-keeping computes the right gradient.

A bound on each example's gradient is worthless if one example changes another's gradient: by batch
normalisation, batch statistics in a forward pass, or a loss divided by the size of the batch. Book-keeping
also misses a weight that is used outside its module. All of this is refused here; the error names the module
and says what to do instead.

The check runs on made-up examples (`farthing.torch.checks.probe`), never on private ones. Its result depends
on the model and on public shapes only, so a refusal reveals nothing about the records and costs no budget.
Examples are exchanged, and batches are made larger and smaller (`farthing.torch.checks.independence`). This
is a check, not a proof; `farthing.torch.gradients.isolation` needs none.

Before that, two checks need no gradient: whether it is a model, and whether its weights exist yet.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.torch.checks.chance import refuse_public
from farthing.torch.checks.fixing import described, replacement
from farthing.torch.checks.independence import (
    Company,
    Effort,
    Rows,
    agree,
    gradient,
    losses,
)
from farthing.torch.checks.leftovers import Wall, refuse_changes, values
from farthing.torch.checks.probe import Range, Ranges, Source, brief, calm, close, devices, form_of
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.layout import Sketch, real
from farthing.torch.gradients.tape import Loss, Passes, call, mapped, one

T = TypeVar("T")

_LATE = "the model makes parameters in its forward: call it once on public inputs, so that they are there"
_EXAMPLES = 4
_WIDE, _LARGE = 30.0, 1e4  # the size of made-up inputs


def refuse_known(model: nn.Module) -> None:
    """Refuse modules that are known to mix examples, or to keep something of them."""
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        match module:
            case _BatchNorm() if (new := replacement(module)) is not None:
                raise Unsupported(
                    f"{what} mixes examples: use {described(new)} in its place, as model = "
                    "ft.torch.fix(model) does, or call its eval() where its statistics are public"
                )
            case _InstanceNorm() if module.training and module.track_running_stats:
                raise Unsupported(
                    f"{what} keeps statistics of private examples, noise-free: set "
                    "track_running_stats=False, as model = ft.torch.fix(model) does"
                )
            case nn.Embedding() | nn.EmbeddingBag() if module.scale_grad_by_freq:
                raise Unsupported(
                    f"{what} counts tokens over the batch: set scale_grad_by_freq=False, as "
                    "ft.torch.fix(model) does"
                )
            case nn.Embedding() | nn.EmbeddingBag() if module.max_norm is not None:
                raise Unsupported(
                    f"{what} changes its weights in forward: set max_norm=None, as ft.torch.fix(model) does"
                )
            case torch.jit.ScriptModule() if module is model:
                raise Unsupported(f"{what} is compiled to TorchScript: give the module that it was made of")
            case nn.DataParallel():
                raise Unsupported(f"{what} splits batches by itself: give its module, model.module")


def verify(
    model: nn.Module,
    loss: Loss,
    source: Source,
    rows: Rows,
    kept: Callable[[], None],
    sketch: Sketch,
    expected: int = 0,
    autocast: torch.dtype | None = None,
) -> None:
    """Refuse a model in which examples do not stay apart, or which ``rows`` follows only in part.

    ``kept`` refuses what the model or the loss keeps of examples (`farthing.torch.checks.leftovers`);
    ``sketch`` is what gradients are shortened by, in ``rows`` as in those of ordinary autograd; ``expected``
    is how many examples the model is going to be given at once, if that is known, ``autocast`` the dtype of
    mixed precision, which ``rows`` is without.
    """
    with torch.random.fork_rng(devices(model)):
        inputs, targets = source.batch(_EXAMPLES)
        _refuse_targets(model, loss, inputs, targets)
        try:
            rows(inputs, targets)
        except Exception as error:
            refuse_unfollowed(error)
        kept()
        before = values(model, loss)
        with Wall(model, loss, everything=True):  # restores state that made-up examples changed
            refuse_public(lambda: rows(inputs, targets))
            company = Company(model, loss, source, rows, Effort.of(model, inputs), sketch, expected)
            company.exchanges()
            company.chances()
            if autocast is not None:
                _refuse_failing(company, autocast)
            company.sizes()
        refuse_changes(before, model, loss)  # state that the wall did not restore


def refuse_unfollowed(error: Exception) -> NoReturn:
    """Raise an error of our own as it is, and for any other one that the model cannot be followed."""
    if isinstance(error, FarthingError):
        raise error
    raise Unsupported(
        f'book-keeping cannot follow the model ({brief(error)}); use route="vmap", which is slower'
    ) from error


def _refuse_failing(company: Company, autocast: torch.dtype) -> None:
    """Refuse a model that mixes examples under mixed precision, or that does not run in it at all."""
    try:
        company.low_precision(autocast)
    except FarthingError:
        raise
    except Exception as error:
        raise Unsupported(
            f"the model runs in full precision, and not with autocast={autocast} ({brief(error)}): leave "
            "autocast out, or use torch.bfloat16"
        ) from error


def settle_autocast(passes: Passes, source: Source) -> None:
    """Refuse a model that cannot be followed under mixed precision, with or without layers without a rule."""
    if passes.autocast is None:
        return
    for passes.plan.mixed in (True, False):
        try:
            with torch.random.fork_rng(devices(passes.model)):
                passes.rows(*source.batch(2), sketch=Sketch(passes.layout.sizes))
            return
        except FarthingError:
            raise
        except Exception as error:
            failed = error
    raise Unsupported(
        f"book-keeping cannot follow the model with autocast={passes.autocast} ({brief(failed)}): leave "
        "autocast out"
    ) from failed


def both_passes(
    model: nn.Module,
    loss: Loss,
    rows: Callable[..., Tensor],
    source: Source,
    alone: bool,
    trained: int,
    size: int,
    seed: int,
) -> Tensor:
    """Run ``rows`` and the plain passes on made-up examples; return the losses, with their graph.

    ``alone``: examples go through the model one by one; ``trained`` are the parameters that there were.
    """
    inputs, targets = source.batch(size, seed=seed)
    with torch.random.fork_rng(devices(model)), torch.enable_grad():
        rows(inputs, targets)
        ones = [one(inputs, targets, n) for n in range(size)]
        batches = ones if alone else [mapped((inputs, targets), torch.clone)]
        found = torch.cat([loss(call(model, x), y) for x, y in batches])
        if len(parameters := [p for p in model.parameters() if p.requires_grad]) > trained:
            raise InvalidValue(_LATE)
        if found.requires_grad:
            torch.autograd.grad(found.sum(), parameters, allow_unused=True, retain_graph=True)
    return found


def verify_again(model: nn.Module, loss: Loss, source: Source, rows: Rows, sketch: Sketch) -> None:
    """Refuse a model whose gradients in a small batch are not those of single examples: a quick check."""

    def once() -> list[Tensor]:
        return [losses(model, loss, *source.batch(_EXAMPLES))]

    wall, apart = Wall(model, loss, everything=True), torch.random.fork_rng(devices(model))
    with apart, wall, calm(model, once) as steady:
        for seed, scale in enumerate((1.0, _WIDE) if steady else ()):
            batch = source.batch(_EXAMPLES, seed, Ranges(Range(scale)))
            found = rows(*batch)
            for n in range(_EXAMPLES):
                expected = gradient(model, loss, *one(*batch, n))
                parts = [sketch(k, real(part).reshape(1, -1))[0] for k, part in enumerate(expected)]
                agree(model, parts, found[n], 1e-3 if scale == 1 else 0.05)


def _refuse_targets(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> None:
    """Refuse targets of a shape or kind that the loss does not take, in the records' own terms."""
    try:
        losses(model, loss, inputs, targets)
    except FarthingError:
        raise
    except Exception as error:
        with torch.no_grad():
            outputs = call(model, inputs)
        advice = "a class is an int64 (), a number a float32 of the shape of the outputs"
        if not callable(loss) or isinstance(loss, type):
            advice = 'give a function of outputs and targets, such as nn.CrossEntropyLoss(reduction="none")'
        elif all(isinstance(x, Tensor) for x in (outputs, targets)) and outputs.shape[:2] == targets.shape:
            advice = (
                "of one class a token the loss is F.cross_entropy(outputs.transpose(1, 2), targets, "
                'reduction="none").sum(1)'
            )
        raise InvalidValue(
            f"the loss does not take what the model returns for a record, {form_of(outputs)}, with a target "
            f"{form_of(targets)} ({brief(error)}): {advice}"
        ) from error


def autocast_dtype(given: Any) -> torch.dtype | None:
    """Return the dtype of mixed precision; raise unless it is one that autocast takes."""
    if given is None or given in (torch.bfloat16, torch.float16):
        return given  # type: ignore[no-any-return]
    raise InvalidValue(f"autocast must be torch.bfloat16, torch.float16 or None, got {given!r}")


def verify_isolated(
    how: Isolation,
    model: nn.Module,
    loss: Loss,
    source: Source,
    rows: Rows,
    kept: Callable[[], None],
    alike: bool = False,
) -> None:
    """Refuse a model that cannot run in isolation, or that has no gradients there.

    ``alike``: also one that would compute something else on a batch, of which others are only warned.
    """
    inputs, targets = source.batch(_EXAMPLES)

    def tried(part: Callable[[], T]) -> T:
        try:
            return part()
        except FarthingError:
            raise
        except Exception as error:
            raise Unsupported(_why(how, error, lambda: rows(inputs, targets))) from error

    def once() -> list[Tensor]:
        return tried(lambda: [rows(inputs, targets)])

    tried(kept)  # with its random numbers
    before = values(model, loss)
    with contextlib.suppress(Exception), torch.random.fork_rng(devices(model)):  # whatever it does not take
        rows(*source.batch(2, ranges=Ranges(Range(_LARGE))))
    refuse_changes(before, model, loss)
    with torch.random.fork_rng(devices(model)):
        refuse_public(once, elsewhere=False)
    with torch.random.fork_rng(devices(model)), calm(model, once) as steady:
        (found,) = once()
        if not steady:
            if alike:
                raise Unsupported("the model does not repeat itself, so that nothing can be said of it")
            return
        for n in range(_EXAMPLES):
            with Wall(model, loss, everything=True):
                expected = gradient(model, loss, *one(inputs, targets, n))
            agree(model, expected, found[n])
        _alone_by_choice(model, loss, inputs, targets, alike)


def _why(how: Isolation, error: Exception, run: Callable[[], Any]) -> str:
    said = brief(error)
    if how is Isolation.VMAP and _runs(run):
        return (
            "the model switches autocast on in its forward, and torch.func.vmap cannot run one of its layers "
            f"so ({said}): leave autocast out of forward, as lanes compute in full precision, or use "
            'route="loop", which is slower'
        )
    if how is Isolation.LOOP:
        return (
            f"the model does not run on made-up inputs, a batch of one ({said}); give public ones, "
            "example=(inputs, targets), with at least two different records"
        )
    return (
        f"the model cannot run in lanes of torch.func.vmap ({said}): take what depends on an example's "
        'values out of its control flow, or use route="loop", which is slower and takes any model that '
        "runs on a batch of one"
    )


def _runs(run: Callable[[], Any]) -> bool:
    """Return whether code runs if autocast, where it is switched on, stays off."""
    kind: Any = torch.autocast
    enter = kind.__enter__

    def off(self: torch.autocast) -> Any:
        entered = enter(self)
        torch.set_autocast_enabled(self.device, False)  # leaving puts back what was there before
        return entered

    kind.__enter__ = off
    try:
        run()
    except Exception:
        return False
    finally:
        kind.__enter__ = enter
    return True


def _alone_by_choice(model: nn.Module, loss: Loss, inputs: Any, targets: Any, alike: bool) -> None:
    """Warn of a model that would compute something else on a batch: alone it is safe, but perhaps useless."""

    def once(*batch: Any) -> Tensor:
        with Wall(model, loss, everything=True):
            return losses(model, loss, *batch)

    try:
        together = once(inputs, targets)
        alone = torch.cat([once(*one(inputs, targets, n)) for n in range(_EXAMPLES)])
    except Exception:  # it runs on a batch of one, which is all that is asked of it
        return
    if close(together, alone):
        return
    if alike:
        raise Unsupported(_MIXES)
    warnings.warn(_MIXES, stacklevel=2)


_MIXES = (
    "on a batch this model, or its loss, mixes examples; in isolation each is a batch of its own, so that "
    "what it computes from others (batch statistics, negatives, mixup) is missing"
)


def refuse_other_kinds(model: Any) -> None:
    """Refuse anything but one module with weights."""
    if isinstance(model, list | tuple | dict):
        raise InvalidValue(
            f"model must be an nn.Module, got a {type(model).__name__} of {len(model)}: of several models "
            "put those that see private records into one module, whose forward returns what the loss needs; "
            "the others (a generator, say) are trained between the steps, for nothing"
        )
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be an nn.Module, got a {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise InvalidValue(f"the model ({type(model).__name__}) has no parameters: there is nothing to train")


@torch.no_grad()
def materialise(model: nn.Module, inputs: Any) -> None:
    """Give lazy layers their weights, by made-up inputs of the records' shape.

    >>> model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
    >>> materialise(model, torch.zeros(1, 5))
    >>> [tuple(p.shape) for p in model.parameters()]
    [(3, 5), (3,), (2, 3), (2,)]
    """
    if not any(map(is_lazy, model.parameters())):
        return
    made = Source(inputs, None).batch(2)[0]
    try:
        call(model, made)
    except Exception as error:
        raise Unsupported(
            f"a lazy layer could not be given its weights by made-up inputs, {form_of(made)} each "
            f"({type(error).__name__}: {error}); call the model once on public inputs before training"
        ) from error
