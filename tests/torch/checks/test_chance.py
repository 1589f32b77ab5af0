"""Random numbers of a model: public ones are refused where they tell examples apart, rare ones are met."""

import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farthing.errors import Unsupported
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks.chance import AtQuantile
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.plan import checked
from farthing.torch.training.records import Examples

X = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(300) % 3


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Net(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x):
        return self.last(self.function(torch.tanh(self.first(x))))


def admitted(model, route="fast"):
    found = Gradient(model, losses, physical_batch_size=512, route=route)
    return found, checked(found, Examples((X, Y)), None, len(X))


MIXES_BY_CHANCE = {
    "seldom": lambda h: h + h.flip(0) if torch.rand(()) > 0.98 else h,
    "one of twenty": lambda h: h + h.flip(0) if torch.randint(20, ()) == 19 else h,
    "a number between": lambda h: h + h.flip(0) if torch.randint(20, ()) == 7 else h,
    "a coin": lambda h: h + h.flip(0) if torch.bernoulli(torch.tensor(0.01)) else h,
    "a far number": lambda h: h + h.flip(0) if torch.randn(()) > 3 else h,
    "drawn in place": lambda h: h + h.flip(0) if h.new_empty(()).uniform_(-1, 1) < -0.99 else h,
}


@pytest.mark.parametrize("name", MIXES_BY_CHANCE)
def test_a_model_that_mixes_examples_by_chance_is_refused(name):
    with pytest.raises(Unsupported, match="mixes examples"):
        admitted(Net(MIXES_BY_CHANCE[name]))


def seeded(h):
    torch.manual_seed(0)
    return h * (torch.rand(h.shape) > 0.5)


def seeded_aside(h):
    with torch.random.fork_rng([]):
        return seeded(h)


PUBLIC = {
    "a generator": lambda h: h * (torch.rand(h.shape, generator=torch.Generator().manual_seed(0)) > 0.5),
    "a seed": seeded,
    "a seed aside": seeded_aside,
    "a seed aside and a secret one": lambda h: F.dropout(seeded_aside(h)),
    "numpy's": lambda h: h * torch.from_numpy(np.random.RandomState(0).rand(*h.shape) > 0.5),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_numbers_from_a_public_seed_that_differ_by_place_are_refused(name):
    with pytest.raises(Unsupported, match=r"mixes examples|seeds torch's generator"):
        admitted(Net(PUBLIC[name]))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "numpy's"])
def test_so_they_are_in_lanes(name):
    """Lanes draw apart, from a seed that everybody knows."""
    with pytest.raises(Unsupported):
        admitted(Net(PUBLIC[name]), route="vmap")


def test_a_public_projection_that_is_the_same_for_everybody_may_stay():
    def projected(h):
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            return h @ torch.randn(8, 8)

    admitted(Net(projected))


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_book_keeping_leaves_a_model_that_draws_elsewhere_to_isolation(draw):
    model = Net(lambda h: h * (1 + 0 * draw()))
    with pytest.raises(Unsupported, match="Python's generator or numpy's"):
        admitted(model)
    found, _ = admitted(model, route="auto")
    assert found.isolation is not None


@pytest.mark.parametrize("most", [64, 200])
def test_a_model_whose_results_depend_on_the_size_of_large_batches_is_refused(most):
    with pytest.raises(Unsupported, match="mixes examples"):
        admitted(Net(lambda h: h if len(h) < most else 0.1 * h))


class Quantised(nn.Module):
    """Rounds numbers of half precision, on one scale for the batch."""

    def forward(self, x):
        if x.dtype is not torch.bfloat16:
            return x
        scale = x.detach().abs().amax().clamp_min(1e-6) / 7
        return x + (torch.round(x / scale) * scale - x).detach()


def test_a_scale_of_the_batch_under_mixed_precision_is_seen():
    def check(*between):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), *between, nn.Linear(8, 3))
        checked(Gradient(model, losses, autocast=torch.bfloat16), Examples((X, Y)))

    check()
    with pytest.raises(Unsupported, match="mixes examples under autocast"):
        check(Quantised())


class _Shrunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        return delta if len(delta) < 64 else 0.1 * delta


def test_so_is_one_whose_gradients_do():
    with pytest.raises(Unsupported, match="mixes examples"):
        admitted(Net(_Shrunk.apply))


class Switched(Net):
    """Mixes examples when it is told to."""

    negatives, strength, other = False, 0.0, None

    def __init__(self):
        super().__init__(self.mixed)

    def mixed(self, h):
        h = h + self.strength * h.flip(0) if self.strength else h
        h = h if self.other is None else h + h.flip(0)
        return h - 3 * h.mean(0) if self.negatives else h


