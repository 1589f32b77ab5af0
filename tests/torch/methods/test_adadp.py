"""AdaDP: scales of released values only, at DP-SGD's price; its recursion by hand; its halves."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.queries.query import Query
from farthing.queries.samplers import Poisson
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.methods.adadp import AdaDP, AdaL, AdaN
from farthing.torch.training.loop import train

LOSS = nn.CrossEntropyLoss(reduction="none")


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data(seed=0, records=400):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 4, generator=made)
    return x, x[:, :3].argmax(1)


def feed(method, gradients, deviation):
    """Released mean gradients, as training hands them to the optimiser."""
    for row in gradients:
        for parameter, gradient in zip(method.param_groups[0]["params"], row, strict=True):
            parameter.grad = gradient.clone()
        method.expect(deviation)
        method.step()


def released(model, steps, size=0.3, seed=5):
    made = torch.Generator().manual_seed(seed)
    return [[size * torch.randn(p.shape, generator=made) for p in model.parameters()] for _ in range(steps)]


@pytest.mark.parametrize("shape", ["box", "ellipsoid"])
@pytest.mark.parametrize("estimate", ["coordinate", "factored", "layer"])
def test_same_released_values_same_scales_whatever_the_records(shape, estimate):
    """Two models with other weights and other records: what was released decides, and nothing else."""
    bounds = []
    for seed in (1, 2):
        model = network(seed)
        model(data(seed)[0]).sum().backward()  # gradients of records: must not matter
        method = AdaDP(model, estimate=estimate, shape=shape, period=1)
        feed(method, released(model, 12), 0.05)
        bounds.append(method.bound(13))
    assert isinstance(bounds[0], ClipCoordinates if shape == "box" else ClipNorm)
    assert np.array_equal(bounds[0].scale, bounds[1].scale)
    assert bounds[0].norm() == bounds[1].norm()
    assert np.ptp(np.asarray(bounds[0].scale)) > 0


@pytest.mark.parametrize("shape", ["box", "ellipsoid"])
def test_a_batch_costs_what_it_costs_in_dp_sgd(shape):
    model, budget = network(), ft.Budget(1.0, 1e-5)
    method = AdaDP(model, shape=shape, period=1)
    feed(method, released(model, 12), 0.05)
    plain = Query(Poisson(0.1), ft.PerExample(lambda rows, w: rows[0]), ClipNorm(1.0), TensorGaussian(1.3))
    ours = Query(plain.sampler, plain.contribution, method.bound(13), plain.mechanism)
    assert np.size(np.asarray(method.bound(13).scale)) > 1
    assert ours.price(budget) == plain.price(budget)


def test_the_recursion_by_hand():
    """E' of one weight over three batches, its root and the update, in Python's floats."""
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().clone().flatten().tolist()
    method = AdaDP(model, 0.01, memory=0.9, rate_memory=0.8, estimate="coordinate", period=1, eps=1e-6)
    steps = [[3.0, -1.0], [2.0, 0.5], [4.0, 1.5]]
    feed(method, [[torch.tensor([row])] for row in steps], 0.5)
    signal, square, weights = [0.0, 0.0], [0.0, 0.0], list(start)
    for row in steps:
        for i, g in enumerate(row):
            signal[i] = 0.9 * signal[i] + 0.1 * (g * g - 0.25)
            square[i] = 0.8 * square[i] + 0.2 * g * g
            weights[i] -= 0.01 * g / math.sqrt(square[i] + 1e-6)
    assert model.weight.detach().flatten().tolist() == pytest.approx(weights, rel=1e-5)
    young = 1 - 0.9**3
    means = [s / young for s in signal]
    centre, doubt = sum(means) / 2, 2 * 0.25**2 / 3  # of three squares of noise, each of variance 2 · .25²
    part = 1 - doubt / ((means[0] - means[1]) / 2) ** 2
    wanted = [math.sqrt(centre + part * (mean - centre)) for mean in means]
    (root,) = method.scales()
    assert root.flatten().tolist() == pytest.approx(wanted, rel=1e-5)
    half = (root[0, 0] + root[0, 1]).item() / 2
    bound = method.bound(4)
    assert bound.scale.tolist() == pytest.approx(
        [math.sqrt(r / half) for r in root.flatten().tolist()], rel=1e-5
    )
    assert float((bound.scale**2).mean()) == pytest.approx(1.0)
    assert bound.norm() == pytest.approx(half / math.sqrt(sum(r * r for r in root.flatten().tolist()) / 2))


def test_rows_and_columns_make_the_factored_estimate():
    model = nn.Linear(3, 2, bias=False)
    method = AdaDP(model, estimate="factored", period=1, floor=1e-3, ceiling=1e3)
    gradient = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])  # of rank one: found exactly
    feed(method, [[gradient]] * 3, 0.0)
    (root,) = method.scales()
    assert torch.allclose(root, gradient, rtol=1e-5)


def test_floor_and_ceiling_hold():
    model = nn.Linear(4, 1, bias=False)
    method = AdaDP(model, estimate="coordinate", shape="box", factor=1.0, clip_norm=100.0, period=1,
                   floor=0.5, ceiling=1.5)  # fmt: skip
    feed(method, [[torch.tensor([[0.0, 1.0, 1.0, 10.0]])]] * 2, 0.0)
    level = math.sqrt(102 / 4)
    assert method.bound(3).scale.tolist() == pytest.approx(
        [level / 2, level / 2, level / 2, 1.5 * level], rel=1e-5
    )


def test_the_gate_stays_closed_on_noise_and_opens_on_a_signal():
    for size, opens in ((1.0, False), (4.0, True)):
        model = nn.Linear(20, 30, bias=False)
        method = AdaDP(model, clip_norm=2.0, period=1)
        feed(method, released(model, 40, size=size), 1.0)
        bound = method.bound(41)
        assert (np.ndim(bound.scale) > 0) is opens
        if not opens:
            assert bound.norm() == 2.0


def test_the_papers_gate_asks_for_the_variance_of_the_estimates():
    """Line 7, Var √E' > G, of what was released: without noise √E' is the gradient itself."""
    row = torch.tensor([[0.0, 1.0, 1.0, 3.0]])
    spread = float(np.var(row.numpy()))
    for threshold, opens in ((0.9 * spread, True), (1.1 * spread, False)):
        method = AdaDP(nn.Linear(4, 1, bias=False), clip_norm=2.0, period=1, threshold=threshold)
        feed(method, [[row]] * 3, 0.0)
        assert (np.ndim(method.bound(4).scale) > 0) is opens


def test_a_factor_is_refused_where_it_would_do_nothing():
    with pytest.raises(InvalidValue, match=r"factor multiplies the sides of a box, .*'ellipsoid'.*1\.5"):
        AdaDP(network(), factor=1.5)
    with pytest.raises(InvalidValue, match="shape='box'"):
        AdaN(network(), factor=1.2)
    row = [[torch.tensor([[0.5, 1.0, 1.0, 2.0]])]] * 3
    scales = []
    for factor in (None, 1.2, 2.4):
        method = AdaDP(nn.Linear(4, 1, bias=False), shape="box", clip_norm=100.0, factor=factor, period=1)
        feed(method, row, 0.0)
        scales.append(method.bound(4).scale)
    assert torch.equal(scales[0], scales[1])
    assert torch.allclose(scales[2], 2 * scales[1])


def test_without_the_noises_share_the_estimate_would_feed_on_noise():
    """Noise in proportion to the scale, and no gradient at all: E' must not grow (it did 2.7-fold a step)."""
    model = nn.Linear(30, 30, bias=False)
    method = AdaDP(model, estimate="layer", shape="box", period=1, memory=0.9, floor=0.1, clip_norm=1e9)
    made = torch.Generator().manual_seed(3)
    feed(method, [[torch.full((30, 30), 0.01)]] * 3, 0.0)
    first = float(method.scales()[0].mean())
    for _ in range(50):
        deviation = 1.2 * float(method.scales()[0].mean()) if method.scales() else 0.01
        feed(method, [[deviation * torch.randn(30, 30, generator=made)]], deviation)
    scales = method.scales()
    assert scales is None or float(scales[0].mean()) < 2 * first


