"""Truncated batches of groups in turns: the price against enumeration, the deal, the ledger, planted bugs."""

import io
import itertools
import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import pld
from farthing.budget import Adjacency, Observer
from farthing.errors import InvalidValue, PromiseBroken, Unsupported
from farthing.ledger import verifier
from farthing.noise.lattice import SeededStream
from farthing.queries import truncation
from farthing.queries.correlated import coefficients, spread
from farthing.queries.events import DrawnEvent, GaussianEvent, PoissonEvent, RepeatedEvent, TruncatedEvent

ADD, ZERO, REPLACE = Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
ROWS = ft.PerExample(lambda rows, w: rows[0])


def sums(values, rate, size):
    """The law of a turn's sum: over all draws, and all that may be kept of each."""
    found = {}
    for k in range(len(values) + 1):
        for drawn in itertools.combinations(values, k):
            kept = list(itertools.combinations(drawn, min(k, size)))
            for chosen in kept:
                chance = rate**k * (1 - rate) ** (len(values) - k) / len(kept)
                found[sum(chosen)] = found.get(sum(chosen), 0.0) + chance
    return found


def density(own, others, rate, size, noise, grid):
    """The density of three rows of two groups in turns, under noise of two bands, on a grid."""
    c = coefficients(2, 0.5)[1]
    first, second = sums(own, rate, size), sums(others, rate, size)
    s0, s1 = np.array([*first]), np.array([*second])
    p0, p1 = np.array([*first.values()]), np.array([*second.values()])

    def normal(mean):
        z = (grid.reshape(-1, *[1] * mean.ndim) - mean) / noise
        return np.exp(-z * z / 2) / noise / math.sqrt(2 * math.pi)

    rows = np.einsum("as,s,bst->abt", normal(s0), p0, normal(c * s0[:, None] + s1))
    last = np.einsum("ctu,u->ct", normal(c * s1[:, None] + s0), p0)  # the next draw of the first group
    return np.einsum("abt,t,ct->abc", rows, p1, last)


def neighbours(others, adjacency):
    return {ADD: [[*others]], ZERO: [[0, *others]], REPLACE: [[-1, *others], [0, *others]]}[adjacency]


def worst(rate, size, most, noise, adjacency, epsilon, seconds):
    """The largest δ(ε) over all small groups of the record of value 1, in both directions."""
    grid = np.linspace(-4 - 5 * noise, 4 + 5 * noise, 61)
    cell, found = (grid[1] - grid[0]) ** 3, 0.0
    deviation = noise * spread(2, 0.5)
    for others in itertools.combinations_with_replacement((-1, 0, 1), most - 1):
        for second in seconds:
            one = density([1, *others], second, rate, size, deviation, grid)
            for values in neighbours(others, adjacency):
                other = density(values, second, rate, size, deviation, grid)
                both = (one, other), (other, one)
                found = max(found, *(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in both))
    return found


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize(("rate", "size", "most"), [(0.5, 1, 2), (0.9, 1, 2), (0.7, 2, 3)])
@pytest.mark.parametrize(("noise", "epsilon"), [(1.0, 0.5), (2.0, 0.2)])
def test_no_small_deal_tells_more_than_the_price_in_three_turns(adjacency, rate, size, most, noise, epsilon):
    """The record has the first and the third turn: its rows overlap with those of the other group."""
    sampler = ft.TruncatedCyclic(rate / 2, 2, size, of=2 * most)
    price = pld.delta(sampler.plan(GaussianEvent(noise), 3), epsilon, adjacency)
    found = worst(rate, size, most, noise, adjacency, epsilon, [[-1] * most, [1, -1]])
    assert 0 < found <= price * (1 + 1e-3)


@pytest.mark.parametrize(
    ("adjacency", "rate", "most", "epsilon"), [(ADD, 0.9, 2, 2.0), (REPLACE, 0.3, 4, 5.0)]
)
def test_a_price_that_leaves_the_overflow_out_is_too_low(adjacency, rate, most, epsilon):
    found = worst(rate, 1, most, 1.0, adjacency, epsilon, [[-1, -1]])
    poisson = RepeatedEvent(PoissonEvent(rate, GaussianEvent(1.0)), 2)
    assert found > 1.2 * pld.delta(poisson, epsilon, adjacency)


def test_every_record_has_one_place_and_groups_have_one_size():
    groups = truncation.dealt(SeededStream(0), 10, 10, 3)
    assert sorted(np.concatenate(groups).tolist()) == list(range(10))
    assert [len(group) for group in groups] == [4, 3, 3]
    few = truncation.dealt(SeededStream(1), 4, 100, 5)
    assert sorted(np.concatenate(few).tolist()) == list(range(4))


def test_all_deals_are_alike():
    stream, trials, together, first = SeededStream(2), 4000, 0, np.zeros(4)
    for _ in range(trials):
        groups = truncation.dealt(stream, 3, 4, 2)
        place = np.array([next(g for g in range(2) if one in groups[g]) for one in range(3)])
        together += place[0] == place[1]
        first[:3] += place == 0
    assert together / trials == pytest.approx(1 / 3, abs=0.05)  # of three other places one is in the group
    assert first[:3] / trials == pytest.approx(0.5, abs=0.05)


