"""Planted bugs where bounds meet contributions and where sums fail: each is noticed by a law."""

import numpy as np
import pytest

from farthing import failsafe
from farthing.audit import charges


def an_error_after_the_charge(original):
    return lambda error: error


def noise_on_zero_for_all(original):
    return lambda sums, places, zero: zero


def a_part_that_fails_is_dropped_whole(original):
    def without_failing(sums, places, zero):
        total = zero
        for part in np.array_split(places, 2):
            found = failsafe._tried(sums, part)
            total = total if found is None or found.shape != zero.shape else total + np.nan_to_num(found)
        return total

    return without_failing


BUGS = [
    (charges.failures, failsafe, "refusal", an_error_after_the_charge),
    (charges.failures, failsafe, "without_failing", noise_on_zero_for_all),
    (charges.failures, failsafe, "without_failing", a_part_that_fails_is_dropped_whole),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug[3].__name__)
def test_planted_bugs_are_caught(bug, monkeypatch):
    law, owner, name, changed = bug
    monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    assert law()


@pytest.mark.parametrize("law", sorted({bug[0] for bug in BUGS}, key=repr), ids=lambda law: law.__name__)
def test_the_real_code_sets_off_no_alarm(law):
    assert law() == []
