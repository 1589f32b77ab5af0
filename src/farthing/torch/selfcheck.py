"""Before the first lot: do examples stay apart in this model, and does book-keeping see all of its gradient?

A bound on each example's gradient means nothing where one example moves another's: batch normalisation,
batch statistics in a forward, a loss divided by the size of the batch. And book-keeping misses a weight that
is used past its module. All of that is refused here, naming the module and what to do instead.

The check runs on made-up examples (`farthing.torch.probe`), never on private ones: what it finds depends on
the model and on public shapes only, so a refusal tells nothing about the records and costs no budget. Four
examples go through the model together and one by one; one of them is exchanged, and the others must not
move; their gradients are compared with ordinary autograd, one example at a time. Dropout is switched off
for the comparison (and runs in the exchange, with the same seed before and after).
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.torch.isolation import Isolation
from farthing.torch.layers import leaves
from farthing.torch.probe import Source, devices
from farthing.torch.traces import Wall
from farthing.torch.vmapped import Loss, call, mapped

_EXAMPLES = 4
Rows = Callable[[Any, Any], Tensor]


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


def verify(model: nn.Module, loss: Loss, source: Source, rows: Rows) -> None:
    """Refuses a model in which examples do not stay apart, or that ``rows`` sees only in part."""
    inputs, targets = source.batch(_EXAMPLES)
    other_inputs, other_targets = source.batch(_EXAMPLES, seed=1)
    swapped = _first_of(other_inputs, inputs), _first_of(other_targets, targets)
    with _buffers(model), torch.random.fork_rng(devices(model)):
        before, after = (_seeded(model, loss, *batch) for batch in ((inputs, targets), swapped))
        _apart(model, inputs, before[1:], after[1:])
        with _steady(model, lambda: leaves(call(model, inputs))) as steady:
            if not steady:
                return  # random by itself: the exchange above is what can be said of it
            alone = [_losses(model, loss, *_one(inputs, targets, n)) for n in range(_EXAMPLES)]
            _unscaled(model, inputs, _losses(model, loss, inputs, targets), torch.cat(alone))
            found = rows(inputs, targets)
            for n in range(_EXAMPLES):
                _agree(model, _gradient(model, loss, *_one(inputs, targets, n)), found[n])


def verify_isolated(how: Isolation, model: nn.Module, loss: Loss, source: Source, rows: Rows) -> None:
    """Refuses a model that cannot run in isolation, or whose gradients do not come out of it."""
    inputs, targets = source.batch(_EXAMPLES)

    def once() -> list[Tensor]:
        try:
            return [rows(inputs, targets)]
        except FarthingError:
            raise
        except Exception as error:
            raise Unsupported(_why(how, error)) from error

    with torch.random.fork_rng(devices(model)), _steady(model, once) as steady:
        (found,) = once()
        if not steady:
            return
        for n in range(_EXAMPLES):
            with Wall(model, loss, everything=True):
                expected = _gradient(model, loss, *_one(inputs, targets, n))
            _agree(model, expected, found[n])
        _alone_by_choice(model, loss, inputs, targets)


def _why(how: Isolation, error: Exception) -> str:
    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
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
            return _losses(model, loss, *batch)

    try:
        together = once(inputs, targets)
        alone = torch.cat([once(*_one(inputs, targets, n)) for n in range(_EXAMPLES)])
    except Exception:  # it runs on a batch of one, which is all that is asked of it
        return
    if not _close(together, alone):
        warnings.warn(
            "on a batch this model, or its loss, mixes examples; in isolation each is a batch of its own, so "
            "that what it computes from others (batch statistics, negatives, mixup) is missing",
            stacklevel=2,
        )


def _losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    with torch.no_grad():
        found = loss(call(model, inputs), targets)
    size = len(leaves((inputs,))[0])
    if found.shape != (size,):
        raise InvalidValue(
            f"loss must return one value a record, shape ({size},), got {tuple(found.shape)}: "
            'use reduction="none" and sum over what belongs to one record'
        )
    return found.float()


def _seeded(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    torch.manual_seed(0)
    return _losses(model, loss, inputs, targets)


def _apart(model: nn.Module, inputs: Any, before: Tensor, after: Tensor) -> None:
    if not _close(before, after):
        raise Unsupported(f"{_culprit(model, inputs)} mixes examples: {_MIXED}")


_MIXED = (
    "what it computes for one depends on the others in the batch; use statistics of one example "
    "(GroupNorm, LayerNorm) in place of those of a batch"
)


def _unscaled(model: nn.Module, inputs: Any, together: Tensor, alone: Tensor) -> None:
    if _close(together, alone):
        return
    for ratio, what in ((_EXAMPLES, "divided"), (1 / _EXAMPLES, "multiplied")):
        if _close(together * ratio, alone):
            raise Unsupported(
                f"the loss is {what} by the size of the batch: return each record's own loss, "
                'reduction="none"; the step is divided by a public number later'
            )
    raise Unsupported(f"{_culprit(model, inputs)} mixes examples: {_MIXED}")


def _agree(model: nn.Module, expected: list[Tensor], found: Tensor) -> None:
    """Every parameter's gradient must be that of ordinary autograd."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parts = torch.split(found, [p.numel() for _, p in trained])
    size = math.sqrt(sum(float(part.double().square().sum()) for part in expected))
    coarse = any(p.dtype in (torch.float16, torch.bfloat16) for _, p in trained)
    for (name, p), want, got in zip(trained, expected, parts, strict=True):
        error = float((want.flatten().double() - got.double()).norm())
        if not error <= (0.05 if coarse else 1e-3) * float(want.double().norm()) + 1e-5 * size:
            owner = name.rpartition(".")[0] or "the model"
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise Unsupported(
                f"{owner} ({kind}): its parameter {name} {tuple(p.shape)} is used past its module, so that "
                f"its gradient is not seen; call {owner} itself in forward, or use isolate=True, which is "
                "slower"
            )


