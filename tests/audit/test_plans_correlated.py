"""The attack on correlated noise: it respects sound plans, and breaks planted bugs."""

from dataclasses import replace

import numpy as np
import pytest

from farthing.audit import plans
from farthing.audit.plans import BalancedTarget, BandedTarget, BufferedTarget, PersonalBandedTarget
from farthing.noise.lattice import SeededStream
from farthing.queries.correlated import Balanced, BandedGaussian, Cyclic, spread
from farthing.queries.personal import PersonalCyclic

SOUND = BandedTarget(groups=4, bands=4, steps=12, runs=10_000)
SURE = replace(SOUND, sampling_rate=0.25, noise_multiplier=4.0)  # every canary in every cycle


def broken(target):
    return target.verdicts(1.0, 0.999999, SeededStream(0), lambda: None)[0].broken


@pytest.mark.parametrize("target", [SOUND, replace(SOUND, bands=1), SURE])
def test_a_sound_plan_is_not_refuted(target):
    assert not broken(target)


def test_bands_beyond_the_groups_are_refuted():
    assert broken(replace(SURE, groups=2, sampling_rate=0.5, bands=12, exponent=1.0, runs=60_000))


def test_noise_for_one_row_instead_of_a_column_is_refuted(monkeypatch):
    def smaller(self, bound, size):
        bits, cell = BandedGaussian.grid(self, bound, size)
        return bits, cell / 2

    planted = type("Planted", (BandedGaussian,), {"grid": smaller, "__slots__": ()})
    monkeypatch.setattr(plans, "BandedGaussian", planted)
    assert broken(SURE)


PAIRS = replace(SURE, groups=2, sampling_rate=0.5, bands=2, exponent=1.0, runs=120_000)


def test_pairs_are_not_refuted():
    assert not broken(PAIRS)


def test_noise_for_one_band_less_is_refuted(monkeypatch):
    """The noise of a column of one coefficient on columns of two."""

    def shorter(self, bound, size):
        bits, cell = BandedGaussian.grid(self, bound, size)
        return bits, cell * spread(self.bands - 1, self.exponent) / spread(self.bands, self.exponent)

    planted = type("Shorter", (BandedGaussian,), {"grid": shorter, "__slots__": ()})
    monkeypatch.setattr(plans, "BandedGaussian", planted)
    assert broken(PAIRS)


def test_a_record_that_is_drawn_twice_in_a_cycle_is_refuted(monkeypatch):
    class Twice(Cyclic):
        __slots__ = ()

        def begin(self):
            begun, draw = Cyclic.begin(self), Cyclic.draw
            planted = object.__new__(type("Begun", (), {"members": lambda _, turn: begun.members(turn)}))
            before = [np.empty(0, np.int64)]

            def twice(runs, stream, turn):
                now = draw(begun, runs, stream, turn)
                both, before[0] = np.concatenate([now, before[0]]), now
                return both

            planted.draw = twice
            return planted

    monkeypatch.setattr(plans, "Cyclic", Twice)
    assert broken(PAIRS)


def test_a_resumed_run_that_draws_its_noise_anew_is_refuted(monkeypatch):
    """The same turns are answered twice, with fresh noise: the attacker averages."""

    class Redrawn(BandedGaussian):
        __slots__ = ()

        def begin(self):
            both = [BandedGaussian.begin(self) for _ in range(2)]
            released = type("Both", (), {})()
            released.release = lambda *given: sum(one.release(*given) for one in both) / 2
            return released

    monkeypatch.setattr(plans, "BandedGaussian", Redrawn)
    assert broken(PAIRS)


def test_noise_that_begins_anew_at_every_turn_is_less_correlated_and_not_refuted(monkeypatch):
    fresh = type("Fresh", (BandedGaussian,), {"begin": lambda self: self, "__slots__": ()})
    monkeypatch.setattr(plans, "BandedGaussian", fresh)
    assert not broken(SOUND)


def test_a_canary_moves_the_rows_of_its_chances():
    shifts = SOUND._shifts(1, (1.0, 0.5, 0.25, 0.125), whole=False)
    assert [np.flatnonzero(shift).tolist() for shift in shifts] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]


PASSES = BufferedTarget(groups=4, steps=12, noise_multiplier=2.0, runs=20_000)


def test_noise_by_buffers_is_not_refuted():
    assert not broken(PASSES)


def test_buffers_made_for_fewer_passes_than_are_made_are_refuted():
    slow = {"weights": (0.5, 0.4), "decays": (0.99, 0.9)}  # whose columns overlap
    assert not broken(replace(PASSES, groups=2, sampling_rate=0.5, passes=6, **slow))
    assert broken(replace(PASSES, groups=2, sampling_rate=0.5, passes=1, **slow))


SECRET = BalancedTarget(runs=20_000)


@pytest.mark.parametrize("target", [SECRET, replace(SECRET, groups=1, bands=1, steps=8)])
def test_balanced_draws_are_not_refuted(target):
    assert not broken(target)


def test_a_pass_that_is_drawn_again_after_each_restart_is_refuted(monkeypatch):
    """Each turn is another process, which assigns the turns that are left of the pass anew."""

    class Redrawn(Balanced):
        __slots__ = ()

        def begin(self):
            begun, again = Balanced.begin(self), object.__new__(type("Begun", (), {}))

            def draw(records, stream, turn):
                left = self.bins - turn % self.bins
                if left < self.bins:
                    begun._memory._places = stream.uniform_below(left, records) + self.bins - left
                return Balanced.draw(begun, records, stream, turn)

            again.draw, again.members = draw, begun.members
            return again

    target = replace(SECRET, groups=1, bands=1, steps=12, noise_multiplier=2.0, runs=60_000)
    assert not broken(target)
    monkeypatch.setattr(plans, "Balanced", Redrawn)
    assert broken(target)


def test_balanced_draws_priced_as_a_pass_of_twice_the_turns_are_refuted(monkeypatch):
    wide = type(
        "Wide", (Balanced,), {"plan": lambda self, *given: Balanced(8 * self.bins, self.groups).plan(*given)}
    )
    monkeypatch.setattr(plans, "Balanced", wide)
    assert broken(replace(SECRET, noise_multiplier=1.0))


OWN = PersonalBandedTarget(groups=4, bands=4, steps=12, runs=20_000)


def test_a_level_with_correlated_noise_is_not_refuted():
    assert not broken(OWN)
    assert not broken(replace(OWN, sampling_rate=0.25, other_rate=0.05))


def test_a_level_that_is_drawn_at_the_rate_of_another_is_refuted(monkeypatch):
    class Swapped(PersonalCyclic):
        __slots__ = ()

        def begin(self):
            return PersonalCyclic(self.sampling_rates[::-1], groups=self.groups).begin()

    monkeypatch.setattr(plans, "PersonalCyclic", Swapped)
    assert broken(OWN)
