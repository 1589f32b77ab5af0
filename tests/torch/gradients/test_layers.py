"""Every layer's per-example gradients against ordinary autograd, one example at a time."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from farthing.errors import Unsupported
from farthing.torch.checks.probe import Source, plan_of
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.convolution import Windows
from farthing.torch.gradients.holdings import Holdings
from farthing.torch.gradients.joint_terms import SumTerm
from farthing.torch.gradients.layers import anything, rules_of
from farthing.torch.gradients.outers import Lookup, Outer
from farthing.torch.gradients.tape import Tape
from farthing.torch.gradients.terms import Factor, Route, RowTerms
from farthing.torch.kernels import positions


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Head(nn.Module):
    """A layer whose output is cut to three numbers an example."""

    def __init__(self, layer, forward):
        super().__init__()
        self.layer, self.way = layer, forward

    def forward(self, *inputs):
        return self.way(self.layer, *inputs).flatten(1)[:, :3]


class Tied(nn.Module):
    """Tokens, learnt places that all examples share, and an output layer that is the embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.layer = (
            nn.Embedding(11, 6, padding_idx=0),
            nn.Embedding(7, 6),
            nn.Linear(6, 6),
        )
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.out(torch.tanh(self.layer(x))).mean(1)


class Vision(nn.Module):
    """A class token and places as parameters of the model itself."""

    def __init__(self):
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 8, 8))
        self.patches, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        x = self.patches(x)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.layer(x)[:, 0])


class Odd(nn.Module):
    """A layer that no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return (x * self.scale).sin() @ self.weight


class Held(nn.Module):
    """Parameters beside other modules: a scale, places, a gate, a shift of channels and a temperature."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale, self.places = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(7, 5))
        self.gate, self.temperature = nn.Parameter(torch.randn(5)), nn.Parameter(torch.tensor(0.3))
        self.channels = nn.Parameter(torch.randn(7))

    def forward(self, x):
        gate = torch.sigmoid(self.gate)
        y = self.scale * self.layer(x + self.places)
        y = gate * y + (1 - gate) * x - self.channels.view(1, -1, 1) / 2 + self.channels[None, :, None]
        y = torch.where(y > 0, y, self.scale) ** 2
        return self.head(y.mean(1)) * torch.exp(-self.temperature).clamp(0.1, 10.0)


class Multiplied(nn.Module):
    """Parameters beside other modules in what is not elementwise."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.weight, self.how = nn.Linear(5, 3), nn.Parameter(torch.randn(5, 5)), how

    def forward(self, x):
        return self.layer(torch.tanh(self.how(x, self.weight)))


class LowRank(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Boxed(nn.Module):
    """Factors in an nn.ParameterDict, as PEFT's IA3 has them, beside a frozen layer."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 6).requires_grad_(False)
        self.factors = nn.ParameterDict({"default": nn.Parameter(torch.rand(6, 1))})

    def forward(self, x):
        return self.base(x) * self.factors["default"].flatten()


class ScaledTable(nn.Embedding):
    """An embedding with a forward of its own, as Gemma has it, in which nothing is learnt of token 0."""

    def __init__(self):
        super().__init__(11, 6, padding_idx=0)

    def forward(self, ids):
        return 4.0 * super().forward(ids)


class Bags(nn.Module):
    """Bags of different lengths: token 0 is left out, and what is left begins at an offset."""

    def __init__(self, **how):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(11, 6, **how), nn.Linear(6, 3)

    def forward(self, tokens):
        there = tokens != 0
        ends = there.sum(1).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])
        return self.last(self.bag(tokens[there], starts if self.bag.include_last_offset else starts[:-1]))


class Packs(nn.Module):
    """Sequences that end at their first token 0, packed; all that a layer returns is used."""

    def __init__(self, kind, **how):
        super().__init__()
        self.table, self.rnn = nn.Embedding(11, 5), kind(5, 6, batch_first=True, **how)
        self.last = nn.LazyLinear(3)

    def forward(self, tokens):
        lengths = (tokens != 0).cumprod(1).sum(1).clamp_min(1)
        long = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        packed, states = self.rnn(long)
        outs = pad_packed_sequence(packed, batch_first=True, total_length=7)[0].sum(1)
        states = states if isinstance(states, tuple) else (states,)
        return self.last(torch.cat([outs, *(s.transpose(0, 1).flatten(1) for s in states)], 1).tanh())


