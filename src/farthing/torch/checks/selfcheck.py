"""Checks before the first batch that examples stay apart in a model and that book-keeping sees its gradient.

A bound on each example's gradient means nothing where one example moves another's: batch normalisation,
batch statistics in a forward, a loss divided by the size of the batch. And book-keeping misses a weight that
is used past its module. All of that is refused here, naming the module and what to do instead.

The check runs on made-up examples (`farthing.torch.checks.probe`), never on private ones: what it finds
depends on the model and on public shapes only, so a refusal tells nothing about the records and costs no
budget. Examples are exchanged and batches made larger and smaller (`farthing.torch.checks.independence`).
That is a check and no proof; `farthing.torch.gradients.isolation` needs none.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from farthing.errors import FarthingError, Unsupported
from farthing.torch.checks.independence import (
    Company,
    Effort,
    Rows,
    agree,
    brief,
    calm,
    close,
    gradient,
    losses,
)
from farthing.torch.checks.leftovers import Wall
from farthing.torch.checks.probe import Source, devices
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.tape import Loss, one

T = TypeVar("T")

_EXAMPLES = 4


def refuse_known(model: nn.Module) -> None:
    """Modules that are known to mix examples, or to keep something of them."""
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        match module:
            case _BatchNorm() if module.training or not module.track_running_stats:
                width = module.num_features
                raise Unsupported(
                    f"{what} mixes examples: use GroupNorm({math.gcd(32, width)}, {width}) in its place, "
                    "or call its eval() where its statistics are public"
                )
            case _InstanceNorm() if module.training and module.track_running_stats:
                raise Unsupported(
                    f"{what} keeps statistics of private examples, noise-free: set track_running_stats=False"
                )
            case nn.Embedding() | nn.EmbeddingBag() if module.scale_grad_by_freq:
                raise Unsupported(f"{what} counts tokens over the batch: set scale_grad_by_freq=False")
            case nn.Embedding() | nn.EmbeddingBag() if module.max_norm is not None:
                raise Unsupported(f"{what} changes its weights in forward: set max_norm=None")
            case nn.DataParallel():
                raise Unsupported(f"{what} splits batches by itself: give its module, model.module")
        if type(module).__name__ == "OptimizedModule":
            raise Unsupported(f"{what} is compiled: give the model itself, before torch.compile")


def verify(model: nn.Module, loss: Loss, source: Source, rows: Rows, kept: Callable[[], None]) -> None:
    """Refuses a model in which examples do not stay apart, or that ``rows`` sees only in part.

    ``kept`` refuses what the model or the loss keeps of examples (`farthing.torch.checks.leftovers`).
    """
    with torch.random.fork_rng(devices(model)):
        inputs, targets = source.batch(_EXAMPLES)
        losses(model, loss, inputs, targets)
        try:
            rows(inputs, targets)
        except FarthingError:
            raise
        except Exception as error:
            raise Unsupported(
                f"book-keeping cannot follow the model ({brief(error)}): use isolate=True, which is slower"
            ) from error
        kept()
        with Wall(model, loss, everything=True):  # what made-up examples leave behind is put back
            company = Company(model, loss, source, rows, Effort.of(model, inputs))
            company.exchanges()
            company.sizes()


def verify_isolated(
    how: Isolation, model: nn.Module, loss: Loss, source: Source, rows: Rows, kept: Callable[[], None]
) -> None:
    """Refuses a model that cannot run in isolation, or whose gradients do not come out of it."""
    inputs, targets = source.batch(_EXAMPLES)

    def tried(part: Callable[[], T]) -> T:
        try:
            return part()
        except FarthingError:
            raise
        except Exception as error:
            raise Unsupported(_why(how, error)) from error

    def once() -> list[Tensor]:
        return tried(lambda: [rows(inputs, targets)])

    tried(kept)  # with its random numbers
    with torch.random.fork_rng(devices(model)), calm(model, once) as steady:
        (found,) = once()
        if not steady:
            return
        for n in range(_EXAMPLES):
            with Wall(model, loss, everything=True):
                expected = gradient(model, loss, *one(inputs, targets, n))
            agree(model, expected, found[n])
        _alone_by_choice(model, loss, inputs, targets)


def _why(how: Isolation, error: Exception) -> str:
    said = brief(error)
    if how is Isolation.LOOP:
        return (
            f"the model does not run on made-up inputs, a batch of one ({said}); give public ones, "
            "example=(inputs, targets), with at least two different records"
        )
    return (
        f"the model cannot run in lanes of torch.func.vmap ({said}): take what depends on an example's "
        'values out of its control flow, or use isolate="loop", which is slower and takes any model that '
        "runs on a batch of one"
    )


def _alone_by_choice(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> None:
    """Warns of a model that would compute something else on a batch: alone it is safe, perhaps no use."""

    def once(*batch: Any) -> Tensor:
        with Wall(model, loss, everything=True):
            return losses(model, loss, *batch)

    try:
        together = once(inputs, targets)
        alone = torch.cat([once(*one(inputs, targets, n)) for n in range(_EXAMPLES)])
    except Exception:  # it runs on a batch of one, which is all that is asked of it
        return
    if not close(together, alone):
        warnings.warn(
            "on a batch this model, or its loss, mixes examples; in isolation each is a batch of its own, so "
            "that what it computes from others (batch statistics, negatives, mixup) is missing",
            stacklevel=2,
        )
