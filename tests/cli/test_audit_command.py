"""``farthing audit``: exit codes, the table, JSON and HTML."""

import json

import pytest

from farthing.audit import methods
from farthing.cli import auditing
from farthing.cli import main as cli
from farthing.noise.lattice import SeededStream


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    """The command has no seed; tests must not depend on luck."""
    monkeypatch.setattr(methods, "Stream", lambda: SeededStream(11))
    monkeypatch.setattr(auditing, "Stream", lambda: SeededStream(12))


def test_a_broken_method_ends_with_1(capsys):
    assert cli.main(["audit", "noisy-min-as-published", "--effort", "0.5"]) == 1
    out, err = capsys.readouterr()
    assert "broken" in out
    assert "ε claimed" in out
    assert err == "farthing: broken: noisy-min-as-published\n"


def test_a_standing_method_ends_with_0_and_writes_json_and_html(capsys, tmp_path):
    page = tmp_path / "audit.html"
    assert cli.main(["audit", "laplace", "--effort", "0.1", "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == 1
    assert found["broken"] == 0
    assert {row["verdict"] for row in found["verdicts"]} == {"not refuted"}
    assert all(row["confidence"] >= found["confidence"] for row in found["verdicts"])
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert '<section class="audit">' in text
    assert "no proof" in text
    assert "proved" not in text


def test_wrong_usage_is_said_in_one_sentence(capsys, tmp_path):
    for arguments in ([], ["descent", "--all"], ["nothing"], ["laplace", "--effort", "0"]):
        assert cli.main(["audit", *arguments]) == 2
    assert "got both --all and 'descent'" in capsys.readouterr().err
    assert cli.main(["audit", "laplace", "--html", str(tmp_path / "no" / "such" / "page.html")]) == 2
    assert "--html must be writable" in capsys.readouterr().err
    (tmp_path / "page.html").write_text("mine")
    assert cli.main(["audit", "laplace", "--html", str(tmp_path / "page.html")]) == 2
    assert "--html must be new" in capsys.readouterr().err
    assert (tmp_path / "page.html").read_text() == "mine"
    again = ["audit", "laplace", "--effort", "0.1", "--html", str(tmp_path / "page.html"), "--force"]
    assert cli.main(again) == 0
    assert (tmp_path / "page.html").read_text() != "mine"


@pytest.mark.slow
def test_laws_alone(capsys, monkeypatch):
    assert cli.main(["audit", "laws"]) == 0
    out, err = capsys.readouterr()
    assert out.count("holds") == len(out.splitlines()) >= 10
    assert err == ""
    monkeypatch.setattr(auditing, "lawful", lambda method: {"draws": ["a record comes twice"]})
    assert cli.main(["audit", "laws", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["laws"]["draws"] == ["a record comes twice"]


def test_all_splits_what_may_fail(monkeypatch):
    asked, scales = [], []

    def attack(name, *, confidence, scale, **_):
        asked.append((name, confidence))
        scales.append(scale)
        return []

    monkeypatch.setattr(methods, "attack", attack)
    auditing.audited(None, True, 1.0, 0.99)
    assert [name for name, _ in asked] == methods.names()
    assert all(1 - confidence == pytest.approx(0.01 / len(asked)) for _, confidence in asked)
    assert 1.5 < min(scales) == max(scales) < 2.5  # more runs, so that each shows as much as by itself
    scales.clear()
    auditing.audited("laplace", False, 1.0, 0.99)
    assert scales == [1.0]


def test_an_interrupted_audit_shows_what_it_reached(capsys, monkeypatch):
    verdict = methods.attack("laplace", scale=0.02)[0]

    def attack(name, **_):
        if name != methods.names()[0]:
            raise KeyboardInterrupt
        return [verdict]

    monkeypatch.setattr(methods, "attack", attack)
    assert cli.main(["audit", "--all"]) == 130
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == "farthing: interrupted: these are the results so far\n"


def test_unsound_targets_are_never_a_way_to_train(capsys):
    from farthing.federated import jobs

    assert methods.names()
    assert not set(methods.published()) & {*methods.names(), *jobs.METHODS}
    for name in list(methods.published())[:1]:
        code = ["train", "adult", "--epsilon", "1", "--delta", "1e-6", "--method", name]
        assert cli.main(code) == 2
        assert name not in capsys.readouterr().err.split("got")[0]
