"""The training command: from a table and a public schema to a private model.

Everything that can be wrong is looked at before the first charge: the schema, the tables, where the model
will be written, and, at a rehearsal on made-up rows, the method itself. Messages name files, columns and what
was declared, never a cell of a table. No record decides whether it is refused: one with a label that is not
declared, or without a number where one is, counts as nothing. With ``strict`` it does, and `STRICT` says so.

`StepRecorder` records a method's steps and queries as they are made, and ends it early when asked to.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix
from sklearn.metrics import roc_auc_score

from farthing import validate
from farthing.accounting.filters import BasicFilter, RdpFilter
from farthing.accounting.personal import PersonalBudgets
from farthing.budget import Adjacency, Budget, Unit
from farthing.cli import export
from farthing.data import table_files
from farthing.data.model_file import Model, check_writable, write
from farthing.data.schema import Categorical, Schema
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.linear.base import PUBLIC_SIZE
from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression
from farthing.linear.methods.privgene import NoisyTop
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS, Settings, SolverMethod
from farthing.queries.mechanisms import Laplace, Mechanism, NoisyMax
from farthing.queries.personal import Personal
from farthing.queries.query import Answer, Query, Step
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler
from farthing.report.document import page
from farthing.report.subject import Score, Subject

Watch = Callable[[Step, Ledger], bool]  # sees a step and the ledger that paid for it; True ends the training


class StepRecorder:
    """A recorder of an algorithm's steps and queries, which may end it after any step.

    Each step is shown to ``watch`` before the next is asked for.
    """

    def __init__(self, name: str, algorithm: Callable[[Ledger, Problem], Iterator[Step]]) -> None:
        self.name, self.algorithm = name, algorithm
        self.watch: Watch | None = None
        self.stopped = False
        self.ledger: Ledger | None = None  # what the last run spent from
        self.asked: dict[tuple[str, str, str], Asked] = {}

    def __call__(self, ledger: Ledger, problem: Problem) -> Iterator[Step]:
        self.ledger, self.stopped, self.asked = ledger, False, {}
        step = None
        for step in self.algorithm(ledger.with_listener(self._note), problem):
            yield step
            if self.watch is not None and self.watch(step, ledger):
                self.stopped = True
                return
        if step is None:
            raise BudgetSpent(f"{ledger.budget} does not allow a single step of {self.name!r}")

    def _note(self, query: Query, w: Any, answer: Answer) -> None:
        what = type(query.contribution).__name__.lower()
        kind = what, drawn(query.sampler), type(query.mechanism).__name__
        self.asked.setdefault(kind, Asked()).add(query)


@dataclass(slots=True)
class Asked:
    """Answers of one kind: how many, and between which ends their clips and their noise lie."""

    times: int = 0
    clip_norm: tuple[float, float] = (math.inf, 0.0)
    deviation: tuple[float, float] = (math.inf, 0.0)  # of a coordinate, a standard one
    noise_multiplier: tuple[float, float] = (math.inf, 0.0)  # deviation over clip

    def add(self, query: Query) -> None:
        """Add one answer."""
        order = 1 if isinstance(query.mechanism, Laplace) else 2
        clip = query.bound.norm(order) * float(np.max(query.bound.scale))
        noise = float(getattr(query.mechanism, "noise_multiplier", math.nan)) * _spread(query.mechanism)
        self.times += 1
        self.clip_norm = _stretched(self.clip_norm, clip)
        self.noise_multiplier = _stretched(self.noise_multiplier, noise)
        self.deviation = _stretched(self.deviation, noise * clip)


def drawn(sampler: Sampler) -> str:
    """A sampler in words.

    >>> drawn(Poisson(0.01))
    'poisson, sampling rate 0.01'
    """
    match sampler:
        case Everyone():
            return "everyone"
        case Poisson(sampling_rate=rate):
            return f"poisson, sampling rate {rate:.3g}"
        case FixedSize(size=size, of=of):
            return f"{size} of {of}"
        case Personal(sampling_rates=rates, weights=weights):
            if min(rates) == 1:
                return f"everyone, weights {min(weights):.3g} to 1 by budget"
            return f"poisson, sampling rates {min(rates):.3g} to {max(rates):.3g} by budget"
    return repr(sampler)


def _spread(mechanism: Mechanism) -> float:
    """The standard deviation of its noise at scale 1."""
    match mechanism:
        case Laplace() | NoisyMax(kind="laplace"):
            return math.sqrt(2)
        case NoisyMax() | NoisyTop():
            return math.pi / math.sqrt(6)
    return 1.0


def _stretched(ends: tuple[float, float], value: float) -> tuple[float, float]:
    return min(ends[0], value), max(ends[1], value)


STRICT = "that every value lies within the schema was checked without paying for it (--strict)"
REHEARSED = "as on made-up rows: a method that adapts to its answers may choose otherwise"

Array = NDArray[np.float64]
Estimator = LogisticRegression | LinearSVC | LinearRegression
Follow = Callable[[], AbstractContextManager[Watch | None]]  # entered when the spending begins


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


def train(job: TrainingJob, follow: Follow = nullcontext) -> dict[str, Any]:
    """Checks everything, spends the budget, writes the model and its guarantee; returns what may be told.

    ``follow`` may show how it goes, and end it early: the model is then that of the last step.
    """
    estimator, method, recorder, settings = _prepared(job)
    X, y = table_files.read(job.table, job.schema, strict=job.strict)
    people = _people(job)
    if job.records is None:
        table_files.filled(job.table, y)
    test = table_files.held_out(job.test, job.table, job.schema)
    files = _files(job)
    for path in files.values():
        check_writable(path, job.force, kept=(job.table, job.test, job.ledger))
    if job.ledger is not None and not Journal.exists(job.ledger):
        check_writable(job.ledger, force=False, option="--ledger")
    with ExitStack() as resources:
        ledger = resources.enter_context(_existing(job))
        recorder.watch = _first_step_only
        _rehearse(job, estimator, method, len(X), ledger, people)
        if ledger is None and job.ledger is not None:
            ledger = resources.enter_context(_created(job, method, people))
        recorder.watch = resources.enter_context(follow())
        _paying(job, estimator, method, ledger).fit(X, y, budgets=people)
        assert recorder.ledger is not None
        recorder.ledger.refund()
        measured = None if test is None else {"table": job.test, **_measured(estimator, *test)}
        if job.strict:
            estimator.privacy_ = estimator.privacy_.noted(STRICT)
        spent = recorder.ledger.spent
        told = {
            **asdict(estimator.privacy_),
            **_levels(estimator),
            "method": job.method,
            "settings": settings,
            "steps": estimator.n_iter_,
            "records": len(X) if job.records is None else job.records,  # a private number stays private
            "features": job.schema.width,
            "partial": recorder.stopped,
            "spent": {"epsilon": spent.epsilon, "delta": spent.delta, "note": spent.note},
            "ledger": None if job.ledger is None else str(job.ledger),
            **{kind: str(path) for kind, path in files.items() if kind != "privacy"},
        }
        privacy = json.dumps(told, allow_nan=False, indent=1)
        model = Model(job.schema, np.atleast_2d(estimator.coef_), np.atleast_1d(estimator.intercept_))
        write(files["model"], model.to_bytes(privacy))
        write(files["privacy"], (privacy + "\n").encode())
        for form in job.formats:
            write(files[form], export.exported(form, job.schema, estimator.to_sklearn()))
        try:
            report = _reported(job, estimator, ledger or recorder.ledger, told, measured)
        except FarthingError as error:  # nothing is wrong with what was asked for, and it is paid
            raise FarthingError(f"the model is written, but its report could not be: {error}") from None
        write(files["report"], report.encode())
    return told if measured is None else {**told, "test": measured}


def rehearse(job: TrainingJob, records: int) -> dict[str, Any]:
    """Trains on made-up rows, charged to a ledger in memory like the real one; returns price and noise."""
    estimator, method, recorder, settings = _prepared(job)
    with _existing(job) as ledger:
        before = 0.0 if ledger is None else ledger.share
        paid = _rehearse(job, estimator, method, records, ledger, _people(job))
    assert recorder.ledger is not None
    return {
        "dry_run": True,
        **asdict(estimator.privacy_),
        **({"note": PUBLIC_SIZE} if job.records is None else {}),
        **_levels(estimator),
        "method": job.method,
        "settings": settings,
        "steps": estimator.n_iter_,
        "records": job.records or records,
        "features": job.schema.width,
        "answers": [
            {"what": what, "sampler": sampler, "mechanism": mechanism, **asdict(asked)}
            for (what, sampler, mechanism), asked in recorder.asked.items()
        ],
        "expected": REHEARSED,
        "ledger": None if job.ledger is None else str(job.ledger),
        "share": [before, (paid or recorder.ledger).share],
    }


def _people(job: TrainingJob) -> Array | None:
    """Everybody's own ε, of the column that a job names."""
    if job.budget_column is None:
        return None
    return table_files.budgets(job.table, job.budget_column, job.schema)


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
    for form in job.formats:
        if form not in export.FORMATS:
            raise InvalidValue(f"--format must be one of {list(export.FORMATS)}, got {form!r}")
    plain = known[job.method]
    settings = plain.parsed(job.settings, job.method)
    chosen = plain.with_(settings)
    recorder = StepRecorder(job.method, chosen.algorithm)
    method = replace(chosen, algorithm=recorder, rehearsed=True)
    estimator = made[kind]().set_params(
        epsilon=job.epsilon,
        delta=job.delta,
        bounds=(0.0, 1.0),  # what a schema encodes into
        solver=method,
        adjacency=job.adjacency,
        records=job.records,
    )
    return estimator, method, recorder, settings


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
        released = [f"{measure} on {measured['table']}, {table_files.WITHOUT_PRIVACY}"]
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


