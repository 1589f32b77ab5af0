import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.accountants import Accountant, EqualSteps
from farthing.cli.ledger_output import rounded_up
from farthing.errors import Unsupported
from farthing.noise.lattice import SeededStream

EXAMPLE = (
    "account",
    "--noise-multiplier",
    "4",
    "--sampling-rate",
    "0.01",
    "--steps",
    "10000",
    "--delta",
    "1e-5",
)
BUDGET = ("calibrate", "--epsilon", "1", "--delta", "1e-5", "--sampling-rate", "0.01")
SAMPLED = (
    "account",
    "--noise-multiplier",
    "899.480224",
    "--sampling-rate",
    "0.01",
    "--epsilon",
    "0.1",
    "--accountant",
    "sampling",
)
STATED = {"epsilon", "delta", "adjacency", "unit", "observer", "accountant", "theorem"}
KEYS = {"noise_multiplier", "steps", "valid"}


# --- account


@pytest.mark.parametrize(
    ("accountant", "epsilon"),
    [("pld", 0.946867), ("rdp", 1.0355), ("moments", 1.2585747), ("advanced", 17.1623)],
)
def test_epsilon_of_the_example(run: Any, accountant: str, epsilon: float) -> None:
    done = run(*EXAMPLE, "--accountant", accountant, "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.json["format"], done.json["guarantee"].keys()) == (1, STATED | {"note"})
    assert done.json.keys() >= KEYS
    assert done.json["guarantee"]["epsilon"] == pytest.approx(
        epsilon, abs=6e-5 if epsilon > 10 else 6e-7, rel=2e-5
    )
    told = {"unit": "record", "observer": "anyone", "accountant": accountant}
    assert done.json["guarantee"].items() >= told.items()
    assert (done.json["valid"], done.json["steps"]) == (True, 10_000)
    assert done.json["guarantee"]["theorem"]


def test_strong_composition_is_printed_and_never_passes_for_a_guarantee(run: Any) -> None:
    done = run(*EXAMPLE, "--accountant", "strong", "--json")
    assert done.json["guarantee"]["epsilon"] == pytest.approx(9.3390652, abs=1e-7)
    assert done.json["valid"] is False
    assert done.json["guarantee"]["note"]
    assert done.code == 1
    text = run(*EXAMPLE, "--accountant", "strong", "--epsilon", "20")
    assert "not a guarantee" in text.out
    assert "no guarantee" in text.err
    assert text.code == 1


def test_the_text_shows_the_whole_guarantee(run: Any) -> None:
    done = run(*EXAMPLE)
    shown = dict(line.split(None, 1) for line in done.out.splitlines())
    assert shown.keys() >= STATED | KEYS
    assert shown["epsilon"] == "0.946867"
    assert done.err == ""


def test_delta_at_epsilon(run: Any) -> None:
    plain = [word for word in EXAMPLE if word not in ("--delta", "1e-5")]
    for accountant in ("pld", "rdp", "moments", "advanced"):
        epsilon = run(*EXAMPLE, "--accountant", accountant, "--json").json["guarantee"]["epsilon"]
        done = run(*plain, "--epsilon", epsilon, "--accountant", accountant, "--json")
        assert done.json["guarantee"]["delta"] == pytest.approx(1e-5, rel=1e-6)
        assert done.json["guarantee"]["epsilon"] == epsilon


def test_theorem_1_of_adadp_does_not_say_what_its_paper_says_of_it(run: Any) -> None:
    """Its example, 1800 steps at noise 0.9 and rate 0.01: 4.0 by the exact moments, 6.92 by it."""
    plan = (
        "account",
        "--noise-multiplier",
        "0.9",
        "--sampling-rate",
        "0.01",
        "--steps",
        "1800",
        "--delta",
        "1e-5",
        "--json",
    )
    told = run(*plan, "--accountant", "adadp").json
    said = told["guarantee"]
    assert said["epsilon"] == pytest.approx(6.92141, abs=1e-5)
    assert (told["valid"], said["adjacency"], said["observer"]) == (True, "add-remove", "anyone")
    assert "Thm. 1" in said["theorem"]
    assert run(*plan, "--accountant", "moments").json["guarantee"]["epsilon"] == pytest.approx(4.0, abs=0.02)


@pytest.mark.parametrize(("steps", "fits"), [(37_849, True), (37_850, False)])
def test_the_sampling_theorem_counts_to_the_last_round(run: Any, steps: int, fits: bool) -> None:
    done = run(*SAMPLED, "--steps", steps, "--adjacency", "zero-out", "--json")
    assert (done.json["guarantee"]["delta"] <= 1e-8) is fits
    assert done.json["guarantee"]["observer"] == "coordinator"
    both = run(*SAMPLED, "--steps", steps, "--adjacency", "zero-out", "--delta", "1e-8", "--json")
    assert both.json["within"] is fits
    assert both.code == (0 if fits else 3)


def test_both_epsilon_and_delta_check_a_claim(run: Any) -> None:
    fits = run(*EXAMPLE, "--epsilon", "1", "--json")
    assert (fits.code, fits.json["within"], fits.json["limit"]) == (0, True, 1.0)
    fails = run(*EXAMPLE, "--epsilon", "0.9", "--json")
    assert (fails.code, fails.json["within"]) == (3, False)
    assert "0.946867" in fails.err
    assert "0.9" in fails.err


def test_gaussian_dp_of_everybody(run: Any) -> None:
    command = (
        "account",
        "--noise-multiplier",
        "400",
        "--sampling-rate",
        "1",
        "--steps",
        "10000",
        "--delta",
        "1e-5",
        "--json",
    )
    found = {
        name: run(*command, "--accountant", name).json["guarantee"]["epsilon"]
        for name in ("gdp", "pld", "zcdp", "rdp")
    }
    assert found["gdp"] == pytest.approx(0.9263415, abs=1e-6)
    assert found["pld"] == pytest.approx(found["gdp"], rel=1e-9)
    assert found["gdp"] < found["zcdp"] <= found["rdp"] < 1.02


@pytest.mark.parametrize(
    "accountant", ["gdp", "zcdp", "rdp", "moments", "advanced", "strong", "pld", "sampling"]
)
def test_replacing_a_record_counts_twice(run: Any, accountant: str) -> None:
    command = (
        "account",
        "--sampling-rate",
        "1",
        "--steps",
        "100",
        "--delta",
        "1e-5",
        "--accountant",
        accountant,
        "--json",
    )
    replaced = run(*command, "--noise-multiplier", "80", "--adjacency", "replace-one").json["guarantee"][
        "epsilon"
    ]
    single = run(*command, "--noise-multiplier", "40", "--adjacency", "zero-out").json["guarantee"]["epsilon"]
    assert replaced == pytest.approx(single, rel=1e-9)


def test_accountants_that_hold_are_never_below_the_tight_one() -> None:
    for adjacency in ft.Adjacency:
        for rate, records in ((0.02, None), (0.02, 1000), (1.0, None), (1.0, 1000)):
            plan = EqualSteps(3.0 if rate < 1 else 100.0, rate, 500, adjacency, records)
            tight = Accountant.PLD.curve(plan).epsilon(1e-5)
            held = 0
            for accountant in Accountant.of_steps():
                try:
                    curve = accountant.curve(plan)
                except Unsupported:
                    continue
                if curve.proven(1e-5):
                    held += 1
                    at_delta = curve.epsilon(1e-5)
                    seen = accountant is Accountant.SAMPLING and records is not None and rate < 1
                    assert at_delta >= tight * (1 - 1e-6) or seen, (plan, accountant)
                    assert curve.delta(at_delta * (1 + 1e-9)) <= 1e-5 * (1 + 1e-6), (plan, accountant)
            assert held >= 2, plan


def test_more_noise_never_costs_more() -> None:
    for accountant in Accountant.of_steps():
        rate = 1.0 if accountant in (Accountant.GDP, Accountant.ZCDP) else 0.05
        costs = [
            accountant.curve(EqualSteps(sigma, rate, 200, ft.Adjacency.ZERO_OUT)).epsilon(1e-6)
            for sigma in (1.0, 1.5, 3.0, 10.0, 50.0)
        ]
        assert costs == sorted(costs, reverse=True), accountant


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("gdp",), "pld or rdp"),
        (("zcdp",), "pld or rdp"),
        (("moments", "--sampler", "fixed", "--records", "1000"), "pld or rdp"),
        (("moments", "--adjacency", "replace-one"), "pld or rdp"),
        (("advanced", "--adjacency", "replace-one"), "pld"),
        (("advanced", "--sampler", "fixed", "--records", "1000"), "pld"),
        (("strong", "--adjacency", "replace-one"), "pld"),
        (("sampling",), "replace-one or zero-out"),
        (("adadp", "--adjacency", "replace-one"), "pld or rdp"),
        (("adadp", "--sampler", "fixed", "--records", "1000"), "pld or rdp"),
    ],
)
def test_what_has_no_theorem_is_refused(run: Any, arguments: tuple[str, ...], instead: str) -> None:
    done = run(*EXAMPLE, "--accountant", *arguments)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"farthing: {arguments[0]} has no theorem .*{instead}.*\n", done.err)


