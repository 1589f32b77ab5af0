"""The training command: from a table and a public schema to a private model.

Everything that can be wrong is looked at before the first charge: the schema, the tables, where the model
will be written, and, at a rehearsal on made-up rows, the method itself. Messages name files, columns and what
was declared, never a cell of a table. No record decides whether it is refused: one with a label that is not
declared, or without a number where one is, counts as nothing. With ``strict`` it does, and `STRICT` says so.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix

from farthing import validate
from farthing.accounting import gaussian, groups
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter
from farthing.accounting.personal import PersonalBudgets
from farthing.budget import Adjacency, Budget, Guarantee, Unit
from farthing.cli import export, measuring
from farthing.cli.step_recorder import StepRecorder, Watch
from farthing.data import table_files
from farthing.data.columns import Categorical
from farthing.data.csv_files import Csv
from farthing.data.model_file import Model, check_writable, write
from farthing.data.schema import Schema
from farthing.data.splitting import Split
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.linear.base import PUBLIC_SIZE
from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS, Settings, SolverMethod
from farthing.queries.query import Step
from farthing.report.document import page
from farthing.report.subject import Score, Subject

STRICT = "that every value lies within the schema was checked without paying for it (--strict)"
HELD = (
    "a share of {:g} of the records, by hash, is held out, and figures on those cost each no more than the "
    "training costs the others (parallel composition)"
)
REHEARSED = "as on made-up rows: a method that adapts to its answers may choose otherwise"

Array = NDArray[np.float64]
Estimator = LogisticRegression | LinearSVC | LinearRegression
Follow = Callable[[], AbstractContextManager[Watch | None]]  # entered when the spending begins
Reading = Callable[[Csv], AbstractContextManager[Csv]]  # entered while the table is read


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The options of a training: what to train on which table, and where to put it."""

    table: str
    schema: Schema
    _: KW_ONLY
    epsilon: float | None  # None where each record has its own
    delta: float
    budget_column: str | None = None
    adjacency: Adjacency | None = None  # that of the ledger, or add-remove
    model: str | None = None  # "logistic", "svm" or "linear"; the first that suits the target
    method: str = "auto"
    records: int | None = None
    ledger: Path | None = None
    out: Path = Path()
    force: bool = False
    test: str | None = None
    strict: bool = False  # refuse values that the schema does not have
    formats: tuple[str, ...] = ()  # besides .npz
    settings: tuple[str, ...] = ()  # of the method, as NAME=VALUE
    csv: Csv = table_files.PLAIN
    user: str | None = None  # the column that says whose record it is: whole people are protected
    rows: int = 1  # that are kept of a person
    holdout: float = 0.0  # the share of the records that is not learnt from

    @property
    def budget(self) -> Budget:
        """The budget as it is asked for, per person where people have several records."""
        assert self.epsilon is not None
        unit = Unit.RECORD if self.user is None else Unit.USER
        return Budget(self.epsilon, self.delta, self.adjacency or Adjacency.ADD_REMOVE, unit)

    @property
    def split(self) -> bool:
        """Whether some rows of the table are not learnt from."""
        return self.user is not None or self.holdout > 0

    def notes(self) -> tuple[str, ...]:
        """Return what the guarantee has to say where some rows are not learnt from."""
        of = "of the table" if self.user is None else f"that are kept, at most {self.rows} of a person,"
        size = f"the number of records {of} is taken as public" * (self.split and self.records is None)
        return tuple(text for text in (size, HELD.format(self.holdout) * (self.holdout > 0)) if text)

    def sized(self, kept: int) -> "TrainingJob":
        """Return the job with a public number of records to learn from: the share that is not held out.

        How many are on which side follows from hashes of records, so it is neither printed nor learnt with.
        """
        if self.records is not None or not self.split:
            return self
        return replace(self, records=max(1, round(kept * (1 - self.holdout))))

    def per_record(self) -> "TrainingJob":
        """Return the job with the budget that each record may take, where whole people are protected."""
        if self.user is None:
            return self
        return replace(self, epsilon=groups.per_record(self.budget, self.rows).epsilon)


