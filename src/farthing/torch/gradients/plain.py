"""Prepare a model for per-example gradients: without wrappers, eager, and with its public state fixed.

Some things that people wrap around a model change how it runs and not what it computes. While a sum is made
they are put aside (`Plain.running`), and afterwards they are as they were:

* `torch.compile`: compiled modules, functions and losses run eagerly. What is compiled cannot be followed
  layer by layer, and may free what a second pass over the graph needs.
* `torch.utils.checkpoint`: parts with a checkpoint are computed again in the backward pass under the same
  tape (`farthing.torch.gradients.tape`), by the kind that is not reentrant. What cannot be, and parts in
  isolation, are kept instead, of ``physical_batch_size`` rows at a time.
* `fully_shard`: the weights that lie in shards on other ranks are gathered, and its hooks rest.
* Spectral norms keep two vectors of a power iteration, which belong to the weights and not to the examples.
  They stay as they are during a sum; `Plain.refresh` moves them once an update, by the new weights.

>>> model = nn.Linear(3, 2)
>>> bare(model) is model  # what is not wrapped stays as it is
True
"""

import argparse
import functools
import itertools
import logging
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import checkpoint

from farthing.errors import InvalidValue, Unsupported
from farthing.torch.checks.reach import attributes, is_own, slots
from farthing.torch.gradients.tape_plan import running

_HookedNorm: Any = sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm  # its name is a function's, too


log = logging.getLogger("farthing.torch")


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile and DistributedDataParallel: the same parameters."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


class Makeup:
    """What a model was made of when it was checked: modules, modes, switches and hooks, what is trained.

    A check speaks of the model, and of its loss, as they were then. A part that is put into training mode
    since (as ``train()`` does to frozen batch norms), another module, a new hook or a switch that was turned
    (``model.in_batch_negatives = True``) may mix examples, or keep them.
    """

    def __init__(self, model: nn.Module | None, loss: Any = None) -> None:
        self._modules = [] if model is None else [*model.modules(), *_inside(loss)]
        self._loss, self._parts = loss, _parts(self._modules, loss)

    def holds(self, model: nn.Module, loss: Any = None) -> bool:
        """Return whether the model and its loss are still made of the same, as they were checked."""
        if not self._modules or self._modules[0] is not model:
            return False
        if isinstance(loss, nn.Module) and not any(loss is module for module in self._modules):
            return False
        found = _parts(self._modules, None if self._loss is None else loss)
        return len(found) == len(self._parts) and all(map(operator.is_, found, self._parts))


def of_torch(module: nn.Module) -> bool:
    """Return whether a module is of torch's own classes, so that its code is known."""
    return type(module).__module__.startswith("torch.")


def _inside(loss: Any) -> list[nn.Module]:
    return list(loss.modules()) if isinstance(loss, nn.Module) else []


def _parts(modules: list[nn.Module], loss: Any) -> list[Any]:
    """Return objects that are the same ones as long as nothing is changed: this runs before every sum."""
    held = [module.__dict__ for module in modules]
    found: list[Any] = [module.training for module in modules]
    for module in modules:
        if not of_torch(module):
            for name, value in module.__dict__.items():
                if name not in _COMMON:
                    _switches(name, value, found)
    if isinstance(loss, types.FunctionType):
        for name, value in slots(loss).items():
            _switches(name, value, found)
    for name in ("_modules", *_HOOKS):
        found += itertools.chain.from_iterable((None, *part[name].values()) for part in held)
    for name in _HOOKS:
        found += getattr(torch.nn.modules.module, f"_global{name}").values()
    for p in itertools.chain.from_iterable((None, *part["_parameters"].values()) for part in held):
        found += (p,) if p is None else (p, p.requires_grad, p.dtype)
    return found


def _switches(name: Any, value: Any, found: list[Any], depth: int = 2) -> None:
    """Add what may turn parts of a user's own code on or off: truths, words, whether a number is 0.

    Also those in a short table or list, and in an object of the user's own, such as a configuration.
    """
    if value is None or isinstance(value, bool | int | float):
        found += (sys.intern(str(name)), value if isinstance(value, bool) else not value)
    elif isinstance(value, str) or name == "forward":
        found.append(value)
    elif isinstance(value, types.CellType):
        _switches(name, slots(value).get("value"), found, depth)
    elif depth and not isinstance(value, Tensor | nn.Module | type | types.FunctionType):
        inner = value if isinstance(value, dict | list | tuple) else _settings(value)
        if inner and len(inner) <= _FEW:
            for key, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
                _switches(key, part, found, depth - 1)


