"""Run the training command: from a table and a public schema to a private model.

All input is checked before the first charge: the schema, the tables, the output files and, by a rehearsal on
made-up rows, the method itself. Messages name files, columns and declarations, never a cell of a table. No
record decides whether a table is refused: a record whose label is not declared, or that lacks a number,
contributes nothing. With ``strict`` such a record causes a refusal, and `STRICT` says so in the guarantee.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix

from farthing import validate
from farthing.accounting import composition, gaussian
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter
from farthing.accounting.personal import PersonalBudgets
from farthing.budget import Adjacency, Budget, Guarantee, Unit
from farthing.cli import export, measuring, outputs
from farthing.cli.job import LARGE, Estimator, TrainingJob
from farthing.cli.step_recorder import StepRecorder, Watch
from farthing.data import table_files
from farthing.data.columns import Categorical
from farthing.data.csv_files import Csv
from farthing.data.model_file import check_writable, write
from farthing.data.schema import Schema
from farthing.data.splitting import Split
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.linear.base import PUBLIC_SIZE
from farthing.linear.solvers import PURE, Settings, SolverMethod
from farthing.queries.query import Step

log = logging.getLogger(__name__)

STRICT = "--strict checked, without a charge, that every value lies within the schema"
REHEARSED = "rehearsed on made-up rows: a method that adapts to its answers may choose other noise"

Array = NDArray[np.float64]
Follow = Callable[[], AbstractContextManager[Watch | None]]  # entered when the spending begins
Reading = Callable[[Csv], AbstractContextManager[Csv]]  # entered while the table is read


def train(job: TrainingJob, follow: Follow = nullcontext, reading: Reading | None = None) -> dict[str, Any]:
    """Check all options, spend the budget, write model and guarantee; return the public results.

    ``follow`` may show how it goes, and end it early: the model is then that of the last step. ``reading``
    may show how far the table is read.
    """
    asked, job = job, job.per_record()
    estimator, method, recorder, settings = _prepared(job)
    files, (own, earlier) = outputs.files_of(job), outputs.new_ledger(job.out)
    job = replace(job, ledger=job.ledger or own)
    assert job.ledger is not None
    for path in files.values():
        check_writable(path, job.force, kept=(job.table, job.schema_file, job.test, job.ledger))
    if not Journal.exists(job.ledger):
        # force: a file may be left of a ledger that a full disk did not let begin
        check_writable(job.ledger, force=True, option="--out" if asked.ledger is None else "--ledger")
    with nullcontext(job.csv) if reading is None else reading(job.csv) as csv:
        split = Split(job.user, job.rows, job.holdout)
        X, y, held = table_files.training_rows(job.table, job.schema, split, strict=job.strict, csv=csv)
    log.info("the table %s is read; nothing is charged yet", job.table)
    people = _people(job)
    kept = len(y) + (0 if held is None else len(held[1]))
    if job.records is None:
        table_files.filled(job.table, kept)
    job, records = job.sized(kept), job.records or kept  # a private number stays private
    if records > LARGE:
        job = replace(job, large=True)
        estimator, method, recorder, settings = _prepared(job)
    test = table_files.held_out(job.test, job.table, job.schema, job.csv)
    with ExitStack() as resources:
        _refuse_another(asked, own)
        ledger = resources.enter_context(_existing(job))
        _refuse_undivided(asked, method, ledger)
        recorder.watch = _first_step_only
        _rehearse(job, estimator, method, len(X), ledger, people)
        log.info("%s is rehearsed on made-up rows: its budget and its settings are in order", job.method)
        if ledger is None:
            _refuse_another(asked, own)
            if asked.ledger is None:
                own.parent.mkdir(exist_ok=True)
            ledger = resources.enter_context(_created(job, _filter(asked, method), people))
        log.info("charges go to %s", job.ledger)
        recorder.watch = resources.enter_context(follow())
        _fitted(_paying(job, estimator, method, ledger), X, y, people)
        assert recorder.ledger is not None
        recorder.ledger.refund()
        measured = None if test is None else {"table": job.test, **measuring.measured(estimator, *test)}
        if held is not None:
            size = kept if asked.records is None else 0  # the table's number is public only there
            figures = measuring.held_out(estimator, *held, recorder.ledger, size * job.holdout)
            measured = None if figures is None else {"table": job.table, **figures}
        if job.strict:
            estimator.privacy_ = estimator.privacy_.noted(STRICT)
        if asked.user is not None:
            estimator.privacy_ = composition.per_person(estimator.privacy_, asked.budget, asked.rows)
        spent = _spent(asked, recorder.ledger)
        name, trained = job.kind
        model = outputs.model_of(job.schema, estimator, trained.kind)
        told = {
            **outputs.stamped(estimator.privacy_),
            **_levels(estimator),
            "trained": name,
            **_choice(job, estimator),
            "method": job.method,
            "settings": settings,
            "steps": estimator.n_iter_,
            "records": records,
            "rows_per_person": asked.rows if asked.user is not None else None,
            **({"user_column": asked.user} if asked.user is not None else {}),
            "features": job.schema.width,
            "partial": recorder.stopped,
            **({"unmeasured": measuring.UNPAID} if held is not None and measured is None else {}),
            "spent": asdict(spent),
            "public": outputs.public(asked, model.schema),
            "ledger": str(job.ledger),
            "ledger_head": ledger.journal.last().hash,
            "earlier_ledgers": [str(path) for path in earlier] if asked.ledger is None else [],
            **{kind: str(path) for kind, path in files.items() if kind != "privacy"},
        }
        contents = {"model": model.to_bytes(json.dumps(told, allow_nan=False, indent=1))}
        for form in job.formats:
            contents[form] = export.exported(form, job.schema, estimator.to_sklearn())
        told["sha256"] = {kind: outputs.sha256(content) for kind, content in contents.items()}
        if measured is not None:
            told["test"] = measured | measuring.verdict(measured)
        contents["privacy"] = (json.dumps(told, allow_nan=False, indent=1) + "\n").encode()
        log.info("%d steps are taken; %s", estimator.n_iter_, estimator.privacy_)
        written = list[Path]()
        try:
            for kind, content in contents.items():
                write(files[kind], content)
                written.append(files[kind])
                log.info("%s is written", files[kind])
            write(files["report"], outputs.reported(job, estimator, ledger, told, measured).encode())
        except FarthingError as error:  # nothing is wrong with what was asked for, and it is paid
            raise FarthingError(f"{error}. {_paid(job, files, written)}") from None
        log.info("%s is written", files["report"])
    return told


def _paid(job: TrainingJob, files: dict[str, Path], written: list[Path]) -> str:
    """Return what a training leaves of which not all files could be written."""
    said = f"The training is charged to {job.ledger}; written: {', '.join(map(str, written)) or 'no file'}"
    if files["privacy"] not in written:
        return said
    again = f"farthing report {job.ledger} --privacy {files['privacy']} --out {files['report']}"
    return f"{said}. To write the report again: {again}"


def _refuse_another(asked: TrainingJob, own: Path) -> None:
    """Refuse a ledger of its own that was not there before: another training would pay from the same one."""
    if asked.ledger is None and Journal.exists(own):
        raise InvalidValue(f"another training has begun {str(own)!r} meanwhile: choose another --out")


def rehearse(job: TrainingJob, records: int) -> dict[str, Any]:
    """Train on made-up rows, charged to a copy of the ledger in memory; return price and noise."""
    job = replace(job, large=(job.records or records) > LARGE)
    asked, job = job, job.per_record()
    estimator, method, recorder, settings = _prepared(job)
    job = job.sized(records)
    with _existing(job) as ledger:
        _refuse_undivided(job, method, ledger)
        before = 0.0 if ledger is None else ledger.share
        paid = _rehearse(job, estimator, method, records, ledger, _people(job))
    assert recorder.ledger is not None
    if asked.user is not None:
        estimator.privacy_ = composition.per_person(estimator.privacy_, asked.budget, asked.rows)
    return {
        "dry_run": True,
        "guarantee": {
            **asdict(estimator.privacy_),
            **({"note": PUBLIC_SIZE} if job.records is None else {}),  # nothing says it at a rehearsal
        },
        **_levels(estimator),
        "trained": job.kind[0],
        **_choice(job, estimator),
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
        "ledger": str(job.ledger or outputs.new_ledger(job.out)[0]),
        "share": [before, (paid or recorder.ledger).share],
    }


def _spent(asked: TrainingJob, ledger: Ledger) -> Guarantee:
    """Return what was charged until now: that of a person, where people have several records."""
    spent = ledger.spent
    if asked.user is None:
        return spent
    mu = asked.rows * measuring.paid_mu(ledger)
    epsilon = min(gaussian.epsilon(mu, asked.delta) if mu else 0.0, asked.budget.epsilon)
    lifted = composition.per_person(spent, asked.budget, asked.rows)
    stopped = f"if it depended on the answers, epsilon {asked.budget.epsilon:g} holds"  # the whole budget's
    note = f"valid only if the stopping time was fixed in advance; {stopped}"
    return replace(lifted, epsilon=epsilon, note=note)


def _people(job: TrainingJob) -> Array | None:
    """Return each record's own ε, from the column that a job names."""
    if job.budget_column is None:
        return None
    return table_files.budgets(job.table, job.budget_column, job.schema, job.csv)


