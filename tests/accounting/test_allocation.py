"""Balanced draws: their price against simulation, integration and Poisson samples, and what is refused."""

import io
import math

import numpy as np
import pytest
from scipy.special import ndtr

import farthing as ft
from farthing.accounting import allocation, calibrate, gaussian, pld
from farthing.accounting.filters import GdpFilter, RdpFilter, ZcdpFilter
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import judge
from farthing.budget import Adjacency, Observer
from farthing.errors import Unsupported
from farthing.ledger import verifier
from farthing.noise.lattice import SeededStream
from farthing.queries.events import (
    BalancedEvent,
    ComposedEvent,
    GaussianEvent,
    PoissonEvent,
    RepeatedEvent,
    decode,
    encode,
)

ZERO_OUT, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


def two_turns(mu, epsilon):
    """δ(ε) of one of two turns, in both directions, by integrating over both answers."""
    z = np.linspace(-12, 12 + mu, 2401)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    moved = np.exp(-((z - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
    without = np.outer(density, density)
    with_ = (np.outer(moved, density) + np.outer(density, moved)) / 2
    cell = (z[1] - z[0]) ** 2
    pairs = (with_, without), (without, with_)
    return [float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell) for a, b in pairs]


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.2, 1.0, 2.5])
def test_one_of_two_turns_costs_what_integration_says(noise, epsilon):
    exact = two_turns(1 / noise, epsilon)
    ways = pld.directions(BalancedEvent(2, GaussianEvent(noise)), Adjacency.ADD_REMOVE)
    for way, wanted in zip(ways, exact, strict=True):
        found = math.exp(pld.log_delta(way, epsilon))
        assert wanted * (1 - 1e-6) - 1e-12 <= found <= wanted * 1.01 + 1e-9


@pytest.mark.parametrize(("bins", "noise", "epsilon"), [(7, 0.8, 1.0), (50, 0.6, 1.5), (200, 1.0, 0.25)])
def test_a_pass_costs_no_less_than_simulation_says(bins, noise, epsilon):
    """E[(L - e^ε)₊] and E[(1 - e^ε L)₊] over many draws of the mean of log-normal ratios."""
    rng, mu = np.random.default_rng(bins), 1 / noise
    means = np.concatenate(
        [np.exp(mu * rng.normal(size=(2000, bins)) - mu * mu / 2).mean(axis=1) for _ in range(50)]
    )
    ways = pld.directions(BalancedEvent(bins, GaussianEvent(noise)), Adjacency.ADD_REMOVE)
    for way, sample in zip(
        ways,
        (np.maximum(means - math.exp(epsilon), 0), np.maximum(1 - math.exp(epsilon) * means, 0)),
        strict=True,
    ):
        found, error = math.exp(pld.log_delta(way, epsilon)), sample.std() / math.sqrt(len(sample))
        assert found >= sample.mean() - 5 * error
        assert found <= sample.mean() * 1.01 + 5 * error + 1e-9


@pytest.mark.parametrize("bins", [2, 3, 100, 4096])
@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 3.0])
def test_mass_and_mean_are_kept_or_moved_to_the_dear_side(bins, mu):
    losses, masses, infinite = allocation.atoms(bins, mu, False)
    assert 1 - 1e-9 <= masses.sum() + infinite <= 1 + 1e-6
    assert masses @ np.exp(-losses) == pytest.approx(1.0, abs=1e-9)  # their mass under "without"
    losses, masses, infinite = allocation.atoms(bins, mu, True)
    assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-9)
    assert masses @ np.exp(-losses) <= 1 + 1e-9


@pytest.mark.parametrize(("bins", "passes"), [(10, 1), (10, 12), (100, 4)])
@pytest.mark.parametrize("noise", [0.6, 1.5])
def test_a_pass_costs_less_than_poisson_samples_and_more_than_nothing(bins, passes, noise):
    event = RepeatedEvent(BalancedEvent(bins, GaussianEvent(noise)), passes)
    balanced = pld.epsilon(event, 1e-6)
    poisson = pld.epsilon(RepeatedEvent(PoissonEvent(1 / bins, GaussianEvent(noise)), bins * passes), 1e-6)
    always = gaussian.epsilon(math.sqrt(passes) / noise, 1e-6)
    assert 0.5 * poisson < balanced < min(poisson, always)
    assert pld.epsilon(event, 1e-6, ZERO_OUT) == balanced
    assert pld.delta(event, balanced) <= 1e-6 * (1 + 1e-6)


