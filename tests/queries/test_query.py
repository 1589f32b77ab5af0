"""A query's price follows from its parts; an algorithm ends with its budget and with nothing else."""

import numpy as np
import pytest

from farthing.budget import Adjacency, Budget, Observer
from farthing.errors import BudgetSpent, InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.events import DrawnEvent, GaussianEvent, PoissonEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import PerExample, Query, Rows, Step, run, until_spent
from farthing.queries.samplers import Everyone, Poisson

FIRST = PerExample(lambda rows, w: rows[0])
REPLACE = Budget(1.0, 1e-5, Adjacency.REPLACE_ONE)


def test_what_a_bound_knows_of_everybody_is_not_taken_for_a_sample():
    """A replaced value in [0, 1] moves a sum by 1, but in a sample it may also come or go."""
    bound = ClipValue(0.0, 1.0)
    assert Query(Everyone(), FIRST, bound, Gaussian(2.0)).price(REPLACE) == GaussianEvent(4.0)
    sampled = Query(Poisson(0.1), FIRST, bound, Gaussian(2.0)).price(REPLACE)
    assert sampled == PoissonEvent(0.1, GaussianEvent(2.0))


def test_a_coordinator_who_sees_the_draw_gets_no_amplification():
    query = Query(Poisson(0.1), FIRST, ClipNorm(1.0), Gaussian(2.0))
    seen = Budget(1.0, 1e-5, Adjacency.ZERO_OUT, observer=Observer.COORDINATOR)
    assert query.price(seen) == DrawnEvent(0.1, GaussianEvent(2.0))
    assert query.price(Budget(1.0, 1e-5)) == PoissonEvent(0.1, GaussianEvent(2.0))


def test_rows_are_of_equal_length():
    assert len(Rows(np.zeros((3, 2)), np.zeros(3))) == 3
    with pytest.raises(InvalidValue, match="one row per record"):
        Rows(np.zeros((3, 2)), np.zeros(2))


@pytest.mark.parametrize("last", [1.0, "x", None, [1.0, 2.0]])
def test_no_record_of_a_list_decides_whether_it_is_refused(last):
    with pytest.raises(InvalidValue, match="type of a list"):
        Rows([1.0, 2.0, last])


def test_rows_that_are_found_by_labels_are_refused():
    """Several rows of a data frame may have one label: one that is drawn would bring all of them."""

    class Frame:
        shape, iloc = (3, 2), None

    with pytest.raises(InvalidValue, match=r"frame\.to_numpy\(\)"):
        Rows(np.zeros((3, 2)), Frame())


@pytest.mark.parametrize("times", [2, 10])
def test_a_function_of_several_rows_a_record_moves_no_sum(times):
    """Each row is clipped by itself, so that a record with ten of them would count ten times."""
    several = PerExample(lambda rows, w: np.repeat(rows[0], times, axis=0))
    query = Query(Everyone(), several, ClipNorm(1.0), Gaussian(1e-6))
    private = Ledger(Budget(1e20, 1e-5)).over(Rows(np.ones((5, 1))))
    assert abs(private.ask(query).value[0]) < 1e-3


def steps(error):
    yield Step(1, "w")
    raise error


def test_an_algorithm_ends_by_itself_when_the_budget_is_spent_and_not_otherwise():
    assert run(until_spent(steps)(BudgetSpent("all of it"))).steps == 1
    with pytest.raises(ZeroDivisionError):
        run(until_spent(steps)(ZeroDivisionError()))


def test_an_algorithm_that_yields_no_steps_is_told_so():
    with pytest.raises(InvalidValue, match=r"must yield ft\.Step.* got int"):
        run([1])


def test_a_run_shows_its_steps_where_that_is_asked_for(capsys):
    steps = [Step(t, None) for t in (1, 2)]
    assert run(steps).steps == 2
    assert capsys.readouterr().err == ""
    run(steps, stop=lambda step: True, progress=True)
    run(steps, progress=True)
    shown = capsys.readouterr().err.split("\n")
    assert [line.split("\r")[-1].split(" in ")[0] for line in shown[:2]] == ["1 step", "2 steps"]