def test_a_fixed_size_is_rate_times_records_rounded_up(run: Any) -> None:
    fixed = ("--sampler", "fixed", "--adjacency", "replace-one", "--json")
    told = run(*EXAMPLE, *fixed, "--records", "48842").json
    assert (told["size"], told["records"], told["sampling_rate"]) == (489, 48_842, 489 / 48_842)
    assert EqualSteps(1.0, 0.07, 1, records=100).size == 7
    assert EqualSteps(1.0, 1e-9, 1, records=100).size == 1
    by_rdp = run(*EXAMPLE, *fixed, "--records", "10000", "--accountant", "rdp").json
    assert (
        by_rdp["guarantee"]["epsilon"]
        > run(*EXAMPLE, *fixed, "--records", "10000").json["guarantee"]["epsilon"]
    )


def test_nothing_promised_is_null_and_fails(run: Any) -> None:
    done = run(
        "account",
        "--noise-multiplier",
        "1e-3",
        "--sampling-rate",
        "1",
        "--steps",
        "10",
        "--delta",
        "1e-5",
        "--json",
    )
    assert (done.code, done.json["guarantee"]["epsilon"], done.json["valid"]) == (
        1,
        None,
        False,
    ) or done.json["guarantee"]["epsilon"] > 1e4
    done = run(
        "account",
        "--noise-multiplier",
        "1e-300",
        "--sampling-rate",
        "1",
        "--steps",
        "10",
        "--delta",
        "1e-5",
        "--json",
    )
    assert (done.code, done.json["guarantee"]["epsilon"], done.json["valid"]) == (1, None, False)
    assert "no guarantee" in done.json["guarantee"]["note"]


