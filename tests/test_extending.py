"""The promise of `docs/contributing.md`: one of each kind is added in about ten lines, outside the package.

Layer rules and clip rules are in tests/torch/test_extending.py, federated methods in
tests/federated/test_extending.py.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest
import typer
from scipy.special import expit

import farthing as ft
from farthing.accounting import zcdp
from farthing.accounting.accountants import Accountant, EqualSteps, PrivacyCurve
from farthing.cli import export
from farthing.cli.main import app, main
from farthing.cli.options import AsJson, Command, emit, emit_json
from farthing.data import table_files
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.linear.losses import one_against_rest
from farthing.queries.bounds import ROWS
from farthing.report import drawing, page, pictures
from farthing.report.pictures import Picture
from farthing.report.subject import Subject

DATA = np.random.default_rng(0)
ROWS_OF_TWO = ft.Rows(DATA.uniform(-1, 1, size=(500, 2)))
BUDGET = ft.Budget(1.0, 1e-5)


def rows_of(records: Any, w: Any) -> Any:
    return records[0]


# --- a loss


class SoftHinge:
    """log(1 + e^(1 - s)) of s = (2y - 1) m."""

    curvature, slope = 0.25, 1.0

    def value(self, margins, y):
        return np.logaddexp(0.0, 1 - (2 * y - 1) * margins)

    def residual(self, margins, y):
        return -(2 * y - 1) * expit(1 - (2 * y - 1) * margins)


class SoftSVC(ft.LinearSVC):
    losses = (SoftHinge(), one_against_rest)


def test_a_loss():
    X = DATA.uniform(size=(4000, 2))
    y = (X[:, 0] > X[:, 1]).astype(int)
    model = SoftSVC(1.0, 1e-5, bounds=(0, 1)).fit(X, y)
    assert model.score(X, y) > 0.9
    assert model.privacy_.epsilon == 1.0


# --- a bound


@dataclass(frozen=True, eq=False)
class ClipLargest:
    """Rows of ``width`` numbers are shrunk until none of them is beyond ``clip``."""

    clip: float
    width: int
    scale = 1.0
    kind = "ClipLargest(clip, width)"

    def norm(self, order=2):
        return self.clip * self.width ** (1 / order)

    def sensitivity(self, adjacency, order=2):
        return self.norm(order) * adjacency.shift

    def apply(self, rows):
        rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
        return rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True) / self.clip, 1.0)


class Shrunk(ft.PerExample):
    honours = (*ROWS, ClipLargest.kind)  # rows go through bound.apply, so that this bound holds too


def test_a_bound():
    query = ft.Query(ft.Everyone(), Shrunk(rows_of), ClipLargest(0.5, 2), ft.Gaussian(20.0))
    ledger = ft.Ledger(BUDGET).over(ROWS_OF_TWO)
    assert ledger.ask(query).value.shape == (2,)
    assert query.price(BUDGET) == ft.Gaussian(20.0).unit_event()
    with pytest.raises(ft.Unsupported, match="ClipLargest"):  # who has not said that it holds is refused
        ft.Query(ft.Everyone(), ft.PerExample(rows_of), ClipLargest(0.5, 2), ft.Gaussian(20.0))


# --- a mechanism


@dataclass(frozen=True)
class Clamped:
    """Gaussian noise, and then the public range within which an answer makes sense."""

    inner: ft.Gaussian
    low: float
    high: float

    def unit_event(self):
        return self.inner.unit_event()

    def event(self, bound, adjacency, sampled):
        return self.inner.event(bound, adjacency, sampled)

    def check(self, bound, shape):
        self.inner.check(bound, shape)

    def release(self, total, bound, stream, turn=0):
        return np.clip(self.inner.release(total, bound, stream, turn), self.low, self.high)


def test_a_mechanism():
    query = ft.Query(
        ft.Poisson(0.1), ft.PerExample(rows_of), ft.ClipNorm(1.0), Clamped(ft.Gaussian(5.0), 0, 50)
    )
    ledger = ft.Ledger(BUDGET).over(ROWS_OF_TWO)
    times = ledger.promise(query).times
    assert times == ft.steps_for(ft.Poisson(0.1).amplify(ft.Gaussian(5.0)), BUDGET)
    assert all(0 <= ledger.ask(query).value.min() <= 50 for _ in range(20))


# --- a sampler


@dataclass(frozen=True)
class EitherOf:
    """Those that one of two Poisson draws takes."""

    sampling_rate: float

    @property
    def union(self):
        return ft.Poisson(1 - (1 - self.sampling_rate) ** 2)

    def draw(self, records, stream, turn=0):
        once = ft.Poisson(self.sampling_rate)
        return np.union1d(once.draw(records, stream), once.draw(records, stream))

    def amplify(self, step, observer=ft.Observer.ANYONE):
        return self.union.amplify(step, observer)


def test_a_sampler():
    query = ft.Query(EitherOf(0.05), ft.PerExample(rows_of), ft.ClipNorm(1.0), ft.Gaussian(2.0))
    ledger = ft.Ledger(BUDGET).over(ROWS_OF_TWO)
    assert ledger.promise(query).times == ft.steps_for(ft.Poisson(0.0975).amplify(ft.Gaussian(2.0)), BUDGET)
    assert ledger.ask(query).receipt.event.rate == pytest.approx(0.0975)


# --- an accountant


def closed_form(plan):
    """zCDP of steps on everybody, by the closed form ρ + 2√(ρ ln(1/δ))."""
    if plan.drawn < 1:
        raise ft.Unsupported("the closed form has no theorem for sampled steps: use pld")
    rho = plan.steps * zcdp.rho_of_gaussian(plan.noise)
    return PrivacyCurve(
        lambda delta: rho + 2 * np.sqrt(rho * np.log(1 / delta)),
        lambda epsilon: np.exp(-((epsilon - rho) ** 2) / (4 * rho)) if epsilon > rho else 1.0,
        "Bun & Steinke 2016, Prop. 1.3",
    )


def test_an_accountant():
    row = Accountant._new_member_(Accountant, "closed", "Bun & Steinke 2016, Prop. 1.3", closed_form)
    plan = EqualSteps(40.0, 1.0, 100)
    found = row.curve(plan)
    assert Accountant.ZCDP.curve(plan).epsilon(1e-5) < found.epsilon(1e-5) < 1.5
    assert found.delta(found.epsilon(1e-5)) == pytest.approx(1e-5)
    with pytest.raises(ft.Unsupported, match="closed form"):
        row.curve(EqualSteps(40.0, 0.1, 100))


# --- a command


def greet(name: Annotated[str, typer.Argument(help="Whom.")], as_json: AsJson = False) -> int:
    """Greets somebody."""
    if as_json:
        emit_json({"name": name})
    else:
        emit(f"hello {name}")
    return 0


@pytest.fixture
def commands():
    known = list(app.registered_commands)
    yield
    app.registered_commands[:] = known


@pytest.mark.usefixtures("commands")
def test_a_command(capsys):
    app.command(cls=Command)(greet)
    assert main(["greet", "ann", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"format": 1, "name": "ann"}
    assert main(["greet", "--loud"]) == 2
    assert "farthing: " in capsys.readouterr().err


# --- a picture


def charged(subject):
    """How much of the ledger's budget is charged, as one line."""
    title, caption = "Charged", f"{subject.share:.0%} of the budget is charged."
    return Picture(
        title, caption, drawing.svg(title, caption, [drawing.line(0, 9, 99, 9, "limit")], "charged")
    )


