"""In isolation examples cannot meet: whatever a model does, one moves the sum by one bound at most."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import farthing as ft
from farthing.accounting.filters import ZcdpFilter
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import plain_sum
from farthing.torch.gradients.plain import Makeup
from farthing.torch.methods.dpagd import dpagd
from farthing.torch.training.records import Examples

CLIP = ClipNorm(1e-2)
BOTH = pytest.mark.parametrize("route", ["vmap", "loop"])


def data(n=24, width=5):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, width, generator=generator)
    x[0] = 40.0  # who comes or goes is unlike the others
    return x, torch.randint(0, 3, (n,), generator=generator)


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Applied(nn.Module):
    """A function before a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.fc = function, nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.function(x))


class Kept(nn.Module):
    """Adds what it saw in the batch before."""

    def __init__(self):
        super().__init__()
        self.fc, self.last, self.seen = nn.Linear(5, 3), None, []

    def forward(self, x):
        before = self.last if self.last is not None else torch.zeros_like(x)
        older = self.seen[-1] if self.seen else torch.zeros_like(x)
        self.last = (x + before).detach()
        self.seen.append(x.detach())
        return self.fc(x + before + older)


def mixup(x):
    return 0.5 * x + 0.5 * x[torch.randperm(len(x))]


def chunks(x):
    return (x.view(-1, 8, 5) - x.view(-1, 8, 5).mean(1, keepdim=True)).flatten(0, 1) if len(x) % 8 == 0 else x


MIXED = {
    "mean": lambda x: x - x.mean(0),
    "mixup": mixup,
    "chunks": chunks,
    "capacity": lambda x: torch.cat([x[:16], 0 * x[16:]]),
    "cumulative": lambda x: x.cumsum(0),
    "sorted": lambda x: x.sort(0).values,
    "slightly": lambda x: x + 1e-4 * x.sum(0),
    "through the gradient": lambda x: x,
}


def moved(model, loss=losses, route="vmap", checked=True, **how):
    """|sum(D) - sum(D minus one)| over the clip, on the same randomness; perhaps without the check."""
    x, y = data()
    gradient = Gradient(model, loss, route=route, **how)
    gradient.checked = Makeup(None if checked else model)
    sums = []
    for chosen in (slice(None), np.arange(1, len(y))):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sums.append(gradient.bounded_sum(Examples((x, y)).take(chosen), None, CLIP))
    return float((sums[0] - sums[1]).norm()) / CLIP.norm()


@BOTH
@pytest.mark.parametrize("name", MIXED)
def test_one_example_moves_the_sum_by_one_bound(name, route):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert moved(Applied(MIXED[name]), route=route) <= 1 + 1e-4


def pairs(outputs, targets):
    return losses(outputs, targets) + (outputs - outputs.roll(1, 0)).square().sum(1)


@BOTH
@pytest.mark.parametrize("loss", [pairs, lambda out, y: losses(out, y) / len(y)])
def test_a_loss_sees_one_example_as_well(loss, route):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert moved(nn.Linear(5, 3), loss, route) <= 1 + 1e-4


def test_what_depends_on_values_is_refused_in_lanes_and_right_in_a_loop():
    model = Applied(lambda x: x / x.max() if x.max() > 1 else x)
    with pytest.raises(Unsupported, match=r'cannot run in lanes.*route="loop"'):
        moved(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert moved(model, route="loop") <= 1 + 1e-4


@BOTH
def test_a_model_that_keeps_its_inputs_meets_none_of_them_again(route):
    """Batches of 4: a tensor that escaped from a lane would enter the same lane of the next batch."""
    with pytest.raises(Unsupported, match="a pass over the model changes last, seen"):
        moved(Kept(), route=route, physical_batch_size=4)
    assert moved(Kept(), route=route, checked=False, physical_batch_size=4) <= 1 + 1e-4


def test_a_tensor_that_escapes_reaches_the_next_batch_unless_it_is_put_back(monkeypatch):
    from contextlib import nullcontext

    from farthing.torch.gradients import isolation

    def second(first):
        torch.manual_seed(0)
        (x, y), gradient = data(), Gradient(Kept(), losses, route="vmap")
        gradient.rows(first * x[:4], y[:4])
        return gradient.rows(x[4:8], y[4:8])

    assert torch.equal(second(1.0), second(-1.0))
    monkeypatch.setattr(isolation, "Wall", lambda *_, **__: nullcontext())
    assert not torch.allclose(second(1.0), second(-1.0), rtol=0.1)


@BOTH
def test_a_loss_that_keeps_outputs_in_a_closure_is_put_back(route):
    kept = []

    def loss(outputs, targets):
        shift = kept[-1] if kept else 0.0
        kept.append(outputs.detach())
        return losses(outputs + shift, targets)

    with pytest.raises(Unsupported, match=r"a pass over the model changes loss\.kept"):
        moved(nn.Linear(5, 3), loss, route)
    assert moved(nn.Linear(5, 3), loss, route, checked=False, physical_batch_size=4) <= 1 + 1e-4
    assert kept == []


@pytest.mark.filterwarnings("ignore:on a batch")
@BOTH
def test_a_buffer_written_in_forward_is_refused_and_would_be_put_back(route):
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 3)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach()[0])
            return self.fc(x - self.mean)

    model = Running()
    found = "cannot run in lanes" if route == "vmap" else "a pass over the model changes mean"
    with pytest.raises(Unsupported, match=found):
        moved(model, route=route)
    assert moved(model, route="loop", checked=False, physical_batch_size=4) <= 1 + 1e-4
    assert not model.mean.any()