@pytest.mark.parametrize("accountant", Accountant.of_steps())
@pytest.mark.parametrize("sigma", ["1e-308", "1e-5", "1e5", "1e300"])
@pytest.mark.parametrize("steps", ["1", str(2**62 - 1)])
def test_extreme_values_are_answered(run: Any, accountant: str, sigma: str, steps: str) -> None:
    rate = "1" if accountant in ("gdp", "zcdp") else "1e-9"
    done = run(
        "account", "--noise-multiplier", sigma, "--sampling-rate", rate, "--steps", steps, "--delta", "1e-9",
        "--accountant", accountant, "--adjacency", "zero-out", "--json",
    )  # fmt: skip
    epsilon = done.json["guarantee"]["epsilon"]
    assert epsilon is None or epsilon >= 0
    assert done.code == (0 if done.json["valid"] else 1)


# --- calibrate


def test_noise_for_steps(run: Any) -> None:
    done = run(*BUDGET, "--steps", "10000", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json.keys() >= KEYS
    assert done.json["noise_multiplier"] == pytest.approx(3.812817, abs=1e-6)
    assert 0.999999 < done.json["guarantee"]["epsilon"] <= 1
    again = list(EXAMPLE)
    again[2] = repr(done.json["noise_multiplier"])
    assert run(*again, "--epsilon", "1", "--json").json["within"] is True


def test_steps_for_noise(run: Any) -> None:
    done = run(*BUDGET, "--noise-multiplier", "4", "--json")
    assert (done.code, done.json["steps"]) == (0, 11_050)
    assert 0.9999 < done.json["guarantee"]["epsilon"] <= 1
    again = list(EXAMPLE)
    for steps, code in ((11_050, 0), (11_051, 3)):
        again[6] = str(steps)
        assert run(*again, "--epsilon", "1").code == code


def test_a_budget_too_small_for_one_step_exits_with_3(run: Any) -> None:
    done = run(
        "calibrate",
        "--epsilon",
        "0.1",
        "--delta",
        "1e-9",
        "--sampling-rate",
        "0.5",
        "--noise-multiplier",
        "0.3",
        "--json",
    )
    assert (done.code, done.out) == (3, "")
    assert "does not fit" in done.err


def test_a_budget_no_noise_fits_exits_with_3(run: Any) -> None:
    done = run("calibrate", "--epsilon", "1e-6", "--delta", "1e-9", "--sampling-rate", "1", "--steps", 2**60)
    assert (done.code, done.out) == (3, "")
    assert "no noise" in done.err


def test_calibrate_prices_a_menu(run):
    found = run(*BUDGET, "--menu", "2,4", "--json").json
    assert (found["budget"]["epsilon"], found["budget"]["adjacency"]) == (1.0, "add-remove")
    assert [entry["noise_multiplier"] for entry in found["entries"]] == [2.0, 4.0]
    for entry in found["entries"]:
        assert 0.97 * entry["promise"] <= entry["steps"] <= entry["promise"]
    done = run(*BUDGET, "--menu", "2,4")
    assert done.code == 0
    assert "noise multiplier 4: " in done.out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--menu", "2,four"), "--menu must be numbers separated by commas, got '2,four'"),
        (("--menu", "2,2"), "the events of a menu must differ"),
        (("--menu", "0"), "--noise-multiplier must be"),
        (("--menu", "2", "--steps", "3"), "leave out --steps and --noise-multiplier"),
        (("--menu", "0.1"), "does not pay for one"),
    ],
)
def test_a_menu_that_makes_no_sense_is_told(run, given, says):
    done = run(*BUDGET, *given)
    assert done.code == 2
    assert says in done.err


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
@pytest.mark.parametrize("sampler", [("poisson",), ("fixed", "--records", "10000")])
def test_calibrated_noise_fits_under_every_adjacency(
    run: Any, adjacency: str, sampler: tuple[str, ...]
) -> None:
    given = (
        "--sampling-rate",
        "0.01",
        "--steps",
        "1000",
        "--adjacency",
        adjacency,
        "--sampler",
        *sampler,
        "--json",
    )
    sigma = run("calibrate", "--epsilon", "1", "--delta", "1e-5", *given).json["noise_multiplier"]
    assert (
        run("account", "--noise-multiplier", sigma, "--epsilon", "1", "--delta", "1e-5", *given).json[
            "within"
        ]
        is True
    )