def _levels(estimator: Estimator) -> dict[str, Any]:
    """Return the guarantee of each level of budget, if there are several."""
    said = getattr(estimator, "guarantees_", {})
    each = [{"budget": level, "epsilon": holds.epsilon} for level, holds in said.items()]
    return {"levels": each} if len(each) > 1 else {}


def _rehearse(
    job: TrainingJob,
    estimator: Estimator,
    method: SolverMethod,
    records: int,
    ledger: Ledger | None,
    people: Array | None,
) -> Ledger | None:
    """Fit made-up rows and export the result; return the copy of ``ledger`` that paid for it.

    What a method refuses, what does not fit the budget and what cannot be exported is refused here, before
    anything is charged.
    """
    copy = None if ledger is None else ledger.rehearsal()
    estimator.set_params(records=job.records or records if people is None else job.records)
    rows = None if people is None else len(people)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what made-up rows hold
        _fitted(_paying(job, estimator, method, copy), *_made_up(job.schema, rows), people)
    estimator.set_params(records=job.records)
    for form in job.formats:
        export.exported(form, job.schema, estimator.to_sklearn())
    return copy


def _fitted(estimator: Estimator, X: Any, y: Any, people: Array | None) -> None:
    """Fit an estimator, with budgets of records where they have some."""
    estimator.fit(X, y, **({} if people is None else {"budgets": people}))


