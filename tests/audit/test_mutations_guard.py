"""Planted bugs in the guard: each is noticed by the law of its replies."""

import logging
import os
import tempfile

import numpy as np
import pytest
from scipy.special import softmax

from farthing.audit import entrances
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.guard.policy import Limits
from farthing.deploy.messages.signed import MessageKind, Reason, refuse
from farthing.ledger import answers
from farthing.linear import losses


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "farthing.deploy.guard")


@pytest.fixture
def folder():
    """In memory where that is possible: nothing here is about disks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as found:
        yield found


def a_refusal_after_the_charge_tells_of_a_label(original):
    def ask(self, question, terms, w, key):
        answer = original(self, question, terms, w, key)
        if (self._attached._records.y > 2).any():
            refuse(Reason.SHAPE, "there is a class without a column")
        return answer

    return ask


def an_error_before_the_charge_tells_of_a_label(original):
    def ask(self, question, terms, w, key):
        if np.isnan(self._attached._records.y).any():
            raise ValueError
        return original(self, question, terms, w, key)

    return ask


def the_number_of_records_is_told_as_it_is(original):
    def row(self):
        return original(self) | {"there": len(self._attached._records)}

    return row


def an_answer_is_as_long_as_what_it_holds(original):
    def sealed(self, kind, turn, opened, header, body=b""):
        present = np.abs(self._attached._records.X).max() > 1
        return original(
            self, kind, turn, opened, header, body + bytes(8 * int(present and kind is MessageKind.ANSWER))
        )

    return sealed


def a_label_of_no_class_raises(original):
    def residual(self, margins, y):
        found = softmax(margins, axis=1)
        found[np.arange(len(y)), y.astype(np.int64)] -= 1.0
        return found

    return residual


def fewer_columns_than_classes_are_allowed(original):
    return lambda self, loss, rows, shape: shape[0] == rows and shape[-1] <= max(rows, self.outputs)


def failures_after_the_charge_are_told(original):
    return lambda error: error


BUGS = [
    (Guard, "ask", a_refusal_after_the_charge_tells_of_a_label),
    (Guard, "ask", an_error_before_the_charge_tells_of_a_label),
    (Guard, "_row", the_number_of_records_is_told_as_it_is),
    (Guard, "_sealed", an_answer_is_as_long_as_what_it_holds),
    (losses.Softmax, "residual", a_label_of_no_class_raises),
    (Limits, "allows_shape", fewer_columns_than_classes_are_allowed),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug[2].__name__)
def test_planted_bugs_are_caught(bug, monkeypatch, folder):
    owner, name, changed = bug
    monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    assert entrances.replies(folder)


def test_what_every_guard_once_told_is_caught(monkeypatch, folder):
    """All three together are how the guard was: an answer or `internal`, by one record's label."""
    for owner, name, changed in [*BUGS[-2:], (answers, "refusal", failures_after_the_charge_are_told)]:
        monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    said = entrances.replies(folder)
    assert any("multinomial" in text and "label 77" in text for text in said)


def test_the_real_guard_sets_off_no_alarm(folder):
    assert entrances.replies(folder) == []