def test_ties_of_keys_are_drawn_again(monkeypatch):
    words = [np.array([5, 5, 1], np.uint64), np.array([3, 2, 1], np.uint64)]
    stream = SeededStream(0)
    monkeypatch.setattr(stream, "integers", lambda n: words.pop(0))
    assert [group.tolist() for group in truncation.dealt(stream, 3, 3, 3)] == [[2], [1], [0]]


def test_batches_are_of_one_group_and_never_too_large():
    begun, stream = ft.TruncatedCyclic(0.2, 4, 12, of=80).begin(), SeededStream(3)
    drawn = [begun.draw(80, stream, turn) for turn in range(40)]
    assert max(map(len, drawn)) == 12
    for turn, batch in enumerate(drawn):
        assert set(batch) <= set(begun.members(turn).tolist())
        assert len(set(batch)) == len(batch)
    assert set(begun.members(0)) == set(begun.members(4))
    assert not set(begun.members(0)) & set(begun.members(1))


def test_a_whole_group_is_a_batch_of_one_size():
    sampler, stream = ft.TruncatedCyclic(1 / 4, 4, 5, of=20), SeededStream(4)
    begun = sampler.begin()
    assert not sampler.cuts
    assert [len(begun.draw(20, stream, turn)) for turn in range(8)] == [5] * 8
    assert sampler.plan(GaussianEvent(1.0), 8) == ft.Cyclic(1 / 4, 4).plan(GaussianEvent(1.0), 8)


def test_turns_that_were_lost_draw_nobody_until_a_cycle_begins():
    begun, stream = ft.TruncatedCyclic(0.25, 4, 30, of=100).begin(), SeededStream(5)
    lengths = [len(begun.draw(100, stream, turn)) for turn in (2, 3, 4, 5, 9, 10, 11, 12)]
    assert [length > 0 for length in lengths] == [False, False, True, True, False, False, False, True]


def test_draws_of_a_plan_share_their_deal():
    with pytest.raises(InvalidValue, match="begin"):
        ft.TruncatedCyclic(0.25, 4, 30, of=100).draw(100, SeededStream(0), 1)
    assert len(ft.TruncatedCyclic(0.25, 4, 30, of=100).draw(100, SeededStream(0))) == 25


@pytest.mark.parametrize(
    "given", [(0.3, 4, 10, 100), (0.1, 0, 10, 100), (0.1, 4, 0, 100), (0.1, 4, 10, 0), (0.0, 4, 10, 100)]
)
def test_nonsense_is_refused(given):
    with pytest.raises(InvalidValue):
        ft.TruncatedCyclic(*given)


def test_an_observer_of_the_draws_pays_for_a_chance_in_full():
    sampler = ft.TruncatedCyclic(0.1, 4, 10, 100)
    assert sampler.plan(GaussianEvent(1.0), 8, Observer.COORDINATOR).event == DrawnEvent(
        0.4, GaussianEvent(1.0)
    )


def query(of=400, bands=4, size=60):
    return ft.Query(
        ft.TruncatedCyclic(0.1, 4, size, of), ROWS, ft.ClipNorm(1.0), ft.BandedGaussian(4.0, bands, 0.6)
    )


@pytest.mark.parametrize("adjacency", Adjacency)
def test_a_ledger_promises_one_plan_and_a_verifier_agrees(adjacency):
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5, adjacency))
    ledger.promise(query(), 12)
    private = ledger.over(ft.Rows(np.ones((400, 2))))
    for _ in range(12):
        private.ask(query(), None)
    event = RepeatedEvent(TruncatedEvent(0.4, 60, 100, GaussianEvent(4.0)), 3)
    assert ledger.guarantee.epsilon == pytest.approx(pld.epsilon(event, 1e-5, adjacency), rel=1e-9)
    ledger.journal.export(exported := io.StringIO())
    found = verifier.verify(exported.getvalue().splitlines())
    assert found.code == 0, found.reason
    low, high = found.plan
    assert low * (1 - 1e-6) <= ledger.guarantee.epsilon <= high * (1 + 2e-3)


def test_more_records_or_bands_or_another_plan_are_refused_at_no_charge():
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5))
    ledger.promise(query(of=300), 12)
    with pytest.raises(InvalidValue, match="of=300"):
        ledger.over(ft.Rows(np.ones((400, 2)))).ask(query(of=300), None)
    with pytest.raises(Unsupported, match="5 bands"):
        query(bands=5)
    with pytest.raises(PromiseBroken):
        ledger.over(ft.Rows(np.ones((300, 2)))).ask(query(of=300, size=61), None)
    assert ledger.spent.epsilon == 0


def test_buffers_take_whole_groups_only():
    noise = ft.BufferedGaussian(1.0, weights=(0.3,), decays=(0.9,), steps=8, groups=4)
    ft.Query(ft.TruncatedCyclic(1 / 4, 4, 5, of=20), ROWS, ft.ClipNorm(1.0), noise)
    with pytest.raises(Unsupported):
        ft.Query(ft.TruncatedCyclic(1 / 4, 4, 4, of=20), ROWS, ft.ClipNorm(1.0), noise)
