"""All steps of an LSTM by the kernels in C, against torch's own layer in float64."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from farthing.torch.kernels import positions, steps  # noqa: E402

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not positions.available(CPU), reason="no kernels for this processor")


def layer(depth, width, bias):
    torch.manual_seed(0)
    net = nn.LSTM(depth, width, batch_first=True, bias=bias)
    biases = (net.bias_ih_l0, net.bias_hh_l0) if bias else (None, None)
    parts = (net.weight_ih_l0, net.weight_hh_l0, *biases)
    return net, steps.LayerWeights(*(None if p is None else p.detach() for p in parts))


def close(one, other, slack=2e-5):
    one, other = one.detach().double(), other.detach()
    return float((one - other).abs().max()) <= slack * float(other.abs().max())


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("records", "count", "depth", "width"),
    [(1, 1, 1, 1), (7, 5, 2, 3), (13, 4, 20, 16), (20, 6, 64, 64), (5, 3, 140, 70)],
)
def test_states_and_all_gradients_are_those_of_the_layer(
    records, count, depth, width, bias, threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    net, weights = layer(depth, width, bias)
    given = [torch.randn(records, count, depth), torch.randn(records, width), torch.randn(records, width)]
    back = [torch.randn(records, count, width), torch.randn(records, width)]
    leaves, gates = [part.clone().requires_grad_() for part in given], []
    anchor = torch.zeros((), requires_grad=True)
    found = steps.Lstm.apply(anchor, *leaves, weights, gates.append)
    found = *found, *torch.autograd.grad(found, leaves, back)

    net.double()
    x, h, c = (part.double().requires_grad_() for part in given)
    states, (_, last) = net(x, (h[None], c[None]))
    expected = torch.autograd.grad(
        [states, last[0]], [x, h, c, net.weight_ih_l0], [part.double() for part in back]
    )
    for one, other in zip(found, (states, last[0], *expected[:3]), strict=True):
        assert close(one, other)
    assert close(gates[0].flatten(0, 1).t().double() @ given[0].flatten(0, 1).double(), expected[3])


@needs_kernels
def test_an_input_that_needs_no_gradient_gets_none_and_the_gates_still_do():
    _, weights = layer(4, 6, True)
    anchor, gates = torch.zeros((), requires_grad=True), []
    x, h = torch.randn(3, 5, 4), torch.zeros(3, 6)
    states, _ = steps.Lstm.apply(anchor, x, h, h, weights, gates.append)
    states.sum().backward()
    assert x.grad is None
    assert gates[0].shape == (3, 5, 24)


@needs_kernels
def test_infinities_saturate_and_nan_stays_with_its_record():
    _, weights = layer(1, 2, True)
    x, h = torch.tensor([[[1e38]], [[-torch.inf]], [[torch.nan]], [[0.5]]]), torch.zeros(4, 2)
    weights = weights._replace(input=torch.ones(8, 1))
    states, _ = steps.Lstm.apply(torch.zeros((), requires_grad=True), x, h, h, weights, lambda gates: None)
    assert torch.isfinite(states[[0, 1, 3]]).all()
    assert states[2].isnan().all()


def test_other_types_are_left_to_torch():
    _, weights = layer(4, 6, True)
    assert not steps.fits(torch.zeros(2, 3, 4, dtype=torch.float64), weights)
    assert not steps.fits(torch.zeros(0, 3, 4), weights)
