"""What notebooks show of ledgers, guarantees, runs and verdicts."""

import base64
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import farthing as ft
from farthing.audit.auditing import Verdict
from farthing.report import notebook

QUERY = ft.Query(
    ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), ft.Gaussian(30.0)
)


@pytest.fixture
def ledger():
    begun = ft.Ledger(ft.Budget(1.0, 1e-5))
    attached = begun.over(ft.Rows(np.ones((20, 2))))
    begun.run = ft.run(ft.Step(t, None, (attached.ask(QUERY, np.zeros(2)).receipt,)) for t in range(1, 5))
    return begun


def test_each_has_a_table_of_its_facts(ledger):
    verdict = Verdict(0.5, ft.Budget(1.0, 1e-5), 100, 0.99, "<a canary>", caught=2.5)
    for one, facts in (
        (ledger, ("gone with its process", "add-remove")),
        (ledger.guarantee, ("per record", "Smith &amp; Thakurta 2022", "strong")),
        (ledger.run, ("<td style='text-align:left'>4</td>", "ended because")),
        (verdict, ("not refuted", "2.5", "&lt;a canary&gt;")),
    ):
        text = one._repr_html_()
        ElementTree.fromstring(text)
        assert all(fact in text for fact in facts), text


def test_a_ledger_and_a_run_are_drawn(ledger, tmp_path):
    for one, title in ((ledger, "The budget, answer by answer"), (ledger.run, "Noise, answer by answer")):
        drawn = one.plot()
        assert drawn.title == title
        drawn.save(tmp_path / "a.svg")
        assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
        inside = re.search(r"base64,([^']*)'", drawn._repr_html_())
        assert base64.b64decode(inside[1]).decode() == drawn.svg


def test_a_training_of_a_network_is_shown_and_drawn():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    data = torch.zeros(400, 3), torch.zeros(400, dtype=torch.int64)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    training = ft.torch.train(torch.nn.Linear(3, 2), loss, data, epsilon=1.0, delta=1e-5, steps=4)
    assert sum(1 for _ in training) == 4
    text = training._repr_html_()
    ElementTree.fromstring(text)
    facts = ("Linear", "4 made", "4 planned", "100 %", "-DP, add-remove, per record, against anyone, by pld")
    assert all(fact in text for fact in facts), text
    assert training.plot().title == "The budget, answer by answer"


def test_a_picture_has_a_ground_of_its_own(ledger):
    """A page may be light where the reader prefers dark, and letters would then be light on light."""
    assert "svg{background:var(--card)" in ledger.plot().svg


def test_what_cannot_be_drawn_says_so(ledger):
    with pytest.raises(ft.InvalidValue, match="nothing to draw"):
        ft.Ledger(ft.Budget(1.0, 1e-5)).plot()
    for show in (notebook.plot, notebook.html):
        with pytest.raises(ft.Unsupported, match="of int"):
            show(3)