def _settings(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of the user's own."""
    own = isinstance(value, types.SimpleNamespace | argparse.Namespace) or is_own(type(value).__module__)
    return attributes(value) if own else {}


class TrainedWeights:
    """The trained parameters of a model, as they are when a run begins: ``each`` of them once.

    Sums and optimisers hold these very objects. One that takes the place of another later on (an assignment
    to ``layer.weight``, ``load_state_dict(…, assign=True)``), comes, goes, is frozen or changes its dtype,
    shape or device would be left out by them, or get noise alone.

    >>> model = nn.Linear(3, 2)
    >>> weights = TrainedWeights(model)
    >>> _ = model.weight.data.zero_()  # other values are as welcome as before
    >>> weights.refuse_changes()
    >>> model.weight = nn.Parameter(torch.ones(2, 3))
    >>> weights.refuse_changes()
    Traceback (most recent call last):
        ...
    farthing.errors.Unsupported: weight is another parameter than when this run began, ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._seen = model, _trained(model)
        self.each = [p for p in model.parameters() if p.requires_grad]  # held, so that no id is used again

    def refuse_changes(self) -> None:
        """Raise unless the model still has these parameters, as they were; looks at no weight."""
        if torch.is_inference_mode_enabled():
            raise InvalidValue("there are no gradients in torch.inference_mode: train outside of it")
        settle(self._model.modules())
        now, before = _trained(self._model), self._seen
        if list(now.items()) == list(before.items()):
            return
        changed = (name for name in (*before, *now) if now.get(name) != before.get(name))
        name = next(changed, "")
        what = f"{name} {_difference(before.get(name), now.get(name))}" if name else _TURNED
        raise Unsupported(
            f"{what}, and what is summed and updated are the parameters of then. Write new values into "
            "those (load_state_dict without assign=True, or parameter.data.copy_(values)); after any "
            "other change call train anew: a ledger goes on with what is left of its budget"
        )


_TURNED = "the model's parameters have another order than when this run began"
_Form = tuple[int, torch.dtype, torch.Size, torch.device]


def _trained(model: nn.Module) -> dict[str, _Form]:
    """Return what is trained under which name, tied parameters under each of theirs."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: (id(p), p.dtype, p.shape, p.device) for name, p in named if p.requires_grad}


def _difference(before: _Form | None, now: _Form | None) -> str:
    """Say how a parameter differs from what it was."""
    if before is None:
        return "is trained now and was not (or was not there) when this run began"
    if now is None:
        return "was trained when this run began, and is frozen or gone now"
    if before[0] != now[0]:
        return "is another parameter than when this run began"
    names = ("dtype", "shape", "device")
    changed = next((n, a, b) for n, a, b in zip(names, before[1:], now[1:], strict=True) if a != b)
    return f"has {changed[0]} {changed[2]} now and had {changed[1]} when this run began"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode meanwhile; every part is afterwards in its own mode again.

    ``model.train(True)`` would thaw parts that are frozen in a model in training mode, such as batch norms.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Plain:
    """What is put aside while a model's gradients are summed: a context that may be entered again inside."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = list(_spectral_norms(model))
        self.sharded = [module for module in model.modules() if _shards(module)]
        self._kinds = sorted({"cpu", *(p.device.type for p in model.parameters())} - {"meta"})
        self._depth, self._stack = 0, ExitStack()

    def running(self) -> "Plain":
        """Run the model eagerly, whole, in the precision asked for, with checkpoints of one kind.

        Spectral norms stay as they are.
        """
        return self

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            try:
                self._put_aside()
            except BaseException:  # a rank is gone, say
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for name, own in zip(_NAMES, _OWN, strict=True):
                setattr(checkpoint, name, own)
            torch.ctc_loss, torch.grid_sampler = _CTC, _GRID
            self._stack.close()

    def _put_aside(self) -> None:
        for name, plain in zip(_NAMES, (_Kept, _kept), strict=True):
            setattr(checkpoint, name, plain)
        torch.ctc_loss, torch.grid_sampler = _ctc_within, _grid_within  # type: ignore[assignment]
        if self.sharded:
            self._stack.enter_context(_gathered(self.sharded))
        for kind in self._kinds:
            if torch.is_autocast_enabled(kind):  # of the caller: norms and sums would be rounded to 8 bits
                self._stack.enter_context(torch.autocast(kind, enabled=False))
        if "torch._dynamo" in sys.modules:  # something may be compiled: a function that forward calls, say
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, _ in self._norms:
            self._stack.callback(setattr, module, "training", module.training)
            module.training = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Move the power iterations of spectral norms in training mode, by the weights as they are."""
        for module, iterate in self._norms:
            if module.training:
                iterate()


@contextmanager
def without_cudnn(model: nn.Module) -> Iterator[None]:
    """Run recurrent layers without cuDNN, whose kernels have a backward pass in training mode only.

    A check switches dropout between layers off by that mode, and a model may be in eval mode by choice.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    before = torch.backends.cudnn.enabled
    if not recurrent or not before or next(model.parameters()).device.type != "cuda":
        yield
        return
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _shards(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextmanager
def _gathered(modules: list[Any]) -> Iterator[None]:
    """Give modules their whole weights, without the hooks of `fully_shard`; every rank does so at once."""
    places = [held for module in modules for held in (module._forward_pre_hooks, module._forward_hooks)]
    before = [dict(held) for held in places]
    try:
        settle(modules)  # a forward in between may have left weights from before an update
        for module in modules:
            module.unshard()
        for held in places:
            for key in [key for key, hook in held.items() if _of_fsdp(hook)]:
                del held[key]
        yield
    finally:
        for held, hooks in zip(places, before, strict=True):
            held.clear()
            held.update(hooks)
        settle(modules)


def settle(modules: Iterable[nn.Module]) -> None:
    """Let weights that `fully_shard` gathered for a forward go, so that every rank holds its shard."""
    for module in modules:
        if _shards(module):
            module.reshard()  # type: ignore[operator]


def _of_fsdp(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp")


def _spectral_norms(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """Yield each spectral norm: whose training mode makes it iterate, and a call that does."""
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            for part in module:
                if isinstance(part, _SpectralNorm):
                    yield part, module
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _HookedNorm):
                yield module, _iteration(hook, module)


def _iteration(hook: Any, module: nn.Module) -> Callable[[], object]:
    return lambda: setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=True))


def _ctc_within(log_probs: Any, targets: Any, inputs: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch.ctc_loss, which reads past its memory for a label out of range; here that is an error."""
    used, there = targets, torch.as_tensor(lengths, device=targets.device)
    if targets.ndim == 2:
        used = targets[torch.arange(targets.shape[1], device=targets.device) < there[:, None]]
    if bool(((used < 0) | (used >= log_probs.shape[-1])).any()):
        raise IndexError("a label is out of range")
    return _CTC(log_probs, targets, inputs, lengths, *args, **kwargs)


_CTC: Any = torch.ctc_loss


def _grid_within(input: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> Tensor:
    """Return torch.grid_sampler, NaN at places that are not finite: on a CPU its backward pass ends there."""
    there = grid.isfinite().all(-1)
    found = _GRID(input, torch.where(there[..., None], grid, 0.0), mode, padding, corners)
    return torch.where(there.unsqueeze(1), found, torch.nan)


_GRID: Any = torch.grid_sampler


class _Kept:
    """What stands in for torch's function of reentrant checkpoints, which need a pass of their own."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _kept(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Do what torch does before and after a part with a checkpoint, or nothing where the part is kept."""
    tape = running()
    if tape is None or not tape.plan.again or not torch.is_grad_enabled():
        if tape is not None and not tape.plan.again:
            _say()
        yield
        return
    with tape.checkpointed(function) as again:
        yield from _OWN[1](again, *args, **kwargs)


@functools.cache
def _say() -> None:
    """Say once that checkpoints are put aside, and what that costs."""
    log.warning(
        "torch.utils.checkpoint is put aside, as parts do not come out the same again: activations of all "
        "rows that go through the model at once are kept; a smaller physical_batch_size takes less memory"
    )


_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_FEW = 64  # settings in one place
_COMMON = frozenset(nn.Module().__dict__)
_NAMES = "CheckpointFunction", "_checkpoint_without_reentrant_generator"  # what torch's checkpoint looks up
_OWN = [getattr(checkpoint, name) for name in _NAMES]
