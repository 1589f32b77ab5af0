"""Planted bugs in the checks of models and in isolation: each is noticed, and without them nothing is."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farthing.errors import FarthingError
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks import independence, probe
from farthing.torch.gradients import bookkeeping, isolation
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.plain import Makeup
from farthing.torch.training.records import Examples

WIDTH, CLIP = 4, 1e-3


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Before(nn.Module):
    """A function before a linear layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.fc, self.last = function, nn.Linear(WIDTH, 3), None

    def forward(self, x):
        return self.fc(self.function(self, x))


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, WIDTH, generator=generator)
    x[0] = 30.0
    return x, torch.randint(0, 3, (n,), generator=generator)


class Ruled(torch.autograd.Function):
    """The identity, with a batching rule that takes the mean of all lanes away."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, delta):
        return delta

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(0), 0


def kept(self, x):
    found = x if self.last is None else x + self.last
    self.last = found.detach()
    return found


def chunks(self, x):
    return (
        (x.view(-1, 8, WIDTH) - x.view(-1, 8, WIDTH).mean(1, keepdim=True)).flatten(0, 1)
        if len(x) % 8 == 0
        else x
    )


def hooked(self, x):
    x = x * self.fc.weight.mean()
    if x.requires_grad:
        x.register_hook(lambda g: g - g.mean(0))
    return x


MIXING = {
    "mean": lambda self, x: x - x.mean(0),
    "chunks": chunks,
    "largest": lambda self, x: x / x.max() if x.max() > 1 else x,
    "slightly": lambda self, x: x + 1e-4 * x.mean(0),
    "nan": lambda self, x: x if bool(x.isfinite().all()) else torch.zeros_like(x),
    "size": lambda self, x: x * (1 + len(x)),
}


def isolated():
    """Whatever a model does, an example moves the sum in isolation by one bound at most."""
    found = []
    for name, function in (MIXING | {"kept": kept, "ruled": lambda self, x: Ruled.apply(x)}).items():
        (x, y), model = data(), Before(function)
        other = torch.cat([-x[:1], x[1:]])
        gradient = Gradient(model, lambda out, y: out.sum(1) + 0 * y, route="vmap", physical_batch_size=6)
        gradient.checked = Makeup(model)
        sums = []
        try:
            for rows, chosen in ((x, slice(None)), (other, slice(None)), (x, np.arange(1, 24))):
                model.last = None
                sums.append(gradient.bounded_sum(Examples((rows, y)).take(chosen), None, ClipNorm(CLIP)))
        except (FarthingError, RuntimeError):
            if len(sums) < 2:
                continue
        for bound, sum_ in zip((2.01, 1.01), sums[1:], strict=False):
            if (moved := float((sums[0] - sum_).norm()) / CLIP) > bound:
                found.append(f"{name}: {moved}")
    return found


def checked():
    """A model that mixes examples is refused."""
    found = []
    for name, function in MIXING.items():
        try:
            Gradient(Before(function), losses).check(*data())
        except FarthingError:
            continue
        found.append(f"{name} is accepted")
    return found


def together(function, in_dims=0, randomness="error"):
    """In place of vmap: all examples go through at once, and each row has a part of the sum."""

    def run(weights, inputs, targets, present):
        with torch.enable_grad():
            own = {name: p.clone().requires_grad_() for name, p in weights.items()}
            model, loss = run.model
            out = torch.func.functional_call(model, own, (inputs,))
            each = loss(out, targets)
            rows = [
                torch.autograd.grad(value, list(own.values()), retain_graph=True, allow_unused=True)
                for value in each
            ]
        return {name: torch.stack([row[n] for row in rows]) for n, name in enumerate(own)}

    return run


def _nothing(*_, **__):
    return contextlib.nullcontext()


def _rows_together(how, model, loss, names, inputs, targets, weights):
    run = together(None)
    run.model = model, loss
    trained = {name: dict(model.named_parameters())[name].detach() for name in names}
    found = run(trained, inputs, targets, weights)
    return torch.cat([found[name].flatten(1) for name in names], 1)


PLANTED = {
    "what a model keeps is not put back": (isolation, "Wall", _nothing, isolated),
    "batching rules by hand run": (isolation, "_without_rules", _nothing, isolated),
    "examples go through together": (bookkeeping.isolation, "per_example", _rows_together, isolated),
    "nobody is exchanged": (
        independence,
        "_patterns",
        lambda size, _: iter([torch.zeros(size, dtype=torch.bool)]),
        checked,
    ),
    "only small batches": (independence.Effort, "affords", lambda *_: False, checked),
    "only mild values": (probe.Source, "wildest", lambda *_: probe.Ranges(), checked),
    "no value that is not a number": (independence, "_SPOILT", probe.Ranges(), checked),
    "sizes are not compared": (independence.Company, "sizes", lambda *_: None, checked),
}


@pytest.mark.parametrize("complaints", [isolated, checked])
def test_without_bugs_there_is_no_complaint(complaints):
    assert complaints() == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_noticed(name, monkeypatch):
    place, attribute, broken, complaints = PLANTED[name]
    monkeypatch.setattr(place, attribute, broken)
    assert complaints() != []