def _choice(job: TrainingJob, estimator: Estimator) -> dict[str, str]:
    """Return which model was trained and why, where public numbers or other options chose."""
    choice = job.why_linear or getattr(estimator, "choice_", "")
    return {"choice": choice} if choice else {}


def _first_step_only(step: Step, ledger: Ledger) -> bool:
    return True


def _prepared(job: TrainingJob) -> tuple[Estimator, SolverMethod, StepRecorder, Settings]:
    """Return the estimator that a job asks for, its method, the recorder of its steps, and its settings."""
    name, kind = job.kind
    known = kind.methods
    private = sorted(name for name, method in known.items() if method.private)
    if job.method not in private:  # a fit without privacy is a baseline, and for Python only
        of_model = f" of --model {job.model}" if job.model else ""
        validate.one_of(private, **{f"--method{of_model}": job.method})
    if job.delta == 0 and known[job.method].filter is not BasicFilter:
        pure = [f"; --method {name} allows 0" for name in PURE if name in known]
        raise InvalidValue(
            f"--delta must be above 0 with --method {job.method}, got {job.delta:g}{''.join(pure)}"
        )
    if job.budget_column is not None and known[job.method].personal is None:
        able = sorted(name for name, method in known.items() if method.personal)
        if not able:
            raise Unsupported(
                f"--budget-column needs a linear model: --model {name} treats all records alike"
            )
        raise InvalidValue(f"--budget-column needs --method {' or '.join(able)}, got {job.method!r}")
    if job.records is not None:
        validate.count(**{"--records": job.records})
    _refuse_splits(job, known[job.method])
    if job.formats and not kind.linear:
        raise Unsupported(
            f"--format writes linear models only, got --model {name}: leave --format out, and predict with "
            "model.npz"
        )
    if job.formats and np.isnan(job.schema.bounds[0]).any():
        raise Unsupported(
            "--format cannot write private bounds: leave --format out, and predict with model.npz"
        )
    for form in job.formats:
        validate.one_of(export.FORMATS, **{"--format": form})
    plain = known[job.method]
    own = [text for text in job.settings if text.partition("=")[0] in kind.own]
    settings = plain.parsed([text for text in job.settings if text not in own], job.method)
    chosen = plain.with_(settings)
    recorder = StepRecorder(job.method, chosen.algorithm)
    recorder.notes = job.notes()
    method = replace(chosen, algorithm=recorder, rehearsed=True)
    belongs = _of_the_model(own)
    estimator = kind.made(job.schema.target).set_params(
        epsilon=job.epsilon,
        delta=job.delta,
        bounds=job.schema.bounds,  # what it encodes into
        adjacency=job.adjacency,
        records=job.records,
        **belongs,
    )
    settings = belongs | settings
    if "solver" in estimator.get_params():
        estimator.set_params(solver=method)
    else:
        estimator.follow(recorder)
    return estimator, method, recorder, settings


