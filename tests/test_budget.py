"""Budgets refuse nonsense and print in full."""

import math

import pytest

from farthing.budget import Adjacency, Budget, Guarantee, Observer, Unit
from farthing.errors import InvalidValue


def test_a_budget_says_everything():
    budget = Budget(0.5, 1e-8, "replace-one", "user", "server")
    assert str(budget) == "(0.5, 1e-08)-DP, replace-one, per user, against server"
    assert budget.adjacency is Adjacency.REPLACE_ONE
    assert budget.with_(0.1, 0.0).observer is Observer.SERVER


@pytest.mark.parametrize("arguments", [(0, 1e-5), (math.nan, 1e-5), (1, 1), (1, -1e-9), (1, 1e-5, "swap")])
def test_nonsense_is_refused(arguments):
    with pytest.raises(InvalidValue):
        Budget(*arguments)


def test_conversions():
    # closed forms, evaluated by hand: (sqrt(ln 1e8 + .5) - sqrt(ln 1e8))^2
    log = math.log(1e8)
    assert Budget(0.5, 1e-8).rho == pytest.approx((math.sqrt(log + 0.5) - math.sqrt(log)) ** 2, rel=1e-12)
    assert Budget(1.0, 1e-6).mu * 42.25 / 10 == pytest.approx(1.0, abs=2e-4)  # 100 steps at sigma 42.25


def test_an_infinite_guarantee_reads_as_none():
    text = str(
        Guarantee(math.inf, 1e-5, Adjacency.ADD_REMOVE, Unit.RECORD, Observer.ANYONE, "pld", note="seeded")
    )
    assert text.startswith("no guarantee")
    assert "seeded" in text