def test_scales_are_kept_for_a_period():
    model = network()
    method = AdaDP(model, period=5)
    feed(method, released(model, 5), 0.05)
    sixth = method.bound(6)
    feed(method, released(model, 3, seed=9), 0.05)
    assert method.bound(9) is sixth
    assert method.bound(11) is not sixth


@pytest.mark.parametrize(
    "make",
    [AdaDP, AdaL, AdaN, lambda m: AdaDP(m, shape="box", estimate="layer")],
    ids=["dp", "l", "n", "box"],
)
def test_it_trains_within_the_budget(make):
    model = network()
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5))
    method = make(model)
    training = train(
        model,
        LOSS,
        data(),
        ledger,
        sampling_rate=0.25,
        noise_multiplier=2.0,
        steps=12,
        optimizer=method,
        clip_norm=method.bound,
    )
    assert len(list(training)) == 12
    assert ledger.spent.epsilon <= 3.0
    alike = ft.epsilon(ft.Poisson(0.25).amplify(ft.Gaussian(2.0)), steps=12, delta=1e-5)
    assert ledger.spent.epsilon == pytest.approx(alike, rel=1e-3)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_it_learns():
    model = network()
    x, y = data(records=4000)
    method = AdaDP(model, 0.02, period=5)
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5), stream=SeededStream(1))
    list(
        train(
            model, LOSS, (x, y), ledger, sampling_rate=0.1, steps=60, optimizer=method, clip_norm=method.bound
        )
    )
    assert (model(x).argmax(1) == y).float().mean() > 0.8


