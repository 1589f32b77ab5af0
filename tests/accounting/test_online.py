"""The online accountant: the same figures as `pld`, in any order, at any time, never below the truth."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian, pld
from farthing.accounting.online import OnlineAccountant
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.events import (
    ComposedEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)


def poisson(rate, noise):
    return PoissonEvent(rate, GaussianEvent(noise))


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(
    ("event", "steps"),
    [
        (poisson(0.01, 4.0), 10_000),
        (poisson(0.01, 1.0), 10_000),
        (poisson(0.1, 2.0), 500),
        (GaussianEvent(50.0), 1000),
        (FixedSizeEvent(1, 100, GaussianEvent(1.8)), 1800),
    ],
)
def test_same_as_pld(event, steps, adjacency):
    accountant = OnlineAccountant(adjacency)
    accountant.add(event, steps)
    plan = RepeatedEvent(event, steps)
    for delta in (1e-3, 1e-5, 1e-8):
        tight = pld.epsilon(plan, delta, adjacency)
        found = accountant.epsilon(delta)
        assert found == pytest.approx(tight, rel=1e-6)
        assert accountant.delta(found) == pytest.approx(delta, rel=0.1)
        assert accountant.delta(found) >= pld.delta(plan, found, adjacency) * (1 - 1e-6)


def test_hundreds_of_noises_in_any_order():
    rng = np.random.default_rng(0)
    noises = rng.uniform(1.0, 5.0, 400)
    forth, back = OnlineAccountant(), OnlineAccountant()
    for k in range(400):
        forth.add(poisson(0.01, float(noises[k])))
        back.add(poisson(0.01, float(noises[-1 - k])))
        if k % 100 == 50:
            forth.delta(1.0)
    plan = ComposedEvent(tuple(poisson(0.01, float(noise)) for noise in noises))
    for delta in (1e-5, 1e-8):
        tight = pld.epsilon(plan, delta)
        assert forth.epsilon(delta) == pytest.approx(tight, rel=1e-6)
        assert back.epsilon(delta) == pytest.approx(tight, rel=1e-6)
    # never below eight groups, each at its quietest: more noise never costs more
    noises.sort()
    options = {"sampling_prob": 0.01, "pessimistic_estimate": False, "use_connect_dots": False}
    groups = [
        peer.from_gaussian_mechanism(float(group[-1]), value_discretization_interval=1e-4, **options)
        for group in np.split(noises, 8)
    ]
    total = groups[0].self_compose(50)
    for group in groups[1:]:
        total = total.compose(group.self_compose(50))
    assert 0.1 < total.get_epsilon_for_delta(1e-5) <= forth.epsilon(1e-5)


@pytest.mark.slow
def test_a_thousand_distinct_noises():
    noises = np.random.default_rng(0).uniform(1.0, 5.0, 1000)
    accountant = OnlineAccountant()
    for noise in noises:
        accountant.add(poisson(0.01, float(noise)))
        accountant.delta(1.0)
    plan = ComposedEvent(tuple(poisson(0.01, float(noise)) for noise in noises))
    for delta in (1e-3, 1e-5, 1e-8):
        assert accountant.epsilon(delta) == pytest.approx(pld.epsilon(plan, delta), rel=1e-6)
    assert accountant.delta(1.0) == pytest.approx(pld.delta(plan, 1.0), rel=1e-3)


def test_interleaved_questions_do_not_disturb_each_other():
    """The line that suits one δ must not be kept for another."""
    busy = OnlineAccountant()
    rng = np.random.default_rng(1)
    steps = 0
    for _ in range(12):
        count = int(rng.integers(1, 400))
        steps += count
        busy.add(poisson(0.02, 1.5), count)
        for delta in rng.permutation([0.1, 1e-3, 1e-5, 1e-8, 1e-12]):
            tight = pld.epsilon(RepeatedEvent(poisson(0.02, 1.5), steps), delta)
            assert busy.epsilon(delta) == pytest.approx(tight, rel=1e-5, abs=1e-6)
        for epsilon in (0.1, 1.0, 4.0):
            tight = pld.delta(RepeatedEvent(poisson(0.02, 1.5), steps), epsilon)
            if 1e-12 < tight < 0.9:
                assert busy.delta(epsilon) == pytest.approx(tight, rel=2e-3)


def test_monotone_in_steps():
    accountant = OnlineAccountant()
    last_epsilon, last_delta = 0.0, 0.0
    for k in range(120):
        accountant.add(poisson(0.02, 1.0 + k % 7))
        epsilon, delta = accountant.epsilon(1e-5), accountant.delta(0.5)
        assert epsilon >= last_epsilon * (1 - 1e-4)
        assert delta >= last_delta * (1 - 1e-4) or k < 64  # with few steps the bound is loose
        last_epsilon, last_delta = epsilon, delta


@given(
    st.lists(
        st.tuples(st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([0.8, 2.0, 9.0]), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1e-2, 1e-5, 1e-9]),
    st.sampled_from(list(Adjacency)),
)
@settings(max_examples=40, deadline=None)
def test_never_below_gaussian_parts_nor_far_above_pld(parts, delta, adjacency):
    accountant = OnlineAccountant(adjacency)
    for rate, noise, count in parts:
        accountant.add(poisson(rate, noise), count)
    found = accountant.epsilon(delta)
    shift = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    mu = math.sqrt(sum(count * (shift / noise) ** 2 for rate, noise, count in parts if rate == 1))
    assert found >= gaussian.epsilon(mu, delta) * (1 - 1e-9)
    plan = ComposedEvent(tuple(RepeatedEvent(poisson(rate, noise), n) for rate, noise, n in parts))
    assert found <= pld.epsilon(plan, delta, adjacency) * 1.001 + 1e-3


def test_many_single_steps():
    one_by_one, at_once = OnlineAccountant(), OnlineAccountant()
    for k in range(9000):  # past the point where sums are formed anew
        one_by_one.add(poisson(0.01, 2.0))
        if k % 10 == 0:
            one_by_one.delta(1.0)
    at_once.add(poisson(0.01, 2.0), 9000)
    assert one_by_one.epsilon(1e-6) == pytest.approx(at_once.epsilon(1e-6), rel=1e-7)
    assert one_by_one.plan == ComposedEvent((RepeatedEvent(poisson(0.01, 2.0), 9000),))


def test_bounded_losses():
    accountant = OnlineAccountant()
    assert accountant.epsilon(1e-5) == 0.0
    assert accountant.delta(0.0) == 0.0
    accountant.add(PureEvent(0.1), 3)
    accountant.add(LaplaceEvent(10.0), 2)
    assert accountant.delta(0.51) == 0.0
    assert accountant.epsilon(1e-9) <= 0.5 * (1 + 1e-8)


def test_nested_events_are_unrolled():
    accountant = OnlineAccountant()
    accountant.add(ComposedEvent((RepeatedEvent(poisson(0.1, 2.0), 3), GaussianEvent(9.0))), 2)
    assert accountant.plan == ComposedEvent(
        (RepeatedEvent(poisson(0.1, 2.0), 6), RepeatedEvent(GaussianEvent(9.0), 2))
    )


@pytest.mark.parametrize("count", [0, -1, 1.5, True, math.nan, 2**62])
def test_bad_counts(count):
    with pytest.raises(InvalidValue, match="count must be"):
        OnlineAccountant().add(GaussianEvent(1.0), count)


def test_bad_input():
    accountant = OnlineAccountant()
    with pytest.raises(Unsupported):
        accountant.add(ZcdpEvent(0.1))
    with pytest.raises(InvalidValue):
        accountant.epsilon(0.0)
    with pytest.raises(InvalidValue):
        accountant.delta(-1.0)
    accountant.add(poisson(0.5, 1e-200))
    assert accountant.epsilon(1e-5) == math.inf
    assert accountant.delta(1.0) == pytest.approx(0.5)  # seen whenever drawn, and drawn half the time
