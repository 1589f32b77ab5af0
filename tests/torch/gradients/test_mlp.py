"""Plain stacks: what they give, what is taken for one, and strange examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.torch.gradients import mlp
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import Automatic, ClipCounted, ClipLayers, plain_sum, rule_of
from farthing.torch.gradients.graphs import Live
from farthing.torch.gradients.mlp import Stack
from farthing.torch.training.records import Examples

EVERYBODY = slice(None)
BETWEEN = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


SIZE = 6 * 40 + 40 + 40 * 8 + 8 + 8 * 3 + 3  # of the network below
SCALE = np.random.default_rng(0).uniform(0.5, 2.0, SIZE)
BOUNDS = (
    *(ClipNorm(0.7), ClipNorm(0.4, SCALE), ClipNorm(0.4, np.array(2.0)), ClipCoordinates(SCALE / 50)),
    *(Automatic(0.5), ClipCounted(0.7, 0.1)),
)


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def data(n=11, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3))


def agree(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape
    assert (found - expected).norm() <= tolerance * expected.norm()


def gradient_of(model, physical=None):
    """A gradient that is known to go through a stack."""
    gradient = Gradient(model, losses, physical_batch_size=physical)
    gradient.check(*data(2))
    assert gradient._stack is not None
    return gradient


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def kernels(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("farthing.noise.native.kernels", lambda *_: None)


@pytest.mark.parametrize("physical", [None, 4])
@pytest.mark.parametrize("bound", BOUNDS)
def test_bounds_are_those_of_plain_rows(physical, bound, kernels, one_by_one):
    model, (x, y) = network(), data()
    gradient = gradient_of(model, physical)
    found = gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, bound)
    agree(found, plain_sum(one_by_one(model, losses, x, y), bound))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.sampled_from(BETWEEN), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_random_stacks(layers, seed, frozen):
    torch.manual_seed(seed)
    parts, width = [nn.Flatten()], 6
    for wide, between, bias in layers:
        parts += [nn.Linear(width, wide, bias=bias), between()]
        width = wide
    model = nn.Sequential(nn.Sequential(*parts), nn.Linear(width, 3))
    if frozen:
        model[0][1].requires_grad_(False)
    gradient, (x, y) = gradient_of(model), data(7, seed=seed)
    rows = Gradient(model, losses, route="vmap").rows(x, y)
    bound = ClipNorm(float(rows.norm(dim=1).median()) + 1e-3)
    agree(gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, bound), plain_sum(rows, bound))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("bound", BOUNDS)
def test_an_example_that_is_not_finite_counts_as_zero(bad, bound, kernels):
    gradient, (x, y) = gradient_of(network()), data()
    spoilt = x.clone()
    spoilt[3, 0] = bad
    rest = [n for n in range(len(y)) if n != 3]
    found = gradient.bounded_sum(Examples((spoilt, y)).take(EVERYBODY), None, bound)
    others = gradient.bounded_sum(Examples((x[rest], y[rest])).take(EVERYBODY), None, bound)
    if isinstance(bound, ClipCounted):
        assert abs(found[-1] - others[-1]) <= bound.unit / 2 * 1.001
        found, others = found[:-1], others[:-1]
    if bad == 1e30:
        assert ((found - others) / torch.from_numpy(np.array(bound.scale))).norm() <= bound.norm() * 1.0001
    else:
        agree(found, others)


@pytest.mark.parametrize("bound", BOUNDS)
def test_blank_rows_count_as_nobody_and_weights_multiply_losses(bound, kernels):
    gradient, (x, y) = gradient_of(network()), data()
    weights = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 1.0])
    x[4] = float("nan")
    rule = rule_of(bound)
    expected = gradient._empty(rule).zero_()
    assert gradient._stack.fits(x, weights, rule)
    found = gradient._sum_of(x, y, weights, rule, None)
    gradient._add(x, y, weights, rule, Live.of(rule, SIZE, x.device), expected)
    agree(found, expected)


def test_the_given_batch_is_left_alone():
    gradient, (x, y) = gradient_of(nn.Sequential(nn.ReLU(inplace=True), network())), data()
    before = x.clone()
    total = torch.empty(gradient.layout.size)
    assert gradient._stack.add(x, y, gradient._losses, rule_of(ClipNorm(1.0)), total, True)
    assert torch.equal(x, before)


def test_dropout_draws_what_book_keeping_draws():
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 3))
    gradient, (x, y), found = gradient_of(model), data(), []
    for stack in (gradient._stack, None):
        gradient._stack = stack
        torch.manual_seed(1)
        found.append(gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(0.3)))
    agree(*found)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Doubled(6, 3)),
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 6), nn.ELU(inplace=True)),
        nn.Sequential(nn.Linear(6, 6).double(), nn.ReLU()),
        nn.Linear(6, 3).bfloat16(),
        tied(),
    ],
)
def test_what_is_no_stack(model):
    assert Stack.of(model, ()) is None


def test_what_no_stack_takes():
    model, (x, _) = network(), data()
    stack = Stack.of(model, tuple(p.numel() for p in model.parameters()))
    assert stack.fits(x, None, rule_of(ClipNorm(1.0)))
    assert stack.fits(x, torch.ones(len(x)), rule_of(ClipNorm(1.0)))
    assert not stack.fits(x, torch.ones(len(x), 1), rule_of(ClipNorm(1.0)))
    assert not stack.fits((x, x), None, rule_of(ClipNorm(1.0)))
    assert not stack.fits(x.double(), None, rule_of(ClipNorm(1.0)))
    assert not stack.fits(x, None, ClipLayers((1.0,), (SIZE,)))
    with torch.autocast("cpu", torch.bfloat16):
        assert not stack.fits(x, None, rule_of(ClipNorm(1.0)))
    handle = model[1].register_forward_hook(lambda *_: None)
    assert not stack.fits(x, None, rule_of(ClipNorm(1.0)))
    handle.remove()
    model[1] = nn.GELU()
    assert not stack.fits(x, None, rule_of(ClipNorm(1.0)))


def test_positions_go_the_long_way(one_by_one):
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3))
    x, y = data()
    x = x.view(-1, 3, 2)
    gradient = Gradient(model, losses)
    found = gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(0.5))
    assert gradient._stack is None
    agree(found, plain_sum(one_by_one(model, losses, x, y), ClipNorm(0.5)))


def test_a_loss_that_writes_into_outputs_goes_the_long_way(one_by_one):
    def greedy(outputs, targets):
        return losses(outputs.mul_(2.0), targets)

    model, (x, y) = network(), data()
    gradient = Gradient(model, greedy)
    found = gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(0.5))
    assert gradient._stack is None
    agree(found, plain_sum(one_by_one(model, greedy, x, y), ClipNorm(0.5)))


def test_a_stack_that_gave_something_else_would_not_be_used(monkeypatch):
    squares = mlp._add_squares

    def wrong(u, gate, v, weight, bias, found):
        squares(2 * u, gate, v, weight, bias, found)

    monkeypatch.setattr(mlp, "_add_squares", wrong)
    gradient = Gradient(network(), losses)
    gradient.check(*data(2))
    assert gradient._stack is None


def test_a_loss_without_gradient_adds_nothing():
    gradient, (x, y) = gradient_of(network()), data()
    gradient.loss = lambda outputs, targets: targets.float()
    assert not gradient.bounded_sum(Examples((x, y)).take(EVERYBODY), None, ClipNorm(1.0)).any()


def test_norms_of_tiny_beside_huge_factors(kernels):
    u, v, squares = (
        torch.full((1, 1000), 1e-30),
        torch.full((1, 7), 1e30),
        torch.zeros(1, dtype=torch.float64),
    )
    mlp._add_squares(u, None, v, True, False, squares)
    assert float(squares.sqrt()) == pytest.approx(7000**0.5, rel=1e-6)


def test_tiny_gradients_of_a_bias_with_a_tiny_scale_are_clipped():
    """Their squares vanish in float32, but not what they are in units of the scale."""
    model = nn.Sequential(nn.Linear(2, 1000))
    model[0].weight.requires_grad_(False)
    gradient = Gradient(model, lambda outputs, targets: outputs.sum(1) * 1e-23)
    gradient.check(*data(2, 2))
    assert gradient._stack is not None
    bound = ClipNorm(1e-4, np.full(1000, 1e-18))
    total = gradient.bounded_sum(Examples(data(1, 2)).take(EVERYBODY), None, bound)
    assert (total.double() / 1e-18).norm() <= 1e-4 * (1 + 2**-10)


def test_kernels_and_plain_agree(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    u, gate, v = (torch.randn(9, wide, generator=generator) for wide in (37, 37, 50))
    found = []
    for _ in range(2):
        one, squares = u.clone(), torch.ones(9, dtype=torch.float64)
        mlp._add_squares(one, gate, v, True, True, squares)
        mlp._add_squares(one, None, v, False, True, squares)
        squares[4], squares[5] = torch.nan, 1e100
        factors = [mlp._factors(rule_of(bound), squares) for bound in (ClipNorm(9.0), Automatic(2.0))]
        found.append((one, squares[:4], *(f for f, _ in factors)))
        assert [strange for _, strange in factors] == [True, True]
        monkeypatch.setattr("farthing.noise.native.kernels", lambda *_: None)
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=0.0)
    assert all(not factors[4:6].any() and factors[:4].all() for factors in found[0][2:])