def test_a_checkpoint_carries_the_estimate():
    one, two = network(), network()
    first, second = AdaDP(one, period=1), AdaDP(two, period=1)
    feed(first, released(one, 8), 0.05)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(second.bound(9).scale, first.bound(9).scale)


def test_halves():
    model = network()
    lonely = AdaL(model)
    feed(lonely, released(model, 12), 0.01)
    assert np.size(lonely.bound(13).scale) == 1  # plain noise
    plain = nn.Linear(2, 1, bias=False)
    before = plain.weight.detach().clone()
    feed(AdaN(plain, 0.5), [[torch.tensor([[1.0, -2.0]])]], 0.01)
    assert torch.allclose(before - plain.weight, 0.5 * torch.tensor([[1.0, -2.0]]))  # plain steps


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_norm": 0.0},
        {"memory": 1.0},
        {"rate_memory": -0.1},
        {"floor": 2.0},
        {"ceiling": 0.5},
        {"period": 0},
        {"estimate": "guess"},
        {"shape": "egg"},
        {"factor": 0.0, "shape": "box"},
        {"threshold": -1.0},
        {"lr": -1.0},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(InvalidValue):
        AdaDP(network(), **wrong)


def test_without_gradients_nothing_moves():
    model = nn.Linear(3, 2)
    before = [p.clone() for p in model.parameters()]
    AdaDP(model).step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_parameters_of_half_precision_and_noise_told_as_numbers_or_tensors():
    """All at once is what one by one would be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).to(torch.bfloat16))
    method = AdaDP(model, 0.1, momentum=0.5, period=1)
    squares, means, signals = ({p: torch.zeros(p.shape) for p in model.parameters()} for _ in range(3))
    for told in (
        0.1,
        [0.1, torch.full((4,), 0.2), 0.3, 0.1],
        [torch.rand(p.shape) for p in model.parameters()],
    ):
        wanted, each = [], [told] * 4 if isinstance(told, float) else told
        for p, deviation in zip(model.parameters(), each, strict=True):
            p.grad = torch.randn(p.shape).to(p.dtype)
            g = p.grad.float()
            signals[p] = 0.99 * signals[p] + 0.01 * (g**2 - torch.as_tensor(deviation) ** 2)
            squares[p] = 0.99 * squares[p] + 0.01 * g**2
            means[p] = 0.5 * means[p] + g
            wanted.append(p.float() - 0.1 * means[p] / (squares[p] + 1e-8).sqrt())
        method.expect(told)
        method.step()
        for p, right in zip(model.parameters(), wanted, strict=True):
            close = 0.01 if p.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(p.float(), right, rtol=close, atol=close)
            assert torch.allclose(method.state[p]["signal"], signals[p], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", ["box", "ellipsoid"])
def test_views_of_one_gradient_and_gradients_apart_are_the_same(device, shape):
    """`train` hands out views of one tensor, which are not copied; on a GPU graphs read what changes."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    one, two, close = network().to(device), network(), 0.0 if device == "cpu" else 1e-3
    first, second = (AdaDP(m, 0.01, shape=shape, period=1, momentum=0.5) for m in (one, two))
    made, views = torch.Generator().manual_seed(1), first._layout.views
    for t in range(1, 13):
        flat = 0.3 * torch.randn(first._layout.size, generator=made)
        spread = 0.01 + 0.02 * torch.rand(first._layout.size, generator=made)
        for method, copied, where in ((first, lambda view: view, device), (second, torch.clone, "cpu")):
            for p, view in zip(method.param_groups[0]["params"], views(flat.to(where)), strict=True):
                p.grad = copied(view)
            method.param_groups[0].update(lr=0.01 / t, eps=1e-8 if t < 9 else 1.0)
            method.expect(0.01 if t < 6 else [copied(view) for view in views(spread.to(where))])
            method.step()
        scales = [method.bound(t + 1).scale.cpu() for method in (first, second)]
        assert torch.allclose(*scales, rtol=close, atol=0.0)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.allclose(p.cpu(), q, rtol=close, atol=close)


