"""Events survive the journal and unroll."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing import events as ev
from farthing.errors import InvalidValue

sizes = st.floats(1e-6, 1e6)
simple = st.one_of(
    st.builds(ev.GaussianEvent, sizes),
    st.builds(ev.LaplaceEvent, sizes),
    st.builds(ev.PureEvent, sizes),
    st.builds(ev.BoundedRangeEvent, sizes),
    st.builds(ev.ZcdpEvent, sizes, st.floats(0, 0.5)),
    st.builds(ev.ApproximateEvent, sizes, st.floats(0, 0.5)),
)
rates = st.floats(1e-9, 1.0)
sampled = st.one_of(
    simple,
    st.builds(ev.PoissonEvent, rates, simple),
    st.builds(ev.DrawnEvent, rates, simple),
    st.builds(
        lambda size, more, inner: ev.FixedSizeEvent(size, size + more, inner),
        st.integers(1, 99),
        st.integers(0, 99),
        simple,
    ),
)
repeated = st.builds(ev.RepeatedEvent, sampled, st.integers(1, 10**9))
anything = st.one_of(sampled, repeated, st.builds(ev.ComposedEvent, st.tuples(repeated, sampled)))


@given(anything)
def test_json_round_trip_is_exact(event):
    assert ev.decode(json.loads(json.dumps(ev.encode(event), allow_nan=False))) == event


@given(repeated, repeated)
def test_flatten_counts(first, second):
    parts = ev.flatten(ev.RepeatedEvent(ev.ComposedEvent((first, second)), 3))
    assert parts == [(first.event, 3 * first.count), (second.event, 3 * second.count)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ev.GaussianEvent(0.0),
        lambda: ev.GaussianEvent(float("nan")),
        lambda: ev.PoissonEvent(1.5, ev.GaussianEvent(1.0)),
        lambda: ev.FixedSizeEvent(3, 2, ev.GaussianEvent(1.0)),
        lambda: ev.RepeatedEvent(ev.GaussianEvent(1.0), 0),
        lambda: ev.ZcdpEvent(-1.0),
    ],
)
def test_impossible_events_cannot_be_made(make):
    with pytest.raises(InvalidValue):
        make()
