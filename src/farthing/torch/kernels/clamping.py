"""Sum gradients clamped coordinate by coordinate, without holding one example's gradient matrix.

A linear layer's gradient is Σ_t δ_t ⊗ a_t over its positions t. Clamping every coordinate of it
(`farthing.queries.bounds.ClipCoordinates`) does not scale an example as a whole, so norms and one weighted
product do not give the sum: every coordinate of every example has to be computed. A Triton kernel on a GPU
and a C kernel on a CPU do this in registers; otherwise it is done in pieces that fit into the cache.

Examples must be finite; the caller sets others to zero as a whole. If a gradient still overflows, it is
clamped, and NaN counts as zero. Sums round as `farthing.torch.kernels.totals` says.

>>> out = torch.zeros(1, 2)
>>> clamped_sum(torch.ones(3, 1), torch.tensor([[2.0, -5.0]] * 3), 1.5, out)
tensor([[ 4.5000, -4.5000]])
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.errors import InvalidValue
from farthing.noise import native
from farthing.torch.kernels import totals
from farthing.torch.kernels.noise import has_triton

_PIECE = 2**18  # coordinates at a time without a kernel
_SHARES = 64  # of the examples at a time on a GPU: each has a sum of its own


def clamped_sum(delta: Tensor, a: Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """Add Σ_b clamp(Σ_t δ_bt ⊗ a_bt, -s, s) to ``out``, and return it.

    ``delta`` is (B, T, O) and ``a`` (B, T, I), or (B, O) and (B, I) where T is 1; ``s`` is one number or
    (O, I), like ``out``, which is float32.
    """
    if delta.ndim == 3 and delta.shape[1] == 1:
        delta, a = delta[:, 0], a[:, 0]
    delta, a, limit = _ready(delta), _ready(a), _limit(s, out)
    shape = (delta.shape[-1], a.shape[-1])
    if delta.ndim not in (2, 3) or delta.shape[:-1] != a.shape[:-1] or out.shape != shape:
        shapes = [tuple(one.shape) for one in (delta, a, out)]
        raise InvalidValue(f"delta (B, T, O), a (B, T, I) and out (O, I) must fit each other, got {shapes}")
    if not len(delta) or not delta.numel():
        return out
    if out.is_cuda and has_triton():
        from farthing.torch.kernels import layer_sums

        many = layer_sums.clamped_outer if delta.ndim == 2 else layer_sums.clamped_dots
        return _by_kernel(many, (delta, a), limit, out)
    if out.device.type == "cpu" and out.is_contiguous():
        limits = limit.expand(shape).contiguous().numpy()
        if _compiled(delta.numpy(), a.numpy(), limits, out, threads=torch.get_num_threads()):
            return out
    return _in_pieces(delta, a, limit, out)


def clamped_rows(gradients: Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """Add Σ_b clamp(g_b, -s, s) to ``out`` (P,), and return it; ``gradients`` is (B, P), one per row."""
    gradients, limit = _ready(gradients), _limit(s, out)
    if gradients.ndim != 2 or out.shape != gradients.shape[1:]:
        shapes = [tuple(one.shape) for one in (gradients, out)]
        raise InvalidValue(f"gradients (B, P) and out (P,) must fit each other, got {shapes}")
    if not gradients.numel():
        return out
    if out.is_cuda and has_triton():
        from farthing.torch.kernels import layer_sums

        return _by_kernel(layer_sums.clamped_rows, (gradients,), limit, out)
    if out.device.type == "cpu" and out.is_contiguous():
        one = np.ones((len(gradients), 1), np.float32)
        limits = limit.expand(out.shape).contiguous().numpy()[None]
        if _compiled(one, gradients.numpy(), limits, out[None]):
            return out
    total = torch.zeros_like(out, dtype=torch.float64)
    for rows in gradients.split(max(1, _PIECE // gradients.shape[1])):
        total += _clamped(rows, limit).sum(0, dtype=torch.float64)
    return out.add_(total)


def _by_kernel(many: Callable[..., Tensor], given: tuple[Tensor, ...], limit: Tensor, out: Tensor) -> Tensor:
    """Add the sum by a Triton kernel, whose shares have as many examples as may be added in float32."""
    most = totals.chain(len(given[0]))
    total = torch.zeros_like(out, dtype=torch.float64)
    for some in zip(*(part.split(_SHARES * most) for part in given), strict=True):
        total += many(*some, limit, most)
    return out.add_(total)


def _compiled(delta: Any, a: Any, limits: Any, out: Tensor, threads: int = 1) -> bool:
    """Add the sum by the kernel in C: in a few pieces that may be added in float32, or in float64.

    Where parts of a batch are added where their sum lies, no roundings are left for pieces of each.
    """
    most, examples = totals.chain(len(delta)), len(delta)
    if examples <= 6 * most and not totals.is_in_place():  # each call adds onto the sum: 6 more
        target = out.detach().numpy()
        pieces = [slice(start, start + most) for start in range(0, examples, most)]
        return all(
            native.clamped_outer_sum(delta[some], a[some], limits, target, threads=threads) for some in pieces
        )
    total = np.zeros(tuple(out.shape))
    done = native.clamped_outer_sum(delta, a, limits, total, threads=threads)
    if done:
        out += torch.from_numpy(total)
    return done


def _in_pieces(delta: Tensor, a: Tensor, limit: Tensor, out: Tensor) -> Tensor:
    """Add the clamped sum to out by plain products of some examples and some rows at a time."""
    if delta.ndim == 2:
        delta, a = delta[:, None], a[:, None]
    columns = a.shape[2]
    rows = max(1, min(delta.shape[2], _PIECE // columns))
    examples = max(1, _PIECE // (rows * columns))
    total = torch.zeros_like(out, dtype=torch.float64)
    for first in range(0, delta.shape[2], rows):
        part = slice(first, first + rows)
        most = limit[part] if limit.ndim else limit
        for some, inputs in zip(delta[:, :, part].split(examples), a.split(examples), strict=True):
            gradients = torch.bmm(some.transpose(1, 2), inputs)
            total[part] += _clamped(gradients, most).sum(0, dtype=torch.float64)
    return out.add_(total)


def _clamped(gradients: Tensor, limit: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(gradients, -limit), limit).nan_to_num_(0.0)


def _ready(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def _limit(s: float | Tensor, out: Tensor) -> Tensor:
    """Return the limits on the sum's device: one number, or one a coordinate."""
    limit = torch.as_tensor(s, dtype=torch.float32, device=out.device).detach()
    if limit.numel() == 1:
        return limit.reshape(())
    if limit.shape != out.shape:
        raise InvalidValue(f"s must be one number or of the sum's shape, got {tuple(limit.shape)}")
    return limit.contiguous()
