"""Models that are compiled, that compute parts again, or whose norms iterate: summed as they mean it."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

import farthing as ft
from farthing.errors import Unsupported
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
    gradient, before, other = Gradient(model, LOSS), norm._u.clone(), norm._v.clone()
    gradient.bounded_sum(Examples((x, y)).take(slice(None)), None, BOUND)
    assert torch.equal(norm._u, before)
    assert norm.training
    next(ft.torch.train(model, LOSS, (x, y), epsilon=8.0, delta=1e-5, steps=2, sampling_rate=0.1))
    moved = norm._u.clone()
    assert not torch.equal(moved, before)
    weight = model[0].parametrizations.weight.original.detach()  # one iteration, at the weights as they are
    torch.testing.assert_close(moved, nn.functional.normalize(weight @ other, dim=0), rtol=0.0, atol=1e-4)


def test_a_compiled_model_is_trained_in_place():
    model = compiled(layers())
    before = model._orig_mod[0].weight.detach().clone()
    training = ft.torch.train(model, LOSS, data(2000), epsilon=8.0, delta=1e-5, steps=2, sampling_rate=0.1)
    assert ft.run(training).steps == 2
    assert not torch.equal(model._orig_mod[0].weight, before)


class Tied(nn.Module):
    """Two layers with one weight, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def _turn(model):
    head = model.head
    del model.head
    first = model.first
    del model.first
    model.head, model.first = head, first


CHANGES = {
    "another weight": (
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(3, 5))),
        "head.weight is",
    ),
    "assigned state": (
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
        "first.weight is another",
    ),
    "another layer": (lambda m: setattr(m, "head", nn.Linear(5, 3)), "head.weight is another"),
    "another dtype": (lambda m: m.double(), "first.weight has dtype torch.float64 now"),
    "another shape": (lambda m: setattr(m.head.bias, "data", torch.zeros(1)), "head.bias has shape"),
    "another device": (lambda m: m.to("meta"), "first.weight is another"),
    "frozen": (lambda m: m.head.requires_grad_(False), "head.weight was trained"),
    "one more layer": (lambda m: setattr(m, "more", nn.Linear(2, 2)), "more.weight is trained now"),
    "one layer less": (lambda m: setattr(m, "second", nn.Identity()), "second.weight was trained"),
    "untied": (
        lambda m: setattr(m.second, "weight", nn.Parameter(m.first.weight.detach().clone())),
        "second.weight is another",
    ),
    "tied": (lambda m: setattr(m.second, "bias", m.first.bias), "second.bias is another"),
    "a parametrization": (lambda m: nn.utils.parametrizations.weight_norm(m.head), "head.weight was trained"),
    "another order": (_turn, "another order"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_change_in_mid_run_are_refused_before_a_charge(change):
    model, (change_it, says) = Tied(), CHANGES[change]
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5), block=1)  # a row of the journal for each charge
    training = ft.torch.train(model, LOSS, data(400), ledger, steps=3, sampling_rate=0.1)
    next(training)
    charged = ledger.journal.last()
    change_it(model)
    with pytest.raises(Unsupported, match=says) as told:
        next(training)
    assert "train anew" in str(told.value)
    assert ledger.journal.last() == charged


def test_other_values_and_frozen_parts_may_come_in_mid_run():
    model = Tied()
    training = ft.torch.train(model, LOSS, data(400), epsilon=8.0, delta=1e-5, steps=3, sampling_rate=0.1)
    next(training)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    next(training)
    assert float(model.head.bias.detach().abs().sum()) > 0
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    next(training)


def test_a_bare_gradient_says_that_its_model_changed():
    model, (x, y) = Tied(), data(40)
    gradient, batch = Gradient(model, LOSS), Examples((x, y)).take(slice(None))
    gradient.bounded_sum(batch, None, BOUND)
    model.head.weight = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(Unsupported, match=r"head\.weight is another") as told:
        gradient.bounded_sum(batch, None, BOUND)
    assert told.value.public  # so that a ledger raises it, too


@pytest.mark.parametrize(
    "model", [lambda: nn.Linear(6, 3), lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))]
)
def test_a_compiled_loss_runs_eagerly_too(model):
    """Compiled code may free what a second backward pass needs; here any compiled code would fail."""

    def compiler(graph, inputs):
        def fail(*_):
            raise RuntimeError("compiled code ran")

        return fail

    def losses(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    torch.manual_seed(0)
    x, y, model = torch.randn(5, 6), torch.arange(5) % 3, model()
    found, plain = (
        Gradient(model, loss).bounded_sum(Examples((x, y)).take(slice(None)), None, ClipNorm(1.0))
        for loss in (torch.compile(losses, backend=compiler), losses)
    )
    assert torch.equal(found, plain)
