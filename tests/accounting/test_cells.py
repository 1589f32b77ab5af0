"""Losses on a grid, ours and dp-accounting's: never below the truth, and close to it."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution

from farthing.accounting import cells, gaussian, pld, sampling
from farthing.budget import Adjacency
from farthing.queries.events import (
    ComposedEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
)

ADD, REPLACE, ZERO = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
RELATIONS = {
    ADD: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    REPLACE: dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def on_cells(event, delta, adjacency=ADD, about=None):
    ways = pld.directions(event, adjacency)
    return cells.epsilon(ways, delta, about or 2 * pld.epsilon(event, delta, adjacency))


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize("rate", [0.3, 0.01, 1e-3])
@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_one_step_is_the_closed_form(noise, rate, adjacency, delta):
    event = PoissonEvent(rate, GaussianEvent(noise))
    exact = pld.epsilon(event, delta, adjacency)
    if exact > 0:
        assert exact * (1 - 1e-9) <= on_cells(event, delta, adjacency) <= exact * 1.001


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (8.0, 5), (30.0, 400), (100.0, 5000)])
def test_gaussians_are_exact_up_to_a_thousandth(noise, steps, delta):
    exact = gaussian.epsilon(steps**0.5 / noise, delta)
    found = on_cells(RepeatedEvent(GaussianEvent(noise), steps), delta)
    assert exact * (1 - 1e-9) <= found <= exact * 1.001


@pytest.mark.parametrize(("noise", "rate", "steps"), [(8.0, 0.05, 400), (3.0, 0.01, 30), (20.0, 0.5, 64)])
def test_seen_draws_are_the_sampling_theorem(noise, rate, steps):
    exact = sampling.epsilon(noise, rate, steps, 1e-6)
    found = on_cells(RepeatedEvent(DrawnEvent(rate, GaussianEvent(noise)), steps), 1e-6, ZERO, 2 * exact)
    assert exact * (1 - 1e-9) <= found <= exact * 1.001


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.1, 421), (0.1, 2.0, 60), (0.02, 4.0, 3000)])
def test_many_steps_agree_with_the_inversion(rate, noise, steps, adjacency):
    event = RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps)
    inverted = pld.epsilon(event, 1e-5, adjacency)
    assert inverted * (1 - 1e-7) <= on_cells(event, 1e-5, adjacency) <= inverted * 1.001


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_few_steps_at_a_tiny_rate_are_within_a_thousandth_of_an_oracles_bracket(adjacency, delta):
    rate, noise, steps = 1.45e-4, 1.58, 8

    def oracle(pessimistic):
        found = privacy_loss_distribution.from_gaussian_mechanism(
            noise,
            sampling_prob=rate,
            value_discretization_interval=2e-6,
            pessimistic_estimate=pessimistic,
            neighboring_relation=RELATIONS[adjacency],
        )
        return found.self_compose(steps).get_epsilon_for_delta(delta)

    found = pld.epsilon(RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps), delta, adjacency)
    low, high = oracle(False), oracle(True)
    assert low <= found <= 1.001 * high


def test_a_few_records_of_many_are_within_a_thousandth_of_finer_cells(monkeypatch):
    event = RepeatedEvent(FixedSizeEvent(3, 5305, GaussianEvent(3.58)), 7205)
    found = pld.epsilon(event, 1e-6, REPLACE)
    monkeypatch.setattr(cells, "_FINE", 0.01)
    monkeypatch.setattr(cells, "_LONGEST", 2**18)
    finer = cells.epsilon(pld.directions(event, REPLACE), 1e-6, found)
    assert finer <= found <= 1.001 * finer
    assert found < 0.1284  # 0.12883 by smoothed frequencies


def test_what_lies_beyond_the_grid_is_counted(monkeypatch):
    monkeypatch.setattr(cells, "_SHARE", 0.3)
    event = RepeatedEvent(PoissonEvent(0.01, GaussianEvent(0.8)), 20)
    exact = pld.epsilon(event, 1e-6)
    assert exact * (1 - 1e-7) <= on_cells(event, 1e-6)


def test_no_grid_is_claimed_for_other_steps():
    from farthing.queries.events import LaplaceEvent

    assert cells.epsilon(pld.directions(LaplaceEvent(2.0), ADD), 1e-5, 1.0) == float("inf")


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_the_reference_bounds_a_gaussian_closely(adjacency):
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    exact = gaussian.epsilon(shift / 3.0 * math.sqrt(4), 1e-6)
    found = cells.reference_epsilon(RepeatedEvent(GaussianEvent(3.0), 4), 1e-6, adjacency, exact)
    assert exact <= found <= exact * 1.0001


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_reference_bounds_one_sampled_step(rate, adjacency):
    event = PoissonEvent(rate, GaussianEvent(1.0))
    exact = pld.epsilon(event, 1e-6, adjacency)  # a closed form
    assert (
        exact <= cells.reference_epsilon(event, 1e-6, adjacency, exact) * (1 + 1e-9) <= exact * 1.001 + 1e-5
    )


def test_few_steps_are_as_tight_as_the_reference():
    plan = RepeatedEvent(PoissonEvent(0.01, GaussianEvent(1.0)), 3)
    found = pld.epsilon(plan, 1e-6)
    assert found <= cells.reference_epsilon(plan, 1e-6, Adjacency.ADD_REMOVE, found) * (1 + 1e-3)


def test_the_reference_bounds_laplace_noise():
    plan = RepeatedEvent(LaplaceEvent(2.0), 5)
    found = cells.reference_epsilon(plan, 1e-5, Adjacency.ADD_REMOVE, 2.0)
    assert 1.5 < found < 2.5
    assert cells.reference_epsilon(plan, 1e-5, Adjacency.REPLACE_ONE, 2.0) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        PureEvent(0.1),
        FixedSizeEvent(1, 10, GaussianEvent(1.0)),
        ComposedEvent((GaussianEvent(1.0), PureEvent(0.1))),
    ],
)
def test_the_reference_leaves_unknown_events_alone(event):
    assert cells.reference_epsilon(event, 1e-5, Adjacency.ADD_REMOVE, 1.0) == math.inf


def test_the_reference_is_not_asked_where_its_own_tails_would_show():
    event = GaussianEvent(1.0)
    assert cells.reference_epsilon(event, 1e-13, Adjacency.ADD_REMOVE, 1.0) == math.inf
    assert cells.reference_epsilon(event, 1e-5, Adjacency.ADD_REMOVE, 0.0) == math.inf
    assert cells.reference_epsilon(event, 1e-5, Adjacency.ADD_REMOVE, math.inf) == math.inf
