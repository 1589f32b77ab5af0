"""Protect whole people who have several records: a budget for each record that adds up to one for the person.

Theorem (Dong, Roth & Su 2022, Thm. 2.14): what is f-DP for one record is, for neighbours that differ in k
records, (1 - (1 - f)^∘k)-DP; for Gaussian trade-off functions that is exactly G_kμ. So where every person has
at most k records, under a rule that looks at that person's records only, a mechanism that is (μ/k)-GDP per
record under add-remove is μ-GDP per person: one person comes or goes by at most k records, one after the
other. It holds for whatever is accounted by μ (`GdpFilter`), and for no (ε, δ) that other accountants give.

>>> person = Budget(1.0, 1e-5, unit="user")
>>> record = per_record(person, 4)
>>> print(record)
(0.220267, 1e-05)-DP, add-remove, per record, against anyone
>>> record.mu * 4 <= person.mu
True
"""

from dataclasses import replace

from farthing import validate
from farthing.accounting import gaussian
from farthing.budget import Adjacency, Budget, Guarantee, Unit
from farthing.errors import Unsupported

THEOREM = "group privacy of μ-GDP: Dong, Roth & Su 2022, Thm. 2.14"
_CLOSER = 1 - 2.0**-30


def per_record(budget: Budget, rows: int) -> Budget:
    """Return the budget per record that is ``budget`` for a person with ``rows`` records, rounded down."""
    rows = validate.count(rows=rows)
    if budget.adjacency is not Adjacency.ADD_REMOVE:
        raise Unsupported(
            f"people with several records are protected under add-remove only, got {budget.adjacency}: one "
            "who is replaced may have another number of records"
        )
    epsilon = gaussian.epsilon(budget.mu / rows, budget.delta)
    if epsilon == 0:
        raise Unsupported(
            f"{budget} leaves no epsilon to each of {rows} records: keep fewer records a person"
        )
    record = replace(budget.with_(epsilon, budget.delta), unit=Unit.RECORD)
    while record.mu * rows > budget.mu:  # which the margin of μ makes rare
        record = record.with_(record.epsilon * _CLOSER, record.delta)
    return record


def per_person(guarantee: Guarantee, budget: Budget, rows: int) -> Guarantee:
    """Return what a guarantee per record under `per_record` means for a person: that of ``budget``."""
    lifted = replace(guarantee, epsilon=budget.epsilon, delta=budget.delta, unit=Unit.USER)
    theorem = f"{guarantee.theorem}; {THEOREM}" if guarantee.theorem else THEOREM
    return replace(lifted, theorem=theorem).noted(f"at most {rows} records of a person are kept")
