"""Where parameters lie in a flat gradient: complex weights are two numbers each."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import plain_sum
from farthing.torch.gradients.layout import Layout
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")


class Waves(nn.Module):
    """Complex weights of its own, and a complex layer."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))  # so that the complex ones begin at an odd place
        self.first = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))
        self.second = nn.Linear(4, 3, dtype=torch.complex64)

    def forward(self, x):
        return self.second(x.to(torch.complex64) @ self.first).abs() + self.shift


def exactly(model, x, y):
    """Each example's gradient in double precision, one at a time, real and imaginary parts side by side."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    weights = {
        name: p.to(torch.complex128 if p.is_complex() else torch.float64) for name, p in weights.items()
    }
    rows = []
    for n in range(len(y)):
        own = {name: p.clone().requires_grad_() for name, p in weights.items()}
        out = x[n : n + 1].to(torch.complex128) @ own["first"]
        out = (out @ own["second.weight"].T + own["second.bias"]).abs() + own["shift"]
        found = torch.autograd.grad(LOSS(out, y[n : n + 1]).sum(), list(own.values()))
        parts = [torch.view_as_real(g) if g.is_complex() else g for g in found]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def data(n=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)


def test_complex_weights_are_two_numbers_each_and_come_back_in_their_shape():
    model = Waves()
    layout = Layout.of(model)
    assert layout.size == 3 + 2 * (20 + 12 + 3)
    shift, first, weight, bias = layout.views(torch.arange(float(layout.size)))
    assert shift.tolist() == [0, 1, 2]
    assert first[0, 0] == 3 + 4j
    assert weight.shape == (3, 4)
    assert bias[2] == 71 + 72j


def test_gradients_of_complex_weights_are_clipped_with_their_imaginary_parts():
    torch.manual_seed(0)
    model, (x, y), bound = Waves(), data(), ClipNorm(0.5)
    expected = plain_sum(exactly(model, x, y), bound)
    for route in ("fast", "vmap", "loop"):
        gradient = Gradient(model, LOSS, route=route)
        found = gradient.bounded_sum(Examples((x, y)).take(slice(None)), None, bound)
        assert (found - expected).norm() <= 1e-5 * expected.norm(), route


def test_complex_weights_are_trained_in_both_parts():
    model = Waves()
    before = model.first.detach().clone()
    next(ft.torch.train(model, LOSS, data(2000), epsilon=8.0, delta=1e-5, steps=2, sampling_rate=0.1))
    moved = (model.first - before).detach()
    assert moved.real.abs().min() > 0
    assert moved.imag.abs().min() > 0


def test_a_lazy_layer_is_refused_by_its_name():
    with pytest.raises(ft.InvalidValue, match=r"0\.weight has no weights yet"):
        Layout.of(nn.Sequential(nn.LazyLinear(3)))
