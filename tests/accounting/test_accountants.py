"""The table of accountants: every row has a name, a theorem and something that it computes."""

import math

import pytest

import farthing as ft
from farthing.accounting.accountants import Accountant, EqualSteps
from farthing.errors import InvalidValue, Unsupported
from farthing.federated import Invitation

PLAN = EqualSteps(noise_multiplier=4.0, sampling_rate=1.0, steps=10)
BUDGET = ft.Budget(1.0, 1e-5)


@pytest.mark.parametrize("row", Accountant)
def test_a_row_says_what_it_proves_and_computes_something(row):
    assert row == row.value == str(row)
    assert row.theorem
    assert row in Accountant.of_steps() or row in Accountant.of_rounds()


@pytest.mark.parametrize("row", Accountant.of_steps())
def test_a_curve_falls_in_delta(row):
    plan = PLAN if row is not Accountant.SAMPLING else EqualSteps(4.0, 1.0, 10, ft.Adjacency.ZERO_OUT)
    curve = row.curve(plan)
    assert 0 < curve.epsilon(1e-3) <= curve.epsilon(1e-6) < math.inf


@pytest.mark.parametrize("row", [row for row in Accountant.of_rounds() if row is not Accountant.TIGHT])
def test_rounds_on_draws_without_a_textbook_theorem_are_refused(row):
    """In a full batch one record displaces another: the noise for epsilon 1 gave 2.15."""
    with pytest.raises(Unsupported, match="tight"):
        row.noise(10, BUDGET, ft.TruncatedPoisson(1.0, 99, of=100))
    with pytest.raises(Unsupported, match="tight"):
        row.rounds(12.0, 10, BUDGET, ft.TruncatedPoisson(1.0, 99, of=100))


@pytest.mark.parametrize("row", Accountant.of_rounds())
def test_noise_for_rounds_affords_them(row):
    noise = row.noise(5, BUDGET, ft.Poisson(0.1))
    assert row.rounds(noise * (1 + 1e-9), 5, BUDGET, ft.Poisson(0.1)) >= 5
    assert row.rounds(noise * 0.9, 5, BUDGET, ft.Poisson(0.1)) < 5


def test_a_row_that_is_not_for_this_says_what_is():
    with pytest.raises(Unsupported, match=r"basic has no curve of equal steps: use one of pld"):
        Accountant.BASIC.curve(PLAN)
    with pytest.raises(Unsupported, match=r"rdp does not count rounds: use one of advanced"):
        Accountant.RDP.noise(5, BUDGET, ft.Everyone())
    with pytest.raises(InvalidValue, match="accountant must be one of"):
        Invitation(3.0, ft.Poisson(0.01), 10, accountant="rdp")
