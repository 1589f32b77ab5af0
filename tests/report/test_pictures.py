"""What is drawn lies on the paper, where its numbers say, and its labels keep apart."""

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.audit.auditing import Verdict
from farthing.budget import Budget
from farthing.report import Score
from farthing.report.drawing import HEIGHT, WIDTH, frame
from farthing.report.pictures import audited, burned, pictures, profile, remaining, scored

LETTER = 7.5  # of a wide font


def texts(svg, kind=None):
    return [one for one in ElementTree.fromstring(svg).iter("text") if kind in (None, one.get("class"))]


def span(one):
    wide, x = LETTER * len(one.text), float(one.get("x"))
    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[one.get("text-anchor")]
    return left, left + wide


def apart(found):
    """Labels on one line do not touch, and none leaves the paper."""
    lines = {}
    for one in found:
        left, right = span(one)
        assert left >= -3, one.text
        assert right <= WIDTH + 3, one.text
        lines.setdefault(one.get("y"), []).append((left, right))
    for line in lines.values():
        line.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(line)), line


def coordinates(svg):
    for one in ElementTree.fromstring(svg).iter():
        for name in ("x1", "x2", "cx"):
            if one.get(name):
                yield float(one.get(name)), WIDTH
        for x, _ in re.findall(r"(-?[\d.]+) (-?[\d.]+)", one.get("d", "")):
            yield float(x), WIDTH


def test_all_that_is_drawn_is_on_the_paper(full):
    for picture in pictures(full):
        apart(texts(picture.svg))
        assert all(-1 <= at <= most + 1 for at, most in coordinates(picture.svg)), picture.title


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-4, 1e7),
    st.floats(0, 1e5),
    st.floats(1e-5, 1e6),
    st.booleans(),
    st.booleans(),
)
def test_labels_of_axes_keep_apart(low, width, bottom, height, log_x, log_y):
    x = (abs(low) + 1e-3, (abs(low) + 1e-3) * (1.1 + width)) if log_x else (low, low + width)
    y = (bottom + 1e-9, (bottom + 1e-9) * (1.1 + height)) if log_y else (bottom, bottom + height)
    if x[1] - x[0] < 1e-6 * abs(x[1]) or y[1] - y[0] < 1e-6 * abs(y[1]):
        return
    drawn = frame(x, y, across="ε", upwards="δ", log_x=log_x, log_y=log_y)
    found = ElementTree.fromstring(f"<svg>{''.join(drawn.parts)}</svg>").iter("text")
    ticks = [one for one in found if one.get("class") == "tick"]
    across = [one for one in ticks if float(one.get("y")) > HEIGHT - 40]
    lines = sorted(span(one) for one in across)
    assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(lines))


def test_the_limit_is_drawn_where_the_claim_is(full):
    picture = burned(full)
    tree = ElementTree.fromstring(picture.svg)
    limit = next(one for one in tree.iter("line") if one.get("class") == "limit")
    ticks = {one.text: float(one.get("y")) - 4 for one in texts(picture.svg, "tick")}
    assert float(limit.get("y1")) == pytest.approx(ticks["1.00"], abs=0.1)
    assert picture.rows[-1][0] == "40"
    assert "After 40 answers" in picture.caption


def test_the_claim_is_on_the_curve(full):
    picture = profile(full)
    tree = ElementTree.fromstring(picture.svg)
    curve = next(one for one in tree.iter("path") if one.get("class") == "line c0")
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", curve.get("d"))]
    mark = next(one for one in tree.iter("rect") if "dot" in one.get("class"))
    x = float(mark.get("x")) + float(mark.get("width")) / 2
    y = float(mark.get("y")) + float(mark.get("height")) / 2
    assert min(abs(x - a) + abs(y - b) for a, b in points) < 0.1


def test_scores_are_told_apart_by_shape_and_named(full):
    picture = scored(full)
    tree = ElementTree.fromstring(picture.svg)
    assert sum("dot c0" in (one.get("class") or "") for one in tree.iter("circle")) == 3
    assert sum("dot c1" in (one.get("class") or "") for one in tree.iter("rect")) == 1
    assert [said for _, said in picture.legend] == [
        "auto",
        "DP-SGD: 84 % at ε 1",
        "without privacy: 85.2 %",
        "guessing: 76.4 %",
    ]
    assert ("auto", "1", "85.1 %") in picture.rows
    assert ("guessing", "none", "76.4 %") in picture.rows


def test_other_measures_are_numbers(full):
    picture = scored(replace(full, measure="rmse", scores=(Score(label="a", epsilon=1.0, value=12.5),)))
    assert ("a", "1", "12.5") in picture.rows
    assert "%" not in picture.svg
    assert scored(replace(full, scores=(Score(label="g", epsilon=None, value=0.7),))) is None


def test_bars_are_as_long_as_rounds(federated_run):
    picture = remaining(federated_run())
    tree = ElementTree.fromstring(picture.svg)
    bars = {
        kind: [float(one.get("width")) for one in tree.iter("rect") if one.get("class") == kind]
        for kind in ("whole", "bar c0")
    }
    assert bars["whole"][0] / bars["whole"][2] == pytest.approx(142 / 1827, rel=1e-3)
    assert bars["bar c0"][2] / bars["whole"][2] == pytest.approx(1500 / 1827, rel=1e-3)
    assert "162 can still afford another" in picture.caption
    assert picture.rows[2] == ("1", "162", "1,827", "1,500", "17.9 %")


def test_many_kinds_of_clients_are_counted(federated_run):
    groups = [(0.1 * (1 + kind), 10, 100, min(100, 9 * kind)) for kind in range(15)]
    picture = remaining(federated_run(groups))
    counts = [int(count) for _, count in picture.rows]
    assert sum(counts) == 150
    assert counts[0] == 30  # kinds 12, 13 and 14 took all
    assert counts[10] == 20  # the first took none, the second nine
    apart(texts(picture.svg))


def test_nobody_is_no_picture(federated_run):
    assert remaining(federated_run(())) is None


def test_attacks_are_sorted_and_broken_ones_red(full):
    verdicts = [(f"m{n}", Verdict(n / 10, Budget(1.0, 1e-5), 9, 0.99, "an attack")) for n in range(20)]
    picture = audited(replace(full, audit=tuple(verdicts)))
    tree = ElementTree.fromstring(picture.svg)
    assert sum(one.get("class") == "bad" for one in tree.iter("rect")) == 9  # 1.1 to 1.9
    assert "6 weakest are left out" in picture.caption
    assert texts(picture.svg, "name")[0].text.startswith("m19")