# --- wrong input

OPTIONS = {"--noise-multiplier": "4", "--sampling-rate": "0.01", "--steps": "100", "--delta": "1e-5"}
NUMBERS = ("nan", "inf", "-inf", "0", "-1", "1e400", "text", "")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--noise-multiplier", value) for value in NUMBERS),
        *(("--sampling-rate", value) for value in (*NUMBERS, "2", "1.0000001")),
        *(("--steps", value) for value in (*NUMBERS, "1.5", "1e3", str(2**62), "9" * 400)),
        *(("--delta", value) for value in (*NUMBERS, "1", "2")),
        *(("--epsilon", value) for value in NUMBERS if value != "0"),
        *(("--records", value) for value in ("0", "-5", "2.5", "many", str(2**62))),
        ("--accountant", "foo"),
        ("--adjacency", "neighbours"),
        ("--sampler", "shuffle"),
    ],
)
def test_wrong_values_are_named(run: Any, option: str, value: str) -> None:
    given = {**OPTIONS, **({"--sampler": "fixed"} if option == "--records" else {}), option: value}
    done = run("account", *(word for pair in given.items() for word in pair))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert option in done.err
    assert re.search(rf"(got |')({'|'.join(_as_shown(value))})", done.err)
    assert "Traceback" not in done.err


def _as_shown(value: str) -> list[str]:
    """The value as it was typed, and as Python prints the number that it reads as."""
    try:
        return [re.escape(text) for text in (value, repr(value), repr(float(value)))]
    except ValueError:
        return [re.escape(value), re.escape(repr(value))]