def train(job: TrainingJob, follow: Follow = nullcontext, reading: Reading | None = None) -> dict[str, Any]:
    """Checks everything, spends the budget, writes the model and its guarantee; returns what may be told.

    ``follow`` may show how it goes, and end it early: the model is then that of the last step. ``reading``
    may show how far the table is read.
    """
    asked, job = job, job.per_record()
    estimator, method, recorder, settings = _prepared(job)
    files = _files(job)
    for path in files.values():
        check_writable(path, job.force, kept=(job.table, job.test, job.ledger))
    if job.ledger is not None and not Journal.exists(job.ledger):
        check_writable(job.ledger, force=False, option="--ledger")
    with nullcontext(job.csv) if reading is None else reading(job.csv) as csv:
        split = Split(job.user, job.rows, job.holdout)
        X, y, held = table_files.training_rows(job.table, job.schema, split, strict=job.strict, csv=csv)
    people = _people(job)
    kept = len(y) + (0 if held is None else len(held[1]))
    if job.records is None:
        table_files.filled(job.table, kept)
    job, records = job.sized(kept), job.records or kept  # a private number stays private
    test = table_files.held_out(job.test, job.table, job.schema, job.csv)
    with ExitStack() as resources:
        ledger = resources.enter_context(_existing(job))
        _refuse_undivided(job, method, ledger)
        recorder.watch = _first_step_only
        _rehearse(job, estimator, method, len(X), ledger, people)
        if ledger is None and job.ledger is not None:
            ledger = resources.enter_context(_created(job, method, people))
        recorder.watch = resources.enter_context(follow())
        _paying(job, estimator, method, ledger).fit(X, y, budgets=people)
        assert recorder.ledger is not None
        recorder.ledger.refund()
        measured = None if test is None else {"table": job.test, **measuring.measured(estimator, *test)}
        if held is not None:
            figures = measuring.held_out(estimator, *held, recorder.ledger)
            measured = None if figures is None else {"table": job.table, **figures}
        if job.strict:
            estimator.privacy_ = estimator.privacy_.noted(STRICT)
        if asked.user is not None:
            estimator.privacy_ = groups.per_person(estimator.privacy_, asked.budget, asked.rows)
        spent = _spent(asked, recorder.ledger)
        told = {
            **asdict(estimator.privacy_),
            **_levels(estimator),
            "method": job.method,
            "settings": settings,
            "steps": estimator.n_iter_,
            "records": records,
            "features": job.schema.width,
            "partial": recorder.stopped,
            **({"unmeasured": measuring.UNPAID} if held is not None and measured is None else {}),
            "spent": {"epsilon": spent.epsilon, "delta": spent.delta, "note": spent.note},
            "ledger": None if job.ledger is None else str(job.ledger),
            **{kind: str(path) for kind, path in files.items() if kind != "privacy"},
        }
        privacy = json.dumps(told, allow_nan=False, indent=1)
        kind = "logistic" if isinstance(estimator, LogisticRegression) else "scores"
        model = _model(job.schema, estimator, kind)
        write(files["model"], model.to_bytes(privacy))
        write(files["privacy"], (privacy + "\n").encode())
        for form in job.formats:
            write(files[form], export.exported(form, job.schema, estimator.to_sklearn()))
        try:
            report = _reported(job, estimator, ledger or recorder.ledger, told, measured)
        except FarthingError as error:  # nothing is wrong with what was asked for, and it is paid
            raise FarthingError(f"the model is written, but its report could not be: {error}") from None
        write(files["report"], report.encode())
    return told if measured is None else {**told, "test": measured | measuring.verdict(measured)}


