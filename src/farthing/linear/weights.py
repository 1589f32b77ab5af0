"""Read the weights of records and classes, and buy their totals from the budget of a fit.

``sample_weight`` gives every record a private number from 0 to a declared largest one
(``max_sample_weight``); beyond that it is clamped. ``class_weight`` multiplies it by a public number a class,
or, "balanced", by n / (K n_k) with class totals n_k that are bought. A record's clipped terms are then
multiplied by its share of the largest weight that may occur, which moves no sum further
(`farthing.data.weighted` has the proof), so a fit costs what it costs without weights.

Methods divide sums by the number of records, and with weights that is their total, which is private: a share
of μ² (or ρ) buys the totals of all classes in one answer, one cell a record, of norm 1. A method that
promises a plan cannot buy them, and divides by the number of records.

*Budgets of their own.* Records with personal budgets are weighted, too, or drawn, by the solver. In *batches*
(``"sgd-ma"``) each record is drawn at the rate that spends its own ε by tight accounting; sums are divided by
the expected size of a batch. Where a solver asks *everybody* by Gaussian answers (``"auto"`` and all that
divide a budget by `farthing.linear.budget_schedule`), each record counts with a weight μ(ε, δ) / μ of the
largest; to the solver's rules n records then are the sum of their weights. Both are rules of public numbers:
the levels of budget, and how many records are on each. The guarantees are those of
`farthing.queries.personal`, a level each, under every adjacency.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting.filters import GdpFilter, ZcdpFilter
from farthing.accounting.personal import PersonalBudgets, everyone
from farthing.data.tables import Table
from farthing.data.weighted import WeightedTable
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.problem import Problem
from farthing.linear.solvers import SolverMethod
from farthing.queries import arrays
from farthing.queries.personal import Leveled, Personal
from farthing.queries.query import PerExample, Rows
from farthing.statistics.spending import Allowance

Array = NDArray[np.float64]

SHARE = 0.02  # of μ², for the totals
_SHYEST = 2.0  # deviations of the noise that a class total is at least taken for


@dataclass(frozen=True, slots=True, eq=False)
class RecordWeights:
    """What records count: private shares of a largest weight, and the public weights of their classes.

    ``codes`` are the places of the classes, NaN for a label that is not declared. ``by_class`` has one number
    a class, or is None where classes are balanced.
    """

    shares: Array
    largest: float
    codes: Array
    classes: int
    by_class: Array | None

    def refuse(self, method: SolverMethod, people: Any) -> None:
        """Refuse weights where no proof covers them, before anything is charged."""
        if not method.weighed:
            raise Unsupported(
                "this solver has no proof for records with weights: use solver='auto', or 'sgd-ma' for "
                "batches ('sufficient' or 'gradient' for regression)"
            )
        if people is not None:
            raise Unsupported("budgets weigh records already: leave sample_weight and class_weight out")
        if self.by_class is None and not _sells(method):
            raise Unsupported(
                "class_weight='balanced' buys class totals, and this solver promises its whole budget: use "
                "solver='auto', or give a dictionary"
            )

    def settled(self, ledger: Ledger, method: SolverMethod, records: int) -> tuple[Array, int, float]:
        """Buy the totals; return the share of each record, their total, and the largest weight."""
        totals, noise = self._bought(ledger) if _sells(method) else (np.zeros(0), 0.0)
        by_class = self.by_class
        if by_class is None:
            trusted = np.maximum(totals, max(_SHYEST * noise, 1.0))
            by_class = trusted.sum() / (self.classes * trusted)
        most = float(by_class.max())
        known = np.isfinite(self.codes)
        places = np.where(known, self.codes, 0).astype(np.int64)
        shares = np.where(known, self.shares * (by_class / most)[places], 0.0)
        if totals.size:
            records = round(min(max(float(totals @ (by_class / most)), 1.0), records))
        return shares, records, self.largest * most

    def _bought(self, ledger: Ledger) -> tuple[Array, float]:
        """Return the noisy sum of the shares of every class, and the deviation of its noise."""
        rows = Rows(np.column_stack([self.shares, self.codes]))

        def cells(arrays: Any, w: Any) -> Array:
            return np.asarray((arrays[0][:, 1:] == np.arange(self.classes)) * arrays[0][:, :1])

        return Allowance(ledger).ask(rows, PerExample(cells), (1.0, 1.0), SHARE)


def _sells(method: SolverMethod) -> bool:
    return method.filter in (GdpFilter, ZcdpFilter)


def read(sample_weight: Any, largest: float | None, rows: int) -> tuple[Array, float]:
    """Return every record's share of the largest weight, and that weight; all 1 where none are given."""
    if sample_weight is None:
        return np.ones(rows), 1.0
    if largest is None:
        raise InvalidValue(
            "sample_weight needs max_sample_weight, the largest weight that may occur: how much one record "
            "counts is bounded by it, so it must be declared and not read from the records"
        )
    most = validate.positive(max_sample_weight=largest)
    said = "sample_weight must be one number a row"
    values = np.asarray(arrays.attempt(lambda: arrays.target(sample_weight), said=said), dtype=np.float64)
    if values.shape != (rows,):
        raise InvalidValue(said)  # how many there are is no one's business
    return np.where(np.isfinite(values), np.clip(values / most, 0.0, 1.0), 0.0), most


def of_classes(class_weight: Any, classes: NDArray[Any]) -> Array | None:
    """Return the public weight of each class, 1 where none is given; None where they are balanced."""
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str) and class_weight == "balanced":
        return None
    if not isinstance(class_weight, Mapping):
        raise InvalidValue(f"class_weight must be a dictionary, 'balanced' or None, got {class_weight!r}")
    names = classes.tolist()
    if unknown := [label for label in class_weight if label not in names]:
        raise InvalidValue(f"class_weight names {unknown[0]!r}, which is not one of the classes {names}")
    weights = np.array([validate.non_negative(class_weight=class_weight.get(name, 1.0)) for name in names])
    if not weights.any():
        raise InvalidValue("class_weight must leave a class with a weight above 0")
    return weights


def over(
    ledger: Ledger,
    rows: Table | WeightedTable,
    problem: Problem,
    people: PersonalBudgets | None,
    weighed: bool,
) -> tuple[Ledger, Problem]:
    """Return the way to rows with everybody's level of budget, and the problem in their numbers.

    Rows of another number than ``people``, which are made up, are on the smallest level.
    """
    if people is None:
        return ledger.over(rows), problem
    made_up = len(rows) != len(people)
    levels = np.zeros(len(rows), dtype=np.int64) if made_up else people.levels
    records, all_ = problem.records, everyone(ledger.filter)
    if weighed and isinstance(all_, Personal):
        records = max(1, round(all_.expected(people.sizes)))
    own = replace(problem, records=records, sizes=people.sizes)
    return ledger.over(Leveled(rows, levels, people.epsilons)), own
