"""Bounded sums of a model's gradients: every bound, odd batches, strange examples, random networks."""

import copy
import traceback

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import farthing as ft
from farthing.errors import InvalidValue, OutOfMemory, Unsupported
from farthing.queries.bounds import ClipCoordinates, ClipNorm, ClipValue
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query
from farthing.queries.samplers import Poisson
from farthing.torch.gradients import bookkeeping
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import Automatic, ClipCounted, ClipLayers, plain_sum
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.layout import Layout
from farthing.torch.gradients.tape import Passes
from farthing.torch.kernels import totals
from farthing.torch.training.records import Examples

EVERYBODY = slice(None)
NOBODY = np.empty(0, np.int64)


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def network():
    """Convolution, norm, positions, one position: a term of every kind."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.Flatten(2),
            nn.Linear(30, 8),
            nn.Tanh(),
        ),
        *(nn.LayerNorm(8), nn.Flatten(), nn.Linear(48, 7), nn.ReLU(), nn.Linear(7, 3)),
    )


def data(n=13):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 5, 6, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


def bounds(rows, layout):
    clip = 0.9 * float(rows.norm(dim=1).median())
    scale = np.random.default_rng(0).uniform(0.5, 2.0, layout.size)
    yield from (
        ClipNorm(clip),
        ClipNorm(clip, scale),
        ClipNorm(clip, np.array(2.0)),
        ClipCoordinates(scale / 50),
    )
    yield from (Automatic(clip), ClipCounted(clip, 0.1))
    yield ClipLayers(tuple(clip / (2 + n) for n in range(len(layout.sizes))), layout.sizes)
    yield ClipLayers((clip / 2, clip / 3), (sum(layout.sizes[:4]), sum(layout.sizes[4:])), (1.0, 3.0))


def agree(found, expected, tolerance=1e-5):
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("route", ["fast", "rows", "again", "gram", "vmap"])
@pytest.mark.parametrize("physical", [None, 4])
def test_bounds_are_those_of_plain_rows(route, physical, one_by_one):
    model, (x, y) = network(), data()
    rows, gradient = (
        one_by_one(model, losses, x, y),
        Gradient(model, losses, physical_batch_size=physical, route=route),
    )
    for bound in bounds(rows, gradient.layout):
        agree(gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, bound), plain_sum(rows, bound))


def test_plain_rows_are_bounded_like_the_core(one_by_one):
    model, (x, y) = network(), data()
    rows = one_by_one(model, losses, x, y)
    for bound in bounds(rows, Layout.of(model)):
        if isinstance(bound, ClipNorm | ClipCoordinates):
            expected = torch.from_numpy(bound.apply(rows.numpy()).sum(0)).float()
            agree(plain_sum(rows, bound), expected)


def test_an_empty_batch_is_zeros():
    model = network()
    gradient = Gradient(model, losses)
    batch = Examples(data()).take(NOBODY)
    assert gradient.bounded_sum(batch, None, ClipNorm(1.0)).tolist() == [0.0] * gradient.layout.size
    assert len(gradient.bounded_sum(batch, None, ClipCounted(1.0))) == gradient.layout.size + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("route", ["fast", "gram", "vmap"])
def test_an_example_that_is_not_finite_counts_as_zero(bad, route):
    model, (x, y) = network(), data()
    gradient = Gradient(model, losses, route=route)
    spoilt = x.clone()
    spoilt[3, 0, 0, 0] = bad
    others = [n for n in range(len(y)) if n != 3]
    for bound in (ClipNorm(0.5), ClipNorm(0.5, np.linspace(1, 2, gradient.layout.size)), Automatic(0.5)):
        found = gradient.bounded_sum(Examples((spoilt, y)).take(EVERYBODY), None, bound)
        expected = gradient.bounded_sum(Examples((x[others], y[others])).take(EVERYBODY), None, bound)
        if bad == 1e30:  # still finite in its norms' layer: at most one bounded gradient more
            assert (found - expected).norm() <= 1.01
        else:
            agree(found, expected)


def test_a_spoilt_example_is_no_trace_under_coordinates_or_layers():
    model, (x, y) = network(), data()
    gradient = Gradient(model, losses)
    spoilt = x.clone()
    spoilt[0] = float("nan")
    layers = ClipLayers((0.1,) * len(gradient.layout.sizes), gradient.layout.sizes)
    for bound in (ClipCoordinates(np.full(gradient.layout.size, 0.01)), layers):
        found = gradient.bounded_sum(Examples((spoilt, y)).take(EVERYBODY), None, bound)
        agree(found, gradient.bounded_sum(Examples((x[1:], y[1:])).take(EVERYBODY), None, bound))


class Padded:
    """A batch filled up with rows that count for nothing."""

    def __init__(self, x, y, filler):
        self.x, self.y, self.filler = x, y, filler

    def __len__(self):
        return len(self.y)

    def physical_batches(self, physical):
        blank = torch.full((2, *self.x.shape[1:]), self.filler)
        weights = torch.cat([torch.ones(len(self.y)), torch.zeros(2)])
        yield torch.cat([self.x, blank]), torch.cat([self.y, self.y[:2]]), weights


@pytest.mark.parametrize("filler", [0.0, 7.0, float("nan")])
@pytest.mark.parametrize("route", ["fast", "vmap"])
def test_rows_that_fill_up_count_for_nothing(filler, route, one_by_one):
    model, (x, y) = network(), data()
    rows, gradient = one_by_one(model, losses, x, y), Gradient(model, losses, route=route)
    for bound in bounds(rows, gradient.layout):
        agree(gradient.bounded_sum(Padded(x, y, filler), None, bound), plain_sum(rows, bound))


@pytest.mark.parametrize("route", ["fast", "gram", "vmap"])
def test_a_user_is_the_sum_of_their_records(route, one_by_one):
    model, (x, y) = network(), data()
    users = np.array([0, 1, 0, 2, 2, 2, 3, 0, 4, 4, 5, 6, 6])
    rows = one_by_one(model, losses, x, y)
    kept = [np.flatnonzero(users == user)[:2] for user in range(7)]
    people = torch.stack([rows[places].sum(0) for places in kept])
    gradient = Gradient(model, losses, physical_batch_size=6, route=route)
    batch = Examples((x, y), users=users, records_per_user=2).take(EVERYBODY)
    for bound in bounds(people, gradient.layout):
        agree(gradient.bounded_sum(batch, None, bound), plain_sum(people, bound))


def test_users_of_a_model_with_copies(one_by_one):
    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.head = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 3)
            self.act = nn.PReLU()

        def forward(self, x):
            return self.head(self.act(x + self.token))

    torch.manual_seed(0)
    model, x, y = Token(), torch.randn(8, 4), torch.randint(0, 3, (8,))
    rows = one_by_one(model, losses, x, y)
    people, bound = torch.stack([rows[n::4].sum(0) for n in range(4)]), ClipNorm(0.5)
    batch = Examples((x, y), users=[0, 1, 2, 3] * 2, records_per_user=3).take(EVERYBODY)
    agree(Gradient(model, losses).bounded_sum(batch, None, bound), plain_sum(people, bound))


def test_several_inputs_and_outputs(one_by_one):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, x, z=None):
            return self.one(x[:, :4] if z is None else x) + self.other(x[:, 4:] if z is None else z)

    torch.manual_seed(0)
    model, x, y = Two(), torch.randn(8, 6), torch.randint(0, 3, (8,))
    expected = plain_sum(one_by_one(model, losses, x, y), ClipNorm(0.5))
    batch = Examples((x[:, :4], x[:, 4:], y)).take(EVERYBODY)
    agree(Gradient(model, losses).bounded_sum(batch, None, ClipNorm(0.5)), expected)


def test_mixed_precision_bounds_what_it_computed():
    model, (x, y) = network(), data()
    exact = Gradient(model, losses).bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(0.1))
    for route in ("fast", "gram", "vmap"):
        gradient = Gradient(model, losses, autocast=torch.bfloat16, route=route)
        found = gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(0.1))
        agree(found, exact, 0.05)
        one = gradient.bounded_sum(Examples((x[:1], y[:1])).take(EVERYBODY), None, ClipNorm(1e-3))
        assert float(one.norm()) <= 1e-3 * (1 + 2.0**-10)


def test_dropout_does_not_join_examples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 3))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    gradient = Gradient(model, losses)
    gradient.check(x, y)
    torch.manual_seed(5)
    rows = gradient.rows(x, y)
    torch.manual_seed(5)
    losses(model(x), y).sum().backward()
    agree(rows.sum(0), torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert ((rows[:, :200].view(6, 50, 4).abs().sum(2) == 0).float().mean(1) > 0.3).all()


def test_through_the_door():
    model, (x, y) = network(), data()
    gradient = Gradient(model, losses)
    query = Query(Poisson(0.5), gradient, ClipNorm(1.0), Gaussian(4.0))
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5))
    ledger.promise(query)
    door = ledger.over(Examples((x, y)))
    assert len(door.ask(query).value) == gradient.layout.size
    assert ledger.share > 0


def test_what_does_not_fit_is_refused():
    model, (x, y) = network(), data()
    gradient, batch = Gradient(model, losses), Examples((x, y)).take(EVERYBODY)
    with pytest.raises(Unsupported, match="ClipValue does not bound"):
        gradient.bounded_sum(batch, None, ClipValue(0.0, 1.0))
    with pytest.raises(Unsupported, match="order 2"):
        gradient.bounded_sum(batch, None, ClipNorm(1.0, order=1))
    with pytest.raises(InvalidValue, match="the bound has 3 coordinates"):
        gradient.bounded_sum(batch, None, ClipCoordinates(np.ones(3)))
    with pytest.raises(InvalidValue, match="the bound has 8 coordinates"):
        gradient.bounded_sum(batch, None, ClipLayers((1.0,), (8,)))
    with pytest.raises(InvalidValue, match="no trainable parameter"):
        Gradient(nn.ReLU(), losses)
    with pytest.raises(InvalidValue, match="route"):
        Gradient(model, losses, route="quick")


def test_layers_must_end_where_parameters_do():
    gradient = Gradient(nn.Linear(4, 3), losses)
    batch = Examples((torch.randn(5, 4), torch.randint(0, 3, (5,)))).take(EVERYBODY)
    with pytest.raises(InvalidValue, match="a layer ends inside a parameter"):
        gradient.bounded_sum(batch, None, ClipLayers((1.0, 1.0), (13, 2)))


def test_the_model_is_as_before():
    model, (x, y) = network(), data()
    before = copy.deepcopy(model.state_dict())
    gradient = Gradient(model, losses)
    gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(1.0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


LAYERS = st.sampled_from(["linear", "tanh", "norm", "attention", "conv", "lstm", "twice", "odd"])


class Random(nn.Module):
    """Layers in any order over a sequence of width 6."""

    def __init__(self, kinds):
        super().__init__()
        made = {
            "linear": lambda: nn.Linear(6, 6),
            "tanh": nn.Tanh,
            "norm": lambda: nn.LayerNorm(6),
            "attention": lambda: nn.TransformerEncoderLayer(6, 2, 7, 0.0, batch_first=True),
            "conv": lambda: nn.Conv1d(6, 6, 3, padding=1, groups=2),
            "lstm": lambda: nn.LSTM(6, 3, bidirectional=True, batch_first=True),
            "twice": lambda: nn.Linear(6, 6, bias=False),
            "odd": lambda: nn.PReLU(6),
        }
        self.kinds, self.layers = kinds, nn.ModuleList([made[kind]() for kind in kinds])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            match kind:
                case "conv":
                    x = layer(x.transpose(1, 2)).transpose(1, 2)
                case "lstm":
                    x = layer(x)[0]
                case "twice":
                    x = layer(torch.tanh(layer(x)))
                case "odd":
                    x = layer(x.transpose(1, 2)).transpose(1, 2)
                case _:
                    x = layer(x)
        return self.head(x.mean(1))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(kinds=st.lists(LAYERS, min_size=1, max_size=4), frozen=st.integers(0, 3), seed=st.integers(0, 9))
def test_random_networks(kinds, frozen, seed):
    torch.manual_seed(seed)
    model, x, y = Random(kinds), torch.randn(5, 4, 6), torch.randint(0, 3, (5,))
    if frozen < len(kinds):
        model.layers[frozen].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for n in range(5):
        found = torch.autograd.grad(losses(model(x[n : n + 1]), y[n : n + 1]).sum(), trained)
        rows.append(torch.cat([part.flatten() for part in found]))
    rows = torch.stack(rows)
    bound = ClipNorm(0.7 * float(rows.norm(dim=1).mean()))
    gradient = Gradient(model, losses, physical_batch_size=3)
    agree(gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, bound), plain_sum(rows, bound))


def test_without_memory_nothing_is_said_of_the_batch(monkeypatch):
    """What torch could not allocate tells how many rows were drawn."""
    model = nn.Conv1d(2, 3, 2)
    gradient = Gradient(model, lambda out, y: out.flatten(1).sum(1), physical_batch_size=7)
    batch = Examples((torch.randn(5, 2, 4), torch.zeros(5))).take(slice(None))
    gradient.check(torch.randn(5, 2, 4), torch.zeros(5))

    def greedy(*given):
        raise torch.OutOfMemoryError("Tried to allocate 4.32 GiB")

    monkeypatch.setattr(gradient, "_add", greedy)
    with pytest.raises(OutOfMemory, match="no memory for a batch of physical_batch_size=7 rows") as caught:
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
    assert "GiB" not in "".join(traceback.format_exception(caught.value))


class Repeats(nn.Module):
    """As much memory as an example says."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        if float(x[0, 0]) > 1e6:
            raise torch.OutOfMemoryError("Tried to allocate 4.32 TiB")
        return self.fc(x)