def test_a_state_that_is_replaced_counts():
    """A checkpoint restored into a run that has begun: by its state it goes on, and alone."""
    one, two = network(), network()
    first, second = AdaDP(one, period=1), AdaDP(two, period=1)
    feed(first, released(one, 8), 0.05)
    feed(second, released(two, 5, seed=9), 0.1)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(second.bound(9).scale, first.bound(9).scale)
    signal = first.state[one[0].weight]["signal"].clone()
    feed(second, released(two, 1, seed=9), 0.1)
    assert torch.equal(first.state[one[0].weight]["signal"], signal)
    assert not torch.equal(second.state[two[0].weight]["signal"], signal)
    feed(first, released(one, 1, seed=9), 0.1)
    assert torch.equal(second.state[two[0].weight]["signal"], first.state[one[0].weight]["signal"])


def test_what_is_lost_in_noise_counts_as_what_noise_can_hide():
    """A bias of which one coordinate looks large and the other smaller than nothing."""
    model = nn.Linear(3, 2)
    method = AdaDP(model, period=1, memory=0.9)
    feed(method, [[torch.full((2, 3), 2.0), torch.tensor([1.2, 0.0])]] * 30, 0.87)
    weight, bias = method.scales()
    assert weight.flatten().tolist() == pytest.approx([math.sqrt(4 - 0.87**2)] * 6)
    assert bias.tolist() == pytest.approx([math.sqrt(3 * 0.87**2 * math.sqrt(2 / (19 * 2)))] * 2)


def test_noise_told_anew_is_heard():
    model = nn.Linear(3, 2)
    method = AdaDP(model, memory=0.5)
    for told, wanted in ((1.0, 0.5), (2.0, 2.25), ([3.0, torch.full((2,), 1.0)], None)):
        feed(method, [[torch.zeros_like(p) for p in model.parameters()]], told)
        found = [float(method.state[p]["clutter"]) for p in model.parameters()]
        assert found == pytest.approx([wanted] * 2 if wanted else [0.5 * 2.25 + 4.5, 0.5 * 2.25 + 0.5])


def test_a_gradient_may_be_missing():
    """Parameters that were frozen since are left as they are; the others move as if alone."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    method, alone = AdaDP(model, 0.1), AdaDP(model[1], 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [torch.randn(p.shape) for p in model[1].parameters()]
    for p, gradient in zip(model[1].parameters(), gradients, strict=True):
        p.grad = gradient
    method.step()
    moved = [p.detach().clone() for p in model[1].parameters()]
    assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), before[:2], strict=True))
    for p, q in zip(model[1].parameters(), before[2:], strict=True):
        p.data.copy_(q)
    alone.step()
    assert all(torch.equal(p, q) for p, q in zip(model[1].parameters(), moved, strict=True))
    assert method.scales() is None
    assert method.bound(2).norm() == 1.0


def test_momentum_may_begin_later():
    model = nn.Linear(2, 1, bias=False)
    method = AdaDP(model, 0.5, adaptive_noise=False, adaptive_rate=False)
    before, gradient = model.weight.detach().clone(), torch.tensor([[1.0, -2.0]])
    feed(method, [[gradient]], 0.0)
    method.param_groups[0]["betas"] = 0.5, 0.99
    feed(method, [[gradient]] * 2, 0.0)
    assert torch.allclose(before - model.weight, 0.5 * (1 + 1 + 1.5) * gradient)