def test_one_turn_a_pass_is_no_choice():
    event = RepeatedEvent(BalancedEvent(1, GaussianEvent(2.0)), 3)
    assert pld.epsilon(event, 1e-5) == pld.epsilon(RepeatedEvent(GaussianEvent(2.0), 3), 1e-5)


def test_balanced_draws_compose_with_other_events():
    balanced, other = BalancedEvent(20, GaussianEvent(1.0)), GaussianEvent(5.0)
    both = pld.epsilon(ComposedEvent((RepeatedEvent(balanced, 2), other)), 1e-5)
    alone = pld.epsilon(RepeatedEvent(balanced, 2), 1e-5)
    assert alone < both < alone + gaussian.epsilon(0.2, 1e-6) + 0.3


def test_noise_and_steps_are_found_for_a_budget():
    budget = ft.Budget(2.0, 1e-5)
    noise = calibrate.noise(lambda s: RepeatedEvent(BalancedEvent(50, GaussianEvent(s)), 3), budget)
    assert 1.99 < pld.epsilon(RepeatedEvent(BalancedEvent(50, GaussianEvent(noise)), 3), 1e-5) <= 2.0
    assert calibrate.steps(BalancedEvent(50, GaussianEvent(noise)), budget) == 3


def test_replace_one_has_no_theorem():
    with pytest.raises(Unsupported, match="no dominating pair"):
        pld.epsilon(BalancedEvent(10, GaussianEvent(1.0)), 1e-5, REPLACE)


@pytest.mark.parametrize("rule", [ZcdpFilter, GdpFilter])
def test_filters_have_no_price_for_a_pass(rule):
    with pytest.raises(Unsupported):
        (made := rule(ft.Budget(1.0, 1e-5))).add(made.start(), BalancedEvent(10, GaussianEvent(1.0)), 1)


def test_a_pass_fits_no_renyi_filter():
    rule = RdpFilter(ft.Budget(100.0, 1e-5))
    assert not rule.fits(rule.add(rule.start(), BalancedEvent(10, GaussianEvent(10.0)), 1))


def test_tiny_noise_is_refused():
    with pytest.raises(Unsupported, match="Poisson"):
        pld.epsilon(BalancedEvent(10, GaussianEvent(0.01)), 1e-5)


def test_an_event_is_written_and_read():
    event = RepeatedEvent(BalancedEvent(10, GaussianEvent(1.0)), 4)
    assert decode(encode(event)) == event


def query(bins, groups=1, bands=1, noise=1.0):
    rows = ft.PerExample(lambda rows, w: rows[0] - w)
    return ft.Query(ft.Balanced(bins, groups), rows, ft.ClipNorm(1.0), ft.BandedGaussian(noise, bands))


def test_a_ledger_spends_a_plan_of_passes_and_the_verifier_agrees():
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5))
    asked, records = query(10, groups=2, bands=2, noise=2.0), ft.Rows(np.ones((400, 2)))
    promised = ledger.promise(asked)
    assert promised.times % 20 == 0
    private, drawn = ledger.over(records), 0.0
    for _ in range(20):  # one pass: everybody once
        drawn = drawn + private.ask(asked, np.zeros(2)).value
    assert np.abs(drawn - 400 / math.sqrt(2)).max() < 60
    ledger.journal.export(exported := io.StringIO())
    found = verifier.verify(exported.getvalue().splitlines())
    assert found.code == 0, found.reason
    low, high = found.plan
    assert low <= ledger.guarantee.epsilon <= 3.0
    assert high == pytest.approx(ledger.guarantee.epsilon, rel=0.02)


def test_an_observer_of_draws_pays_for_a_whole_turn_each_pass():
    plan = ft.Balanced(10).plan(GaussianEvent(2.0), 25, Observer.COORDINATOR)
    assert pld.epsilon(plan, 1e-5, ZERO_OUT) == pytest.approx(gaussian.epsilon(math.sqrt(3) / 2, 1e-5))


