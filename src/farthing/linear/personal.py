"""Linear models of records with budgets of their own: the way to such records, and the problem they make.

Two ways, by the solver. In *batches* (``"sgd-ma"``) each record is drawn at the rate that spends its own ε by
tight accounting; sums are divided by the expected size of a batch. Where a solver asks *everybody* by
Gaussian answers (``"auto"`` and all that divide a budget by `farthing.linear.budget_schedule`), each record
counts with a weight μ(ε, δ) / μ of the largest; to the solver's rules n records then are the sum of their
weights. Both are rules of public numbers: the levels of budget, and how many records are on each. The
guarantees are those of `farthing.queries.personal`, a level each, under every adjacency.
"""

from dataclasses import replace

import numpy as np

from farthing.accounting.personal import PersonalBudgets, everyone
from farthing.data.tables import Table
from farthing.data.weighted import WeightedTable
from farthing.ledger.ledger import Ledger
from farthing.linear.problem import Problem
from farthing.queries.personal import Leveled, Personal


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
