"""Dominating pairs: which pair an event gets, and that its two worlds are distributions."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from farthing.accounting import pairs
from farthing.accounting.pairs import DoubleExponential, Mixture, Piece, SeenShift, Shift, TwoPoint, of_event
from farthing.accounting.transform import log_moment
from farthing.budget import Adjacency
from farthing.errors import Unsupported
from farthing.queries.events import (
    ApproximateEvent,
    BoundedRangeEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)

ADD, ONE, ZERO = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
GAUSS = GaussianEvent(2.0)


@pytest.mark.parametrize(
    ("event", "adjacency", "expected"),
    [
        (GAUSS, ADD, (Shift(0.5),)),
        (GAUSS, ZERO, (Shift(0.5),)),
        (GAUSS, ONE, (Shift(1.0),)),
        (PoissonEvent(1.0, GAUSS), ONE, (Shift(1.0),)),
        (FixedSizeEvent(7, 7, GAUSS), ONE, (Shift(1.0),)),
        (FixedSizeEvent(7, 7, GAUSS), ADD, (Shift(1.0),)),
        (LaplaceEvent(4.0), ADD, (DoubleExponential(0.25),)),
        (LaplaceEvent(4.0), ONE, (DoubleExponential(0.5),)),
        (PureEvent(0.3), ONE, (TwoPoint(0.3),)),
        (BoundedRangeEvent(0.3), ADD, (TwoPoint(0.3),)),
        (
            PoissonEvent(0.1, GAUSS),
            ADD,
            (Mixture((Piece(0.1, 0.5, 0.0, 0.0),)), Mixture((Piece(0.0, 0.0, 0.1, 0.5),))),
        ),
        (PoissonEvent(0.1, GAUSS), ONE, (Mixture((Piece(0.1, 0.5, 0.1, -0.5),)),)),
        (FixedSizeEvent(1, 10, GAUSS), ADD, (pairs._symmetric(0.1, 1.0),)),
        (FixedSizeEvent(1, 10, GAUSS), ZERO, (pairs._symmetric(0.1, 1.0),)),
        (FixedSizeEvent(1, 10, GAUSS), ONE, (pairs._symmetric(0.1, 1.0),)),
        (DrawnEvent(0.1, GAUSS), ZERO, (SeenShift(0.1, 0.5),)),
        (DrawnEvent(1.0, GAUSS), ONE, (Shift(1.0),)),
    ],
)
def test_table(event, adjacency, expected):
    assert of_event(event, adjacency) == expected


@given(st.floats(1e-3, 1), st.floats(1e-3, 20))
@settings(max_examples=50, deadline=None)
def test_symmetric_pair_has_mass_one(rate, shift):
    pair = pairs._symmetric(rate, shift)
    above = ndtr(-shift / 2)
    mixed = (1 - rate) * above + rate * ndtr(shift / 2)
    assert above + mixed + pair.atom == pytest.approx(1, abs=1e-15)
    assert pair.atom >= 0
    assert log_moment(pair, 1e-9) == pytest.approx(0, abs=1e-6)


@given(st.floats(1e-300, 2000), st.floats(1e-300, 1, exclude_min=True))
def test_amplification_never_falls_below_and_never_above_pure(epsilon, rate):
    found = pairs._amplified(epsilon, rate)
    assert found <= epsilon * (1 + 4e-15)
    if epsilon < 700:
        assert found >= math.log1p(rate * math.expm1(epsilon))


def test_amplification_of_tiny_epsilon():
    (pair,) = of_event(PoissonEvent(0.3, PureEvent(1e-15)), ADD)
    assert pair.epsilon == pytest.approx(3e-16, rel=1e-12)


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (PoissonEvent(0.1, PureEvent(1.0)), ONE),
        (FixedSizeEvent(1, 10, PureEvent(1.0)), ADD),
        (FixedSizeEvent(1, 10, PureEvent(1.0)), ZERO),
        (PoissonEvent(0.1, PoissonEvent(0.1, GAUSS)), ADD),
        (PoissonEvent(0.1, RepeatedEvent(GAUSS, 3)), ADD),
        (DrawnEvent(0.1, GAUSS), ADD),
        (ZcdpEvent(0.1), ADD),
        (ApproximateEvent(1.0, 1e-6), ADD),
    ],
)
def test_unsupported_says_what_instead(event, adjacency):
    with pytest.raises(Unsupported, match=r"price it with|can be sampled"):
        of_event(event, adjacency)


def test_largest_loss():
    assert pairs.largest_loss(TwoPoint(0.3)) == 0.3
    assert pairs.largest_loss(Shift(0.3)) == math.inf
    add, remove = of_event(PoissonEvent(0.25, GAUSS), ADD)
    assert pairs.largest_loss(add) == math.inf
    assert pairs.largest_loss(remove) == pytest.approx(-math.log(0.75))
    assert pairs.largest_loss(remove) >= -math.log(0.75)


def test_sampled_laplace_noise_moves_twice_as_far_where_a_record_is_replaced():
    (found,) = of_event(FixedSizeEvent(1, 10, LaplaceEvent(4.0)), ONE)
    assert found.epsilon == pytest.approx(math.log1p(0.1 * math.expm1(0.5)))
    (found,) = of_event(PoissonEvent(0.1, LaplaceEvent(4.0)), ADD)
    assert found.epsilon == pytest.approx(math.log1p(0.1 * math.expm1(0.25)))