def test_an_example_that_asks_for_too_much_memory_alone_counts_as_nothing():
    """Where examples go one by one, their values may decide how much memory that is."""
    x, y = torch.rand(40, 4), torch.zeros(40, dtype=torch.int64)
    x[7] = 1e7
    loss = nn.CrossEntropyLoss(reduction="none")
    how = {"sampling_rate": 1.0, "noise_multiplier": 40.0, "steps": 2, "route": "loop"}
    assert len([*ft.torch.train(Repeats(), loss, (x, y), epsilon=1.0, delta=1e-5, **how)]) == 2


@pytest.mark.parametrize("route", ["fast", "rows", "gram", "vmap", "loop"])
@pytest.mark.parametrize("positions", [1, 7])
def test_mixed_precision_around_a_run_does_not_round_norms_and_sums(route, positions):
    torch.manual_seed(0)
    x = (10 + 10 * torch.randn(1, positions, 6)).expand(24, -1, -1).clone()
    y = (10 + 10 * torch.randn(1, positions, 5)).expand(24, -1, -1).clone()
    gradient = Gradient(nn.Linear(6, 5), lambda out, y: (out * y).flatten(1).sum(1), route=route)
    data = Examples((x[:, 0], y[:, 0]) if positions == 1 else (x, y))
    for n in range(2, 24):
        sums = []
        with torch.autocast("cpu", torch.bfloat16):
            for some in (n, n - 1):
                sums.append(gradient.bounded_sum(data.take(np.arange(some)), None, ClipNorm(1.0)).double())
        assert float((sums[0] - sums[1]).norm()) <= 1 + 2.0**-9