@pytest.mark.parametrize(("name", "value"), [("negatives", True), ("strength", 0.5), ("other", 1.0)])
def test_a_switch_that_is_turned_during_training_is_seen(name, value):
    model = Switched()
    model.strength = 0.0
    found, examples = admitted(model)
    batch = examples.take(np.arange(32))
    found.bounded_sum(batch, None, ClipNorm(1.0))
    setattr(model, name, value)
    with pytest.raises(Unsupported, match="mixes examples"):
        found.bounded_sum(batch, None, ClipNorm(1.0))


def test_a_switch_of_the_loss_is_seen():
    class Weighed(nn.Module):
        together = False

        def forward(self, outputs, targets):
            found = losses(outputs, targets)
            return found * found.detach().mean() if self.together else found

    loss, model = Weighed(), Net(torch.relu)
    found = Gradient(model, loss)
    batch = Examples((X, Y)).take(np.arange(32))
    found.bounded_sum(batch, None, ClipNorm(1.0))
    loss.together = True
    with pytest.raises(Unsupported, match="mixes examples"):
        found.bounded_sum(batch, None, ClipNorm(1.0))


def test_a_number_that_changes_a_little_is_not_checked_again(monkeypatch):
    model = Net(torch.relu)
    model.temperature = 0.5
    found, examples = admitted(model)
    monkeypatch.setattr(found, "check", None)
    model.temperature = 0.4
    found.bounded_sum(examples.take(np.arange(8)), None, ClipNorm(1.0))


def test_quantiles_of_what_is_drawn():
    with AtQuantile(0.25) as draws:
        assert not draws.seen
        assert torch.rand(2).tolist() == [0.25, 0.25]
        assert torch.empty(()).uniform_(2, 6) == 3.0
        assert torch.randint(3, 9, (2,)).tolist() == [3, 3]
        assert abs(float(torch.randn(())) + 0.6745) < 1e-3
        assert torch.bernoulli(torch.tensor([0.2, 0.3])).tolist() == [0.0, 1.0]
        assert torch.empty(()).bernoulli_(0.3) == 1.0
        assert draws.seen
    with AtQuantile(0.75):
        assert int(torch.randint(9, ())) == 8


class Crossed(nn.Module):
    """``torch.cross`` without an axis takes the first one of length 3: the batch's, where three are in it."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.cross(self.left(x), self.right(x)))


@pytest.mark.filterwarnings("ignore:Using torch.cross")
@pytest.mark.parametrize(
    "make",
    [
        Crossed,
        lambda: nn.Sequential(Turned(6), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.Linear(6, 50), Turned(50), nn.Linear(50, 3)),
    ],
    ids=["cross", "inputs", "hidden"],
)
def test_an_axis_that_is_mistaken_where_a_batch_is_as_long_as_another_one_is_seen(make):
    with pytest.raises(Unsupported, match="mixes examples"):
        admitted(make())


class Turned(nn.Module):
    """A matrix that is turned where it is square."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        return x.T if x.shape == (self.width, self.width) else x


def late(h):
    """Mix examples beyond the places at which one is compared with itself alone."""
    return torch.cat([h[:45], h[45:] + h[45:].flip(0)])


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        return late(delta)


@pytest.mark.parametrize("function", [late, _Late.apply], ids=["forward", "backward"])
def test_what_mixes_at_the_end_of_large_batches_only_is_seen(function):
    with pytest.raises(Unsupported, match="mixes examples"):
        admitted(Net(function))


class Words(nn.Module):
    """Centres a batch if a word, a table or a configuration says so."""

    def __init__(self):
        super().__init__()
        self.fc, self.mode, self.table = nn.Linear(5, 3), "plain", {"mixes": False}
        self.settings = types.SimpleNamespace(mixes=False)

    def forward(self, x):
        mixes = self.mode == "batch" or self.table["mixes"] or self.settings.mixes
        return self.fc(x - x.mean(0) if mixes else x)


SWITCH = [False]


def switched_loss(outputs, targets):
    outputs = outputs - outputs.mean(0) if SWITCH[0] else outputs
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize(
    "turn",
    [
        lambda model: setattr(model, "mode", "batch"),
        lambda model: model.table.update(mixes=True),
        lambda model: setattr(model.settings, "mixes", True),
        lambda model: SWITCH.__setitem__(0, True),
    ],
)
def test_words_tables_and_settings_that_were_turned_since_the_check_are_seen(turn):
    model, x, y = Words(), torch.randn(20, 5), torch.arange(20) % 3
    gradient, batch = Gradient(model, switched_loss), Examples((x, y)).take(slice(None))
    try:
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
        checked = gradient.checked
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
        assert gradient.checked is checked
        turn(model)
        with pytest.raises(Unsupported, match="mixes examples"):
            gradient.bounded_sum(batch, None, ClipNorm(1.0))
    finally:
        SWITCH[0] = False
