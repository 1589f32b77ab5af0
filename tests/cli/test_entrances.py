"""Where records come in: odd ones are fed to every way in, and nothing of them is told, whatever happens."""

import datetime
import decimal
import fractions
import io
import json
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.audit.entrances import MARK, entrances, outcome, refusals
from farthing.cli import main as cli
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.data.tables import Table
from farthing.federated.draws import Indicators
from farthing.federated.simulated import Simulated
from farthing.linear.selection import Folds, choose

WORD = f"SECRET_{MARK}"
SCHEMA = Schema((Numeric("a", 0, 1), Categorical("b", ("no", "yes"))), Categorical("c", ("no", "yes")))


class Odd:
    """An object that tells who it is whenever it is asked for anything."""

    def __repr__(self):
        return WORD

    def __float__(self):
        raise ValueError(WORD)


class Worse(Odd):
    """One that is no array either, and has no length."""

    def __len__(self):
        raise TypeError(WORD)

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError(WORD)


CELLS = [
    MARK,
    -MARK,
    float(MARK),
    MARK + 0.5,
    MARK * 1e290,
    10**400 + MARK,
    2**63 + MARK,
    MARK * 1j,
    complex(MARK, np.nan),
    WORD,
    WORD.encode(),
    f"{MARK}",
    f"{MARK},5",
    f"{MARK} kg",
    f"0x{MARK:x}",
    f"{MARK}\n{WORD}",
    f"{MARK}\x00",
    np.datetime64(MARK, "s"),
    datetime.datetime.fromtimestamp(MARK),
    datetime.date.fromordinal(MARK % 700_000),
    np.timedelta64(MARK, "s"),
    decimal.Decimal(MARK),
    fractions.Fraction(MARK, 7),
    [MARK],
    (MARK, WORD),
    {WORD: MARK},
    {MARK},
    np.array([MARK, 1]),
    np.float32(MARK),
    np.longdouble(MARK),
    np.uint64(2**63 + MARK),
    Odd(),
    lambda: MARK,
    bytearray(WORD.encode()),
    slice(MARK),
    type(WORD, (), {}),
    np.void(WORD.encode()),
    np.ma.masked,
]


def table(cell):
    """Rows of objects, one of them odd."""
    rows = np.full((6, 2), 0.5, dtype=object)
    rows[5, 1] = cell
    return rows


def column(cell):
    labels = np.array([0, 1, 0, 1, 0, 1], dtype=object)
    labels[3] = cell
    return labels


GOOD_X, GOOD_Y = np.full((6, 2), 0.5), np.array([0, 1, 0, 1, 0, 1])
WHOLE = np.full((6, 2), MARK)
SHAPES = [
    WHOLE[:, 0],
    WHOLE[None],
    WHOLE[:0],
    WHOLE[:, :0],
    WHOLE[0, 0],
    WHOLE[:5],
    np.full((7, 2), MARK),
    WHOLE.tolist(),
    [[MARK, 1], [MARK]],
    [[MARK], WORD],
    WHOLE + 0j,
    WHOLE.astype(str),
    WHOLE.astype("S12"),
    WHOLE.astype("datetime64[s]"),
    WHOLE.astype("timedelta64[s]"),
    np.rec.fromarrays([WHOLE[:, 0]], names="a"),
    np.full((6, 2), WORD),
    Odd(),
    Worse(),
    WORD,
    {WORD: MARK},
    None,
    MARK,
    [WORD] * 6,
    iter([MARK]),
    (row for row in WHOLE),
    WHOLE.astype(">i8"),
    np.full((6, 2), 0.5, np.float16),
    sparse.csr_array(WHOLE),
    sparse.coo_array(WHOLE + 0j),
    sparse.csr_array(WHOLE * 1e290),
    sparse.dok_array((6, 2)),
    np.ma.masked_equal(WHOLE, 3),
    WHOLE.view(np.matrix),
    memoryview(WHOLE),
    [Worse()] * 6,
    np.full((6, 2), Odd()),
    sparse.csr_array(([MARK], ([0], [0])), (6, 2)),
    np.full((6, 2), np.nan),
    WHOLE * np.inf,
    [[Odd(), 1.0]] * 6,
]
INPUTS = [
    *(("X", table(cell)) for cell in CELLS),
    *(("y", column(cell)) for cell in CELLS),
    *(("X", shape) for shape in SHAPES),
    *(("y", shape) for shape in SHAPES),
]


def fitted(kind):
    options = {"target_bounds": (0, 1)} if kind is ft.LinearRegression else {}
    return kind(ledger=ft.Ledger(ft.Budget(1.0, 1e-5)), records=6, **options).fit(GOOD_X, GOOD_Y)


WAYS_IN = {
    **entrances(),
    "Table": Table,
    "Table within bounds": lambda X, y: Table(X, y, bounds=(0, 1), unit=True),
    "Rows": lambda X, y: ft.Rows(X, y),
    "Indicators": lambda X, y: Indicators(X, 3, y),
    "Indicators of": Indicators.of,
    "gathered": lambda X, y: Simulated.gather([(X, y), (GOOD_X, GOOD_Y)], ft.Budget(1.0, 1e-5)),
    "dealt out": lambda X, y: Simulated.split(X, y, records=3, budgets=ft.Budget(1.0, 1e-5), unit=True),
    "schema": lambda X, y: (SCHEMA.encode({"a": X, "b": X}), SCHEMA.encode_target({"c": y})),
    "folds": lambda X, y: list(Folds(2).split(X, y, groups=y)),
    "choice": lambda X, y: choose([_ZEROS, _ZEROS], X, y, ft.Ledger(ft.Budget(1.0, 1e-5))),
    "prediction": lambda X, y: _LOGISTIC.predict_proba(X),
    "regression": lambda X, y: _LINEAR.predict(X),
    "bounds of a regression": lambda X, y: ft.LinearRegression(1.0, 1e-5, target_bounds=(0, 1)).fit(X, y),
}
_LOGISTIC, _LINEAR = fitted(ft.LogisticRegression), fitted(ft.LinearRegression)
_ZEROS = type("Zeros", (), {"predict": lambda self, X: np.zeros(6, int)})()


