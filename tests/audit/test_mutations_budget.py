"""Planted bugs in how totals are compared with budgets: each sets off the law of the filters."""

import pytest

from farthing.accounting import filters
from farthing.audit import prices

BUGS = {
    "totals are compared bit by bit": ("within", lambda total, limit: total <= limit * (1 - 2.0**-52)),
    "the tolerance is a thousandth": ("within", lambda total, limit: total <= limit * 1.001),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_sets_off_the_law(name, monkeypatch):
    attribute, changed = BUGS[name]
    monkeypatch.setattr(filters, attribute, changed)
    assert prices.filters()


def test_basic_composition_that_forgets_its_deltas_sets_off_the_law(monkeypatch):
    monkeypatch.setattr(
        filters.BasicFilter, "fits", lambda self, total: filters.within(total[0], self.budget.epsilon)
    )
    assert any("more than its δ" in complaint for complaint in prices.filters())


def test_the_real_code_sets_off_no_alarm():
    assert prices.filters() == []