def rehearse(job: TrainingJob, records: int) -> dict[str, Any]:
    """Trains on made-up rows, charged to a ledger in memory like the real one; returns price and noise."""
    asked, job = job, job.per_record()
    estimator, method, recorder, settings = _prepared(job)
    job = job.sized(records)
    with _existing(job) as ledger:
        _refuse_undivided(job, method, ledger)
        before = 0.0 if ledger is None else ledger.share
        paid = _rehearse(job, estimator, method, records, ledger, _people(job))
    assert recorder.ledger is not None
    if asked.user is not None:
        estimator.privacy_ = groups.per_person(estimator.privacy_, asked.budget, asked.rows)
    return {
        "dry_run": True,
        **asdict(estimator.privacy_),
        **({"note": PUBLIC_SIZE} if job.records is None else {}),  # nothing says it at a rehearsal
        **_levels(estimator),
        "method": job.method,
        "settings": settings,
        "steps": estimator.n_iter_,
        "records": asked.records or records,
        "features": job.schema.width,
        "answers": [
            {"what": what, "sampler": sampler, "mechanism": mechanism, **asdict(asked)}
            for (what, sampler, mechanism), asked in recorder.asked.items()
        ],
        "expected": REHEARSED,
        "ledger": None if job.ledger is None else str(job.ledger),
        "share": [before, (paid or recorder.ledger).share],
    }


def _spent(asked: TrainingJob, ledger: Ledger) -> Guarantee:
    """Return what was charged until now: that of a person, where people have several records."""
    spent = ledger.spent
    if asked.user is None:
        return spent
    mu = asked.rows * measuring.paid_mu(ledger)
    epsilon = gaussian.epsilon(mu, asked.delta) if mu else 0.0
    return replace(spent, epsilon=min(epsilon, asked.budget.epsilon), unit=Unit.USER)


def _people(job: TrainingJob) -> Array | None:
    """Everybody's own ε, of the column that a job names."""
    if job.budget_column is None:
        return None
    return table_files.budgets(job.table, job.budget_column, job.schema, job.csv)


def _levels(estimator: Estimator) -> dict[str, Any]:
    """What holds for each level of budget, where there are several."""
    each = [{"budget": level, "epsilon": said.epsilon} for level, said in estimator.guarantees_.items()]
    return {"levels": each} if len(each) > 1 else {}


def _rehearse(
    job: TrainingJob,
    estimator: Estimator,
    method: SolverMethod,
    records: int,
    ledger: Ledger | None,
    people: Array | None,
) -> Ledger | None:
    """Fits made-up rows, and exports the result; returns the copy of ``ledger`` that paid for it.

    What a method refuses, what does not fit the budget and what cannot be exported is refused here, before
    anything is charged.
    """
    copy = None if ledger is None else ledger.rehearsal()
    estimator.set_params(records=job.records or records if people is None else job.records)
    rows = None if people is None else len(people)
    _paying(job, estimator, method, copy).fit(*_made_up(job.schema, rows), budgets=people)
    estimator.set_params(records=job.records)
    for form in job.formats:
        export.exported(form, job.schema, estimator.to_sklearn())
    return copy


def _model(schema: Schema, estimator: Estimator, kind: str) -> Model:
    """Return the model on features in [0, 1], with the bounds that were bought."""
    coef, intercept = np.atleast_2d(estimator.coef_), np.atleast_1d(estimator.intercept_)
    if not hasattr(estimator, "bounds_"):
        return Model(schema, coef, intercept, kind)
    low, high = estimator.bounds_
    return Model(schema.with_bounds(low, high), coef * (high - low), intercept + coef @ low, kind)


def _first_step_only(step: Step, ledger: Ledger) -> bool:
    return True


