"""Models that treat a batch otherwise once their weights have moved: sums stay those of single examples."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import farthing as ft
from farthing.errors import Unsupported
from farthing.ledger.answers import without_failing
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.records import Examples

N, T, WIDTH, CLIP = 12, 6, 4, 0.02
X = torch.randn(N, T, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 2


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Depths(nn.Module):
    """Tokens with a low score skip a layer; at first none does."""

    def __init__(self):
        super().__init__()
        self.score, self.layer, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        nn.init.zeros_(self.score.weight)
        nn.init.constant_(self.score.bias, 3.0)

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores = self.score(tokens).squeeze(1)
        at = (~(scores < 0)).nonzero().squeeze(1)
        made = torch.tanh(self.layer(tokens[at])) * torch.sigmoid(scores[at])[:, None]
        return self.head(tokens.index_put((at,), made).view(x.shape).mean(1))


class Experts(nn.Module):
    """Every token goes to one expert, at first to the first; an expert without a token is not called."""

    def __init__(self):
        super().__init__()
        self.score, self.head = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        nn.init.zeros_(self.score.weight)

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        share, chosen = self.score(tokens).softmax(1).max(1)
        out = torch.zeros_like(tokens)
        for n, expert in enumerate(self.experts):
            at = (chosen == n).nonzero().squeeze(1)
            if len(at):
                out = out.index_put((at,), share[at, None] * expert(tokens[at]))
        return self.head(out.view(x.shape).mean(1))


def moved(make):
    """A model that was checked, whose weights have then moved."""
    torch.manual_seed(0)
    model = make()
    gradient = Gradient(model, losses, route="auto")
    gradient.check(X, Y)
    assert gradient.isolation is None
    with torch.no_grad():
        model.score.weight.normal_()
        if model.score.bias is not None:
            model.score.bias.zero_()
    return gradient


def total(gradient, places):
    examples = Examples((X, Y))

    def sums(part):
        return gradient.bounded_sum(examples.take(part), None, ClipNorm(CLIP))

    return without_failing(sums, np.asarray(places), torch.zeros(gradient.layout.size))


@pytest.mark.parametrize("make", [Depths, Experts])
def test_rows_of_a_batch_that_depend_on_the_data_are_attributed_to_nobody(make):
    gradient = moved(make)
    for first in range(0, N, 3):
        some = [first, first + 1, first + 2]
        whole = total(gradient, some)
        for gone in some:
            rest = total(gradient, [place for place in some if place != gone])
            assert float((whole - rest).norm()) <= CLIP * (1 + 2**-7)


@pytest.mark.parametrize("make", [Depths, Experts])
def test_a_second_look_takes_such_a_model_one_example_at_a_time(make, caplog):
    gradient = moved(make)
    with caplog.at_level(logging.WARNING, "farthing.torch"):
        gradient.look_again()
    assert gradient.isolation == "loop"
    assert len(caplog.records) == 1
    rows = gradient.rows(X, Y)
    expected = (rows * (CLIP / rows.norm(dim=1).clamp_min(CLIP))[:, None]).sum(0)
    assert torch.allclose(total(gradient, range(N)), expected, atol=1e-6)


def test_a_second_look_is_refused_where_book_keeping_was_asked_for():
    gradient = moved(Experts)
    gradient._falls_back = False
    with pytest.raises(Unsupported, match=r"rows that depends on the data|called more often"):
        gradient.look_again()


def test_a_run_looks_again_after_its_first_update():
    torch.manual_seed(0)
    model = Depths()
    optimizer = torch.optim.SGD(model.parameters(), 50.0)
    data = torch.randn(200, T, WIDTH), torch.arange(200) % 2
    how = {"epsilon": 50.0, "delta": 1e-5, "steps": 6, "sampling_rate": 0.1, "optimizer": optimizer}
    training = ft.torch.train(model, losses, data, **how)
    gradient = training._kind.contribution.contribution
    assert gradient.isolation is None
    assert len(list(training)) == 6
    assert gradient.isolation == "loop"


def test_a_model_that_does_the_same_as_before_is_not_checked_anew(monkeypatch):
    gradient = Gradient(Depths(), losses, route="auto")
    gradient.check(X, Y)
    monkeypatch.setattr(gradient, "_admitted", lambda source: pytest.fail("checked anew"))
    gradient.look_again()


def test_an_empty_batch_is_refused_like_any_other_where_the_model_was_changed():
    """Whether anybody was drawn must not decide whether there is an error."""
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 2))
    examples = Examples((X[:, 0], Y))
    gradient = Gradient(model, losses)
    gradient.check(X[:, 0], Y)
    model.train()
    for places in (np.arange(3), np.arange(0)):
        with pytest.raises(Unsupported, match="BatchNorm1d"):
            gradient.bounded_sum(examples.take(places), None, ClipNorm(CLIP))