@pytest.mark.parametrize("missing", ["--noise-multiplier", "--sampling-rate", "--steps"])
def test_missing_options_are_named(run: Any, missing: str) -> None:
    done = run(
        "account", *(word for name, value in OPTIONS.items() if name != missing for word in (name, value))
    )
    assert (done.code, done.out) == (2, "")
    assert missing in done.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ("account", "--noise-multiplier", "4", "--sampling-rate", "0.01", "--steps", "100"),
            ("--delta", "--epsilon"),
        ),
        (BUDGET, ("--steps", "--noise-multiplier")),
        ((*BUDGET, "--steps", "100", "--noise-multiplier", "4.5"), ("--steps 100", "--noise-multiplier 4.5")),
        ((*BUDGET, "--noise-multiplier", "0"), ("--noise-multiplier", "0.0")),
        ((*BUDGET, "--steps", "0"), ("--steps", "0")),
        (
            ("calibrate", "--epsilon", "0", "--delta", "1e-5", "--sampling-rate", "1", "--steps", "1"),
            ("--epsilon", "0.0"),
        ),
        ((*EXAMPLE, "--sampler", "fixed"), ("--records",)),
        ((*EXAMPLE, "--records", "100"), ("--records", "100")),
        ((*EXAMPLE, "--verbose"), ("--verbose",)),
        (("account", "--noise", "4"), ("Did you mean '--noise-multiplier'?", "farthing account --help")),
        (("account", "--delta", "small"), ("must be a number, got 'small'. See",)),
        (("audit", "majoritty"), ("there is no method 'majoritty' (did you mean 'majority'?)",)),
        (("nonsense",), ("nonsense",)),
        (("ledger",), ("command",)),
        (("ledger", "show"), ("FILE",)),
    ],
)
def test_wrong_usage_is_one_sentence(run: Any, arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert all(name in done.err for name in named)


# --- ledgers

QUERY = ft.Query(
    ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), ft.Gaussian(10.0)
)
LOT = ft.Query(ft.Poisson(0.01), QUERY.contribution, QUERY.bound, ft.Gaussian(1.1))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.ledger"
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=path) as ledger:
        door = ledger.over(ft.Rows(np.ones((50, 2))))
        for _ in range(3):
            door.ask(QUERY, np.zeros(2))
    return path


@pytest.fixture
def promised(tmp_path: Path) -> Path:
    path = tmp_path / "promised.ledger"
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=path) as ledger:
        ledger.promise(LOT)
        door = ledger.over(ft.Rows(np.ones((50, 2))))
        for _ in range(40):
            door.ask(LOT, np.zeros(2))
    return path


