"""Truncated Poisson samples: the price against exact enumeration, another composition, and planted bugs."""

import io
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import calibrate, pairs, pld, transform
from farthing.accounting.filters import GdpFilter, RdpFilter
from farthing.budget import Adjacency, Observer
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger import verifier
from farthing.noise.lattice import SeededStream
from farthing.queries.events import (
    ComposedEvent,
    DrawnEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    RepeatedEvent,
    TruncatedEvent,
    decode,
    encode,
)

ADD, ZERO, REPLACE = Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


def event(rate, size, of, noise=1.0):
    return TruncatedEvent(rate, size, of, GaussianEvent(noise))


def random_subset(drawn, size):
    return list(itertools.combinations(drawn, size)) if len(drawn) > size else [drawn]


def law(values, rate, size, noise, answers, kept=random_subset):
    """The density of an answer on these records: over all draws, and all that may be kept of each."""
    density, places = np.zeros_like(answers), range(len(values))
    sizes = range(len(values) + 1)
    for drawn in itertools.chain.from_iterable(itertools.combinations(places, k) for k in sizes):
        chance = rate ** len(drawn) * (1 - rate) ** (len(values) - len(drawn))
        choices = kept(drawn, size)
        for chosen in choices:
            z = (answers - sum(values[place] for place in chosen)) / noise
            density += chance / len(choices) * np.exp(-z * z / 2) / noise / math.sqrt(2 * math.pi)
    return density


def neighbours(others, adjacency):
    """Data without the record of value 1, which comes first: gone, zeroed, or replaced."""
    return {ADD: [[*others]], ZERO: [[0, *others]], REPLACE: [[-1, *others], [0, *others]]}[adjacency]


def worst(records, rate, size, noise, adjacency, epsilon, kept=random_subset):
    """The largest δ(ε) of all small data sets, in both directions, over the price."""
    answers = np.linspace(-8 - 8 * noise, 8 + 8 * noise, 4001)
    cell, found = answers[1] - answers[0], 0.0
    for others in itertools.combinations_with_replacement((-1, 0, 1), records - 1):
        one = law([1, *others], rate, size, noise, answers, kept)
        for values in neighbours(others, adjacency):
            other = law(values, rate, size, noise, answers, kept)
            both = (one, other), (other, one)
            found = max(found, *(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in both))
    return found


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize(("rate", "size"), [(0.2, 1), (0.5, 1), (0.5, 2), (0.9, 2), (0.6, 3)])
@pytest.mark.parametrize(("noise", "epsilon"), [(0.5, 1.0), (1.0, 0.0), (1.0, 0.5), (2.0, 0.2)])
def test_no_small_data_set_tells_more_than_the_price(adjacency, rate, size, noise, epsilon):
    for records in (2, 4):
        found = worst(records, rate, size, noise, adjacency, epsilon)
        assert found <= pld.delta(event(rate, size, records, noise), epsilon, adjacency) * (1 + 1e-4) + 1e-9


def dropped(drawn, size):
    """A batch that is too large is skipped, rather than cut."""
    return [()] if len(drawn) > size else [drawn]


@pytest.mark.parametrize(
    ("adjacency", "rate", "size", "noise", "epsilon"),
    [(ADD, 0.9, 2, 2.0, 2.0), (ZERO, 0.5, 1, 1.0, 3.0), (REPLACE, 0.5, 1, 1.0, 3.0)],
)
def test_a_price_that_leaves_the_overflow_out_is_too_low(adjacency, rate, size, noise, epsilon):
    found = worst(4, rate, size, noise, adjacency, epsilon)
    assert found > 1.9 * pld.delta(PoissonEvent(rate, GaussianEvent(noise)), epsilon, adjacency)


def test_skipping_a_full_batch_would_tell_more_than_the_price():
    assert worst(4, 0.9, 3, 2.0, ADD, 2.0, dropped) > 2 * pld.delta(event(0.9, 3, 4, 2.0), 2.0, ADD)