def test_a_loss_that_is_a_mean_is_refused_where_it_is_computed():
    gradient = Gradient(nn.Linear(2, 1), lambda outputs, targets: (outputs[:, 0] - targets).square().mean())
    with pytest.raises(InvalidValue, match="one value a record"):
        gradient._losses(torch.zeros(4, 1), torch.zeros(4), 4)


def test_an_unknown_choice_of_memory_is_refused():
    with pytest.raises(InvalidValue, match="memory must be one of 'balanced', 'speed', 'space', got 'small'"):
        Gradient(nn.Linear(2, 1), nn.MSELoss(reduction="none"), memory="small")


def test_parts_of_a_huge_models_batch_are_added_where_the_sum_lies(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    batch = Examples((torch.randn(40, 5), torch.arange(40) % 3)).take(slice(None))
    loss = nn.CrossEntropyLoss(reduction="none")
    expected = Gradient(model, loss).bounded_sum(batch, None, ClipNorm(0.1))
    monkeypatch.setattr(Gradient, "_onto", lambda self, parts=0: 8)
    put, seen, chain = [], [], totals.chain

    def watched(records=1):
        seen.append(totals._batch.in_place)
        return chain(records)

    monkeypatch.setattr(totals.Parts, "put", lambda self, part: put.append(part))
    monkeypatch.setattr(totals, "chain", watched)
    found = Gradient(model, loss, physical_batch_size=4).bounded_sum(batch, None, ClipNorm(0.1))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert not put
    assert all(seen)
    with totals.among(40), totals.in_place(True):
        assert chain() + totals.parts_in_place() == totals._roundings(1)
    assert not totals._batch.in_place


def test_more_parts_than_roundings_allow_are_added_in_float64(monkeypatch):
    monkeypatch.setattr(Gradient, "_onto", lambda self, parts=0: 8)
    monkeypatch.setattr(totals, "parts_in_place", lambda records=1: 3)
    put = []
    plain = totals.Parts.put
    monkeypatch.setattr(totals.Parts, "put", lambda self, part: (put.append(part), plain(self, part)))
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    data, loss = (torch.randn(40, 5), torch.arange(40) % 3), nn.CrossEntropyLoss(reduction="none")
    batch = Examples(data).take(slice(None))
    for rows, puts in ((20, 0), (10, 1), (5, 2)):
        put.clear()
        found = Gradient(model, loss, physical_batch_size=rows).bounded_sum(batch, None, ClipNorm(0.1))
        assert len(put) == puts  # of 2, 4 and 8 parts: three lie in each sum
    users = Examples(data, users=np.arange(40) // 2, records_per_user=4).take(slice(None))
    put.clear()
    Gradient(model, loss, physical_batch_size=8).bounded_sum(users, None, ClipNorm(0.1))
    assert len(put) == 3  # parts of two users each are ten
    expected = Gradient(model, loss).bounded_sum(batch, None, ClipNorm(0.1))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


class Lanes(nn.Module):
    """Layers without a rule that vmap cannot run in mixed precision: one with a parametrization, a PReLU."""

    def __init__(self):
        super().__init__()
        self.before, self.first = nn.Linear(5, 5), nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3))
        self.slope, self.last = nn.PReLU(4), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.slope(self.first(self.before(x))).flatten(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("memory", ["balanced", "speed"])
def test_what_vmap_cannot_run_in_mixed_precision_runs_in_full(memory):
    torch.manual_seed(0)
    model, loss = Lanes(), nn.CrossEntropyLoss(reduction="none")
    batch = Examples((torch.randn(6, 2, 5), torch.arange(6) % 3)).take(EVERYBODY)
    expected = Gradient(model, loss).bounded_sum(batch, None, ClipNorm(0.5))
    mixed = Gradient(model, loss, autocast=torch.bfloat16, memory=memory)
    found = mixed.bounded_sum(batch, None, ClipNorm(0.5))
    assert 0.0 < float((found - expected).norm()) < 0.03 * float(expected.norm())


def test_what_cannot_be_followed_in_mixed_precision_is_refused_in_a_sentence(monkeypatch):
    run = Passes.rows

    def rows(self, *given, **more):
        if self.autocast is not None:
            raise RuntimeError("no such kernel")
        return run(self, *given, **more)

    monkeypatch.setattr(Passes, "rows", rows)
    gradient = Gradient(nn.Linear(5, 3), nn.CrossEntropyLoss(reduction="none"), autocast=torch.bfloat16)
    with pytest.raises(Unsupported, match=r"with autocast=torch\.bfloat16 \(RuntimeError: no such kernel\)"):
        gradient.check(torch.randn(1, 5), torch.zeros(1, dtype=torch.int64))


def test_whatever_ends_the_search_for_a_plan_is_refused_or_goes_another_way(monkeypatch):
    def odd(*_):
        raise RuntimeError("an operation of torch fails")

    monkeypatch.setattr(bookkeeping, "most_positions", odd)
    example = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(Unsupported, match="cannot follow"):
        Gradient(nn.Linear(3, 2), losses).check(*example)
    gradient = Gradient(nn.Linear(3, 2), losses, route="auto")
    gradient.check(*example)
    assert gradient.isolation is Isolation.VMAP