def contents(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def test_show_a_filter(run: Any, good: Path) -> None:
    done = run("ledger", "show", good, "--json")
    assert (done.code, done.err) == (0, "")
    told = done.json
    assert told["budget"]["epsilon"] == 1.0
    assert told["filter"]["name"] == "gdp"
    assert told["plan"] == []
    assert told["charged"] == [{"event": {"kind": "gaussian", "noise": 10.0}, "count": 3}]
    assert told["spent"]["epsilon"] == pytest.approx(0.620004, abs=1e-5)
    assert told["guarantee"]["epsilon"] == 1.0
    assert told["kinds"] == {"open": 1, "charge": 3}
    text = run("ledger", "show", good).out
    for word in ("add-remove", "per record", "against anyone", "by gdp", "Smith & Thakurta", "3 x Gaussian"):
        assert word in text


def test_show_a_plan(run: Any, promised: Path) -> None:
    told = run("ledger", "show", promised, "--json").json
    assert [part["times"] for part in told["plan"]] == [421]
    assert [part["count"] for part in told["charged"]] == [40]
    assert told["share"] == pytest.approx(40 / 421)
    assert told["spent"]["epsilon"] < told["guarantee"]["epsilon"] <= 1.0
    assert told["guarantee"]["accountant"] == "pld"
    assert "promised   421 x Gaussian noise" in run("ledger", "show", promised).out


@pytest.mark.parametrize("name", ["good", "promised"])
def test_verify_a_good_ledger(run: Any, name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    done = run("ledger", "verify", path, "--json")
    assert (done.code, done.json["ok"]) == (0, True)
    assert len(done.json["head"]) == 64
    text = run("ledger", "verify", path)
    assert (text.code, text.err) == (0, "")
    assert "OK: recomputed" in text.out


def test_verify_without_the_recomputation(run: Any, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "farthing.ledger.verifier", None)
    monkeypatch.delattr("farthing.ledger.verifier", raising=False)
    done = run("ledger", "verify", good, "--json")
    assert (done.code, done.json["ok"]) == (0, True)
    assert "not recomputed" in done.json["note"]


def test_export(run: Any, good: Path, tmp_path: Path) -> None:
    done = run("ledger", "export", good)
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["kind"] for row in rows] == ["open", "charge", "charge", "charge"]
    out = tmp_path / "rows.jsonl"
    written = run("ledger", "export", good, "-o", out)
    assert (written.code, written.out, out.read_text()) == (0, "", done.out)
    assert "4 rows" in written.err


def test_export_never_overwrites(run: Any, good: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    for out in (good, f"{good}.head", tmp_path / "none" / "rows.jsonl"):
        done = run("ledger", "export", good, "-o", out)
        assert (done.code, done.out) == (2, "")
        assert "--out" in done.err
    assert contents(tmp_path) == before


def test_reading_leaves_every_file_as_it_was(run: Any, good: Path, promised: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    for command in ("show", "verify", "export"):
        assert run("ledger", command, good).code == 0
        assert run("ledger", command, promised).code == 0
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["show", "verify", "export"])
class TestLedgersThatAreNotGood:
    def refused(self, run: Any, command: str, path: Path, code: int) -> str:
        before = contents(path.parent)
        done = run("ledger", command, path)
        assert (done.code, done.out) == (code, "")
        assert "Traceback" not in done.err
        assert path.name in done.err
        assert contents(path.parent) == before
        return str(done.err)

    def test_a_flipped_byte(self, run: Any, command: str, good: Path) -> None:
        data = bytearray(good.read_bytes())
        data[data.index(b'"noise":10.0') + 8] ^= 2  # 10.0 becomes 30.0
        good.write_bytes(data)
        assert "changed" in self.refused(run, command, good, 1)

    def test_an_older_copy(self, run: Any, command: str, good: Path, tmp_path: Path) -> None:
        saved = shutil.copy(good, tmp_path / "saved")
        with ft.Ledger.open(good) as ledger:
            ledger.over(ft.Rows(np.ones((50, 2)))).ask(QUERY, np.zeros(2))
        shutil.move(saved, good)
        assert "head" in self.refused(run, command, good, 1)

    def test_the_head_is_lost(self, run: Any, command: str, good: Path) -> None:
        Path(f"{good}.head").unlink()
        assert "head" in self.refused(run, command, good, 1)

    def test_only_the_head_is_left(self, run: Any, command: str, good: Path) -> None:
        good.unlink()
        assert "is missing" in self.refused(run, command, good, 1)

    def test_a_missing_file(self, run: Any, command: str, tmp_path: Path) -> None:
        self.refused(run, command, tmp_path / "missing.ledger", 2)

    def test_a_directory(self, run: Any, command: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        done = run("ledger", command, tmp_path / "folder")
        assert (done.code, done.out) == (2, "")

    def test_another_file(self, run: Any, command: str, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("not a ledger")
        self.refused(run, command, path, 2)


def test_verify_recomputes_the_spend(run: Any, good: Path) -> None:
    """A ledger whose chain is in order and whose totals are not what its charges cost."""
    with ft.Ledger.open(good) as ledger:
        ledger.journal.append(
            "charge", lambda last: ({"event": {"kind": "gaussian", "noise": 0.1}, "count": 1}, last.state)
        )
    done = run("ledger", "verify", good)
    assert done.code == 1
    assert good.name in done.err
    assert "OK" not in done.out


def test_a_ledger_with_seeded_noise_is_not_in_order(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "seeded.ledger"
    ft.Ledger(ft.Budget(1.0, 1e-5), journal=path, stream=SeededStream(1)).close()
    assert run("ledger", "show", path).code == 2
    done = run("ledger", "verify", path)
    assert done.code == 1
    assert "seeded" in done.err


# --- the program itself


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(ft.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The top-level modules named by -X importtime."""
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


HEAVY = {
    *("numpy", "scipy", "sklearn", "dp_accounting", "mpmath", "cryptography", "rich"),
    *("torch", "flwr", "matplotlib", "pyarrow", "skops", "skl2onnx", "pandas"),
}


@pytest.mark.parametrize("command", [(), ("train",), ("ledger", "show")])
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    done = python("-X", "importtime", "-m", "farthing.cli.main", *command, "--help")
    assert done.returncode == 0
    assert "Usage: farthing" in done.stdout
    # typer before 0.21 opens rich for the help of a command
    assert not imported(done) & (HEAVY - {"rich"} if command else HEAVY)


def test_the_program_exits_with_the_code() -> None:
    done = python("-m", "farthing.cli.main", *EXAMPLE, "--epsilon", "0.5")
    assert done.returncode == 3
    assert done.stdout.startswith("epsilon")


def test_version_and_help(run: Any) -> None:
    assert run("--version").out == f"farthing {ft.__version__}\n"
    assert run().out == run("--help").out
    for command in (
        ("train",),
        ("schema",),
        ("predict",),
        ("account",),
        ("calibrate",),
        ("ledger",),
        ("ledger", "show"),
        ("ledger", "export"),
    ):
        done = run(*command, "--help")
        assert (done.code, done.err) == (0, "")
        assert "\\[" not in done.out


def test_printed_numbers_are_rounded_up() -> None:
    for value in (0.9468668008, 1e-5, 123456.7, 3.0, 1 / 3, 5e-324, 17.16233640001):
        assert value <= float(rounded_up(value)) <= value * (1 + 2e-5) or value < 1e-300
    assert rounded_up(0.1) == "0.1"
    assert math.isclose(float(rounded_up(2 / 3)), 0.666667)


class TestCreate:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_a_ledger_for_several_trainings(self, run: Any) -> None:
        done = run("ledger", "create", "new.ledger", "--epsilon", "2", "--delta", "1e-5", "--filter", "zcdp")
        assert (done.code, done.out) == (0, "")
        shown = json.loads(run("ledger", "show", "new.ledger", "--json").out)
        assert shown["budget"]["epsilon"] == 2
        assert "zcdp" in json.dumps(shown)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("new.ledger", "--epsilon", "0", "--delta", "1e-5"), "epsilon"),
            (("new.ledger", "--epsilon", "1", "--delta", "1"), "delta"),
            (("new.ledger", "--epsilon", "1", "--delta", "1e-5", "--filter", "pld"), "pld"),
            (("no/new.ledger", "--epsilon", "1", "--delta", "1e-5"), "existing folder"),
            (("new.ledger", "--epsilon", "1"), "delta"),
        ],
    )
    def test_refusals_create_nothing(self, run: Any, arguments: tuple[str, ...], said: str) -> None:
        done = run("ledger", "create", *arguments)
        assert (done.code, done.out) == (2, "")
        assert said in done.err
        assert run("ledger", "show", "new.ledger").code == 2

    def test_what_begins_as_json(self, run: Any) -> None:
        done = run("ledger", "create", "new.ledger", "--epsilon", "2", "--delta", "1e-5", "--json")
        assert (done.code, done.err) == (0, "")
        assert done.json["file"] == "new.ledger"
        assert (done.json["budget"]["epsilon"], done.json["filter"]["name"]) == (2.0, "gdp")

    def test_an_existing_ledger_is_left_alone(self, run: Any) -> None:
        new = ("ledger", "create", "new.ledger", "--epsilon", "1", "--delta", "1e-5")
        assert run(*new).code == 0
        before = run("ledger", "show", "new.ledger").out
        done = run(*new)
        assert done.code == 2
        assert "new" in done.err
        assert run("ledger", "show", "new.ledger").out == before


def test_keys_as_json_and_no_name_that_leads_elsewhere(run: Any, tmp_path: Path) -> None:
    done = run("keys", tmp_path / "keys", "--parties", "a,b", "--json")
    assert (done.code, done.err) == (0, "")
    assert len(done.json["made"]) >= 2
    assert all(Path(place).exists() for place in done.json["made"])
    refused = run("keys", tmp_path / "keys", "--parties", "../evil")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "evil").exists()
