"""AdaDP and AdaN as their authors print them (Xu et al. 2020, Algorithm 1). **They guarantee nothing.**

E'[g²] (line 23) and the gate on it (line 7) read gradients before noise, and they set the clip and the noise
of the next batch (lines 9 and 12): `farthing.audit.as_published` shows what this reveals. They are run here
because the paper's figures come from them, never through a ledger, and on public data only.

Algorithm 1 computes a gradient for each example (line 5) and then clips "the gradient" g_t to ± s (line 10),
s being as large as a *mean* gradient was. Both readings are here:

* "published AdaDP", "published AdaN": the batch's mean is clipped. This gives the published accuracies, and
  it is unsound for two reasons: one example can move a clipped mean by 2s, the noise on it is σ √m s / L.
* "published AdaDP, examples clipped": each example is clipped to ± s, as the proof needs it. Examples differ
  far more than means do, so most of the gradient is lost.

In both, noise is divided by the batch's size L before the two mean squares are formed, so that line 26 is a
step of RMSprop with rate η. In both, global clipping (lines 16, 18) is of each example, and by layer where
there is a C for each layer. The gate is line 7's Var √E' > G, where the text has Var E' > G.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from experiments.frame import seed
from farthing.torch.kernels.clamping import clamped_rows, clamped_sum

if TYPE_CHECKING:
    from experiments.deep import Setting

UNSOUND = ("published AdaDP", "published AdaN", "published AdaDP, examples clipped")
REMEMBERED, REMEMBERED_RAW, GATE, SMOOTHING = 0.1, 0.9, 1e-6, 1e-8  # γ, γ', G, ε₀

Pair = tuple[Tensor, Tensor]
Watch = Callable[[int, list[Tensor], list[Tensor], list[Tensor]], None]


def published(
    model: nn.Sequential,
    loss: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    labels: Tensor,
    setting: "Setting",
    watch: Watch | None = None,
) -> Iterator[int]:
    """Steps t = 1, 2, …, the model moved in place. ``watch(t, √E', |g|, σ)`` sees what should stay unseen."""
    torch.manual_seed(seed("published", repr(setting)))
    random = np.random.default_rng(seed("lots", repr(setting)))
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [p for layer in linears for p in (layer.weight, layer.bias)]
    size, rate = sum(p.numel() for p in weights), setting.lot / len(rows)
    adapts, singly = "AdaDP" in setting.method, setting.method.endswith("examples clipped")
    squares, raw = ([torch.zeros_like(p) for p in weights] for _ in range(2))
    for t in range(1, setting.lots + 1):
        places = torch.from_numpy(np.flatnonzero(random.random(len(rows)) < rate)).to(rows.device)
        pairs = _pairs(model, linears, loss, rows[places], labels[places])
        means = [part / setting.lot for delta, a in pairs for part in (delta.T @ a, delta.sum(0))]
        known = [part.sqrt() for part in raw]
        if float(torch.cat([part.flatten() for part in known]).var()) > GATE:  # line 7
            limits = [setting.factor * part for part in known]  # line 9
            clipped = _examples(pairs, limits, setting.lot) if singly else _within(means, limits)  # line 10
            deviations = [setting.noise * size**0.5 * part for part in limits]  # line 12
        else:
            clipped = _global(pairs, setting.clip, setting.lot)  # line 16
            clips = (setting.clip,) * len(pairs) if isinstance(setting.clip, float) else setting.clip
            each = zip(weights, (clip for clip in clips for _ in range(2)), strict=True)
            deviations = [torch.full_like(p, clip * setting.noise) for p, clip in each]  # line 18
        if watch is not None:
            watch(t, known, [mean.abs() for mean in means], deviations)
        with torch.no_grad():
            for place, parameter in enumerate(weights):
                noise = deviations[place] / setting.lot * torch.randn_like(parameter)
                noisy = clipped[place] + noise  # lines 13 and 18
                squares[place].lerp_(noisy.square(), REMEMBERED)  # line 22
                raw[place].lerp_(means[place].square(), 1 - REMEMBERED_RAW)  # line 23
                move = noisy / (squares[place] + SMOOTHING).sqrt() if adapts else noisy
                parameter.sub_(setting.step * move)  # line 26
        yield t


def _pairs(
    model: nn.Sequential,
    linears: list[nn.Linear],
    loss: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    labels: Tensor,
) -> list[Pair]:
    """δ and a of every linear layer: the gradient of example b is δ_b ⊗ a_b."""
    inputs, outputs, value = [], [], rows
    for layer in model:
        if isinstance(layer, nn.Linear):
            inputs.append(value.detach())
            value = layer(value)
            outputs.append(value)
        else:
            value = layer(value)
    deltas = torch.autograd.grad(loss(value, labels).sum(), outputs)
    return [(delta.detach(), a) for delta, a in zip(deltas, inputs, strict=True)]


def _within(means: list[Tensor], limits: list[Tensor]) -> list[Tensor]:
    return [torch.minimum(torch.maximum(m, -s), s) for m, s in zip(means, limits, strict=True)]


def _examples(pairs: list[Pair], limits: list[Tensor], lot: int) -> list[Tensor]:
    sums = [torch.zeros_like(limit) for limit in limits]
    for place, (delta, a) in enumerate(pairs):
        clamped_sum(delta, a, limits[2 * place], sums[2 * place])
        clamped_rows(delta, limits[2 * place + 1], sums[2 * place + 1])
    return [part / lot for part in sums]


def _global(pairs: list[Pair], clip: float | tuple[float, ...], lot: int) -> list[Tensor]:
    """Each example's gradient within a norm, or each layer of it within its own, over the lot's size."""
    squares = torch.stack([delta.square().sum(1) * (1 + a.square().sum(1)) for delta, a in pairs])
    norms = (squares.sum(0, keepdim=True) if isinstance(clip, float) else squares).sqrt()
    limits = torch.tensor([clip] if isinstance(clip, float) else clip, device=norms.device)[:, None]
    factors = ((limits / norms.clamp_min(1e-30)).clamp(max=1)[:, :, None] / lot).expand(len(pairs), -1, 1)
    return [
        part
        for (delta, a), factor in zip(pairs, factors, strict=True)
        for part in ((factor * delta).T @ a, (factor * delta).sum(0))
    ]
