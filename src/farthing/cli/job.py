"""Describe a requested training: the table, the model, and the output files."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from farthing import validate
from farthing.accounting import composition
from farthing.budget import Adjacency, Budget, Unit
from farthing.data import table_files
from farthing.data.columns import Categorical
from farthing.data.csv_files import Csv
from farthing.data.schema import Schema
from farthing.ledger.ledger import Ledger
from farthing.linear import regressors
from farthing.linear.additive import estimators as shapes
from farthing.linear.additive.method import additive
from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS, GENERALISED, REGRESSORS, SolverMethod
from farthing.queries.query import Step

Estimator = Any  # of `ModelKind`: all of them fit, predict and say what holds

AUTO = "auto"
HELD = (
    "a share of {:g} of the records, chosen by hash, is held out; figures on a held-out record cost it no "
    "more than training costs the other records (parallel composition)"
)


def shapes_only(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Train shapes of single features, without trees."""
    return additive(ledger, problem, trees=0)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model that ``--model`` names: its estimator, its methods, and what else is known of it.

    ``own`` are settings that belong to the model rather than to a method. ``linear`` models can be written
    in other formats. ``kind`` says what the scores in a model's file are (`farthing.data.model_file.Model`).
    """

    estimator: type
    methods: dict[str, SolverMethod]
    own: tuple[str, ...] = ()
    linear: bool = True
    kind: str = "scores"

    def made(self, target: Any) -> Estimator:
        """Return the estimator for the target of a schema."""
        if isinstance(target, Categorical):
            return self.estimator(classes=range(len(target.values)))
        return self.estimator(target_bounds=(target.low, target.high))


LARGE = 2**21  # records, beyond which the default is linear: such a model takes no memory a record
_SHAPES, _TREES = {"auto": SolverMethod(shapes_only)}, {"auto": SolverMethod(additive)}
LABELS = {
    "logistic": ModelKind(LogisticRegression, CLASSIFIERS, kind="logistic"),
    "svm": ModelKind(LinearSVC, CLASSIFIERS),
    "additive": ModelKind(shapes.AdditiveClassifier, _SHAPES, linear=False, kind="logistic"),
    "boosted": ModelKind(shapes.GradientBoostingClassifier, _TREES, linear=False, kind="logistic"),
}
NUMBERS = {
    "linear": ModelKind(LinearRegression, REGRESSORS),
    "huber": ModelKind(regressors.HuberRegressor, GENERALISED, own=("threshold",)),
    "quantile": ModelKind(regressors.QuantileRegressor, GENERALISED, own=("quantile",)),
    "poisson": ModelKind(regressors.PoissonRegressor, GENERALISED, linear=False, kind="counts"),
    "additive": ModelKind(shapes.AdditiveRegressor, _SHAPES, linear=False),
    "boosted": ModelKind(shapes.GradientBoostingRegressor, _TREES, linear=False),
}


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The options of a training: the table, the model, and the output files."""

    table: str
    schema: Schema
    _: KW_ONLY
    schema_file: str | None = None  # the schema's name on the command line
    epsilon: float | None  # None where each record has its own
    delta: float
    budget_column: str | None = None
    adjacency: Adjacency | None = None  # None: the ledger's, or add-remove
    model: str | None = None  # a name of `LABELS` or `NUMBERS`; None or "auto" chooses by public facts
    method: str = "auto"
    records: int | None = None
    ledger: Path | None = None  # a new one beside the model
    out: Path = Path()
    force: bool = False
    test: str | None = None
    strict: bool = False  # refuse values that the schema does not have
    formats: tuple[str, ...] = ()  # besides .npz
    settings: tuple[str, ...] = ()  # of the method, as NAME=VALUE
    csv: Csv = table_files.PLAIN
    user: str | None = None  # the column that says whose record it is: whole people are protected
    rows: int = 1  # rows kept per person
    holdout: float = 0.0  # the share of the records that is not learnt from
    large: bool = False  # whether there are more than `LARGE` records

    @property
    def budget(self) -> Budget:
        """The budget as it is asked for, per person where people have several records."""
        assert self.epsilon is not None
        unit = Unit.RECORD if self.user is None else Unit.USER
        return Budget(self.epsilon, self.delta, self.adjacency or Adjacency.ADD_REMOVE, unit)

    @property
    def kind(self) -> tuple[str, ModelKind]:
        """Return the name and the kind of the requested model."""
        made = LABELS if isinstance(self.schema.target, Categorical) else NUMBERS
        if self.model in (None, AUTO):
            named = self.method != AUTO or self.delta == 0  # methods by name are those of linear models
            name = next(iter(made)) if named or self.why_linear else "boosted"
            return name, made[name]
        option = f"for the target {self.schema.target.name!r}, --model"
        name = validate.one_of([AUTO, *made], **{option: self.model})
        return name, made[name]

    @property
    def why_linear(self) -> str:
        """Return why the default is linear, where an option or the number of records makes it so, or ""."""
        if self.model not in (None, AUTO):
            return ""
        if self.formats or self.budget_column is not None:
            return f"linear: {'--format' if self.formats else '--budget-column'} needs a linear model"
        return f"linear: there are more than {LARGE:,} records" if self.large else ""

    @property
    def split(self) -> bool:
        """Whether some rows of the table are not used for training."""
        return self.user is not None or self.holdout > 0

    def notes(self) -> tuple[str, ...]:
        """Return the notes of the guarantee if some rows are not used for training."""
        size = "the number of records of the table is taken as public" * (self.split and self.records is None)
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
        return replace(self, epsilon=composition.per_record(self.budget, self.rows).epsilon)
