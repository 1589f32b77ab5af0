"""What is alive at once in a private sum, beside an ordinary gradient: weighed tensor by tensor."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.records import Examples

LiveBytes = pytest.importorskip("benchmarks.live_memory", reason="not a checkout").LiveBytes


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Lora(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.a, self.b = nn.Linear(inner, 2, bias=False), nn.Linear(2, outer, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Deep(nn.Module):
    """Blocks with trained matrices of low rank beside frozen ones, with or without checkpoints."""

    def __init__(self, reentrant=None, depth=8):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32).requires_grad_(False), Lora(32, 96), nn.GELU(), Lora(96, 32))
            for _ in range(depth)
        )
        self.head = nn.Linear(32, 3).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            more = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + more
        return self.head(x.mean(1))


def data():
    made = torch.Generator().manual_seed(0)
    return torch.randn(8, 40, 32, generator=made, requires_grad=True), torch.arange(8) % 3


def ordinary_peak(model):
    x, y = data()
    gc.collect()
    with LiveBytes() as live:
        losses(model(x), y).mean().backward()
    return live.peak


def private_peak(model, **options):
    x, y = (part.detach() for part in data())
    gradient, batch = Gradient(model, losses, **options), Examples((x, y)).take(slice(None))
    gradient.bounded_sum(batch, None, ClipNorm(1.0))  # with the check, and the choice of routes
    gc.collect()
    with LiveBytes() as live:
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
    return live.peak


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_private_sum_takes_little_more_than_an_ordinary_gradient(reentrant):
    torch.manual_seed(0)
    assert private_peak(Deep(reentrant)) <= 1.1 * ordinary_peak(Deep(reentrant))


def test_checkpoints_save_what_they_save_in_ordinary_training():
    torch.manual_seed(0)
    plain, again = (private_peak(Deep(reentrant)) for reentrant in (None, False))
    assert again < 0.5 * plain


def test_what_is_weighed_is_what_is_alive():
    with LiveBytes() as live:
        kept = torch.ones(1000)
        torch.ones(2000).sum()
    assert (live.peak, live.now, kept.numel()) == (12004, 4000, 1000)
