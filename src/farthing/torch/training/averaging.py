"""A moving average of released weights: post-processing, so it costs nothing.

De et al. 2022, "Unlocking high-accuracy differentially private image classification through scale": averages
take out much of the noise that single iterates carry. The decay is min(decay, (1 + t) / (10 + t)), so that
the start is soon forgotten.

>>> model = torch.nn.Linear(1, 1, bias=False)
>>> _ = torch.nn.init.constant_(model.weight, 0.0)
>>> average = Average(model, 0.999)
>>> _ = torch.nn.init.constant_(model.weight, 1.0)
>>> average.update(model, 1)
>>> round(average.model.weight.item(), 4)  # 1 - 2/11
0.8182
"""

import copy

import torch
from torch import nn

from farthing import validate


class Average:
    """A copy of a model whose weights follow it slowly."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = validate.probability(average=decay)
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module, t: int) -> None:
        """After update t = 1, 2, … of ``model``."""
        weight = 1 - min(self.decay, (1 + t) / (10 + t))
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            if new.requires_grad:
                old.lerp_(new, weight)
        for buffer, current in zip(self.model.buffers(), model.buffers(), strict=True):
            buffer.copy_(current)