def _packs(kind, **how):
    model = Packs(kind, **how)
    model(torch.ones(1, 7, dtype=torch.int64))
    return model


def _cells(cells, x):
    state = cells[0](x[:, 1], cells[0](x[:, 0]))
    return cells[2](cells[1](state[0]))


def _frozen_middle():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


N = 9
WIDE, LONG, IMAGE = (N, 5), (N, 7, 5), (N, 4, 8, 9)


def first(found):
    return found[0]


def mean(x):
    return x.mean(1)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), WIDE),
    "positions": (lambda: Head(nn.Linear(5, 7), lambda m, x: m(x).tanh().mean(1)), LONG),
    "flattened": (lambda: Head(nn.Linear(5, 7), lambda m, x: m(x.flatten(0, 1)).view(len(x), -1)), LONG),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(7, 6, 3, 2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)),
        LONG,
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(6, 20, (2, 3), (1, 2)),
            nn.Flatten(),
            nn.Linear(560, 3),
        ),
        IMAGE,
    ),
    "padding": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"),
            nn.Conv2d(6, 5, 4, padding="same"),
            nn.Flatten(),
            nn.Linear(440, 3),
        ),
        IMAGE,
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(480, 3)),
        (N, 2, 3, 4, 5),
    ),
    "transposed": (lambda: Head(nn.ConvTranspose2d(4, 3, 3), lambda m, x: m(x).mean((2, 3))), IMAGE),
    "transposed strides": (
        lambda: Head(
            nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2),
            lambda m, x: m(x).mean((2, 3))[:, :3],
        ),
        IMAGE,
    ),
    "transposed lines": (
        lambda: Head(
            nn.ConvTranspose1d(4, 3, 3, dilation=3, output_padding=2),
            lambda m, x: m(x.flatten(2)).square().mean(2),
        ),
        IMAGE,
    ),
    "channel norms": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(2, 6),
            nn.InstanceNorm2d(6, affine=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(252, 3),
        ),
        IMAGE,
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(5, 8), nn.LayerNorm(8), nn.RMSNorm((7, 8)), nn.Flatten(), nn.Linear(56, 3)
        ),
        LONG,
    ),
    "attention": (
        lambda: Head(nn.MultiheadAttention(4, 2, batch_first=True), lambda m, x: first(m(x, x, x))),
        (N, 6, 4),
    ),
    "cross attention": (
        lambda: Head(
            nn.MultiheadAttention(4, 2, batch_first=True),
            lambda m, x: m(x, x.flip(1), x + 1, need_weights=False)[0],
        ),
        (N, 6, 4),
    ),
    "other widths": (
        lambda: Head(
            nn.MultiheadAttention(8, 2, kdim=5, vdim=4),
            lambda m, x: m(*(side.transpose(0, 1) for side in (x, x[..., :5], x[..., :4])))[0].transpose(
                0, 1
            ),
        ),
        (N, 6, 8),
    ),
    "transformer": (
        lambda: Head(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 2, enable_nested_tensor=False),
            lambda m, x: m(x.transpose(0, 1)).mean(0),
        ),
        (N, 6, 8),
    ),
    "decoder": (
        lambda: Head(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), lambda m, x: m(x, 2 * x)),
        (N, 6, 8),
    ),
    "tied": (Tied, "tokens"),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum"), nn.Linear(6, 3)), "tokens"),
    "padded bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(11, 6, padding_idx=0), nn.Tanh(), nn.Linear(6, 3)),
        "tokens",
    ),
    "largest of a bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="max"), nn.Linear(6, 3)),
        "tokens",
    ),
    "scaled table": (
        lambda: Head(nn.Sequential(ScaledTable(), nn.Tanh(), nn.Linear(6, 3)), lambda m, x: m(x).mean(1)),
        "tokens",
    ),
    "bags": (lambda: Bags(mode="sum"), "tokens"),
    "bags, padded": (lambda: Bags(mode="mean", padding_idx=3, include_last_offset=True), "tokens"),
    "packed lstm": (lambda: _packs(nn.LSTM, num_layers=2, bidirectional=True), "tokens"),
    "packed gru": (lambda: _packs(nn.GRU, bidirectional=True), "tokens"),
    "packed, projected": (lambda: _packs(nn.LSTM, proj_size=4), "tokens"),
    "packed rnn": (lambda: _packs(nn.RNN, nonlinearity="relu"), "tokens"),
    "vision": (Vision, LONG),
    "held": (Held, LONG),
    "multiplied": (lambda: Multiplied(lambda x, w: x @ w), WIDE),
    "linear of its own": (lambda: Multiplied(lambda x, w: F.linear(x, weight=w)), WIDE),
    "softmax of its own": (lambda: Multiplied(lambda x, w: x * torch.softmax(w[0], 0)), WIDE),
    "odd": (lambda: nn.Sequential(nn.Linear(5, 5), Odd()), WIDE),
    "odd positions": (lambda: Head(nn.Sequential(Odd(), nn.Linear(3, 3)), lambda m, x: m(x).mean(1)), LONG),
    "boxed": (lambda: nn.Sequential(Boxed(), nn.Tanh(), nn.Linear(6, 3)), WIDE),
    "old weight norm": (
        lambda: nn.Sequential(nn.Tanh(), nn.utils.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
        WIDE,
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, 3)), WIDE),
    "bilinear": (lambda: Head(nn.Bilinear(5, 5, 3), lambda m, x: m(x, x.flip(1))), WIDE),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
        WIDE,
    ),
    "twice": (lambda: Head(nn.Linear(5, 5), lambda m, x: m(torch.tanh(m(x)))), WIDE),
    "twice convolved": (
        lambda: Head(nn.Conv2d(4, 4, 3, padding=1), lambda m, x: m(torch.tanh(m(x))).mean((2, 3))),
        IMAGE,
    ),
    "frozen": (_frozen_middle, WIDE),
    "adapter": (lambda: nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(6, 3).requires_grad_(False)), WIDE),
    "statistics": (
        lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(126, 3)).eval(),
        IMAGE,
    ),
    "lstm": (
        lambda: Head(nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True), lambda m, x: m(x)[0].mean(1)),
        LONG,
    ),
    "projected lstm": (
        lambda: Head(nn.LSTM(5, 6, proj_size=4), lambda m, x: m(x.transpose(0, 1))[0].mean(0)),
        LONG,
    ),
    "gru": (
        lambda: Head(nn.GRU(5, 6, 2, bidirectional=True), lambda m, x: m(x.transpose(0, 1))[1].mean(0)),
        LONG,
    ),
    "rnn": (
        lambda: Head(nn.RNN(5, 6, nonlinearity="relu", batch_first=True), lambda m, x: m(x)[0].mean(1)),
        LONG,
    ),
    "cells": (
        lambda: Head(nn.ModuleList([nn.LSTMCell(5, 6), nn.GRUCell(6, 4), nn.RNNCell(4, 3)]), _cells),
        LONG,
    ),
}