def _measured(estimator: Estimator, X: Array, y: NDArray[Any]) -> dict[str, Any]:
    """Return figures of a model on another table, which are not private and say so."""
    told: dict[str, Any] = {"records": len(y), "note": table_files.WITHOUT_PRIVACY}
    found = estimator.predict(X)
    if isinstance(estimator, LinearRegression):
        told["rmse"] = float(np.sqrt(np.mean(np.square(found - y))))
        return {**told, "rmse_of_mean": float(np.std(y))}
    told["accuracy"] = float(np.mean(found == y))
    told["guessing"] = float(np.bincount(y).max() / len(y))
    scores = estimator.decision_function(X)
    if scores.ndim == 1 and 0 < y.sum() < len(y):
        told["auc"] = float(roc_auc_score(y, scores))
    if isinstance(estimator, LogisticRegression):
        told["log_loss"] = -float(np.mean(estimator.predict_log_proba(X)[np.arange(len(y)), y]))
    return told


def _files(job: TrainingJob) -> dict[str, Path]:
    """Return the path of each file: in a folder, or NAME.npz and others that begin with NAME."""
    if job.out.suffix == ".npz":
        folder, model, other = job.out.parent, job.out.stem, f"{job.out.stem}."
    else:
        folder, model, other = job.out, "model", ""
    files = {"model": f"{model}.npz", "privacy": f"{other}privacy.json", "report": f"{other}report.html"}
    files |= {form: f"{model}.{form}" for form in job.formats}
    return {kind: folder / name for kind, name in files.items()}