def test_a_batching_rule_written_by_hand_is_refused():
    class Centre(torch.autograd.Function):
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

    with pytest.raises(Unsupported, match=r"Centre .* has a vmap rule of its own"):
        moved(Applied(Centre.apply))
    assert moved(Applied(Centre.apply), route="loop") <= 1 + 1e-4
    assert "vmap" in Centre.__dict__  # the rule is back in its place


@BOTH
def test_gradients_are_those_of_one_example_at_a_time(route, one_by_one):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.randn(7, 2, 5), torch.arange(7) % 3
    rows = one_by_one(model, losses, x, y)
    bound = ClipNorm(0.7 * float(rows.norm(dim=1).median()))
    found = Gradient(model, losses, route=route, physical_batch_size=3).bounded_sum(
        Examples((x, y)).take(slice(None)), None, bound
    )
    assert torch.allclose(found, plain_sum(rows, bound), atol=1e-6)


@BOTH
def test_records_of_a_user_are_batches_of_one(route, one_by_one):
    model = Applied(lambda x: x - x.mean(0) + x.detach())
    x, y = data(8)
    rows = one_by_one(model, losses, x, y)
    people, bound = torch.stack([rows[n::4].sum(0) for n in range(4)]), ClipNorm(0.5)
    batch = Examples((x, y), users=[0, 1, 2, 3] * 2, records_per_user=2).take(slice(None))
    with pytest.warns(UserWarning, match="each is a batch of its own"):
        found = Gradient(model, losses, route=route).bounded_sum(batch, None, bound)
    assert torch.allclose(found, plain_sum(people, bound), atol=1e-5)


def test_train_takes_it_and_refuses_before_a_charge():
    x, y = data(200)
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    with pytest.raises(Unsupported, match="cannot run in lanes"):
        ft.torch.train(Applied(lambda x: x * x.max().item()), losses, (x, y), ledger, route="vmap")
    assert ledger.share == 0
    model = nn.Linear(5, 3)
    assert (
        len(list(ft.torch.train(model, losses, (x, y), ledger, route="vmap", steps=2, sampling_rate=0.1)))
        == 2
    )
    with pytest.raises(InvalidValue, match=r"route must be one of auto, fast, .*, got 'no'"):
        ft.torch.train(model, losses, (x, y), ledger, route="no")


@BOTH
def test_the_line_search_of_dpagd_is_isolated_too(route):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=ZcdpFilter)
    steps = dpagd(ledger, nn.Linear(5, 3), losses, Examples(data(60)), splits=2, route=route)
    assert len(list(steps)) >= 1


def test_dpagd_refuses_a_model_before_a_charge():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=ZcdpFilter)
    with pytest.raises(Unsupported, match="mixes examples"):
        next(dpagd(ledger, Applied(lambda x: x - x.mean(0)), losses, Examples(data(60))))
    assert ledger.share == 0


class Positions(nn.Module):
    """A table that is read past its module, and written into: book-keeping cannot follow it."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 2), nn.Linear(5, 3)

    def forward(self, x):
        table = self.table.weight.clone()
        return self.last(x * table.mul_(2.0).permute(1, 0)[0])


class Ragged(nn.Module):
    """A model whose course depends on the values of an example."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return torch.stack([self.weight @ row * (row[row > 0].sum() + 1) for row in x])


@pytest.mark.parametrize(("model", "way"), [(Positions, "vmap"), (Ragged, "loop")])
def test_what_book_keeping_cannot_follow_is_isolated_and_said_once(model, way, one_by_one, caplog):
    torch.manual_seed(0)
    model, (x, y) = model(), data()
    gradient = Gradient(model, losses, route="auto")
    for _ in range(2):
        found = gradient.bounded_sum(Examples((x, y)).take(slice(None)), None, ClipNorm(0.5))
    expected = plain_sum(one_by_one(model, losses, x, y), ClipNorm(0.5))
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert gradient.isolation == way
    assert len(caplog.messages) == 1
    assert "slower" in caplog.messages[0]
    assert "MiB" in caplog.messages[0]
    assert f'"{way}"' in caplog.messages[0]
    with pytest.raises(Unsupported):
        Gradient(model, losses, route="fast").check(x, y)


@pytest.mark.parametrize("name", [name for name in MIXED if name != "through the gradient"])
def test_a_model_that_mixes_examples_is_not_isolated_by_itself(name):
    x, y = data()
    with pytest.raises(Unsupported):
        Gradient(Applied(MIXED[name]), losses, route="auto").check(x, y)


def test_a_model_that_also_mixes_examples_is_refused_where_book_keeping_cannot_follow_it():
    class Centred(Positions):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    x, y = data()
    with pytest.raises(Unsupported, match="mixes examples"):
        Gradient(Centred(), losses, route="auto").check(x, y)


def test_short_cuts_that_depend_on_values_are_left_out_in_lanes(one_by_one):
    class Masked(Positions):
        """As transformers do: without a mask where nothing is masked, unless a graph is traced."""

        def forward(self, x):
            mask = x > -1e9
            if not torch.compiler.is_compiling() and mask.all():
                return super().forward(x)
            return super().forward(torch.where(mask, x, 0.0))

    torch.manual_seed(0)
    model, (x, y) = Masked(), data()
    found = Gradient(model, losses, route="vmap").bounded_sum(Examples((x, y)).take(slice(None)), None, CLIP)
    expected = plain_sum(one_by_one(model, losses, x, y), CLIP)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert not torch.compiler.is_compiling()
