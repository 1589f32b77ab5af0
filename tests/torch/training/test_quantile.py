"""The clip that follows a quantile: where it settles, what it is charged, what it may depend on."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent, PoissonEvent
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import ClipCounted
from farthing.torch.training.loop import train
from farthing.torch.training.schedules import Quantile

BUDGET = ft.Budget(4.0, 1e-5)


class Slope(nn.Module):
    """w · x with w one number: the gradient of an example is x itself."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w * x


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_it_settles_at_the_quantile(quantile):
    sizes = torch.arange(1, 2001) / 1000.0  # norms uniform on (0, 2]: the quantile is at 2 q
    clip = Quantile(quantile, start=0.01, step=0.3)
    model = Slope()
    training = train(
        model, lambda outputs, targets: outputs, (sizes, sizes), ft.Ledger(BUDGET, stream=SeededStream(2)),
        sampling_rate=0.2, noise_multiplier=4.0, clip_norm=clip, steps=120,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
    )  # fmt: skip
    settled = [step.clip_norm for step in training][60:]
    assert np.mean(settled) == pytest.approx(2 * quantile, rel=0.08)


def test_gradient_and_count_are_one_release_within_one_norm():
    """The joint contribution of any example has norm at most that which the noise is measured by."""
    clip = Quantile(0.5, start=0.7)
    bound = clip.bound(noise_multiplier=2.0, batch_size=50.0)
    for norm in (0.0, 0.1, 0.6999, 0.7, 0.7001, 5.0, 1e9):
        clipped = min(norm, 0.7)
        counted = bound.unit * (0.5 if norm <= 0.7 else -0.5)
        assert math.hypot(clipped, counted) <= bound.norm() * (1 + 1e-12)
    gradient = Gradient(Slope(), lambda outputs, targets: outputs)
    event = ft.Query(ft.Poisson(0.1), gradient, bound, ft.Gaussian(2.0)).price(BUDGET)
    assert event == PoissonEvent(0.1, GaussianEvent(2.0))


def test_the_count_is_heard_with_the_deviation_asked_for():
    bound = Quantile(0.5, deviation=0.05).bound(noise_multiplier=1.5, batch_size=400.0)
    assert 1.5 * bound.norm() / bound.unit / 400 == pytest.approx(0.05, rel=0.01)
    assert bound.norm() == pytest.approx(1.0, rel=1e-3)  # and costs next to nothing


def test_tiny_batches_never_drown_the_gradient():
    bound = Quantile(0.5).bound(noise_multiplier=10.0, batch_size=1.0)
    assert bound.norm() == pytest.approx(math.sqrt(2))


def test_the_clip_moves_by_released_values_within_public_limits():
    clip = Quantile(0.5, start=1.0, low=0.5, high=1.5)
    bound = clip.bound(1.0, 100.0)
    released = torch.tensor([3.0, 25 * bound.unit])
    assert clip.learn(bound, released, 100.0).tolist() == [3.0]
    assert clip.clip_norm == pytest.approx(math.exp(-0.2 * 0.25), rel=1e-6)
    clip.learn(clip.bound(1.0, 100.0), torch.tensor([0.0, -1e12]), 100.0)
    assert clip.clip_norm == 1.5
    clip.learn(clip.bound(1.0, 100.0), torch.tensor([0.0, 1e12]), 100.0)
    assert clip.clip_norm == 0.5


def test_a_checkpoint_keeps_the_clip():
    clip, other = Quantile(start=0.3), Quantile()
    other.load_state_dict(clip.state_dict())
    assert other.clip_norm == 0.3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantile": 0.0}, "quantile"),
        ({"quantile": 1.0}, "quantile"),
        ({"start": 0.0}, "start"),
        ({"step": -1.0}, "step"),
        ({"deviation": 0.0}, "deviation"),
        ({"low": 2.0}, "start must be from"),
    ],
)
def test_nonsense_is_refused(options, says):
    with pytest.raises(InvalidValue, match=says):
        Quantile(**options)


def test_it_is_the_same_with_no_records_at_all():
    bound = ClipCounted(1.0, 0.01)
    assert bound.read(torch.zeros(3))[1] == 0.0
