"""``make demo``, in small: what it prints and what it leaves behind."""

import hashlib
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from farthing.cli import demo
from farthing.cli.ledger_output import verification
from farthing.data.model_file import Model


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EPSILONS", (demo.EPSILON,))
    monkeypatch.setattr(demo, "ROUNDS", 20)
    monkeypatch.setattr(demo, "EFFORT", 0.05)
    return tmp_path


def test_what_it_prints_and_leaves_behind(small, capsys):
    demo.main()
    said = capsys.readouterr().out
    for text in (
        "auto, the default",
        "DP-AGD",
        "DP-SGD",
        "A-DDP, 488 clients",
        "without privacy",
        "guessing",
    ):
        assert text in said, text
    accuracies = {
        name: float(value) / 100 for name, value in re.findall(r"^(\S.*?) {2,}.*?([\d.]+)%", said, re.M)
    }
    assert accuracies["auto, the default"] > 0.8
    assert accuracies["guessing"] < accuracies["without privacy"]
    assert max(map(len, said.splitlines()[:12])) <= 120
    assert str(small / "farthing-demo" / "report.html") in said
    assert "\x1b" not in said
    assert sorted(os.listdir(".")) == ["farthing-demo"]
    folder = small / "farthing-demo"
    names = {file.name for file in folder.iterdir()}
    assert {"report.html", "model.npz", "privacy.json", "adult.ledger", "adult.ledger.head"} <= names
    assert verification(folder / "adult.ledger")["ok"]
    model_hash = hashlib.sha256((folder / "model.npz").read_bytes()).hexdigest()
    assert model_hash in (folder / "privacy.json").read_text()
    assert model_hash in (folder / "report.html").read_text()
    assert len(list(Model.load(folder).predictions("adult"))) == 16281
    tree = ElementTree.parse(folder / "report.html").getroot()
    titles = [figure.find("figcaption/h3").text for figure in tree.iter("figure")]
    assert len(titles) == 7
    words = " ".join(tree.itertext())
    assert "488 clients" in words
    rows = verification(folder / "adult.ledger")["rows"]
    assert rows > 40
    assert f"{rows} rows" in words
    assert "recomputed the cost" in words
    assert "cost a budget of its own" in " ".join(words.split())


def test_where_nothing_can_be_written_it_goes_elsewhere(small, monkeypatch):
    Path("farthing-demo").write_text("a file of that name")
    monkeypatch.setenv("TMPDIR", str(small))
    monkeypatch.setattr("tempfile.tempdir", None)
    place = demo.place()
    assert place.is_dir()
    assert place.name.startswith("farthing-demo-")
    assert Path("farthing-demo").read_text() == "a file of that name"


@pytest.mark.usefixtures("small")
def test_a_second_run_replaces_the_first_and_nothing_else():
    Path("farthing-demo").mkdir()
    for name in ("report.html", "model.npz", "adult.ledger", "adult.ledger.head", "notes.txt"):
        Path("farthing-demo", name).write_text("old")
    assert demo.place() == Path("farthing-demo")
    assert os.listdir("farthing-demo") == ["notes.txt"]
