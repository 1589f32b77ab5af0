"""Norms from Gram matrices and of rows, where float32 ends."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from farthing.torch.gradients import convolution
from farthing.torch.gradients.convolution import Windows
from farthing.torch.gradients.joint_terms import SumTerm
from farthing.torch.gradients.outers import Lookup, Outer
from farthing.torch.gradients.terms import Factor, Route, RowTerms, contracted
from farthing.torch.kernels import blocks, positions, totals


def gram(side):
    return torch.bmm(side, side.transpose(1, 2))


@pytest.mark.parametrize(("tiny", "huge"), [(1e-20, 1e18), (1e-22, 1e17), (1e-24, 1e18), (1e-30, 1e18)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_norm_is_never_below_the_true_one(tiny, huge, turned):
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(5, 6, 50, generator=generator) * tiny
    v = torch.randn(5, 6, 40, generator=generator) * huge
    true = torch.bmm(u.double().transpose(1, 2), v.double()).flatten(1).norm(dim=1)
    found = contracted(gram(v), gram(u)) if turned else contracted(gram(u), gram(v))
    assert (found >= true * (1 - 1e-5)).all()


def test_ordinary_factors_lose_nothing():
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(5, 6, width, generator=generator) for width in (50, 40))
    true = torch.bmm(u.double().transpose(1, 2), v.double()).flatten(1).norm(dim=1)
    assert torch.allclose(contracted(gram(u), gram(v)).double(), true, rtol=1e-6)


@pytest.mark.parametrize("positions", [2, 8, 32])
def test_norms_of_positions_that_cancel_are_never_too_small(positions):
    """Half of the positions take back the other half, but for the last bits: rounding must not hide those."""
    torch.manual_seed(0)
    half, examples = positions // 2, 200
    u, v = torch.randn(examples, half, 40), torch.randn(examples, half, 30)
    u = torch.cat([u, -u * (1 + 2.0**-12 * torch.rand(examples, half, 1))], 1)
    v = torch.cat([v, v], 1)
    true = torch.linalg.matrix_norm(u.double().transpose(1, 2) @ v.double())
    for factors in (1.0, 1e-3, 1e3):
        found = contracted(gram(factors * u), gram(v)).double() / factors
        assert (found >= true * (1 - 2.0**-10)).all()
        term = Outer(Factor(factors * u), Factor(v))
        term.route = Route.GRAM
        assert (term.norms().double() / factors >= true * (1 - 2.0**-10)).all()


@pytest.mark.parametrize("blocked", [False, True])
def test_tokens_whose_gradients_cancel_are_not_longer_for_their_weight(blocked):
    """A token twice, whose second gradient takes back the first: what is left is as small as a rounding."""
    torch.manual_seed(0)
    v = 1000 * torch.randn(200, 1, 30)
    back = -v * (1 + 2.0**-23)
    term, clip = Lookup(torch.ones(200, 2, dtype=torch.long), Factor(torch.cat([v, back], 1)), 3), 2.0**-20
    factors = clip / term.norms().clamp_min(clip)
    for n in range(200):
        out, one = torch.zeros(90), torch.zeros(200)
        one[n] = factors[n]
        with blocks.blocked((200,), 200, 1) if blocked else nullcontext():
            term.add(one, out)
        assert float(out.double().norm()) <= clip * (1 + 2.0**-9)


HUGE = 2.0**27
TAKEN_BACK = torch.tensor([HUGE, 3.0, -HUGE])  # their sum is 3; added in float32 it is 0


def outer():
    return Outer(Factor(torch.ones(1, 3, 40)), Factor(TAKEN_BACK.view(1, 3, 1).expand(1, 3, 30).clone()))


def windows():
    delta, x = torch.ones(1, 1, 4, 3), TAKEN_BACK.view(1, 1, 1, 3).expand(1, 1, 5, 3).clone()
    return Windows(nn.Conv1d(5, 4, 1), delta, x)


def tied():
    """A matrix that is multiplied by and looked up in: one use takes back what the other gives."""
    given = Outer(Factor(torch.ones(1, 1, 2)), Factor(torch.full((1, 1, 30), HUGE)))
    taken = torch.full((1, 2, 30), -HUGE)
    wide = Lookup(torch.tensor([[0, 1]]), Factor(taken), 2)
    return SumTerm([given, wide, Lookup(torch.tensor([[0]]), Factor(torch.full((1, 1, 30), 3.0)), 2)])


@pytest.mark.parametrize("make", [outer, windows, tied])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_example_gets_past_its_clip_where_its_rows_are_rounded_away(make, scaled):
    """Rows are measured and dropped, and what float32 lost of them is in the sum."""
    term = make()
    term.route = Route.AGAIN
    norm = term.scaled_norms(torch.ones(term.size)) if scaled else term.norms()
    out = torch.zeros(term.size)
    term.add((1.0 / norm).clamp(max=1.0), out)
    assert float(out.double().norm()) <= 1 + 2.0**-9


def test_what_one_use_of_a_matrix_takes_back_does_not_round_the_others():
    term, out = tied(), torch.full((60,), 2.0**-10)
    term.product(torch.ones(1), out)
    assert torch.equal(out, 2.0**-10 + torch.tensor([3.0, 0.0]).repeat_interleave(30))


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("kind", ["rows", "lookup"])
def test_uses_of_a_matrix_that_cancel_are_summed_as_they_are_measured(kind, blocked):
    """One use of 300 examples is a thousand times as long as all of it, and goes all one way."""
    torch.manual_seed(0)
    examples, height, width = 300, 20, 64
    u, v = torch.zeros(examples, 1, height), 1000 * (1 + torch.rand(examples, 1, width))
    u[:, :, 0] = 1.0
    small = torch.rand(examples, 1, width)
    outer = Outer(Factor(u), Factor(v))
    if kind == "rows":
        back = RowTerms((u.transpose(1, 2) * (small - v)).flatten(1))
    else:
        back = Lookup(torch.zeros(examples, 1, dtype=torch.long), Factor(small - v), height)
    term, factors, out = SumTerm.of([outer, back]), 1 + torch.rand(examples), torch.zeros(height * width)
    norms = term.norms()
    exact = (v.double() + (small - v).double())[:, 0] * factors.double()[:, None]
    with blocks.blocked((150, 150), expected=300, count=2) if blocked else nullcontext():
        term.add(factors, out)
    error = (out.view(height, width)[0].double() - exact.sum(0)).norm()
    most = float((norms * factors).max())
    assert error <= 2.0**-10 * most, (error, most)
    assert not out.view(height, width)[1:].any()


@pytest.mark.parametrize("kind", ["float32", "tied"])
def test_a_large_table_is_summed_some_rows_at_a_time(kind, monkeypatch):
    torch.manual_seed(0)
    ids, words, width = torch.randint(50, (6, 4)), torch.randn(6, 4, 8), 8
    lookup = Lookup(ids, Factor(words), 50)
    outer = Outer(Factor(torch.randn(6, 5, 50)), Factor(torch.randn(6, 5, width)))
    term, factors = lookup if kind == "float32" else SumTerm.of([outer, lookup]), torch.rand(6)
    expected = (term.rows(slice(None)).double() * factors[:, None]).sum(0)
    seen = []
    slabs = totals.slabs
    monkeypatch.setattr(totals, "slabs", lambda *shape: seen.append(shape) or slabs(*shape))
    for wide in (2**23, 100):
        monkeypatch.setattr(totals, "_WIDE", wide)
        out = torch.zeros(400)
        term.product(factors, out)
        assert torch.allclose(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert any(len(slabs(*shape)) > 1 for shape in seen)


@pytest.mark.parametrize("empty", [False, True])
def test_a_large_product_is_made_some_rows_at_a_time(empty, monkeypatch):
    torch.manual_seed(0)
    u, v, out = torch.randn(12, 90), torch.randn(12, 7), torch.ones(90, 7)
    expected = (0 if empty else 1) + u.double().t() @ v.double()
    monkeypatch.setattr(totals, "_WIDE", 50)
    totals.add_product(u, v, out, empty=empty, examples=3)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("positions", "width"), [(2, 1), (5, 3), (40, 17)])
def test_norms_of_rows_that_are_looked_up_again_are_those_of_their_sums(
    positions, width, kernels, monkeypatch
):
    if not kernels:
        monkeypatch.setattr("farthing.torch.gradients.outers.compiled.available", lambda *_, **__: False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, (7, positions), generator=generator)
    v = torch.randn(7, positions, width, generator=generator)
    table = torch.zeros(7, 6, width, dtype=torch.float64)
    for example in range(7):
        table[example].index_add_(0, ids[example], v[example].double())
    found = Lookup(ids, Factor(v), 6).norms()
    assert torch.allclose(found.double(), table.flatten(1).norm(dim=1), rtol=1e-5)


CONVOLUTIONS = {
    "a line": (lambda: nn.Conv1d(5, 40, 3, padding=2), (7,)),
    "a plane": (lambda: nn.Conv2d(6, 33, 3, padding=1), (4, 5)),
    "strides and groups": (lambda: nn.Conv2d(6, 16, 3, stride=2, padding=1, groups=2), (5, 6)),
    "same": (lambda: nn.Conv2d(3, 8, (2, 4), padding="same", dilation=(1, 2)), (6, 9)),
    "one": (lambda: nn.Conv2d(70, 64, 1, stride=2), (4, 4)),
    "around": (lambda: nn.Conv2d(4, 9, 3, padding=1, padding_mode="circular"), (4, 4)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (5, 5)),
    "a space": (lambda: nn.Conv3d(2, 10, 3, padding=1), (3, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("route", [Route.ROWS, Route.AGAIN])
@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_rows_of_a_convolution_are_kept_or_made_again_to_the_same_sums(
    kind, threads, records, route, monkeypatch
):
    """Padding is added by the kernel, example by example; every sum is that of float64 gradients."""
    for name, value in {"_POSITIONS": 2**30, "_LARGER": 0, "_FILTERS": 1}.items():
        monkeypatch.setattr(convolution, name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    make, sides = CONVOLUTIONS[kind]
    module, examples = make(), 19
    x = torch.randn(examples * records, module.in_channels, *sides)
    delta = torch.randn_like(module(x))
    wide, rows = copy.deepcopy(module).double(), []
    for n in range(examples):
        here = slice(n * records, (n + 1) * records)
        value = (wide(x[here].double()) * delta[here].double()).sum()
        rows.append(torch.autograd.grad(value, wide.weight)[0].flatten())
    exact, factors = torch.stack(rows), torch.rand(examples)
    term, out = convolution.windows(module, delta, x, examples, False), torch.ones(module.weight.numel())
    term.route = route
    assert torch.allclose(term.rows(slice(2, 5)).double(), exact[2:5], atol=1e-4)
    assert torch.allclose(term.norms().double(), exact.norm(dim=1), rtol=1e-5)
    term.only(factors > 0.2)
    term.add(factors, out)
    expected = 1 + (torch.where(factors > 0.2, factors, 0.0).double()[:, None] * exact).sum(0)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert (term.kept is None) == (route is Route.AGAIN)


def test_rows_that_are_made_again_are_measured_as_they_are_summed():
    """Where positions cancel, what float32 loses of a row is lost in its norm and in the sum alike."""
    delta, x = torch.ones(1, 1, 16, 3), TAKEN_BACK.view(1, 1, 1, 3).expand(1, 1, 50, 3).clone()
    term, out = Windows(nn.Conv1d(50, 16, 1), delta, x), torch.zeros(800)
    term.route = Route.AGAIN
    assert term.recomputes() == positions.available(torch.device("cpu"))
    norm = term.norms()
    term.add((1.0 / norm).clamp(max=1.0), out)
    assert float(out.double().norm()) <= 1 + 2.0**-9


def test_whether_rows_are_made_again_follows_from_shapes_alone():
    deep, shallow = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(3, 64, 3, padding=1)
    for examples in (1, 500):
        few = convolution.windows(
            deep, torch.ones(examples, 64, 2, 2), torch.ones(examples, 64, 2, 2), examples, False
        )
        many = convolution.windows(
            shallow, torch.ones(examples, 64, 8, 8), torch.ones(examples, 3, 8, 8), examples, False
        )
        assert few.recomputes() == positions.available(torch.device("cpu"))
        assert not many.recomputes()


@pytest.mark.parametrize("sides", [(), (5,), (3, 4)])
@pytest.mark.parametrize("centre", [0.0, 50.0])
@pytest.mark.parametrize("needed", [True, False])
def test_a_group_norm_finds_all_its_gradients_from_the_same_sums(sides, centre, needed):
    if not positions.available(torch.device("cpu")):
        pytest.skip("there are no kernels for this processor")
    torch.manual_seed(0)
    module, x = nn.GroupNorm(3, 12), centre + torch.randn(5, 12, *sides)
    module.weight.data.normal_()
    delta, wide, seen = torch.randn_like(x), copy.deepcopy(module).double(), x.double().requires_grad_()
    found = positions.group_sums(x, delta, 3, module.eps, module.weight.detach() if needed else None)
    back = torch.autograd.grad(wide(seen), seen, delta.double())[0]
    if needed:
        assert torch.allclose(found[2].double(), back, rtol=1e-4, atol=1e-4)
    else:
        assert found[2] is None
    for n in range(5):
        value = (wide(x[n : n + 1].double()) * delta[n : n + 1].double()).sum()
        scale, shift = torch.autograd.grad(value, (wide.weight, wide.bias))
        assert torch.allclose(found[0][n].double(), scale, rtol=1e-4, atol=1e-4)
        assert torch.allclose(found[1][n].double(), shift, rtol=1e-5, atol=1e-5)
