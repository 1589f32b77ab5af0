"""DpOpt: the closed form is the best of noises that cost the same; released values only; the same price."""

import numpy as np
import torch
from torch import nn

import farthing as ft
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Query
from farthing.queries.samplers import Poisson
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.methods.dpopt import DpOpt
from farthing.torch.training.loop import train


def fed(model, seed=0, steps=10):
    method = DpOpt(model, clip_norm=2.0, period=1, estimate="coordinate")
    made = torch.Generator().manual_seed(seed)
    sizes = [torch.rand(p.shape, generator=made) + 0.1 for p in model.parameters()]
    for _ in range(steps):
        for parameter, size in zip(model.parameters(), sizes, strict=True):
            parameter.grad = size.clone()
        method.expect(0.01)
        method.step()
    return method, torch.cat([size.flatten() for size in sizes]).double().numpy()


def test_no_other_shape_of_the_same_price_moves_the_loss_less():
    method, gradient = fed(nn.Linear(3, 2))
    bound = method.bound(11)

    def harm(scale):  # Σ g² σ², with Σ (Δ/σ)² the same for all
        return np.sum(gradient**2 * scale**2) * np.mean(scale**-2.0)

    scale = bound.scale.double().numpy()
    best = harm(scale)
    made = np.random.default_rng(0)
    others = [scale * np.exp(made.normal(0, size, len(gradient))) for size in (0.01, 0.1, 1) * 30]
    assert all(harm(other) >= best * (1 - 1e-3) for other in [np.ones(len(gradient)), *others])
    order = np.argsort(np.abs(gradient))
    assert np.all(np.diff(scale[order]) <= 1e-6)  # most noise where the gradient is least


def test_same_released_values_same_scales_and_dp_sgds_price():
    bounds = [fed(nn.Linear(3, 2))[0].bound(11) for _ in range(2)]  # other weights
    assert np.array_equal(bounds[0].scale, bounds[1].scale)
    contribution, budget = ft.PerExample(lambda rows, w: rows[0]), ft.Budget(1.0, 1e-5)
    prices = {
        Query(Poisson(0.1), contribution, bound, TensorGaussian(1.1)).price(budget)
        for bound in (bounds[0], ClipNorm(2.0))
    }
    assert len(prices) == 1


def test_it_trains_within_the_budget():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(500, 4)
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5))
    method = DpOpt(model)
    loss = nn.CrossEntropyLoss(reduction="none")
    batches = train(model, loss, (x, x[:, :3].argmax(1)), ledger, sampling_rate=0.2, noise_multiplier=2.0,
                    steps=15, optimizer=method, clip_norm=method.bound)  # fmt: skip
    assert len(list(batches)) == 15
    assert ledger.spent.epsilon <= 3.0
