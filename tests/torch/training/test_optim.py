"""DP-Adam: AdamW without noise, the corrected update with it, state that survives a checkpoint."""

import math

import pytest
import torch
from torch import nn

from farthing.errors import InvalidValue
from farthing.torch.training.optim import DPAdam, chosen
from farthing.torch.training.plan import Plan


def parameters(seed=0):
    made = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(3, 2, generator=made)), nn.Parameter(torch.randn(4, generator=made))]


def gradients(steps, seed=1):
    made = torch.Generator().manual_seed(seed)
    return [[torch.randn(3, 2, generator=made), torch.randn(4, generator=made)] for _ in range(steps)]


def walk(optimizer, weights, all_gradients):
    for row in all_gradients:
        for weight, gradient in zip(weights, row, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def test_without_noise_it_is_adamw():
    ours, theirs = parameters(), parameters()
    steps = gradients(20)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    found = walk(DPAdam(ours, **options), ours, steps)
    wanted = walk(torch.optim.AdamW(theirs, **options), theirs, steps)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
def test_the_noises_variance_is_taken_off(floor):
    """By the formula, one coordinate at a time and in Python's floats, under a noise that changes."""
    weights, steps, noises = parameters(), gradients(8), [1.0, 0.7, 0.7, 0.3, 0.3, 0.3, 1.2, 1.2]
    start = weights[0].detach().flatten().tolist()
    adam = DPAdam(weights, lr=0.1, betas=(0.9, 0.99), floor=floor)
    for row, noise in zip(steps, noises, strict=True):
        adam.expect(noise)
        walk(adam, weights, [row])
    for place, w in enumerate(start):
        m = v = phi = 0.0
        for t, (row, noise) in enumerate(zip(steps, noises, strict=True), start=1):
            g = row[0].flatten()[place].item()
            m, v, phi = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g, 0.99 * phi + 0.01 * noise**2
            seen, known = v / (1 - 0.99**t), phi / (1 - 0.99**t)
            w -= 0.1 * m / (1 - 0.9**t) / (math.sqrt(max(seen - known, floor**2 * known)) + 1e-8)
        assert w == pytest.approx(weights[0].detach().flatten()[place].item(), rel=1e-3)


def test_noise_may_differ_by_coordinate():
    steps = gradients(5)
    alike, apart = parameters(), parameters()
    one, many = DPAdam(alike, lr=0.1), DPAdam(apart, lr=0.1)
    one.expect(0.4)
    many.expect([torch.full((3, 2), 0.4), torch.full((4,), 0.4)])
    found, wanted = walk(many, apart, steps), walk(one, alike, steps)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(InvalidValue, match="one part a parameter, 2, got 1"):
        one.expect([0.4])


def test_a_signal_under_noise_is_scaled_by_itself():
    """Two coordinates, signals ten times apart, both well above the noise: both move alike, as in Adam."""
    weight = nn.Parameter(torch.zeros(2))
    adam = DPAdam([weight], lr=0.01, floor=0.1)
    made = torch.Generator().manual_seed(0)
    for _ in range(300):
        adam.expect(1.0)
        weight.grad = torch.tensor([3.0, 30.0]) + torch.randn(2, generator=made)
        adam.step()
    assert abs(weight[0].item() / weight[1].item() - 1) < 0.1


def test_state_goes_through_a_state_dict():
    steps = gradients(10)
    straight, broken = parameters(), parameters()
    one, two = DPAdam(straight, lr=0.1), DPAdam(broken, lr=0.1)
    for adam in (one, two):
        adam.expect(0.3)
    wanted = walk(one, straight, steps)
    walk(two, broken, steps[:4])
    again = DPAdam(broken, lr=0.1)
    again.load_state_dict(two.state_dict())
    again.expect(0.3)
    found = walk(again, broken, steps[4:])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0.0}, "lr"),
        ({"floor": -1.0}, "floor"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_nonsense_is_refused(options, says):
    with pytest.raises(InvalidValue, match=says):
        DPAdam(parameters(), **options)


def test_the_chosen_optimizer_follows_public_numbers():
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    small, large = Plan(1000, 0.5, (8.0,), 500), Plan(60_000, 0.02, (2.0,), 500)
    rates = [chosen(plain, plan, 1.0).param_groups[0]["lr"] for plan in (small, large)]
    assert rates[0] < rates[1] <= 1.0  # less noise on a mean gradient, longer steps
    assert chosen(plain, small, 0.1).param_groups[0]["lr"] == pytest.approx(10 * rates[0])
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(16)))
    assert chosen(deep, Plan(10**7, 0.1, (2.0,), 500), 1.0).param_groups[0]["lr"] == 0.25
    assert isinstance(chosen(plain, small, 1.0), torch.optim.SGD)
    assert isinstance(chosen(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)), small, 1.0), DPAdam)
    frozen = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))
    assert len(chosen(frozen, small, 1.0).param_groups[0]["params"]) == 2
