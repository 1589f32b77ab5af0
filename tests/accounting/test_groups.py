"""People with several records: the budget of each record adds up to that of the person."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from farthing.accounting import composition, gaussian
from farthing.budget import Adjacency, Budget, Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger


@given(st.floats(0.01, 20), st.sampled_from([1e-9, 1e-5, 1e-3]), st.integers(1, 50))
def test_so_many_records_together_never_exceed_the_persons_budget(
    eps: float, delta: float, rows: int
) -> None:
    person = Budget(eps, delta, unit=Unit.USER)
    try:
        record = composition.per_record(person, rows)
    except Unsupported:
        assert gaussian.delta(person.mu / rows, 0.0) <= delta
        return
    assert record.unit is Unit.RECORD
    # the oracle: neighbours k records apart are Gaussians k μ apart (Balle & Wang 2018, Theorem 8)
    mu = rows * record.mu
    exact = norm.cdf(mu / 2 - eps / mu) - norm.cdf(-mu / 2 - eps / mu, scale=1) * 2.718281828459045**eps
    assert exact <= delta * (1 + 1e-6) + 1e-13
    assert mu > 0.999 * person.mu or rows == 1 or record.epsilon < 1e-3


def test_one_row_a_person_costs_nothing_more() -> None:
    assert composition.per_record(Budget(1.0, 1e-5, unit="user"), 1).epsilon == pytest.approx(1.0, rel=1e-6)


def test_what_has_no_theorem_is_refused() -> None:
    with pytest.raises(Unsupported, match="need add-remove"):
        composition.per_record(Budget(1.0, 1e-5, adjacency=Adjacency.REPLACE_ONE), 2)
    with pytest.raises(InvalidValue, match="rows"):
        composition.per_record(Budget(1.0, 1e-5), 0)
    with pytest.raises(Unsupported, match="fewer records"):
        composition.per_record(Budget(0.01, 1e-3), 50)


def test_the_guarantee_of_a_person_says_how_many_rows_are_kept() -> None:
    person = Budget(1.0, 1e-5, unit=Unit.USER)
    said = composition.per_person(Ledger(composition.per_record(person, 3)).guarantee, person, 3)
    assert (said.epsilon, said.unit) == (1.0, Unit.USER)
    assert "at most 3 records" in said.note
    assert composition.THEOREM in said.theorem
