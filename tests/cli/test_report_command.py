"""``farthing report``: the page of a ledger that is there, and what is refused."""

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import farthing as ft
from farthing.ledger.journal import Journal
from farthing.noise.lattice import SeededStream
from farthing.report import reading

QUERY = ft.Query(
    ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), ft.Gaussian(30.0)
)
PRIVACY = {
    "guarantee": {"epsilon": 1.0, "delta": 1e-5},
    "method": "auto",
    "steps": 40,
    "records": 300,
    "features": 3,
}
PUBLIC = {
    "schema": {"source": "people.json", "sha256": "ab", "checked_by": "Ann"},
    "columns": [{"name": "age", "low": 0, "high": 9}],
    "target": {"name": "rich", "values": ["no", "yes"]},
}
TEST = {"table": "test.csv", "accuracy": 0.8, "guessing": 0.7, "note": "computed without noise"}
SIMULATED: dict[str, Any] = {
    "method": "addp",
    "guarantee": {
        "epsilon": 1.0,
        "delta": 1e-5,
        "adjacency": "add-remove",
        "unit": "record",
        "observer": "server",
        "accountant": "tight",
        "theorem": "a theorem",
        "note": "",
    },
    "trust": "local",
    "rounds": 70,
    "groups": [{"epsilon": 1.0, "clients": 9, "rounds": 100, "done": 70}],
    "test": TEST,
}
VERDICT: dict[str, Any] = {
    "method": "descent",
    "eps_lower": 0.5,
    "claim": {
        "epsilon": 1.0,
        "delta": 1e-5,
        "adjacency": "add-remove",
        "unit": "record",
        "observer": "anyone",
    },
    "attack": "a canary",
    "trials": 100,
    "confidence": 0.99,
    "assumption": "",
}


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a ledger that was asked ten times."""
    monkeypatch.chdir(tmp_path)
    return _asked(Path("a.ledger"))


def _asked(file: Path, **options: Any) -> Path:
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=file, **options) as begun:
        door = begun.over(ft.Rows(np.ones((20, 2))))
        for _ in range(10):
            door.ask(QUERY, np.zeros(2))
    return file


def _said(file: str = "report.html") -> str:
    return " ".join("".join(ElementTree.parse(file).getroot().itertext()).split())


def _content() -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in Path().iterdir()
        if file.suffix in (".ledger", ".head")
    }


def test_a_page_and_an_untouched_ledger(ledger: Path, run: Any) -> None:
    before = _content()
    done = run("report", str(ledger), "--title", "Wards")
    assert (done.code, done.out) == (0, "")
    assert "report.html is written: (1, 1e-05)-DP" in done.err
    assert _content() == before
    said = _said()
    assert "Wards" in said
    assert "an independent verifier recomputed the cost" in said
    assert "After 10 answers" in said
    assert run("ledger", "verify", str(ledger)).code == 0


@pytest.mark.usefixtures("ledger")
def test_what_other_commands_printed(run: Any) -> None:
    for name, told in (
        ("privacy.json", {**PRIVACY, "settings": {"growth": 0.2}, "test": TEST, "partial": True}),
        ("simulated.json", SIMULATED),
        ("audit.json", {"verdicts": [VERDICT]}),
    ):
        Path(name).write_text(json.dumps(told))
    files = ("--privacy", "privacy.json", "--simulated", "simulated.json", "--audit", "audit.json")
    done = run("report", "a.ledger", *files, "--tuning", "Paid from this ledger", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json == {"format": 1, "report": "report.html", "ok": True, "guaranteed": True}
    said = _said()
    for text in (
        *(
            "Method auto, growth=0.2 · 40 steps · 300 records · 3 features",
            "Partial run",
            "Paid from this ledger",
        ),
        *("9 clients", "30 of 100 rounds left", "a canary", "auto", "addp, 9 clients", "guessing: 70 %"),
        "computed without noise",
    ):
        assert text in said, text


@pytest.mark.usefixtures("ledger")
def test_figures_on_held_out_records_are_within_the_guarantee(run: Any) -> None:
    Path("privacy.json").write_text(json.dumps({**PRIVACY, "test": {**TEST, "note": reading.HELD_OUT}}))
    assert run("report", "a.ledger", "--privacy", "privacy.json").code == 0
    assert "not covered by the guarantee" not in _said()
    assert "Measured within the guarantee" in _said()


@pytest.mark.usefixtures("ledger")
def test_the_guarantee_is_the_ledgers_whatever_a_file_says(run: Any) -> None:
    Path("privacy.json").write_text(json.dumps({**PRIVACY, "epsilon": 0.001}))
    assert run("report", "a.ledger", "--privacy", "privacy.json").code == 0
    assert "ε = 0.001" not in _said()
    assert "(1, 10⁻⁵)-differential privacy" in _said()


def test_facts_about_another_ledger_are_refused(ledger: Path, run: Any) -> None:
    with Journal(ledger) as journal:
        heads = [row.hash for row in journal.rows()]
    for head, code in ((heads[0], 0), (heads[-1], 0), ("00" * 32, 2)):
        Path("privacy.json").write_text(json.dumps({**PRIVACY, "ledger_head": head}))
        done = run("report", "a.ledger", "--privacy", "privacy.json", "--force")
        assert done.code == code
    assert "describes another ledger" in done.err


def test_a_changed_ledger_is_red(ledger: Path, run: Any) -> None:
    with sqlite3.connect(ledger) as database:
        database.execute("UPDATE chain SET kind = 'note' WHERE seq = 5")
    database.close()
    done = run("report", str(ledger), "--json")
    assert done.code == 1
    assert "row 5 was changed" in done.err
    assert done.json["ok"] is False
    said = _said()
    assert "This ledger is damaged" in said
    assert "differential privacy" not in said


def test_a_ledger_without_its_head_is_red(ledger: Path, run: Any) -> None:
    Path(f"{ledger}.head").unlink()
    assert run("report", str(ledger)).code == 1
    assert "is damaged" in _said()


@pytest.mark.usefixtures("ledger")
def test_a_ledger_that_spent_too_much_is_red(run: Any) -> None:
    """Rows whose hashes are right and whose sums are not: only the verifier sees that."""
    from farthing.ledger.books import SOUND, header_of
    from farthing.ledger.journal import Journal
    from farthing.queries.events import GaussianEvent, encode

    rule = ft.Ledger(ft.Budget(1.0, 1e-5)).filter
    with Journal("forged.ledger", header_of(rule, SOUND)) as journal:
        body = {"event": encode(GaussianEvent(0.1)), "count": 1}
        journal.append("charge", lambda last: (body, [100.0]))
    done = run("report", "forged.ledger")
    assert done.code == 1
    assert "overspent" in done.err
    assert "is damaged" in _said()


@pytest.mark.usefixtures("ledger")
def test_seeded_noise_is_no_guarantee(run: Any) -> None:
    _asked(Path("seeded.ledger"), stream=SeededStream(1))
    done = run("report", "seeded.ledger", "--json")
    assert done.code == 1
    assert done.json == {"format": 1, "report": "report.html", "ok": True, "guaranteed": False}
    assert "NO PRIVACY GUARANTEE" in _said()


@pytest.mark.usefixtures("ledger")
def test_float_noise_is_told(run: Any) -> None:
    _asked(Path("floats.ledger"), float_noise=True)
    assert run("report", "floats.ledger").code == 0
    assert "Float noise" in _said()


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("none.ledger",), "there is no ledger 'none.ledger'"),
        (("words.txt",), "'words.txt' is not a ledger"),
        (("a.ledger", "--out", "words.txt"), "exists already"),
        (("a.ledger", "--out", "a.ledger", "--force"), "--out must be new"),
        (("a.ledger", "--out", "a.ledger.head", "--force"), "--out must be new"),
        (("a.ledger", "--out", "nowhere/at/all.html"), "--out must be writable"),
        (("a.ledger", "--privacy", "none.json"), "--privacy 'none.json' cannot be read"),
        (("a.ledger", "--privacy", "words.txt"), "--privacy must be the JSON object"),
        (("a.ledger", "--simulated", "list.json"), "--simulated must be the JSON object"),
        (("a.ledger", "--audit", "list.json"), "--audit must be the JSON object"),
        (("a.ledger", "--audit", "nan.json"), "--audit must be the JSON object"),
        (("a.ledger", "--simulated", "plain.json"), "without privacy"),
    ],
)
def test_what_is_refused(run: Any, arguments: tuple[str, ...], reason: str) -> None:
    Path("words.txt").write_text("not a ledger")
    Path("list.json").write_text("[1, 2]")
    Path("nan.json").write_text(
        json.dumps({"verdicts": [{**VERDICT, "claim": {"epsilon": -1, "delta": 0.0}}]})
    )
    Path("plain.json").write_text(json.dumps({**SIMULATED, "guarantee": {"epsilon": None}}))
    before = _content()
    done = run("report", *arguments)
    assert done.code == 2
    assert reason in done.err
    assert done.err.count("\n") == 1
    assert _content() == before
    assert not Path("report.html").exists()


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--simulated", {**SIMULATED, "groups": [{"epsilon": 1, "clients": -1, "rounds": 1, "done": 0}]}),
        ("--simulated", {**SIMULATED, "guarantee": {**SIMULATED["guarantee"], "observer": "nobody"}}),
        ("--simulated", {key: value for key, value in SIMULATED.items() if key != "groups"}),
        ("--privacy", {**PRIVACY, "steps": 1.5}),
        ("--privacy", {**PRIVACY, "settings": "none"}),
        ("--privacy", {**PRIVACY, "records": "many"}),
        ("--privacy", {**PRIVACY, "records": None}),
        ("--privacy", {**PRIVACY, "public": {**PUBLIC, "columns": [{"name": "age", "low": "x", "high": 9}]}}),
        ("--privacy", {**PRIVACY, "test": {"accuracy": "high", "guessing": 0.1, "table": "t", "note": ""}}),
        ("--audit", {"verdicts": [{**VERDICT, "trials": 1e400}]}),
    ],
)
def test_files_from_anywhere_are_checked(run: Any, option: str, told: Any) -> None:
    Path("given.json").write_text(json.dumps(told))
    done = run("report", "a.ledger", option, "given.json")
    assert done.code == 2
    assert f"{option} must be the JSON object" in done.err


@pytest.mark.usefixtures("ledger")
def test_the_facts_of_a_training_are_accepted(run: Any) -> None:
    Path("given.json").write_text(json.dumps({**PRIVACY, "public": PUBLIC}))
    done = run("report", "a.ledger", "--privacy", "given.json")
    assert done.code == 0, done.err
    assert "numbers from 0 to 9" in _said()


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(("option", "told"), [("--privacy", PRIVACY), ("--simulated", SIMULATED)])
def test_a_file_of_another_format_is_refused(run: Any, option: str, told: Any) -> None:
    Path("given.json").write_text(json.dumps({**told, "format": 99}))
    done = run("report", "a.ledger", option, "given.json")
    assert done.code == 2
    assert f"{option} 'given.json' has format 99, but this version of farthing reads format 1" in done.err
    assert not Path("report.html").exists()


@pytest.mark.usefixtures("ledger")
def test_a_simulation_and_an_audit_of_ones_own(run: Any) -> None:
    """What these commands print is what this one takes."""
    spend = ("--clients", "30", "--records-per-client", "10", "--epsilon", "0.5,1", "--delta", "1e-5")
    Path("simulated.json").write_text(run("simulate", "adult", *spend, "--json").out)
    Path("audit.json").write_text(run("audit", "gaussian", "--effort", "0.01", "--json").out)
    done = run("report", "a.ledger", "--simulated", "simulated.json", "--audit", "audit.json", "--json")
    assert done.code == 0, done.err
    assert "30 clients" in _said()
    assert "Not run on this method" in _said()  # the noise by itself was attacked
    assert "say nothing about this one: gaussian" in _said()