@pytest.mark.parametrize("adjacency", [ADD, ZERO])
def test_two_answers_tell_no_more_than_their_price(adjacency):
    """The exact profile of two independent answers, by integration over both."""
    answers = np.linspace(-9, 9, 901)
    cell, others = (answers[1] - answers[0]) ** 2, (-1, -1)
    one = law([1, *others], 0.5, 1, 1.0, answers)
    other = law(neighbours(others, adjacency)[0], 0.5, 1, 1.0, answers)
    p, q = np.outer(one, one), np.outer(other, other)
    found = max(np.maximum(a - math.exp(0.5) * b, 0).sum() * cell for a, b in ((p, q), (q, p)))
    price = pld.delta(RepeatedEvent(event(0.5, 1, 3), 2), 0.5, adjacency)
    assert 0 < found <= price * (1 + 1e-3)


@pytest.mark.parametrize(
    ("rate", "size", "of"), [(0.5, 2, 4), (0.01, 3, 200), (0.3, 31, 60), (0.1, 1, 2), (0.02, 12, 300)]
)
def test_the_chance_of_a_full_batch_is_that_of_a_binomial(rate, size, of):
    q, n = Fraction(rate), of - 1
    exact = sum(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(size, n + 1))
    found = pairs.overflow(event(rate, size, of))
    assert float(exact) <= found <= float(exact) * (1 + 1e-5)
    assert verifier._tail(n, rate, size) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(("of", "rate"), [(10**6, 0.001), (10**9, 1e-5)])
@pytest.mark.parametrize("deviations", [-2, 0, 3, 8])
def test_two_ways_to_the_tail_agree_where_records_are_many(of, rate, deviations):
    size = round(of * rate + deviations * math.sqrt(of * rate))
    found = pairs.overflow(event(rate, size, of))
    assert found == pytest.approx(verifier._tail(of - 1, rate, size), rel=1e-4)


def test_what_never_overflows_costs_what_a_poisson_sample_costs():
    for adjacency in Adjacency:
        plain = PoissonEvent(0.1, GaussianEvent(1.0))
        assert pairs.of_event(event(0.1, 50, 50), adjacency) == pairs.of_event(plain, adjacency)
    assert pairs.of_event(event(1.0, 5, 50), ADD) == (pairs.Shift(2.0),)


def composed(rate, size, of, noise, steps, delta, adjacency=ADD):
    """ε by an independent composition: the verifier's pairs and fast Fourier transforms."""
    ledger = ft.Ledger(ft.Budget(50.0, delta, adjacency))
    ledger.promise(event(rate, size, of, noise), steps)
    ledger.journal.export(exported := io.StringIO())
    found = verifier.verify(exported.getvalue().splitlines())
    assert found.code == 0, found.reason
    return found.plan


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize("size", [100, 110, 120, 140, 170])
def test_a_plan_costs_what_another_composition_says(size, adjacency):
    low, high = composed(0.01, size, 10_000, 1.0, 1000, 1e-5, adjacency)
    price = pld.epsilon(RepeatedEvent(event(0.01, size, 10_000), 1000), 1e-5, adjacency)
    assert low * (1 - 1e-6) <= price <= high * (1 + 2e-3)


def test_more_room_costs_less_and_in_the_end_no_more_than_poisson():
    prices = [
        pld.epsilon(RepeatedEvent(event(0.01, size, 10_000), 1000), 1e-5)
        for size in (90, 100, 120, 140, 150, 180)
    ]
    poisson = pld.epsilon(RepeatedEvent(PoissonEvent(0.01, GaussianEvent(1.0)), 1000), 1e-5)
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] == pytest.approx(poisson, rel=1e-4)
    assert prices[4] < 1.002 * poisson  # five standard deviations of room


def test_noise_and_steps_are_found_for_a_budget():
    budget = ft.Budget(2.0, 1e-5)
    noise = calibrate.noise(lambda s: RepeatedEvent(event(0.02, 120, 5000, s), 500), budget)
    assert 1.99 < pld.epsilon(RepeatedEvent(event(0.02, 120, 5000, noise), 500), 1e-5) <= 2.0
    assert calibrate.steps(event(0.02, 120, 5000, noise), budget) >= 500


