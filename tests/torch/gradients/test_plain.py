"""Models that are compiled, that compute parts again, or whose norms iterate: summed as they mean it."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

import farthing as ft
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients import plain
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import plain_sum
from farthing.torch.gradients.plain import bare
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
BOUND = ClipNorm(0.5)


class Again(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.first, self.last = reentrant, nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def layers():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def compiled(model):
    return torch.compile(model, backend="eager")


MODELS = {
    "computed again": lambda: Again(False),
    "computed again, reentrant": lambda: Again(True),
    "compiled": lambda: compiled(layers()),
    "a compiled part": lambda: nn.Sequential(compiled(layers()), nn.Tanh(), nn.Linear(3, 3)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
}


def data(n=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)


def one_at_a_time(model, x, y):
    """Each example's gradient by plain autograd, the norms as they stand."""
    model = bare(model).eval()
    trained, rows = list(model.parameters()), []
    with torch.compiler.set_stance("force_eager"):
        for n in range(len(y)):
            value = LOSS(model(x[n : n + 1]), y[n : n + 1]).sum()
            for p in trained:
                p.grad = None
            value.backward()  # what reentrant checkpoints need
            rows.append(torch.cat([p.grad.flatten() for p in trained]))
    model.train()
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_one_example_at_a_time(name):
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](), data()
    found = Gradient(model, LOSS, route="fast").bounded_sum(Examples((x, y)).take(slice(None)), None, BOUND)
    expected = plain_sum(one_at_a_time(model, x, y), BOUND)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"  # as it was


class Fickle(Again):
    """A part that saves other tensors when it is computed again, which shows from how deep it is called."""

    def forward(self, x):
        def part(x):
            again = any(frame.function == "recompute_fn" for frame in inspect.stack(0))
            x = self.blocks[0](x)
            return x.double().tanh().float() if again else x.tanh()

        return self.last(checkpoint.checkpoint(part, self.first(x), use_reentrant=False))


def test_parts_that_do_not_come_out_the_same_again_are_kept(caplog):
    torch.manual_seed(0)
    plain._say.cache_clear()
    model, (x, y) = Fickle(False), data()
    found = Gradient(model, LOSS, route="fast").bounded_sum(Examples((x, y)).take(slice(None)), None, BOUND)
    assert any("put aside" in message for message in caplog.messages)
    model.forward = lambda x: model.last(model.blocks[0](model.first(x)).tanh())
    trained, rows = [p for p in model.parameters() if p is not None], []
    for n in range(len(y)):
        value = LOSS(model(x[n : n + 1]), y[n : n + 1]).sum()
        parts = torch.autograd.grad(value, trained, allow_unused=True)
        pairs = zip(parts, trained, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    expected = plain_sum(torch.stack(rows), BOUND)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_spectral_norm_moves_with_the_weights_and_not_with_the_records():
    model, (x, y) = MODELS["spectral norm"](), data(2000)
    norm = model[0].parametrizations.weight[0]
    gradient, before = Gradient(model, LOSS), norm._u.clone()
    gradient.bounded_sum(Examples((x, y)).take(slice(None)), None, BOUND)
    assert torch.equal(norm._u, before)
    assert norm.training
    next(ft.torch.train(model, LOSS, (x, y), epsilon=8.0, delta=1e-5, steps=2, sampling_rate=0.1))
    moved = norm._u.clone()
    assert not torch.equal(moved, before)
    u, v = norm._u, norm._v
    for _ in range(20):  # the two vectors are close to those of the weights as they are now
        v = nn.functional.normalize(model[0].parametrizations.weight.original.T @ u, dim=0)
        u = nn.functional.normalize(model[0].parametrizations.weight.original @ v, dim=0)
    assert float((u @ moved).detach()) > 0.99


def test_a_compiled_model_is_trained_in_place():
    model = compiled(layers())
    before = model._orig_mod[0].weight.detach().clone()
    training = ft.torch.train(model, LOSS, data(2000), epsilon=8.0, delta=1e-5, steps=2, sampling_rate=0.1)
    assert ft.run(training).steps == 2
    assert not torch.equal(model._orig_mod[0].weight, before)