def test_normal_intervals_are_accurate_in_both_tails():
    x = np.array([-40.0, -1.0, 1.0, 40.0])
    assert allocation._between(x).tolist() == pytest.approx([ndtr(-1.0), ndtr(1) - ndtr(-1), ndtr(-1.0)])


def heard(sampler, present, runs, noise=1.5):
    """The log-likelihood ratio of one pass, canaries in coordinates of their own, with bands and groups."""
    stream, mechanism = SeededStream(int(present)), ft.BandedGaussian(noise, 2, 1.0)
    drawing, noisy, steps = sampler.begin(), mechanism.begin(), sampler.period
    answers, group = np.empty((steps, runs)), np.zeros(runs, np.int64)
    for turn in range(steps):
        drawn, totals = drawing.draw(runs, stream, turn), np.zeros(runs)
        group[drawing._memory.members(turn % sampler.groups)] = turn % sampler.groups
        np.add.at(totals, drawn, float(present))
        answers[turn] = noisy.release(totals, ft.ClipNorm(1.0), stream, turn)
    rows = answers.copy()
    rows[1:] += answers[:-1]  # C times the answers: independent noise again
    deviation, losses = noise * math.sqrt(2), np.zeros(runs)
    for own in range(sampler.groups):
        shifts = [rows[t : t + 2, group == own].sum(axis=0) for t in range(own, steps, sampler.groups)]
        ratios = (np.array(shifts) - 1.0) / deviation**2  # the last chance of a pass may have one row only
        losses[group == own] = np.log(np.exp(ratios).mean(axis=0))
    return losses


def verdict(sampler, runs=30_000):
    claim = ft.Budget(pld.epsilon(ft.Balanced(4, 2).plan(GaussianEvent(1.5), 8), 0.01), 0.01)
    named = [("likelihood ratio of a pass", test_statistics.value)]
    return judge(heard(sampler, False, runs), heard(sampler, True, runs), claim, named, 0.999999)


def test_an_attack_on_a_pass_respects_its_price():
    assert not verdict(ft.Balanced(4, 2)).broken


def test_a_record_that_is_drawn_twice_in_a_pass_is_refuted():
    class Twice(ft.Balanced):
        __slots__ = ()

        def draw(self, records, stream, turn=0):
            now = ft.Balanced.draw(self, records, stream, turn)
            also = self._memory.members(turn % self.groups) if turn < 4 else np.empty(0, np.int64)
            return np.concatenate([now, also])  # everybody in the first turns as well

    assert verdict(Twice(4, 2)).broken


def test_everybody_is_drawn_once_a_pass_and_groups_keep_apart():
    sampler, stream, when = ft.Balanced(5, 3).begin(), SeededStream(3), {}
    for turn in range(60):
        for record in sampler.draw(200, stream, turn):
            when.setdefault(int(record), []).append(turn)
    assert len(when) == 200
    for turns in when.values():
        assert [turn // 15 for turn in turns] == [0, 1, 2, 3]
        assert len({turn % 3 for turn in turns}) == 1


@pytest.mark.parametrize("lost", [1, 7, 15, 22])
def test_a_process_that_takes_over_draws_from_the_next_pass_on(lost):
    stream, when = SeededStream(9), []
    for turns in (range(lost), range(lost, 45)):
        sampler = ft.Balanced(5, 3).begin()
        when += [(int(r), turn // 15) for turn in turns for r in sampler.draw(60, stream, turn)]
    assert len(set(when)) == len(when)  # nobody twice in a pass


def test_bands_are_chosen_for_balanced_draws():
    budget = ft.Budget(8.0, 1e-5)
    found = ft.choose_balanced(budget, turns=6, steps=12, most=2)
    assert found.sampler == ft.Balanced(3, groups=2)
    assert found.gain < ft.choose_bands(budget, sampling_rate=1 / 6, steps=12, most=2).gain
    event = found.sampler.plan(found.mechanism.unit_event(), 12)
    assert 7.9 < pld.epsilon(event, 1e-5) <= 8.0
