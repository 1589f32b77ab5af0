"""What modules make of parameters of their own is followed, whatever the size of a batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.layers import anything

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


HOWS = {
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
