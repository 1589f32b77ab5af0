"""Text and numbers as they are shown."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.queries.events import (
    ApproximateEvent,
    BoundedRangeEvent,
    ComposedEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    TuningEvent,
    ZcdpEvent,
)
from farthing.report.subject import noise_of, priced
from farthing.report.words import escape, number, percent, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (1, "1"), (0.5, "0.5"), (3.14159, "3.142"), (-0.25, "-0.25"), (1234567, "1,234,567")),
        *((1e-5, "10⁻⁵"), (2.5e-7, "2.5 × 10⁻⁷"), (9.99999e-7, "10⁻⁶"), (1e9, "10⁹")),
        (math.nan, "not a number"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@given(st.floats(min_value=1e-250, max_value=1e250))
def test_a_number_is_read_back_as_itself(value):
    text = number(value).replace(",", "")
    if raised := re.fullmatch("(?:(.*) × )?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text):
        power = raised[2].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        text = f"{raised[1] or 1}e{power}"
    read = float(text)
    assert read == pytest.approx(value, rel=6e-4)


@pytest.mark.parametrize(
    ("value", "text"), [(0.99996, "99.996 %"), (1.0, "100 %"), (0.5, "50 %"), (0, "0 %")]
)
def test_what_is_less_than_all_is_never_written_as_all(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    "mark", ["\u202e", "\u2066", "\x00", "\x1b", "\ufffe", "\ud800", "\u200b", "\u2028x"]
)
def test_what_cannot_be_seen_is_shown_as_such(mark):
    said = plain(f"a{mark}b")
    assert said in ("a\ufffdb", "a xb")
    said.encode()


def test_nothing_is_endless():
    assert len(plain("x" * 10_000, 80)) == 80
    assert plain("  a \n b\t") == "a b"


@given(st.text())
def test_escaped_text_has_no_markup(text):
    assert not set(escape(text)) & set("<>\"'")


@pytest.mark.parametrize(
    ("event", "noise"),
    [
        (GaussianEvent(2.0), 2.0),
        (LaplaceEvent(3.0), 3.0),
        (PoissonEvent(0.1, GaussianEvent(2.0)), 2.0),
        (FixedSizeEvent(1, 9, LaplaceEvent(2.0)), 2.0),
        (DrawnEvent(0.1, GaussianEvent(2.0)), 2.0),
        (RepeatedEvent(GaussianEvent(2.0), 3), 2.0),
        (PureEvent(1.0), None),
        (BoundedRangeEvent(1.0), None),
        (ZcdpEvent(0.1, 1e-6), None),
        (ApproximateEvent(1.0, 1e-6), None),
        (TuningEvent(GaussianEvent(2.0), 10.0, 1.0, 1e-6), None),
        (ComposedEvent((GaussianEvent(2.0), PureEvent(1.0))), None),
    ],
)
def test_every_event_has_words(event, noise):
    assert noise_of(event) == noise
    assert "Event" not in priced(event)
    assert priced(event)