def _prepared(job: TrainingJob) -> tuple[Estimator, SolverMethod, StepRecorder, Settings]:
    """Return the estimator that a job asks for, its method, the recorder of its steps, and its settings."""
    target = job.schema.target
    made: dict[str, Callable[[], Estimator]] = {}
    if isinstance(target, Categorical):
        known, classes = CLASSIFIERS, range(len(target.values))
        made["logistic"] = lambda: LogisticRegression(classes=classes)
        made["svm"] = lambda: LinearSVC(classes=classes)
    else:
        known, bounds = REGRESSORS, (target.low, target.high)
        made["linear"] = lambda: LinearRegression(target_bounds=bounds)
    kind = next(iter(made)) if job.model is None else job.model
    if kind not in made:
        raise InvalidValue(f"--model must be one of {list(made)} for target {target.name!r}, got {kind!r}")
    private = sorted(name for name, method in known.items() if method.private)
    if job.method not in private:  # a fit without privacy is a baseline, and for Python only
        raise InvalidValue(f"--method must be one of {private}, got {job.method!r}")
    if job.delta == 0 and known[job.method].filter is not BasicFilter:
        raise InvalidValue(f"--delta must be above 0 with --method {job.method}, got {job.delta:g}")
    if job.budget_column is not None and known[job.method].personal is None:
        able = sorted(name for name, method in known.items() if method.personal)
        raise InvalidValue(f"--budget-column needs a --method of {able}, got {job.method!r}")
    if job.records is not None:
        validate.count(**{"--records": job.records})
    _refuse_splits(job, known[job.method])
    if job.formats and np.isnan(job.schema.bounds[0]).any():
        raise Unsupported("--format cannot write bounds that are bought: predict with model.npz")
    for form in job.formats:
        if form not in export.FORMATS:
            raise InvalidValue(f"--format must be one of {list(export.FORMATS)}, got {form!r}")
    plain = known[job.method]
    settings = plain.parsed(job.settings, job.method)
    chosen = plain.with_(settings)
    recorder = StepRecorder(job.method, chosen.algorithm)
    recorder.notes = job.notes()
    method = replace(chosen, algorithm=recorder, rehearsed=True)
    estimator = made[kind]().set_params(
        epsilon=job.epsilon,
        delta=job.delta,
        bounds=job.schema.bounds,  # what it encodes into
        solver=method,
        adjacency=job.adjacency,
        records=job.records,
    )
    return estimator, method, recorder, settings


def _refuse_splits(job: TrainingJob, method: SolverMethod) -> None:
    """Refuses people with several records, and records that are held out, where no theorem covers them."""
    if (job.user is not None or job.holdout) and job.budget_column is not None:
        raise InvalidValue(
            "--budget-column gives records budgets of their own: leave --user and --holdout out"
        )
    if job.user is not None and method.filter is not GdpFilter:
        raise Unsupported(
            f"--user needs a --method that is accounted by GDP, such as auto, got {job.method!r}"
        )
    if job.holdout:
        if job.test is not None:
            raise InvalidValue("give either --test or --holdout, not both")
        if job.adjacency not in (None, Adjacency.ADD_REMOVE):
            raise Unsupported(
                f"--holdout needs add-remove, got {job.adjacency}: a replaced record changes sides"
            )
        if not job.delta:
            raise Unsupported("--holdout adds Gaussian noise: --delta must be above 0")


def _refuse_undivided(job: TrainingJob, method: SolverMethod, ledger: Ledger | None) -> None:
    """Refuses to measure held-out records where others may ask the same ledger: no part of it pays."""
    parts = ledger is not None and isinstance(ledger.filter, BasicFilter)
    if job.holdout and job.ledger is not None and method.filter in (None, RdpFilter) and not parts:
        raise Unsupported(
            f"--holdout is paid by a part of a ledger, and --method {job.method} takes the whole: leave "
            "--ledger out, or give one created with --filter basic"
        )


@contextmanager
def _existing(job: TrainingJob) -> Iterator[Ledger | None]:
    """Opens the ledger that a job names, if there is one already."""
    if job.ledger is None or not Journal.exists(job.ledger):
        yield None
    else:
        with Ledger.open(job.ledger) as ledger:
            yield ledger


def _created(job: TrainingJob, method: SolverMethod, people: Array | None) -> Ledger:
    """Creates the ledger that a job names, with the job's budget and the filter that its method needs."""
    adjacency = job.adjacency or Adjacency.ADD_REMOVE
    if people is not None:
        levels = PersonalBudgets(people)
        return Ledger(levels.budget(job.delta, adjacency=adjacency), journal=job.ledger, filter=levels)
    assert job.epsilon is not None
    return Ledger(Budget(job.epsilon, job.delta, adjacency), journal=job.ledger, filter=method.filter)


