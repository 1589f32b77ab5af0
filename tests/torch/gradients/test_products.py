"""Products with weights that a module uses by itself have the gradients of plain autograd, without lanes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import plain_sum
from farthing.torch.gradients.layers import anything
from farthing.torch.training.records import Examples

N = 6


def losses(outputs, targets):
    return (outputs.flatten(1) - 0.5).square().sum(1) + 0 * targets


class Holder(nn.Module):
    """A function of the inputs and of parameters of its own, with a layer after it."""

    def __init__(self, how, *shapes, last=True):
        super().__init__()
        self.how, self.last = how, nn.LazyLinear(3) if last else None
        self.weights = [f"w{n}" for n in range(len(shapes))]
        for name, shape in zip(self.weights, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape)))
        self.register_buffer(
            "mask", (torch.arange(shapes[0][-1]) % 2).float() if shapes[0] else torch.ones(())
        )

    def forward(self, x):
        rows = len(x)
        x = torch.tanh(self.how(self, x, *(getattr(self, name) for name in self.weights))).contiguous()
        return x.view(rows, -1) if self.last is None else self.last(x.view(rows, -1))


def quantised(w):
    return torch.fake_quantize_per_tensor_affine(w, float(w.detach().abs().amax()) / 127, 0, -128, 127)


PRODUCTS = {
    "linear": (lambda m, x, w: F.linear(x, w), (4, 5)),
    "linear with a bias": (lambda m, x, w, b: F.linear(x, w, b), (4, 5), (4,)),
    "matmul": (lambda m, x, w: x @ w, (5, 4)),
    "matmul, transposed": (lambda m, x, w: x @ w.t(), (4, 5)),
    "matmul, transposed twice": (lambda m, x, w: x @ w.t().mT, (5, 4)),
    "matmul from the left": (lambda m, x, w: w @ x, (4, 7)),
    "matmul from the left, transposed": (lambda m, x, w: w.T @ x, (7, 4)),
    "matmul of another shape": (lambda m, x, w: x @ w.view(5, -1), (5, 2, 2)),
    "matmul with a part": (lambda m, x, w: x @ w[:, :2] + x @ w[:, 2:], (5, 4)),
    "addmm of tokens": (lambda m, x, b, w: torch.addmm(b, x.reshape(-1, 5), w).view(-1, 7, 4), (4,), (5, 4)),
    "linear of tokens": (lambda m, x, w, b: F.linear(torch.tanh(x.flatten(0, 1)), w, b), (4, 5), (4,)),
    "used twice": (lambda m, x, w: torch.tanh(x @ w) @ w.t(), (5, 4)),
    "einsum": (lambda m, x, w: torch.einsum("btd,dh->bth", x, w), (5, 4)),
    "einsum, weight first": (lambda m, x, w: torch.einsum("hd,btd->bht", w, x), (4, 5)),
    "einsum of heads": (lambda m, x, w: torch.einsum("btd,hdk->bthk", x, w), (2, 5, 3)),
    "einsum of experts": (lambda m, x, w: torch.einsum("bed,edh->beh", x, w), (7, 5, 3)),
    "einsum of parts between": (lambda m, x, w: torch.einsum("bid,iodk->biok", x, w), (7, 2, 5, 2)),
    "einsum without a sum": (lambda m, x, w: torch.einsum("btd,td->btd", x, w), (7, 5)),
    "bilinear": (lambda m, x, w, b: F.bilinear(x, x.flip(1), w, b), (3, 5, 5), (3,)),
    "convolution": (lambda m, x, w, b: F.conv1d(x, w, b, padding=1), (4, 7, 3), (4,)),
    "strides": (lambda m, x, w: F.conv1d(x, w, None, 2, 1, 2), (4, 7, 2)),
    "groups": (lambda m, x, w: F.conv1d(x, w, groups=7), (14, 1, 3)),
    "a mask": (lambda m, x, w: x @ (w * m.mask), (5, 4)),
    "a mask of windows": (lambda m, x, w: F.conv1d(x, w * m.mask, padding=1), (4, 7, 3)),
    "signs, straight through": (lambda m, x, w: F.linear(x, w + (w.sign() - w).detach()), (4, 5)),
    "eight bits": (lambda m, x, w: F.linear(x, quantised(w)), (4, 5)),
    "a slope": (lambda m, x, w: F.linear(x, w.exp() * m.mask), (4, 5)),
    "a standardised weight": (lambda m, x, w: F.linear(x, (w - w.mean(1, keepdim=True)) / w.std()), (4, 5)),
    "two weights": (lambda m, x, v, g: F.linear(x, g * v / v.norm(dim=1, keepdim=True)), (4, 5), (4, 1)),
    "low rank": (lambda m, x, a, b: F.linear(x, a @ b), (4, 2), (2, 5)),
    "one output": (lambda m, x, w: F.linear(x, w), (1, 5)),
}


def made(name, last=True):
    torch.manual_seed(3)
    model = Holder(*PRODUCTS[name], last=last)
    x, y = torch.randn(N, 7, 5), torch.randint(0, 3, (N,))
    model(x)
    return model, x, y


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_are_those_of_autograd_without_lanes(name, last, one_by_one):
    model, x, y = made(name, last)
    gradient = Gradient(model, losses)
    gradient.check(x, y)
    assert anything not in gradient._passes.plan.rules.values()
    found, expected = gradient.rows(x, y), one_by_one(model, losses, x, y)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    bound = ClipNorm(0.7 * float(expected.norm(dim=1).median()))
    total = gradient.bounded_sum(Examples((x, y)).take(slice(None)), None, bound)
    wanted = plain_sum(expected, bound)
    assert (total - wanted).norm() <= 1e-5 * wanted.norm()
    assert set(model._parameters) == set(model.weights)
    assert not set(model.weights) & set(vars(model))


@pytest.mark.parametrize("scale", [0.5, torch.linspace(0.5, 2.0, 20 + 4)])
@pytest.mark.parametrize("name", ["a mask", "eight bits"])
def test_masked_gradients_are_measured_in_units(name, scale, one_by_one):
    torch.manual_seed(3)
    model = Holder(*PRODUCTS[name], last=False)
    model.more = nn.Parameter(torch.zeros(4))
    how = model.how
    model.how = lambda m, x, *weights: how(m, x, *weights) + m.more
    x, y = torch.randn(N, 7, 5), torch.zeros(N)
    expected = one_by_one(model, losses, x, y)
    numbers = scale if isinstance(scale, float) else scale.double().numpy()
    bound = ClipNorm(3.0, scale=numbers)
    total = Gradient(model, losses).bounded_sum(Examples((x, y)).take(slice(None)), None, bound)
    wanted = plain_sum(expected, bound)
    assert (total - wanted).norm() <= 1e-5 * wanted.norm()


def test_users_have_the_sums_of_their_records(one_by_one):
    model, _, _ = made("used twice")
    x, y, weights = torch.randn(4, 2, 7, 5), torch.zeros(4, 2), torch.ones(4, 2)
    gradient = Gradient(model, losses)
    gradient.check(x, y, weights)
    expected = sum(one_by_one(model, losses, x[:, n], y[:, n]) for n in range(2))
    assert (gradient.rows(x, y, weights) - expected).norm() <= 1e-5 * expected.norm()