def made(name):
    """A model, its inputs and targets, the same at every call."""
    build, shape = MODELS[name]
    torch.manual_seed(len(name))
    model = build()
    inputs = torch.randint(0, 11, (N, 7)) if shape == "tokens" else torch.randn(shape)
    return model, inputs, torch.randint(0, 3, (N,))


@pytest.mark.filterwarnings("ignore:.*(batching rule|oneDNN|zero-padded):UserWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autograd(name, one_by_one):
    model, inputs, targets = made(name)
    gradient = Gradient(model, losses)
    gradient.check(inputs, targets)
    found, expected = gradient.rows(inputs, targets), one_by_one(model, losses, inputs, targets)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert all(p.requires_grad for name, p in model.named_parameters() if name in gradient.layout.names)
    assert not any("forward" in vars(module) for module in model.modules())


def test_scales_places_and_products_are_followed_and_other_functions_are_mapped():
    torch.manual_seed(0)
    written = Multiplied(lambda x, w: x @ w.clone().mul_(2.0))
    for model, mapped in ((Held(), []), (Multiplied(lambda x, w: x @ w), []), (written, ["Multiplied"])):
        gradient = Gradient(model, losses)
        gradient.check(torch.zeros(1, *((7, 5) if isinstance(model, Held) else (5,))), torch.zeros(1).long())
        rules = gradient._passes.plan.rules
        assert [type(module).__name__ for module, rule in rules.items() if rule is anything] == mapped


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_sums_of_norms_are_those_of_float64(native, shift, monkeypatch):
    if native and not positions.available(torch.device("cpu")):
        pytest.skip("there is no kernel for this processor")
    monkeypatch.setattr(positions, "available", lambda device, outer=False: native)
    torch.manual_seed(0)
    norms = [nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.RMSNorm(6, eps=1e-3), nn.LayerNorm(6, bias=False)]
    for norm in norms:
        shape = (4, 6, 3, 5) if isinstance(norm, nn.GroupNorm) else (4, 7, 6)
        x, weights = torch.randn(shape) + shift, torch.randn(shape)
        rows = Gradient(norm, lambda out, y: (out * y).flatten(1).sum(1))
        rows.check(x[:1], weights[:1])
        found = rows.rows(x, weights).double()
        wide = copy.deepcopy(norm).double()
        for n in range(4):
            value = (wide(x[n : n + 1].double()) * weights[n : n + 1]).sum()
            exact = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(wide.parameters()))])
            torch.testing.assert_close(found[n], exact, rtol=1e-4, atol=1e-5 + 2e-6 * shift)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_known_layers_are_not_mapped():
    known = [name for name in MODELS if anything not in rules_of(made(name)[0])[0].values()]
    assert set(MODELS) - set(known) == {"largest of a bag", "boxed", "old weight norm"}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_users_and_empty_bags(mode, one_by_one):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(11, 6, mode=mode, padding_idx=0), nn.Linear(6, 3))
    ids, targets = torch.randint(0, 11, (N, 2, 4)), torch.randint(0, 3, (N, 2))
    ids[3, 1] = 0  # nothing but padding
    weights = torch.ones(N, 2)
    gradient = Gradient(model, losses)
    gradient.check(ids, targets, weights)
    found = gradient.rows(ids, targets, weights)
    expected = sum(one_by_one(model, losses, ids[:, n], targets[:, n]) for n in range(2))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_batch_axis_is_the_one_that_grows():
    model, inputs, targets = made("transformer")
    plan = plan_of(model, Source(inputs, targets))
    by_type = {type(module): plan.axes[number, 1][0][0] for module, number in plan.numbers.items()}
    assert by_type[nn.Linear] == by_type[nn.LayerNorm] == 1
    assert plan_of(made("tied")[0], Source(made("tied")[1], targets)).axes[1, 1][0] == (None,)