def _reported(
    job: TrainingJob,
    estimator: Estimator,
    ledger: Ledger,
    told: dict[str, Any],
    measured: dict[str, Any] | None,
) -> str:
    """The page that tells of this training."""
    scores, released, measure = list[Score](), list[str](), "accuracy"
    if measured is not None:
        measure = "rmse" if "rmse" in measured else measure
        baseline = "guessing" if measure == "accuracy" else "rmse_of_mean"
        released = [f"{measure} on {measured['table']}, {measured['note']}"]
        scores = [
            Score(label=job.method, epsilon=estimator.privacy_.epsilon, value=measured[measure]),
            Score(label=baseline.replace("_", " "), epsilon=None, value=measured[baseline]),
        ]
    subject = Subject.of(
        ledger,
        title=f"{job.schema.target.name} of {Path(job.table).name}",
        method=", ".join((job.method, *job.settings)),
        steps=told["steps"],
        guarantee=estimator.privacy_,
        history=estimator.history_,
        records=told["records"],
        features=told["features"],
        scores=scores,
        measure=measure,
        released=released,
        partial=told["partial"],
    )
    return page(subject)


def _paying(job: TrainingJob, estimator: Estimator, method: SolverMethod, ledger: Ledger | None) -> Estimator:
    """Gives the estimator a ledger to take ε and δ from, or all of it where that is meant and none is spent.

    Without one it makes its own, in memory.
    """
    if ledger is None:
        return estimator
    if (job.user is not None or job.holdout) and ledger.budget.adjacency is not Adjacency.ADD_REMOVE:
        raise Unsupported(f"--user and --holdout need a ledger of add-remove: its budget is {ledger.budget}")
    if ledger.budget.unit is not Unit.RECORD:
        raise InvalidValue(
            f"--ledger must be one per record, since a row counts as one: its budget is {ledger.budget}"
        )
    if ledger.share and any(row.kind == "promise" for row in ledger.journal.rows()):
        spent = BudgetSpent if ledger.share == 1 else Unsupported
        raise spent(
            f"--ledger holds the plan of another training, of which {1 - ledger.share:.3%} is left: no other "
            "can spend it, so take a new ledger"
        )
    if isinstance(ledger.filter, RdpFilter) and (method.filter is not RdpFilter or ledger.share):
        raise Unsupported(
            "--ledger is spent by an RDP filter, which hands out no parts: create one with --filter gdp, "
            "zcdp or basic"
        )
    estimator.set_params(ledger=ledger)
    if job.epsilon is None:
        if ledger.budget.delta != job.delta:
            raise InvalidValue(f"--delta must be the ledger's, {ledger.budget.delta:g}, got {job.delta:g}")
        estimator.set_params(delta=None)
        return estimator
    if ledger.share == 0 and ledger.budget == ledger.budget.with_(job.epsilon, job.delta):
        estimator.set_params(epsilon=None, delta=None)
    elif method.filter in (None, RdpFilter) and not isinstance(ledger.filter, BasicFilter):
        kind = "promises a plan" if method.filter is None else "asks batches"
        raise Unsupported(
            f"--method {job.method} {kind}: it takes a new ledger, or a part of one created with "
            "--filter basic"
        )
    return estimator


def _made_up(schema: Schema, rows: int | None = None) -> tuple[Any, ArrayLike]:
    """A row for each label or end of the target, or so many ``rows`` of zeros."""
    target = schema.target
    y = range(len(target.values)) if isinstance(target, Categorical) else (target.low, target.high)
    if rows is None:
        return np.zeros((len(y), schema.width)), y
    return csr_matrix((rows, schema.width)), np.resize(np.array(y), rows)


def _files(job: TrainingJob) -> dict[str, Path]:
    """Return the path of each file: in a folder, or NAME.npz and others that begin with NAME."""
    if job.out.suffix == ".npz":
        folder, model, other = job.out.parent, job.out.stem, f"{job.out.stem}."
    else:
        folder, model, other = job.out, "model", ""
    files = {"model": f"{model}.npz", "privacy": f"{other}privacy.json", "report": f"{other}report.html"}
    files |= {form: f"{model}.{form}" for form in job.formats}
    return {kind: folder / name for kind, name in files.items()}