def _gradient(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> list[Tensor]:
    """The gradient of one example by ordinary autograd."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        value = loss(call(model, inputs), targets).float().sum()
        if not value.requires_grad:
            return [torch.zeros_like(p) for p in trained]
        found = torch.autograd.grad(value, trained, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, trained, strict=True)]


def _culprit(model: nn.Module, inputs: Any) -> str:
    """The first module whose output for an example changes with its company."""
    batch, ones = _outputs(model, inputs), _outputs(model, _one(inputs, None, 0)[0])
    for (module, together), (_, alone) in zip(batch, ones, strict=False):
        same_kind = (
            together.ndim and together.shape[0] == _EXAMPLES and alone.shape == (1, *together.shape[1:])
        )
        if same_kind and together.is_floating_point() and not _close(together[:1], alone):
            name = next(name for name, found in model.named_modules() if found is module)
            return f"{name or 'the model'} ({type(module).__name__})"
    return f"the model ({type(model).__name__}) or its loss"


def _outputs(model: nn.Module, inputs: Any) -> list[tuple[nn.Module, Tensor]]:
    """Every module's output, inner ones first."""
    found: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        found.extend((module, leaf.detach().clone()) for leaf in leaves(out))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            torch.manual_seed(0)
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def _steady(model: nn.Module, run: Callable[[], list[Tensor]]) -> Iterator[bool]:
    """The model without dropout; in eval mode where that is not enough to make it repeat itself."""
    modes = [(module, module.training) for module in model.modules()]
    random = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)
    try:
        for module, _ in modes:
            if isinstance(module, random):
                module.training = False
        for again in range(2):
            with torch.no_grad():
                first, second = run(), run()
            steady = all(_close(a, b) for a, b in zip(first, second, strict=True))
            if steady or again:
                break
            model.eval()
        yield steady
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Refuses a model that keeps something of its inputs; buffers are as before in any case."""
    with _put_back(model) as before:
        yield
        for name, buffer in model.named_buffers():
            if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(before[name])):
                raise Unsupported(
                    f"forward writes the buffer {name}: it would keep something of private examples without "
                    "noise; leave it alone in training, or call eval() on the module that holds it"
                )


@contextmanager
def _put_back(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The buffers before; they are the same afterwards."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield before
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    coarse = a.dtype in (torch.float16, torch.bfloat16)
    size = float(a.detach().abs().amax()) if a.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=0.02 if coarse else 1e-3, atol=1e-5 * size, equal_nan=True))


def _one(inputs: Any, targets: Any, place: int) -> tuple[Any, Any]:
    def pick(x: Tensor) -> Tensor:
        return x[place : place + 1]

    return mapped(inputs, pick), mapped(targets, pick)


def _first_of(other: Any, value: Any) -> Any:
    """The batch with its first example exchanged."""
    fresh = iter(leaves(other))
    return mapped(value, lambda x: torch.cat([next(fresh)[:1], x[1:]]))