def test_a_renyi_filter_charges_the_mixture_order_by_order():
    rule, full = RdpFilter(ft.Budget(8.0, 1e-5)), pairs.overflow(event(0.1, 12, 100))
    for order, cost in zip(rule.orders, rule.cost(event(0.1, 12, 100)), strict=True):
        moments = []
        for way in range(2):
            usual, pushed = (
                pairs.of_event(PoissonEvent(0.1, GaussianEvent(s)), ADD)[way] for s in (1.0, 0.5)
            )
            logs = [transform.log_moment(pair, order - 1) for pair in (usual, pushed)]
            moments.append(np.logaddexp(math.log1p(-full) + logs[0], math.log(full) + logs[1]))
        assert cost == pytest.approx(max(moments) / (order - 1), rel=1e-6)
    with pytest.raises(Unsupported):
        GdpFilter(ft.Budget(1.0, 1e-5)).cost(event(0.1, 12, 100))


def test_a_menu_prices_truncated_batches_and_only_those_that_are_on_it():
    entries = [ft.TruncatedPoisson(0.1, 140, 1000).amplify(GaussianEvent(noise)) for noise in (2.0, 4.0)]
    others = [ft.Poisson(0.1).amplify(GaussianEvent(noise)) for noise in (2.0, 4.0)]
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), filter=ft.Menu(entries))
    plain = ft.Ledger(ft.Budget(2.0, 1e-5), filter=ft.Menu(others))
    counts = []
    for one, asked in ((ledger, entries[0]), (plain, others[0])):
        counts.append(next(n for n in range(1, 2000) if not one.affords(asked, n)) - 1)
    assert 0.8 * counts[1] < counts[0] <= counts[1]
    with pytest.raises(Unsupported):
        ledger.filter.cost(ft.TruncatedPoisson(0.1, 110, 1000).amplify(GaussianEvent(2.0)))
    with pytest.raises(Unsupported):
        plain.filter.cost(entries[0])


def test_events_without_a_theorem_are_refused():
    with pytest.raises(Unsupported, match="no dominating pair"):
        pld.epsilon(TruncatedEvent(0.1, 5, 50, LaplaceEvent(1.0)), 1e-5)


def test_an_event_is_written_and_read():
    both = ComposedEvent((event(0.1, 5, 50), RepeatedEvent(event(0.2, 5, 50), 3)))
    assert decode(encode(both)) == both


def test_a_ledger_spends_truncated_batches_and_the_verifier_agrees():
    rows = ft.PerExample(lambda rows, w: rows[0] - w)
    query = ft.Query(ft.TruncatedPoisson(0.2, 90, of=400), rows, ft.ClipNorm(1.0), ft.Gaussian(2.0))
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5))
    promised = ledger.promise(query)
    answer = ledger.over(ft.Rows(np.ones((400, 2)))).ask(query, np.zeros(2))
    assert promised.left == promised.times - 1
    assert 0 < answer.value[0] * math.sqrt(2) < 90 + 20
    with pytest.raises(InvalidValue, match="more records") as refused:
        ledger.over(ft.Rows(np.ones((477, 2)))).ask(query, np.zeros(2))
    assert "477" not in str(refused.value)
    ledger.journal.export(exported := io.StringIO())
    found = verifier.verify(exported.getvalue().splitlines())
    assert found.code == 0, found.reason
    assert found.plan[0] <= ledger.guarantee.epsilon <= 3.0


def test_an_observer_of_draws_sees_who_is_kept():
    sampler = ft.TruncatedPoisson(0.2, 90, of=400)
    assert sampler.amplify(GaussianEvent(1.0), Observer.COORDINATOR) == DrawnEvent(0.2, GaussianEvent(1.0))


def test_draws_are_cut_to_a_random_part():
    sampler, stream, trials = ft.TruncatedPoisson(0.5, 2, of=4), SeededStream(0), 8000
    kept, sizes = np.zeros(4), np.zeros(3)
    for _ in range(trials):
        drawn = sampler.draw(4, stream)
        kept[drawn] += 1
        sizes[len(drawn)] += 1
    exact = np.array([1, 4, 11]) / 16
    assert np.abs(sizes / trials - exact).max() < 0.03
    assert np.ptp(kept) < 6 * math.sqrt(trials / 4)  # each record alike


@pytest.mark.parametrize("given", [(0.0, 2, 4), (0.5, 0, 4), (0.5, 2, 0), (0.5, 1.5, 4)])
def test_impossible_samplers_cannot_be_made(given):
    with pytest.raises(InvalidValue):
        ft.TruncatedPoisson(*given)
