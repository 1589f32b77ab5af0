"""Compute per-example gradients of scales and shifts of layer, RMS, group and instance norms."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farthing.torch.gradients.tape import Tape
from farthing.torch.gradients.terms import RowTerms
from farthing.torch.kernels import positions as compiled
from farthing.torch.kernels.positions import fused


def normalised(module: Any, x: Tensor) -> Tensor:
    """Return a norm's output before its scale and shift."""
    match module:
        case nn.LayerNorm():
            return F.layer_norm(x, module.normalized_shape, eps=module.eps)
        case nn.RMSNorm():
            return F.rms_norm(x, module.normalized_shape, eps=module.eps)
        case nn.GroupNorm():
            return F.group_norm(x, module.num_groups, eps=module.eps)
    return F.instance_norm(x, eps=module.eps)


def norm(tape: Tape, module: Any, own: Any, input: Tensor) -> Tensor:
    """Run a normalisation, whose gradients are δ · x̂ and δ, summed over positions."""
    use = tape.use(module, module.weight, getattr(module, "bias", None))
    axis = tape.axes(use)[0][0]
    if isinstance(module, nn.GroupNorm) and axis == 0 and _by_kernel(module, input):
        normed: Tensor = _GroupNorm.apply(input, tape.plan.anchor, module, tape)
        tape.note(normed, input)
        return normed
    out: Tensor = own(input)
    last = len(module.normalized_shape) if isinstance(module, nn.LayerNorm | nn.RMSNorm) else 0
    if not last:
        tape.batch_first(module, axis)
    elif axis is None:
        out = tape.spread(out)

    plain = last == 1 and axis == 0 and input.shape[-1] <= 8192

    def sums(values: Tensor) -> RowTerms:
        if last:
            return RowTerms(tape.grouped(values, axis or 0, last).sum(1).flatten(1))
        return RowTerms(tape.joined(values.reshape(*values.shape[:2], -1).sum(2)))

    def then(delta: Tensor, seen: Tensor) -> None:
        found = None
        if fused(delta.device) or (compiled.available(delta.device) and delta.numel()):
            found = _sums(tape, module, seen, delta, plain)
        if found is not None:
            for p, rows in zip((module.weight, getattr(module, "bias", None)), found, strict=True):
                tape.put(p, partial(RowTerms, rows))
            return
        delta = delta.float()
        if tape.trained(module.weight):
            tape.put(module.weight, lambda: sums(delta * normalised(module, seen.float())))
        tape.put(getattr(module, "bias", None), lambda: sums(delta))

    return tape.watch(out, then, as_is=True, keep=(input,))


def _by_kernel(module: nn.GroupNorm, x: Tensor) -> bool:
    """Return whether a kernel makes all gradients of a group norm in one go."""
    plain = x.dtype is module.weight.dtype is module.bias.dtype is torch.float32
    return plain and x.numel() > 0 and torch.is_grad_enabled() and compiled.available(x.device)


def _normed(ctx: Any, x: Tensor, anchor: Tensor, module: nn.GroupNorm, tape: Tape) -> Tensor:
    ctx.save_for_backward(x)
    ctx.layer = module, tape
    return F.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


def _unnormed(ctx: Any, delta: Tensor) -> tuple[Tensor | None, None, None, None]:
    (x,), (module, tape) = ctx.saved_tensors, ctx.layer
    gamma = module.weight.detach() if ctx.needs_input_grad[0] else None
    groups = module.num_groups, module.eps
    scale, shift, back = compiled.group_sums(x.detach().contiguous(), delta.contiguous(), *groups, gamma)
    for p, rows in zip((module.weight, module.bias), (scale, shift), strict=True):
        tape.put(p, lambda rows=rows: RowTerms(tape.joined(rows)))
    return back, None, None, None


# A group norm whose backward pass finds the gradients of its input, scale and shift from the same sums.
_GroupNorm: Any = type(
    "_GroupNorm",
    (torch.autograd.Function,),
    {"forward": staticmethod(_normed), "backward": staticmethod(_unnormed)},
)


def _sums(tape: Tape, module: Any, x: Tensor, delta: Tensor, plain: bool) -> tuple[Tensor, Tensor] | None:
    """Return each example's Σ δ x̂ and Σ δ by a kernel, where there is one for such a norm."""
    grams: Any = compiled
    layer_sums: Any = compiled
    if x.is_cuda:
        from farthing.torch.kernels import grams, layer_sums
    elif not x.dtype == delta.dtype == torch.float32:
        return None
    if isinstance(module, nn.GroupNorm):
        scale, shift, *_ = layer_sums.group_sums(
            x.contiguous(), delta.contiguous(), module.num_groups, module.eps
        )
        return tape.joined(scale), tape.joined(shift)
    if not plain:
        return None
    eps = module.eps if module.eps is not None else torch.finfo(x.dtype).eps
    centred = isinstance(module, nn.LayerNorm)
    made: tuple[Tensor, Tensor] = grams.norm_sums(tape.grouped(x, 0), tape.grouped(delta, 0), eps, centred)
    return made
