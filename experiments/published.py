"""AdaDP and AdaN as their authors print them (Xu et al. 2020, Algorithm 1). **They guarantee nothing.**

E'[g²] (line 23) and the gate on it (line 7) read gradients before noise, and they set the clip and the noise
of the next lot (lines 9 and 12): `farthing.audit.as_published` shows what that tells. They are run here
because the paper's figures are theirs, never through a ledger, and on public data only.

Where the text leaves a choice: gradients are clipped example by example and summed, noise is added to the sum
(lines 13 and 18), and everything is divided by the lot's size L before the two mean squares are formed, so
that line 26 is a step of RMSprop with rate η.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from experiments.frame import seed
from farthing.torch.coordinates import clamped_rows, clamped_sum

if TYPE_CHECKING:
    from experiments.deep import Setting

REMEMBERED, REMEMBERED_RAW, GATE, SMOOTHING = 0.1, 0.9, 1e-6, 1e-8  # γ, γ', G, ε₀

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
    size = sum(p.numel() for p in weights)
    adapts = setting.method.startswith("AdaDP")
    squares, raw = ([torch.zeros_like(p) for p in weights] for _ in range(2))
    rate = setting.lot / len(rows)
    for t in range(1, setting.lots + 1):
        places = torch.from_numpy(np.flatnonzero(random.random(len(rows)) < rate))
        pairs = _pairs(model, linears, loss, rows[places], labels[places])
        means = [part / setting.lot for delta, a in pairs for part in (delta.T @ a, delta.sum(0))]
        known = [part.sqrt() for part in raw]
        if float(torch.cat([part.flatten() for part in known]).var()) > GATE:  # line 7
            limits = [setting.factor * part for part in known]  # line 9
            sums = [torch.zeros_like(p) for p in weights]
            for (delta, a), place in zip(pairs, range(0, len(sums), 2), strict=True):
                clamped_sum(delta, a, limits[place], sums[place])  # line 10
                clamped_rows(delta, limits[place + 1], sums[place + 1])
            deviations = [setting.noise * size**0.5 * part for part in limits]  # line 12
        else:
            norms = sum(delta.square().sum(1) * (1 + a.square().sum(1)) for delta, a in pairs)
            part = (setting.clip / torch.as_tensor(norms).sqrt().clamp_min(1e-30)).clamp(max=1)  # line 16
            sums = [s for d, a in pairs for s in ((d * part[:, None]).T @ a, (d * part[:, None]).sum(0))]
            deviations = [torch.full_like(p, setting.clip * setting.noise) for p in weights]
        if watch is not None:
            watch(t, known, [mean.abs() for mean in means], deviations)
        with torch.no_grad():
            for place, parameter in enumerate(weights):
                noisy = sums[place] + deviations[place] * torch.randn_like(parameter)
                noisy = noisy / setting.lot
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
) -> list[tuple[Tensor, Tensor]]:
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
