"""The page: well-formed, whole, free of scripts and of anything from elsewhere, whatever it is given."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting.filters import BasicFilter
from farthing.ledger.journal import Journal
from farthing.report import Score, Subject, broken, page
from farthing.report.drawing import STYLE
from farthing.report.statement import statement

TITLES = [
    "The budget, answer by answer",
    "One guarantee, every ε and δ",
    "Accuracy against ε",
    "What each client has left",
    "Noise, answer by answer",
    "Clipping norm, answer by answer",
    "Attacks beside the claim",
]
HOSTILE = [
    "<script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</svg><img src=x onerror=alert(1)>",
    "\" onmouseover=\"alert(1)' onclick='x",
    "]]> <![CDATA[ &amp; &#x3c;script&#x3e; <!-- -->",
    "\u202egnihtyna\u2066 \u200b\ufeff",
    "\x00\x01\x1b[31m\ud800\ufffe\uffff",
    "javascript:alert(1) https://example.org/?q=",
    "{}%s$x ${7*7} {{7*7}}",
    "x" * 10_000,
    "ا" * 5_000,
    "",
]


class Read(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def wellformed(text):
    tree = ElementTree.fromstring(text)  # as strict as can be
    found = Read(text)
    for tag, attributes in found.tags:
        assert tag not in ("script", "iframe", "object", "embed", "link", "img", "form", "base", "a"), tag
        for name in attributes:
            assert not name.startswith("on"), name
            assert name not in ("src", "href", "style", "xlink:href", "action", "srcset"), name
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    return tree, found


def test_it_is_one_file_that_needs_nothing(full):
    text = page(full)
    tree, found = wellformed(text)
    assert not re.search(r"url\(|@import|https?:|//", text)
    assert [tag for tag, _ in found.tags].count("style") == 1
    policy = tree.find("head/meta[@http-equiv='Content-Security-Policy']").get("content")
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert len(text) < 200_000


def test_every_picture_is_there_and_says_what_it_is(full):
    tree, _ = wellformed(page(full))
    assert [figure.find("figcaption/h3").text for figure in tree.iter("figure")] == TITLES
    drawings = [svg for svg in tree.iter("svg") if svg.get("role") == "img"]
    assert len(drawings) == len(TITLES)
    for svg in drawings:
        title, description = svg.find("title"), svg.find("desc")
        assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text
        assert len(description.text) > 20
    for table in tree.iter("table"):
        assert list(table.iter("th"))


def test_the_statement_comes_first_and_in_order(full):
    tree, _ = wellformed(page(full))
    heads = ["".join(one.itertext()) for one in tree.iter() if one.tag in ("h1", "h2", "h3")]
    concerns = [one.name for one in statement(full)]
    order = ["Income", "Privacy statement", *concerns, "Federated clients", "Pictures", *TITLES]
    assert heads == [*order, "Audit", "Every attack", "The ledger", "Sign-off"]


@pytest.mark.parametrize(
    ("left_out", "without"),
    [
        (TITLES[2], {"scores": ()}),
        (TITLES[3], {"federated": None}),
        (TITLES[5], {"clips": ()}),
        (TITLES[6], {"audit": ()}),
    ],
)
def test_a_picture_without_data_is_left_out(full, left_out, without):
    tree, _ = wellformed(page(replace(full, **without)))
    assert [f.find("figcaption/h3").text for f in tree.iter("figure")] == [t for t in TITLES if t != left_out]


def test_a_ledger_that_was_never_asked_has_no_pictures_of_answers():
    tree, found = wellformed(page(Subject.of(ft.Ledger(ft.Budget(1.0, 1e-5)), title="t", method="m")))
    assert [f.find("figcaption/h3").text for f in tree.iter("figure")] == [TITLES[1]]
    pure = Subject.of(ft.Ledger(ft.Budget(1.0, 0.0)), title="t", method="m")
    tree, found = wellformed(page(pure))
    assert list(tree.iter("figure")) == []
    assert "Pictures" not in found.texts


def test_no_guarantee_looks_like_none(seeded, full):
    with Journal(seeded) as journal:
        subject = Subject.of(journal, title="t", method="m")
    tree, found = wellformed(page(subject))
    assert tree.find("body").get("class") == "void"
    said = " ".join(found.texts)
    assert "NO PRIVACY GUARANTEE" in said
    assert "None of this holds" in said
    assert tree.find("head/title").text.startswith("No privacy guarantee")
    assert "-differential privacy" not in said
    assert not {TITLES[0], TITLES[1]} & set(found.texts)
    assert wellformed(page(full))[0].find("body").get("class") is None


def test_warnings_are_at_the_top(full):
    said = " ".join(Read(page(replace(full, partial=True))).texts)
    assert "Partial run" in said
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), float_noise=True)
    assert "Float noise" in " ".join(Read(page(Subject.of(ledger, title="t", method="m"))).texts)


def test_a_broken_ledger_is_red_and_says_nothing_else():
    tree, found = wellformed(broken("<b>", "row 5 was <changed>"))
    assert tree.find("body").get("class") == "void"
    assert "row 5 was <changed>" in found.texts
    assert not list(tree.iter("svg"))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_come_from(full, federated_run, name):
    hostile = replace(
        full,
        title=name,
        method=name,
        sampler=name,
        measure=name,
        scores=(*(replace(score, label=name + score.label) for score in full.scores),),
        released=(name, name),
        tuning=name,
        federated=federated_run(method=name),
        guarantee=replace(full.guarantee, accountant=name, theorem=name, note=name),
        audit=tuple((name, replace(verdict, attack=name, assumption=name)) for _, verdict in full.audit),
        verified=name,
    )
    text = page(hostile)
    wellformed(text)
    text.encode()
    assert len(text) < 400_000
    for mark in "\u202e\u2066\u200b\x00\x1b":
        assert mark not in text
    if "script>" in name:
        assert name in " ".join(Read(text).texts)  # shown as what it is


@pytest.mark.parametrize("key", HOSTILE[:7])
def test_keys_in_the_ledger_are_text(tmp_path, queries, key):
    import numpy as np

    key = key.encode(errors="replace").decode() or "key"
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=tmp_path / "a.ledger") as ledger:
        door = ledger.over(ft.Rows(np.ones((10, 2))))
        door.ask(queries["whole"], np.zeros(2), key=key)
        wellformed(page(Subject.of(ledger, title="t", method="m")))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(max_size=60), value=st.floats(), epsilon=st.none() | st.floats())
def test_any_name_and_any_figure(full, name, value, epsilon):
    scores = (*full.scores, Score(label=name, epsilon=epsilon, value=value))
    quick = replace(full, charges=(), rule=BasicFilter(full.budget))  # without the pictures that take time
    wellformed(page(replace(quick, title=name, method=name, scores=scores, measure=name)))


def colours(block):
    return dict(re.findall(r"--(\w+):(#[0-9a-f]{3,6})", block))


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["light", "dark", "print"])
def test_everything_can_be_read(which):
    """WCAG 2.1: 4.5 for text, 3 for lines and marks."""
    palette = colours(re.findall(r":root\{[^}]*\}", STYLE)[which])
    for ink in ("ink", "soft"):
        for paper in ("paper", "card"):
            assert contrast(palette[ink], palette[paper]) >= 4.5
    for tone in ("good", "care", "bad"):
        for paper in (f"{tone}back", "card", "paper"):
            assert contrast(palette[tone], palette[paper]) >= 4.5
        assert contrast(palette["ink"], palette[f"{tone}back"]) >= 4.5
    for series in range(6):
        assert contrast(palette[f"c{series}"], palette["card"]) >= 3
