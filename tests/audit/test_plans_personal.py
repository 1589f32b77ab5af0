"""Attacks on personal budgets: each level's claim stands, and swapped rates or lost weights are noticed."""

import pytest

from farthing.audit.plans import PersonalTarget
from farthing.noise.lattice import SeededStream
from farthing.queries.personal import Personal

EPSILONS, DELTA = (0.5, 3.0), 0.01
SURE = 1 - 1e-7  # a sound claim is called broken with a probability of 1e-7 at most


def attacked(way, runs=20_000, steps=8):
    return PersonalTarget(EPSILONS, DELTA, steps, way, runs).verdicts(
        1.0, SURE, SeededStream(1), lambda: None
    )


@pytest.mark.parametrize("way", ["rates", "weights"])
def test_each_levels_claim_stands_and_is_nearly_reached(way):
    for verdict, epsilon in zip(attacked(way), EPSILONS, strict=True):
        assert verdict.claim.epsilon == epsilon
        assert not verdict.broken
        assert 0.2 * epsilon < verdict.eps_lower <= epsilon


def test_swapped_rates_break_the_smaller_claim(monkeypatch):
    def swapped(self, records, stream, turn):
        return draw(Personal(self.sampling_rates[::-1], self.weights), records, stream, turn)

    draw = Personal.draw_from
    monkeypatch.setattr(Personal, "draw_from", swapped)
    small, large = attacked("rates")
    assert small.broken
    assert not large.broken


def test_lost_weights_break_the_smaller_claim(monkeypatch):
    monkeypatch.setattr(Personal, "weighted", lambda self, sums, records, drawn: sums(records.take(drawn)))
    small, large = attacked("weights")
    assert small.broken
    assert not large.broken


def test_a_larger_rate_than_was_priced_is_noticed(monkeypatch):
    def more(self, records, stream, turn):
        rates = tuple(min(1.0, 3 * rate) for rate in self.sampling_rates)
        return draw(Personal(rates), records, stream, turn)

    draw = Personal.draw_from
    monkeypatch.setattr(Personal, "draw_from", more)
    assert attacked("rates", steps=3)[0].broken