def terms():
    """Terms of every kind with their rows, written out."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(6, 7, 5, generator=generator), torch.randn(6, 7, 40, generator=generator)
    ids = torch.randint(0, 5, (6, 4), generator=generator)
    looked = torch.randn(6, 4, 40, generator=generator)
    outer = torch.einsum("btp,btq->bpq", u, v)
    lookup = torch.einsum("btp,btq->bpq", F.one_hot(ids, 5).float(), looked)
    conv = nn.Conv2d(6, 20, 3, stride=2, dilation=2, groups=2)
    delta = torch.randn(6, 2, 20, 3, 2, generator=generator)
    x = torch.randn(6, 2, 6, 9, 8, generator=generator)
    weight = conv.weight.detach()
    convolved = torch.stack(
        [torch.nn.grad.conv2d_weight(x[n], weight.shape, delta[n], 2, 0, 2, 2).flatten() for n in range(6)]
    )
    yield "outer", Outer(Factor(u), Factor(v)), outer
    yield "wide", Outer(Factor(v), Factor(u)), outer.transpose(1, 2)
    yield "one", Outer(Factor(u[:, :1]), Factor(v[:, :1])), u[:, 0, :, None] * v[:, 0, None]
    yield "lookup", Lookup(ids, Factor(looked), 5), lookup
    yield "sum", SumTerm.of([Outer(Factor(u), Factor(v)), Lookup(ids, Factor(looked), 5)]), outer + lookup
    yield "windows", Windows(conv, delta, x), convolved
    yield "rows", RowTerms(outer.flatten(1)), outer


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("name", "term", "rows"), list(terms()), ids=[name for name, *_ in terms()])
def test_terms_measure_and_add_what_they_stand_for(name, term, rows, route, native, monkeypatch):
    if not native:
        monkeypatch.setattr("farthing.noise.native.kernels", lambda *_: None)
    rows, term = rows.flatten(1), term.fresh()
    inverse, factors = torch.linspace(0.5, 2.0, rows.shape[1]), torch.linspace(0.0, 1.0, len(rows))
    close = {"rtol": 1e-5, "atol": 1e-5 * float(rows.abs().max())}
    assert (term.largest() >= rows.norm(dim=1) * (1 - 1e-6)).all()
    scaled, out = term.fresh(), torch.ones(rows.shape[1])
    scaled.route = term.route = route
    assert torch.allclose(scaled.scaled_norms(inverse), (rows * inverse).norm(dim=1), **close)
    scaled.add(factors, out)
    assert torch.allclose(out, 1 + factors @ rows, **close)
    assert torch.allclose(term.norms(), rows.norm(dim=1), **close)
    out = torch.ones(rows.shape[1])
    term.add(factors, out)
    assert torch.allclose(out, 1 + factors @ rows, **close)


def test_a_norm_lost_to_rounding_is_rounded_up():
    u = torch.tensor([[[1.0], [-1.0]]])
    v = torch.tensor([[[1e4, 1.0], [1e4, 1.0 + 2.0**-12]]])  # what is left of the sum is 2⁻¹²
    term = Outer(Factor(u), Factor(v))
    term.route = Route.GRAM
    assert 2.0**-12 <= float(term.norms()) < 50.0


def test_a_product_of_tiny_and_huge_does_not_vanish():
    term = Outer(Factor(torch.full((1, 1, 1000), 1e-22)), Factor(torch.full((1, 1, 4), 1e18)))
    assert float(term.norms()) >= 1e-22 * 1e18 * (4000**0.5)


def test_sequences_that_a_model_sorts_itself_are_refused():
    """Their rows are not those of the examples any more, and belong to others in another batch."""

    class Sorts(Packs):
        def forward(self, tokens):
            lengths, order = (tokens != 0).cumprod(1).sum(1).clamp_min(1).sort(descending=True)
            packed = pack_padded_sequence(self.table(tokens)[order], lengths, batch_first=True)
            return self.last(self.rnn(packed)[1][0][order.argsort()])

    model, tokens = Sorts(nn.GRU), torch.randint(0, 3, (N, 7))
    model(tokens)
    with pytest.raises(Unsupported, match="mixes examples"):
        Gradient(model, losses, route="auto").check(tokens, torch.randint(0, 3, (N,)))


def test_what_a_hook_holds_is_let_go_when_it_has_run():
    """And not with the whole graph: inputs of layers whose terms are small would all lie there together."""
    held = torch.ones(3)
    gone = weakref.ref(held)
    out = torch.ones(2, requires_grad=True) * 2.0

    def then(delta, held=held):
        assert len(held) == 3

    tape = SimpleNamespace(factored=False, _inside=0, _again=False, note=Holdings().note)
    watched = Tape.watch(tape, out, then)
    del held, then
    watched.sum().backward()
    assert gone() is None


class Fixed(nn.Module):
    """A parameter that is expanded to a fixed length, which a batch may have too."""

    def __init__(self, times):
        super().__init__()
        self.own, self.out, self.times = nn.Parameter(torch.randn(2, 1, 3)), nn.Linear(5, 3), times

    def forward(self, x):
        long = self.own.repeat(1, 4, 1) if self.times else self.own.expand(-1, 4, -1)
        return self.out(x) + (long.sum((0, 1)) + long[0, 3]).tanh()


@pytest.mark.parametrize("times", [False, True])
def test_a_parameter_of_a_fixed_length_is_not_taken_for_one_an_example(times):
    torch.manual_seed(0)
    model = Fixed(times)
    gradient = Gradient(model, losses)
    gradient.check(torch.randn(4, 5), torch.arange(4) % 3)
    for examples in (1, 3, 4, 5):
        x, y = torch.randn(examples, 5), torch.arange(examples) % 3
        wanted = []
        for n in range(examples):
            found = torch.autograd.grad(
                losses(model(x[n : n + 1]), y[n : n + 1]).sum(), list(model.parameters())
            )
            wanted.append(torch.cat([part.flatten() for part in found]))
        assert torch.allclose(gradient.rows(x, y), torch.stack(wanted), atol=1e-6)
