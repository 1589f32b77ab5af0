"""Read the weights of records and classes, and buy their totals from the budget of a fit.

``sample_weight`` gives every record a private number from 0 to a declared maximum (``max_sample_weight``), to
which larger ones are clamped. ``class_weight`` multiplies it by a public number per class or, if "balanced",
by n / (K n_k) with class totals n_k that are bought. A record's clipped terms are multiplied by its weight
over the largest possible one, which does not increase the sensitivity (`farthing.data.weighted` has the
proof), so a fit costs the same as without weights.

Methods divide sums by the number of records, which with weights is their total and is private: a share of μ²
(or ρ) buys the totals of all classes in one answer with one cell per record, of norm 1. A method that
promises a plan cannot buy them, and divides by the number of records.

*Personal budgets.* The solver gives records with personal budgets weights or sampling rates. In *batches*
(``"sgd-ma"``) each record is drawn at the rate that spends its own ε by tight accounting; sums are divided by
the expected batch size. For solvers that query *all records* by Gaussian answers (``"auto"`` and all that use
`farthing.linear.budget_schedule`), each record has the weight μ(ε, δ) / μ of the largest; the number of
records is then replaced by the sum of their weights. Both depend on public numbers only: the levels of
budget, and the number of records on each. The guarantees are those of `farthing.queries.personal`, one per
level, under every adjacency.
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

SHARE = 0.02  # share of μ² for the totals
_SHYEST = 2.0  # a class total is taken to be at least this many deviations of its noise


@dataclass(frozen=True, slots=True, eq=False)
class RecordWeights:
    """The weights of records: private fractions of a largest weight, and the public weights of classes.

    ``codes`` are the indices of the classes, NaN for an undeclared label. ``by_class`` has one number per
    class, or is None if classes are balanced.
    """

    shares: Array
    largest: float
    codes: Array
    classes: int
    by_class: Array | None

    def refuse(self, method: SolverMethod, people: Any) -> None:
        """Refuse weights that no proof covers, before anything is charged."""
        if not method.weighed:
            raise Unsupported(
                "this solver has no proof for records with weights: use solver='auto', or 'sgd-ma' for "
                "batches ('sufficient' or 'gradient' for regression)"
            )
        if people is not None:
            raise Unsupported("budgets weigh records already: leave out sample_weight and class_weight")
        if self.by_class is None and not _sells(method):
            raise Unsupported(
                "class_weight='balanced' buys class totals, and this solver promises its whole budget: use "
                "solver='auto', or pass a dictionary"
            )

    def settled(self, ledger: Ledger, method: SolverMethod, records: int) -> tuple[Array, int, float]:
        """Buy the totals; return the fraction of each record, their total, and the largest weight."""
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
        """Return the noisy sum of the fractions of every class, and the deviation of its noise."""
        rows = Rows(np.column_stack([self.shares, self.codes]))

        def cells(arrays: Any, w: Any) -> Array:
            return np.asarray((arrays[0][:, 1:] == np.arange(self.classes)) * arrays[0][:, :1])

        return Allowance(ledger).ask(rows, PerExample(cells), (1.0, 1.0), SHARE)


def _sells(method: SolverMethod) -> bool:
    return method.filter in (GdpFilter, ZcdpFilter)


def read(sample_weight: Any, largest: float | None, rows: int) -> tuple[Array, float]:
    """Return every record's fraction of the largest weight, and that weight; all 1 without weights."""
    if sample_weight is None:
        return np.ones(rows), 1.0
    if largest is None:
        raise InvalidValue(
            "sample_weight needs max_sample_weight, the largest possible weight: it bounds the influence of "
            "one record, so it must be declared and not read from the records"
        )
    most = validate.positive(max_sample_weight=largest)
    said = "sample_weight must be one number per row"
    values = np.asarray(arrays.attempt(lambda: arrays.target(sample_weight), said=said), dtype=np.float64)
    if values.shape != (rows,):
        raise InvalidValue(said)  # the lengths are private
    return np.where(np.isfinite(values), np.clip(values, 0.0, most) / most, 0.0), most


def of_classes(class_weight: Any, classes: NDArray[Any]) -> Array | None:
    """Return the public weight of each class, 1 if it has none; None if classes are balanced."""
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
    """Return a ledger over rows with their levels of budget, and the problem with the weighted size.

    Made-up rows, whose number differs from that of ``people``, are all on the smallest level.
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
