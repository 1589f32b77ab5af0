"""All steps of a recurrent layer in one node: the same as torch's own layer, forward and backward."""

import pytest
import torch
from torch import nn

from farthing.torch.gradients import recurrent


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_sweep_is_the_layer_and_its_gradient(kind, bias):
    torch.manual_seed(0)
    layer = kind(3, 4, batch_first=True, bias=bias).double()
    x = torch.randn(2, 5, 3, dtype=torch.double)
    start = [torch.randn(2, 4, dtype=torch.double, requires_grad=True) for _ in range(2)]
    projected = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0 if bias else None)
    gates = projected.detach().requires_grad_()
    hidden = layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach() if bias else None
    weights = torch.randn(2, 5, 4, dtype=torch.double)
    if kind is nn.LSTM:
        out, last = recurrent.lstm(gates, *start, *hidden)
        wanted, (_, cell) = layer(x, tuple(part[None] for part in start))
        assert torch.allclose(last, cell[0])
        extra, extra_wanted = last.sum(), cell.sum()
    else:
        out = recurrent.gru(gates, start[0], *hidden, [])
        wanted, _ = layer(x, start[0][None])
        extra, extra_wanted = 0.0, 0.0
    assert torch.allclose(out, wanted)
    begins = start if kind is nn.LSTM else start[:1]
    found = torch.autograd.grad((out * weights).sum() + extra, [gates, *begins])
    expected = torch.autograd.grad((wanted * weights).sum() + extra_wanted, [layer.weight_ih_l0, *begins])
    assert torch.allclose(torch.einsum("btp,btq->pq", found[0], x), expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(one, other)
