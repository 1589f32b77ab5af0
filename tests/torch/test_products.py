"""Products in either order give the same sums."""

import pytest
import torch

from farthing.torch.products import add_product, affine


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
