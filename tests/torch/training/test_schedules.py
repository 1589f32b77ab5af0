"""Bounds of batches: fixed, by the step, in any form, checked against the model before anything is asked."""

import numpy as np
import pytest
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue, Unsupported
from farthing.torch.gradients.clipping import ClipCounted, ClipLayers
from farthing.torch.gradients.layout import Layout
from farthing.torch.training.schedules import Bounds, Quantile

LAYOUT = Layout.of(nn.Linear(3, 2))


def clips(bounds, steps):
    return [bounds.at(t, noise_multiplier=1.0, batch_size=100.0).norm() for t in range(1, steps + 1)]


@pytest.mark.parametrize(
    "clip", [[3.0, 2.0, 1.0], (3.0, 2.0, 1.0), np.array([3.0, 2.0, 1.0]), lambda t: 4 - t]
)
def test_a_clip_for_every_step(clip):
    bounds = Bounds(clip, LAYOUT)
    bounds.covers(3)
    assert clips(bounds, 3) == [3.0, 2.0, 1.0]


def test_one_clip_is_one_bound():
    bounds = Bounds(0.5, LAYOUT)
    assert bounds.at(1, 1.0, 9.0) is bounds.at(7, 2.0, 9.0)
    assert Bounds(bound := ft.ClipNorm(2.0), LAYOUT).at(1, 1.0, 9.0) is bound


def test_bounds_and_numbers_may_follow_each_other():
    layers = ClipLayers((3.0, 4.0), sizes=(6, 2))
    assert clips(Bounds([1.0, layers], LAYOUT), 2) == [1.0, 5.0]


def test_a_quantile_gives_counted_bounds_and_keeps_its_state():
    bounds, other = Bounds(Quantile(start=0.3), LAYOUT), Bounds(Quantile(), LAYOUT)
    assert isinstance(bounds.at(1, 1.0, 100.0), ClipCounted)
    other.load_state_dict(bounds.state_dict())
    assert other.at(1, 1.0, 100.0).clip_norm == 0.3
    assert Bounds(1.0, LAYOUT).state_dict() is None


@pytest.mark.parametrize(
    ("clip", "error", "says"),
    [
        (0.0, InvalidValue, "clip"),
        ("wide", InvalidValue, "clip"),
        ([1.0, -1.0], InvalidValue, "clip"),
        (ft.ClipCoordinates(np.ones(5)), InvalidValue, "5 coordinates, the model 8"),
        (ClipLayers((1.0, 1.0), sizes=(5, 3)), InvalidValue, "ends inside a parameter"),
        (ft.ClipValue(0.0, 1.0), Unsupported, "ClipValue"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(clip, error, says):
    with pytest.raises(error, match=says):
        Bounds(clip, LAYOUT)


def test_a_list_must_be_long_enough():
    with pytest.raises(InvalidValue, match="each of 3 steps, got 2"):
        Bounds([1.0, 2.0], LAYOUT).covers(3)