def _of_the_model(texts: list[str]) -> Settings:
    """Read settings that belong to the model: numbers, as NAME=VALUE."""
    found: Settings = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise InvalidValue(f"--set {text}: {name!r} is given twice")
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidValue(f"--set {name} must be a number, got {value!r}") from None
    return found


def _refuse_splits(job: TrainingJob, method: SolverMethod) -> None:
    """Refuse several records per person, and held-out records, where no theorem covers them."""
    if (job.user is not None or job.holdout) and job.budget_column is not None:
        raise InvalidValue("--budget-column cannot be combined with --user or --holdout: leave those out")
    if job.user is not None and method.filter is not GdpFilter:
        raise Unsupported(
            f"--user needs a method that is accounted by GDP, such as --method auto, got {job.method!r}"
        )
    if job.user is not None and job.records is None:
        raise InvalidValue(
            "--user needs --records, a public number of records to train on: the true number is private, "
            "because one person may have several records"
        )
    if job.holdout:
        if job.test is not None:
            raise InvalidValue("give either --test or --holdout, got both")
        if job.adjacency not in (None, Adjacency.ADD_REMOVE):
            raise Unsupported(f"--holdout needs --adjacency add-remove, got {job.adjacency}")
        if not job.delta:
            raise Unsupported("--holdout adds Gaussian noise, so --delta must be above 0, got 0")


def _refuse_undivided(job: TrainingJob, method: SolverMethod, ledger: Ledger | None) -> None:
    """Refuse held-out records if no part of the ledger's budget can be set aside to pay for them."""
    parts = ledger is not None and isinstance(ledger.filter, BasicFilter)
    if job.holdout and job.ledger is not None and method.filter in (None, RdpFilter) and not parts:
        raise Unsupported(
            f"--holdout needs a part of a ledger, but --method {job.method} needs a whole ledger: leave "
            "--ledger out, or use one created with --filter basic"
        )


