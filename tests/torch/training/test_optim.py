"""DP-Adam: AdamW without noise, the corrected update with it, state that survives a checkpoint."""

import math

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.torch.training.course import in_order
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


def test_several_optimisers_share_a_model_and_a_checkpoint(tmp_path):
    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        parts = (
            torch.optim.SGD(model[0].parameters(), 0.5, momentum=0.9),
            DPAdam(model[1].parameters(), 0.1),
        )
        falling = [torch.optim.lr_scheduler.StepLR(part, 1, 0.5) for part in parts]
        data = torch.randn(2000, 4), torch.randint(2, (2000,))
        loss = nn.CrossEntropyLoss(reduction="none")
        how = {"epsilon": 4.0, "delta": 1e-5, "steps": 4, "sampling_rate": 0.1}
        return ft.torch.train(model, loss, data, optimizer=parts, scheduler=falling, **how), parts

    training, parts = begun()
    before = [p.detach().clone() for p in training.model.parameters()]
    next(training)
    assert all(not torch.equal(p, old) for p, old in zip(training.model.parameters(), before, strict=True))
    assert [part.param_groups[0]["lr"] for part in parts] == [0.25, 0.05]
    assert len(parts[1]._noise) == 2  # told how much noise there is
    ft.torch.save(tmp_path / "run.pt", training)
    again, others = begun()
    ft.torch.restore(tmp_path / "run.pt", again)
    assert [part.param_groups[0]["lr"] for part in others] == [0.25, 0.05]
    assert torch.equal(
        others[1].state[again.model[1].weight]["mean"], parts[1].state[training.model[1].weight]["mean"]
    )


def test_a_parameter_of_two_optimisers_is_refused():
    model = nn.Linear(4, 2)
    both = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    data = torch.randn(2000, 4), torch.randint(2, (2000,))
    with pytest.raises(InvalidValue, match="in two of the optimizers"):
        ft.torch.train(
            model, nn.CrossEntropyLoss(reduction="none"), data, epsilon=1.0, delta=1e-5, optimizer=both
        )


def test_noise_by_parameter_reaches_them_in_the_optimisers_order():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 3, bias=False))
    trained = list(model.parameters())
    parts = [torch.full((1, 2), 1.0), torch.full((3, 1), 2.0)]
    reverse = DPAdam(trained[::-1])
    reverse.expect(in_order(parts, trained, reverse.param_groups))
    assert reverse._noise[trained[0]] is parts[0]
    assert reverse._noise[trained[1]] is parts[1]
