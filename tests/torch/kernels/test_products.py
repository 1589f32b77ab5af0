"""Products in either order give the same sums."""

import pytest
import torch

from farthing.torch.gradients.mlp import affine
from farthing.torch.kernels.positions import scaled_squares
from farthing.torch.kernels.totals import add_product


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("width", [3, 100])
@pytest.mark.parametrize("height", [1, 2, 10, 15, 16, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_both_orders(rows, width, height, bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight, delta = (
        torch.randn(shape, generator=generator) for shape in ((rows, width), (height, width), (rows, height))
    )
    shift = torch.randn(height, generator=generator) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if shift is None else shift.double()
    )
    assert torch.allclose(affine(x, weight, shift, torch.empty(rows, height)).double(), expected, atol=1e-4)
    expected = delta.double().t() @ x.double()
    for empty in (True, False):
        out = torch.full((height, width), 2.0)
        add_product(delta, x, out, empty=empty)
        assert torch.allclose(out.double(), expected + (0.0 if empty else 2.0), atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 50), (50, 3)])
def test_scaled_squares(shape):
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(7, width, generator=generator) for width in shape)
    inverse = torch.rand(shape, generator=generator)
    expected = (u.double()[:, :, None] * v.double()[:, None]).square() * inverse
    assert torch.allclose(scaled_squares(u, v, inverse).double(), expected.flatten(1).sum(1), rtol=1e-5)


def test_tiny_beside_huge_is_not_lost():
    u, v = torch.full((1, 1000), 1e-22), torch.full((1, 4), 1e18)
    for one, other in ((u, v), (v, u)):
        found = scaled_squares(one, other, torch.ones(one.shape[1], other.shape[1])).sqrt()
        assert float(found) >= 1e-22 * 1e18 * 4000**0.5
