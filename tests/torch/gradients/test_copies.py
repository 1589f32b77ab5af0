"""What modules make of parameters of their own is followed, whatever the size of a batch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farthing.ledger.answers import without_failing
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.layers import anything
from farthing.torch.training.records import Examples

LENGTH, WIDTH = 7, 5


def losses(outputs, targets):
    return (outputs.flatten(1) - 0.5).square().sum(1) + 0 * targets


class Places(nn.Module):
    """What stands at a place is found in some way; all examples share the places."""

    def __init__(self, how, *shape):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.table = nn.Parameter(torch.randn(*shape))
        self.register_buffer("at", torch.arange(LENGTH).flip(0))

    def forward(self, x):
        return self.last(torch.tanh(self.how(self, self.first(x))))


def _row(m, x):
    return torch.cat([m.table.expand(len(x), 1, -1), x], 1)


def _bias(m, x):
    apart = (m.at[:, None] - m.at[None]).abs()
    scores = x @ x.transpose(1, 2) + m.table[apart].permute(2, 0, 1)[0]
    return scores.softmax(-1) @ x


def _attention(m, x):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=m.table)


def _windows(m, x):
    """Attention within windows, of which each has a mask, and all the same bias."""
    rows, apart = len(x), (m.at[:, None] - m.at[None]).abs()
    x = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
    mask = torch.stack([apart > 5, apart > 3]).float()[None].expand(rows, 2, *apart.shape).flatten(0, 1)
    bias = m.table[apart].permute(2, 0, 1)[:1] - 9 * mask
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias).unflatten(0, (rows, 2)).sum(1)


def _tiles(m, x):
    heads = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
    scores = heads @ m.table.unflatten(1, (2, -1)).transpose(0, 1).repeat(len(x), 1, 1).mT
    return scores.unflatten(0, (len(x), 2)).sum(1).softmax(-1) @ x


HOWS = {
    "a mask that is learnt": (_attention, (LENGTH, LENGTH)),
    "masks of windows": (_windows, (LENGTH, 2)),
    "once for each head": (_tiles, (LENGTH, 2 * WIDTH)),
    "tokens": (lambda m, x: (x.flatten(0, 1) * m.table).view(x.shape), (WIDTH,)),
    "tokens, in lanes": (
        lambda m, x: F.layer_norm(x.flatten(0, 1), (WIDTH,), m.table).view(x.shape),
        (WIDTH,),
    ),
    "a token": (_row, (WIDTH,)),
    "a token again": (lambda m, x: torch.cat([m.table.unsqueeze(0).repeat(len(x), 1, 1), x], 1), (2, WIDTH)),
    "fixed places": (lambda m, x: x + m.table[m.at], (LENGTH, WIDTH)),
    "places made on the way": (lambda m, x: x + m.table[torch.arange(x.shape[1])], (9, WIDTH)),
    "rows and columns": (lambda m, x: x + m.table.unsqueeze(0).repeat(LENGTH, 1), (WIDTH,)),
    "distances": (_bias, (LENGTH, 2)),
    "a softmax": (lambda m, x: x * m.table.softmax(0), (WIDTH,)),
    "sorted": (lambda m, x: x * torch.sort(m.table).values, (WIDTH,)),
    "parts": (lambda m, x: x * m.table.chunk(2)[0] + m.table.split(WIDTH)[1], (2 * WIDTH,)),
    "one after the other": (lambda m, x: sum(x * row for row in m.table), (3, WIDTH)),
    "joined": (lambda m, x: x * torch.cat([m.table, m.table])[1:], (3,)),
    "a slope for each": (lambda m, x: F.prelu(x.transpose(1, 2), m.table).transpose(1, 2), (WIDTH,)),
    "a norm": (lambda m, x: F.layer_norm(x, (WIDTH,), m.table), (WIDTH,)),
    "written into what is there": (lambda m, x: x.clone().add_(m.table), (WIDTH,)),
    "a power": (lambda m, x: x - (1.5 - m.table.sigmoid()) ** 2 / 2, (WIDTH,)),
    "a number": (lambda m, x: m.table * x, ()),
}


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
@pytest.mark.parametrize("examples", [1, 2, 3, WIDTH, LENGTH, 9])
@pytest.mark.parametrize("name", HOWS)
def test_no_size_of_a_batch_is_mistaken_for_another(name, examples, one_by_one):
    """A table may be as long as a batch: which is which follows from the check."""
    torch.manual_seed(0)
    model = Places(*HOWS[name])
    gradient = Gradient(model, losses)
    gradient.check(torch.zeros(1, LENGTH, WIDTH), torch.zeros(1))
    assert anything not in gradient._passes.plan.rules.values()
    x, y = torch.randn(examples, LENGTH, WIDTH), torch.zeros(examples)
    found, expected = gradient.rows(x, y), one_by_one(model, losses, x, y)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


class Hurries(nn.Module):
    """A model that leaves a mask out where it is of ones, as many do: it computes the same without it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.bias, self.scale = (nn.Parameter(torch.randn(n, LENGTH)) for n in (LENGTH, WIDTH))

    def forward(self, x, mask):
        bias = self.bias * torch.linspace(0.5, 1.0, LENGTH)[:, None]
        if not (mask == 1).all():
            bias = bias - 9 * (mask != 1).float()[:, None, :LENGTH]
        x = torch.tanh(self.first(x))
        x = F.scaled_dot_product_attention(x.flip(1), x, -x, attn_mask=bias)
        return self.last((x * (self.scale * torch.linspace(0.5, 1.0, WIDTH)[:, None]).t()).mean(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_a_record_with_a_mask_does_not_decide_what_the_others_are(dtype):
    torch.manual_seed(0)
    model, n, clip = Hurries(), 9, ClipNorm(1e-3)
    x, mask, y = torch.randn(n, LENGTH, WIDTH), torch.ones(n, 40), torch.zeros(n)
    mask[0, 5:] = 0
    gradient, examples = Gradient(model, losses), Examples((x, mask.to(dtype), y))
    gradient.check(*examples.made_up_batch())
    settled = dict(gradient._passes.plan.settled)
    zero = gradient.zero(examples, None, clip)

    def total(places):
        return without_failing(
            lambda part: gradient.bounded_sum(examples.take(part), None, clip), np.array(places), zero
        )

    every, others = total(range(n)), total(range(1, n))
    assert others.norm() > 3e-3
    assert (every - others).norm() <= 1.001e-3
    assert gradient._passes.plan.settled == settled  # by made-up examples alone


class Read(nn.Module):
    """The table of a layer is read past it: a tied head, or the queries of a detector."""

    def __init__(self, how):
        super().__init__()
        self.how, self.words, self.last = how, nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.last(self.how(self, torch.tanh(self.words(ids))))


READ = {
    "a tied head": lambda m, x: F.linear(x, m.words.weight) @ m.words.weight,
    "queries": lambda m, x: x.mean(1, keepdim=True) + m.words.weight.unsqueeze(0).repeat(len(x), 1, 1),
}


@pytest.mark.parametrize("name", READ)
def test_a_parameter_that_is_read_past_its_module_is_followed(name, one_by_one):
    torch.manual_seed(0)
    model, ids, y = Read(READ[name]), torch.randint(0, 9, (4, LENGTH)), torch.zeros(4)
    gradient = Gradient(model, losses)
    gradient.check(ids, y)
    assert anything not in gradient._passes.plan.rules.values()
    found, expected = gradient.rows(ids, y), one_by_one(model, losses, ids, y)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def _written(m, x):
    return x * m.table.clone().mul_(2.0)


def _dropped(m, x):
    return x * F.dropout(m.table, 0.5)


@pytest.mark.parametrize("how", [_written, _dropped])
def test_what_cannot_be_made_again_is_mapped(how):
    model = Places(how, WIDTH)
    gradient = Gradient(model, losses)
    gradient.check(torch.zeros(1, LENGTH, WIDTH), torch.zeros(1))
    assert [type(m) for m, rule in gradient._passes.plan.rules.items() if rule is anything] == [Places]
