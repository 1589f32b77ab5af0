"""Ticks lie within the ends, in order, and say what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.report.drawing import Scale, around

FINITE = st.floats(-1e9, 1e9)


@given(FINITE, st.floats(1e-6, 1e9), st.integers(2, 9))
def test_steps_are_round_and_inside(low, width, most):
    scale = Scale(low, low + width, 0, 100)
    if scale.high - scale.low < 1e-9 * max(abs(low), 1):  # nothing between neighbouring floats
        return
    ticks = scale.ticks(most)
    assert ticks == sorted(ticks)
    assert len(ticks) <= most + 2
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in ticks)
    assert len(scale.words(ticks)) == len(ticks)


@given(st.floats(1e-12, 1e6), st.floats(1.05, 1e9), st.integers(2, 9))
def test_powers_are_inside(low, ratio, most):
    scale = Scale(low, low * ratio, 0, 100, log=True)
    ticks = scale.ticks(most)
    assert len(ticks) >= 2
    assert all(low * (1 - 1e-6) <= tick <= low * ratio * (1 + 1e-6) for tick in ticks)
    assert len(set(scale.words(ticks))) == len(ticks)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1), st.booleans(), st.booleans())
def test_ends_hold_every_value(values, log, zero):
    low, high = around(values, log=log, zero=zero)
    assert low < high
    assert all(low <= value <= high for value in values)


def test_ends_map_to_ends():
    assert [Scale(1, 100, 10, 30, log=True)(value) for value in (1, 10, 100)] == pytest.approx([10, 20, 30])
    assert Scale(0, 0.25, 0, 1).words([0, 0.025, 0.05]) == ["0.000", "0.025", "0.050"]
    assert Scale(0, 1, 0, 1).words([0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
