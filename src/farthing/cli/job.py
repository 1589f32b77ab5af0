"""Describe a training that is asked for: what to train on which table, and where to put it."""

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from farthing.accounting import composition
from farthing.budget import Adjacency, Budget, Unit
from farthing.data import table_files
from farthing.data.csv_files import Csv
from farthing.data.schema import Schema
from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression

Estimator = LogisticRegression | LinearSVC | LinearRegression

HELD = (
    "a share of {:g} of the records, by hash, is held out, and figures on those cost each no more than the "
    "training costs the others (parallel composition)"
)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The options of a training: what to train on which table, and where to put it."""

    table: str
    schema: Schema
    _: KW_ONLY
    schema_file: str | None = None  # the schema's name on the command line
    epsilon: float | None  # None where each record has its own
    delta: float
    budget_column: str | None = None
    adjacency: Adjacency | None = None  # that of the ledger, or add-remove
    model: str | None = None  # "logistic", "svm" or "linear"; the first that suits the target
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