def test_there_are_enough_odd_inputs():
    assert len(INPUTS) >= 150


@pytest.mark.parametrize("name", WAYS_IN)
def test_nothing_of_a_record_is_told(name):
    for which, odd in INPUTS:
        X, y = (odd, GOOD_Y) if which == "X" else (GOOD_X, odd)
        ended, shown = outcome(WAYS_IN[name], X, y)
        assert str(MARK) not in shown, ended
        assert not ended.startswith("failed"), ended  # whatever is refused is refused in words of our own


def test_the_law_holds_of_the_real_code():
    assert refusals() == []


# --- commands

NUMBERS = (MARK, WORD, f"{MARK}e999", f'"{WORD}"', f"{MARK};1")
TEXTS = (MARK, WORD, f'"{WORD}\n{WORD}"', WORD * 20_000)
LABELS = (MARK, WORD, "", f"yes,{WORD}", f'yes"{WORD}')
FILES = [
    *(f"a,b,c\n0.5,no,yes\n{cell},no,yes\n".encode() for cell in NUMBERS),
    *(f"a,b,c\n0.5,no,yes\n0.5,{cell},yes\n".encode() for cell in TEXTS),
    *(f"a,b,c\n0.5,no,yes\n0.5,no,{cell}\n".encode() for cell in LABELS),
    f"{WORD},{MARK},no\n{WORD},1,2\n".encode(),
    f"a,b,c\n{WORD}\n".encode(),
    f"a,b,c\n0.5,no,{WORD}".encode("utf-16"),
    f"a,b,c\n0.5,no,{WORD}".encode() + b"\xff\xfe",
    b"PAR1" + WORD.encode(),
    b"\x1f\x8b" + WORD.encode(),
    WORD.encode(),
    b"",
    b"a,b,c\n",
    f"a,a,b,c\n{MARK},{MARK},no,yes\n".encode(),
    f"a,b,c\n0.5,no,yes\n\x00{WORD},no,yes\n".encode(),
]
BUDGET = ("--epsilon", "1", "--delta", "1e-5")
COMMANDS = {
    "train": ("train", "t.csv", *BUDGET, "--schema", "s.json", "--out", "fit", "--force"),
    "strict": ("train", "t.csv", *BUDGET, "--schema", "s.json", "--out", "fit", "--force", "--strict"),
    "counted": ("train", "t.csv", *BUDGET, "--schema", "s.json", "--out", "fit", "--force", "--records", "9"),
    "tested": (
        "train",
        "good.csv",
        *BUDGET,
        "--schema",
        "s.json",
        "--out",
        "fit",
        "--force",
        "--test",
        "t.csv",
    ),
    "dry": ("train", "t.csv", *BUDGET, "--schema", "s.json", "--dry-run"),
    "skeleton": ("train", "t.csv", *BUDGET, "--target", "c"),
    "simulate": ("simulate", "t.csv", *BUDGET, "--schema", "s.json", "--clients", "1"),
    "predict": ("predict", "model.npz", "t.csv"),
}


def run(*words):
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), warnings.catch_warnings():
        warnings.simplefilter("always")
        code = cli.main(words)
    return code, out.getvalue()


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA.to_json())
    Path("good.csv").write_text("a,b,c\n0.5,no,yes\n0.25,yes,no\n")
    assert run("train", "good.csv", *BUDGET, "--schema", "s.json", "--out", "model.npz")[0] == 0
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_tells_anything_of_a_record(name, files):
    for content in FILES:
        Path("t.csv").write_bytes(content)
        code, told = run(*COMMANDS[name])
        assert str(MARK) not in told
        assert code in (0, 2), told
        assert "unexpected" not in told
        written = [path for path in files.rglob("*") if path.is_file() and path.name != "t.csv"]
        assert not any(str(MARK).encode() in path.read_bytes() for path in written)


@pytest.mark.usefixtures("files")
def test_a_draft_tells_what_it_read_in_the_draft_only():
    for content in FILES:
        Path("t.csv").write_bytes(content)
        _, told = run("schema", "t.csv", "--target", "c", "--out", "draft.json", "--force")
        assert str(MARK) not in told


@pytest.mark.usefixtures("files")
def test_an_unexpected_error_is_not_quoted(monkeypatch):
    def broken(*_, **__):
        raise KeyError(WORD)

    Path("t.csv").write_text("a,b,c\n0.5,no,yes\n")
    monkeypatch.setattr("farthing.data.schema.Schema.encode", broken)
    code, told = run(*COMMANDS["train"][:-3], "--out", "other")
    assert code == 1
    assert "an unexpected KeyError" in told
    assert "test_entrances" in told  # where it happened
    assert WORD not in told
    monkeypatch.setenv("FARTHING_DEBUG", "1")
    with pytest.raises(KeyError, match=WORD):
        run(*COMMANDS["train"][:-3], "--out", "other")


def test_a_strict_training_says_that_validation_read_the_records(files):
    Path("t.csv").write_text("a,b,c\n0.5,no,yes\n0.25,yes,no\n")
    assert run(*COMMANDS["strict"])[0] == 0
    assert "--strict" in json.loads((files / "fit" / "privacy.json").read_text())["guarantee"]["note"]
    assert run(*COMMANDS["train"])[0] == 0
    assert "--strict" not in json.loads((files / "fit" / "privacy.json").read_text())["guarantee"]["note"]