def test_a_picture(monkeypatch):
    ledger = ft.Ledger(BUDGET)
    ledger.allot(0.5, 1e-5)
    monkeypatch.setattr(pictures, "PICTURES", [*pictures.PICTURES, charged])
    assert "of the budget is charged." in page(Subject.of(ledger, title="a ledger", method="none"))


# --- a file format


class JsonLines:
    """One JSON object a line."""

    @staticmethod
    def _rows(path):
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def claims(self, path):
        return path.endswith(".jsonl")

    def header(self, path, column=None):
        return list(self._rows(path)[0])

    def count(self, path, names):
        return len(self._rows(path))

    def columns(self, path, names):
        rows = self._rows(path)
        yield {name: np.array([row[name] for row in rows], dtype=object) for name in names}


def test_a_file_format(monkeypatch, tmp_path):
    file = tmp_path / "people.jsonl"
    file.write_text('{"age": 20, "rich": "no"}\n{"age": 60, "rich": "yes"}\n')
    schema = Schema((Numeric("age", 0, 100),), Categorical("rich", ("no", "yes")))
    monkeypatch.setattr(table_files, "FORMATS", [JsonLines(), *table_files.FORMATS])
    X, y = table_files.read(str(file), schema)
    assert X.tolist() == np.float32([[0.2], [0.6]]).tolist()
    assert y.tolist() == [0, 1]
    assert table_files.count(str(file), schema) == 2


def test_a_format_of_models(monkeypatch):
    def as_json(pipeline, schema):
        return json.dumps(pipeline[-1].coef_.tolist()).encode()

    monkeypatch.setitem(export.FORMATS, "json", as_json)
    schema = Schema((Numeric("age", 0, 100),), Categorical("rich", ("no", "yes")))
    model = ft.LogisticRegression(1.0, 1e-5, bounds=(0, 1)).fit(
        DATA.uniform(size=(300, 1)), np.arange(300) % 2
    )
    assert np.shape(json.loads(export.exported("json", schema, model.to_sklearn()))) == (1, 1)
