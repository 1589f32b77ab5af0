"""The ledger as a table: short ones whole, long ones folded."""

from xml.etree import ElementTree

import numpy as np
import pytest

import farthing as ft
from farthing.report.drawing import table, what


def rows_of(text):
    tree = ElementTree.fromstring(f"<div>{text}</div>")
    return tree, [["".join(cell.itertext()) for cell in row] for body in tree.iter("tbody") for row in body]


def test_a_short_one_is_shown_as_it_is(planned):
    ledger, _ = planned
    rows = tuple(ledger.journal.rows())
    tree, found = rows_of(table(rows))
    assert len(found) == len(rows) == 7
    assert [row[0] for row in found] == [str(row.seq) for row in rows]
    assert found[1][2:5] == [
        "promise",
        "60 × Gaussian noise 4 × bound, on a Poisson sample of rate 0.1",
        "0 %",
    ]
    assert found[-1][4] == "66.7 %"
    assert all(row.hash.startswith(cells[5]) for row, cells in zip(rows, found, strict=True))
    assert not list(tree.iter("details"))
    assert all(head.get("scope") == "col" for head in tree.iter("th"))


def test_a_filter_shows_its_share(filtered):
    ledger, _ = filtered
    _, found = rows_of(table(tuple(ledger.journal.rows())))
    assert found[-1][4] == f"{100 * ledger.share:.1f} %"


@pytest.mark.parametrize(("answers", "left_out"), [(40, 0), (700, 185)])
def test_a_long_one_is_folded(answers, left_out):
    query = ft.Query(
        ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), ft.Gaussian(500.0)
    )
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), block=1)
    door = ledger.over(ft.Rows(np.ones((5, 1))))
    for _ in range(answers):
        door.ask(query, np.zeros(1))
    text = table(tuple(ledger.journal.rows()))
    _, found = rows_of(text)
    assert len(found) == answers + 1 - left_out
    assert f"{answers + 1 - 16:,} rows between" in text
    assert (f"{left_out:,} more rows" in text) == bool(left_out)
    assert found[0][0] == "0"
    assert found[-1][0] == f"{answers:,}"


def test_every_kind_of_row_has_words(tmp_path):
    query = ft.Query(
        ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), ft.Gaussian(9.0)
    )
    file = tmp_path / "a.ledger"
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=file) as ledger:
        ledger.over(ft.Rows(np.ones((5, 1)))).ask(query, np.zeros(1), key="mean")
        ledger.reserve(query, 3)
        ledger.journal.append("note", lambda last: ({"by": "somebody"}, last.state))
    with ft.Ledger.open(file) as ledger:
        words = [what(row) for row in ledger.journal.rows()]
    assert "gdp filter" in words[0]
    assert "under the key mean" in words[1]
    assert words[2] == "the answer under the key mean"
    assert words[4] == "by: somebody"
    assert "of row 3" in words[5]
