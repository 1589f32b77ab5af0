"""Planted bugs where records come in: each is noticed by the law of entrances."""

import numpy as np
import pytest

from farthing.audit.entrances import refusals
from farthing.data import columns, tables
from farthing.errors import InvalidValue
from farthing.ledger import books
from farthing.linear import base, selection
from farthing.queries import arrays


def _passed_on(function, *given, said, error=InvalidValue):
    try:
        return function(*given)
    except Exception as other:
        raise error(f"{said}: {other}") from other


def _refused_values(original):
    def table(self, X, y=None, **options):
        original(self, X, y, **options)
        if self._blank is not None:
            raise InvalidValue("features must be finite")

    return table


def _refused_labels(original):
    def codes(y, classes, filed=False):
        found = original(y, classes, filed)
        if not np.isfinite(found).all():
            raise InvalidValue(f"undeclared labels {y[~np.isfinite(found)]}")
        return found

    return codes


def _by_the_rows(original):
    def score(self, estimator, X, y):
        return original(self, estimator, X, y) * self.records / len(y)

    return score


BUGS = {
    "errors of other libraries passed on": (arrays, "attempt", lambda _: _passed_on),
    "a row that is not finite refused": (tables.Table, "__init__", _refused_values),
    "an undeclared label refused and quoted": (base, "codes", _refused_labels),
    "a cell that is no number refused": (columns, "_number", lambda _: float),
    "a score divided by its rows": (selection.PrivateScore, "__call__", _by_the_rows),
    "notes of charges forgotten": (books.Books, "note", lambda _: lambda self, text: None),
    "notes of parts not handed on": (books.Books, "notes", lambda _: lambda self: []),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name, monkeypatch):
    owner, attribute, changed = BUGS[name]
    monkeypatch.setattr(owner, attribute, changed(getattr(owner, attribute)))
    if attribute == "attempt":
        monkeypatch.setattr("farthing.audit.entrances.attempt", _passed_on)
    assert refusals()
