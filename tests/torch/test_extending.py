"""A clip rule, an adaptive clip and a layer rule of one's own, in about ten lines each."""

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.noise.lattice import SeededStream
from farthing.torch.gradients.terms import RowTerms

LOSS = nn.CrossEntropyLoss(reduction="none")
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Smooth(ft.torch.ClipRule):
    """g · C / √(C² + |g|²): never longer than C, and smooth at it."""

    largest_norm = 0.5

    def factors(self, norms, clip):
        return clip / (norms.square() + clip**2) ** 0.5


class Ends(ft.torch.AdaptiveClip):
    """A clip that is halved after every batch."""

    clip = 1.0

    def bound(self, noise_multiplier, batch_size):
        return ft.ClipNorm(self.clip)

    def learn(self, bound, released, batch_size):
        self.clip /= 2
        return released

    def state_dict(self):
        return {"clip": self.clip}

    def load_state_dict(self, state):
        self.clip = state["clip"]


class Scaled(nn.Module):
    """A layer with a weight a coordinate, which no rule of the package knows."""

    def __init__(self, width):
        super().__init__()
        self.by = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.by


calls = []


@ft.torch.layer_rule(Scaled)
def scaled(tape, module, own, x):
    calls.append(module)
    tape.use(module, module.by)
    return tape.watch(own(x), lambda delta: tape.put(module.by, lambda: RowTerms(delta * x.detach())))


def gradients(model):
    """Every example's gradient by itself, by plain autograd."""
    trained = list(model.parameters())
    rows = []
    for n in range(len(X)):
        found = torch.autograd.grad(LOSS(model(X[n : n + 1]), Y[n : n + 1]).sum(), trained)
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


def models():
    torch.manual_seed(1)
    stack = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return {"stack": stack, "mapped": nn.Sequential(Scaled(4), nn.Linear(4, 2))}


def trained(model, **options):
    """One private step on all examples, with noise that is too small to see; the step's sum of gradients."""
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    ledger = ft.Ledger(ft.Budget(1e12, 0.5), stream=SeededStream(1))
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    training = ft.torch.train(
        model,
        LOSS,
        (X, Y),
        ledger,
        sampling_rate=1.0,
        noise_multiplier=1e-5,
        steps=1,
        optimizer=sgd,
        **options,
    )
    (step,) = list(training)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return step, (before - after) * len(X)


@pytest.mark.parametrize("route", ["fast", "vmap"])
@pytest.mark.parametrize("name", ["stack", "mapped"])
def test_a_clip_rule_of_ones_own_trains_privately(name, route):
    model = models()[name]
    rows = gradients(model)
    wanted = sum(row * 0.5 / np.hypot(float(row.norm()), 0.5) for row in rows)
    step, found = trained(model, clip_norm=Smooth(), route=route)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert step.clip_norm == 0.5


def test_what_a_rule_allows_at_most_is_what_is_priced():
    query = ft.Query(ft.Poisson(0.1), ft.torch.Gradient(models()["stack"], LOSS), Smooth(), ft.Gaussian(2.0))
    plain = ft.Query(query.sampler, query.contribution, ft.ClipNorm(0.5), query.mechanism)
    assert query.price(ft.Budget(1.0, 1e-5)) == plain.price(ft.Budget(1.0, 1e-5))


def test_an_adaptive_clip_of_ones_own_follows_the_run():
    model = models()["stack"]
    training = ft.torch.train(
        model, LOSS, (X, Y), epsilon=5.0, delta=1e-5, sampling_rate=0.5, steps=3, clip_norm=Ends()
    )
    assert [step.clip_norm for step in training] == [1.0, 0.5, 0.25]


def test_a_layer_rule_of_ones_own_trains_privately():
    model = models()["mapped"]
    rows = gradients(model)
    wanted = sum(row / max(1.0, float(row.norm()) / 0.3) for row in rows)
    calls.clear()
    _, found = trained(model, clip_norm=0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert model[0] in calls


def test_a_layer_rule_that_is_wrong_is_refused_before_anything_is_charged():
    class Wrong(Scaled):
        def forward(self, x):
            return x * self.by

    @ft.torch.layer_rule(Wrong)
    def wrong(tape, module, own, x):
        tape.use(module, module.by)
        return tape.watch(own(x), lambda delta: tape.put(module.by, lambda: RowTerms(delta)))

    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    with pytest.raises(ft.Unsupported):
        ft.torch.train(nn.Sequential(Wrong(4), nn.Linear(4, 2)), LOSS, (X, Y), ledger, steps=1, route="fast")
    assert ledger.share == 0
