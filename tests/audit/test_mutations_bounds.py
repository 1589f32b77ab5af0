"""Planted bugs where bounds meet contributions and where sums fail: each is noticed by a law."""

import numpy as np
import pytest

from farthing.audit import charges, laws, prices
from farthing.ledger import answers
from farthing.linear import losses
from farthing.queries import bounds, mechanisms, query


def an_error_after_the_charge(patch):
    patch(answers, "refusal", lambda error: error)


def noise_on_zero_for_all(patch):
    patch(answers, "without_failing", lambda sums, places, zero, blank=0.0: zero)


def a_part_that_fails_is_dropped_whole(patch):
    def without_failing(sums, places, zero, blank=0.0):
        total = zero
        for part in np.array_split(places, 2):
            found = answers._tried(sums, part)
            total = total if found is None or found.shape != zero.shape else total + np.nan_to_num(found)
        return total

    patch(answers, "without_failing", without_failing)


def a_norm_for_outer_products(patch):
    patch(losses.Gram, "honours", tuple(bounds.Kind))
    patch(bounds.ClipNorm, "rows", property(lambda self: self), raising=False)


def outer_products_clipped_like_rows(patch):
    patch(query.PerExample, "honours", tuple(bounds.Kind))
    patch(bounds.ClipOuter, "apply", lambda self, rows: self.rows.apply(rows), raising=False)


def one_number_for_all_coordinates(patch):
    """A scale of one coordinate clamps all of them, and is priced as one."""
    whole = bounds._rows
    patch(bounds, "_rows", lambda contributions, width=None: whole(contributions))
    patch(mechanisms, "refuse_width", lambda bound, size: None)


def a_choice_on_thirty_bits(patch):
    """As it was: a grid that does not follow the noise."""

    def grid(self, bound, size=1):
        return 30, self.noise_multiplier * bound.norm() * (1 + 2.0**-20) * 2.0**-30

    patch(mechanisms.NoisyMax, "grid", grid)


BUGS = [
    (prices.election_grids, a_choice_on_thirty_bits),
    (charges.failures, an_error_after_the_charge),
    (charges.failures, noise_on_zero_for_all),
    (charges.failures, a_part_that_fails_is_dropped_whole),
    (laws.pairs, a_norm_for_outer_products),
    (laws.pairs, outer_products_clipped_like_rows),
    (laws.pairs, one_number_for_all_coordinates),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=lambda one: one.__name__)
def test_planted_bugs_are_caught(law, bug, monkeypatch):
    bug(monkeypatch.setattr)
    assert law()


@pytest.mark.parametrize(
    "law", [charges.failures, laws.pairs, prices.election_grids], ids=lambda law: law.__name__
)
def test_the_real_code_sets_off_no_alarm(law):
    assert law() == []
