"""The grid for a few steps: an upper bound, close to the truth, infinite where it does not apply."""

import math

import pytest

from farthing.accounting import gaussian, grid, pld
from farthing.budget import Adjacency
from farthing.queries.events import (
    ComposedEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_gaussian_is_bounded_closely(adjacency):
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    exact = gaussian.epsilon(shift / 3.0 * math.sqrt(4), 1e-6)
    found = grid.epsilon(RepeatedEvent(GaussianEvent(3.0), 4), 1e-6, adjacency, exact)
    assert exact <= found <= exact * 1.0001


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_one_sampled_step(rate, adjacency):
    event = PoissonEvent(rate, GaussianEvent(1.0))
    exact = pld.epsilon(event, 1e-6, adjacency)  # a closed form
    assert exact <= grid.epsilon(event, 1e-6, adjacency, exact) * (1 + 1e-9) <= exact * 1.001 + 1e-5


def test_few_steps_are_tightened():
    plan = RepeatedEvent(PoissonEvent(0.01, GaussianEvent(1.0)), 3)
    found = pld.epsilon(plan, 1e-6)
    assert found <= grid.epsilon(plan, 1e-6, Adjacency.ADD_REMOVE, found) * (1 + 1e-3)


def test_laplace():
    plan = RepeatedEvent(LaplaceEvent(2.0), 5)
    found = grid.epsilon(plan, 1e-5, Adjacency.ADD_REMOVE, 2.0)
    assert 1.5 < found < 2.5
    assert grid.epsilon(plan, 1e-5, Adjacency.REPLACE_ONE, 2.0) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        PureEvent(0.1),
        FixedSizeEvent(1, 10, GaussianEvent(1.0)),
        ComposedEvent((GaussianEvent(1.0), PureEvent(0.1))),
    ],
)
def test_unknown_events_are_left_alone(event):
    assert grid.epsilon(event, 1e-5, Adjacency.ADD_REMOVE, 1.0) == math.inf


def test_where_its_own_tails_would_show():
    event = GaussianEvent(1.0)
    assert grid.epsilon(event, 1e-13, Adjacency.ADD_REMOVE, 1.0) == math.inf
    assert grid.epsilon(event, 1e-5, Adjacency.ADD_REMOVE, 0.0) == math.inf
    assert grid.epsilon(event, 1e-5, Adjacency.ADD_REMOVE, math.inf) == math.inf
