"""Norms from Gram matrices, where float32 ends."""

import pytest
import torch

from farthing.torch.gradients.terms import Factor, Outer, Route, contracted


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