@contextmanager
def _existing(job: TrainingJob) -> Iterator[Ledger | None]:
    """Open the ledger that a job names, if it exists."""
    if job.ledger is None or not Journal.exists(job.ledger):
        yield None
    else:
        with Ledger.open(job.ledger) as ledger:
            yield ledger


def _filter(asked: TrainingJob, method: SolverMethod) -> Callable[[Budget], Filter] | None:
    """Return the filter of a new ledger: the one that the method needs.

    In a ledger of its own, a training that is measured on held-out records takes a part that nobody else can
    ask (`farthing.cli.measuring`); of a plan and of batches only basic composition hands out parts.
    """
    whole = asked.ledger is None and asked.holdout and method.filter in (None, RdpFilter)
    return BasicFilter if whole else method.filter


def _created(job: TrainingJob, rule: Callable[[Budget], Filter] | None, people: Array | None) -> Ledger:
    """Create the ledger that a job names, with the job's budget."""
    adjacency = job.adjacency or Adjacency.ADD_REMOVE
    if people is not None:
        levels = PersonalBudgets(people)
        return Ledger(levels.budget(job.delta, adjacency=adjacency), journal=job.ledger, filter=levels)
    assert job.epsilon is not None
    return Ledger(Budget(job.epsilon, job.delta, adjacency), journal=job.ledger, filter=rule)


def _paying(job: TrainingJob, estimator: Estimator, method: SolverMethod, ledger: Ledger | None) -> Estimator:
    """Give the estimator the ledger: all of it if it is unspent and has the job's budget, else a part.

    Without a ledger the estimator makes its own, in memory.
    """
    if ledger is None:
        return estimator
    if (job.user is not None or job.holdout) and ledger.budget.adjacency is not Adjacency.ADD_REMOVE:
        raise Unsupported(
            f"--user and --holdout need a ledger with add-remove adjacency; this one has {ledger.budget}"
        )
    if ledger.budget.unit is not Unit.RECORD:
        raise InvalidValue(
            f"--ledger must have unit record, because each row counts as one; this one has {ledger.budget}"
        )
    if ledger.share and any(row.kind == "promise" for row in ledger.journal.rows()):
        spent = BudgetSpent if ledger.share == 1 else Unsupported
        raise spent(
            f"--ledger holds the plan of another training, with {1 - ledger.share:.3%} left, which no other "
            "training can spend: use a new ledger"
        )
    if isinstance(ledger.filter, RdpFilter) and (method.filter is not RdpFilter or ledger.share):
        raise Unsupported(
            "--ledger has an RDP filter, which cannot be divided into parts: create a ledger with --filter "
            "gdp, zcdp or basic"
        )
    estimator.set_params(ledger=ledger)
    if job.epsilon is None:
        if ledger.budget.delta != job.delta:
            raise InvalidValue(f"--delta must equal the ledger's {ledger.budget.delta:g}, got {job.delta:g}")
        estimator.set_params(delta=None)
        return estimator
    if ledger.share == 0 and ledger.budget == ledger.budget.with_(job.epsilon, job.delta):
        estimator.set_params(epsilon=None, delta=None)
    elif method.filter in (None, RdpFilter) and not isinstance(ledger.filter, BasicFilter):
        kind = "promises a plan" if method.filter is None else "samples batches"
        raise Unsupported(
            f"--method {job.method} {kind}, so it needs a new ledger, or one created with --filter basic"
        )
    return estimator


def _made_up(schema: Schema, rows: int | None = None) -> tuple[Any, ArrayLike]:
    """Return a row of zeros for each label or end of the target, or ``rows`` of them."""
    target = schema.target
    y = range(len(target.values)) if isinstance(target, Categorical) else (target.low, target.high)
    if rows is None:
        return np.zeros((len(y), schema.width)), y
    return csr_matrix((rows, schema.width)), np.resize(np.array(y), rows)
