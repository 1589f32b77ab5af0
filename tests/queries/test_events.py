"""Events survive the journal and unroll."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.errors import InvalidValue
from farthing.queries import events

sizes = st.floats(1e-6, 1e6)
simple = st.one_of(
    st.builds(events.GaussianEvent, sizes),
    st.builds(events.LaplaceEvent, sizes),
    st.builds(events.PureEvent, sizes),
    st.builds(events.BoundedRangeEvent, sizes),
    st.builds(events.ZcdpEvent, sizes, st.floats(0, 0.5)),
    st.builds(events.ApproximateEvent, sizes, st.floats(0, 0.5)),
)
rates = st.floats(1e-9, 1.0)
sampled = st.one_of(
    simple,
    st.builds(events.PoissonEvent, rates, simple),
    st.builds(events.DrawnEvent, rates, simple),
    st.builds(
        lambda size, more, inner: events.FixedSizeEvent(size, size + more, inner),
        st.integers(1, 99),
        st.integers(0, 99),
        simple,
    ),
)
repeated = st.builds(events.RepeatedEvent, sampled, st.integers(1, 10**9))
anything = st.one_of(sampled, repeated, st.builds(events.ComposedEvent, st.tuples(repeated, sampled)))


@given(anything)
def test_json_round_trip_is_exact(event):
    assert events.decode(json.loads(json.dumps(events.encode(event), allow_nan=False))) == event


@given(repeated, repeated)
def test_flatten_counts(first, second):
    parts = events.flatten(events.RepeatedEvent(events.ComposedEvent((first, second)), 3))
    assert parts == [(first.event, 3 * first.count), (second.event, 3 * second.count)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: events.GaussianEvent(0.0),
        lambda: events.GaussianEvent(float("nan")),
        lambda: events.PoissonEvent(1.5, events.GaussianEvent(1.0)),
        lambda: events.FixedSizeEvent(3, 2, events.GaussianEvent(1.0)),
        lambda: events.RepeatedEvent(events.GaussianEvent(1.0), 0),
        lambda: events.ZcdpEvent(-1.0),
    ],
)
def test_impossible_events_cannot_be_made(make):
    with pytest.raises(InvalidValue):
        make()
