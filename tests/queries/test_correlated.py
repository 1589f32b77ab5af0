"""Correlated noise and cyclic draws: what neighbours can do to the noise, by brute force on the lattice."""

import itertools
import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import correlated as choosing
from farthing.accounting import pld
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import SeededStream, on_grid
from farthing.queries import correlated
from farthing.queries.bounds import ClipNorm
from farthing.queries.correlated import Balanced, BandedGaussian, BandedShare, Cyclic, coefficients, spread
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

ROWS = ft.PerExample(lambda rows, w: rows[0] - w)


def query(sampler=None, mechanism=None, bound=None):
    sampler = sampler or Cyclic(0.1, groups=4)
    return ft.Query(sampler, ROWS, bound or ClipNorm(1.0), mechanism or BandedGaussian(2.0, 4))


def toeplitz(column, steps):
    found = np.zeros((steps, steps))
    for j, c in enumerate(column[:steps]):
        found += c * np.eye(steps, k=-j)
    return found


def released(mechanism, sums, bound, seed=0):
    """All turns of a plan, and for each the answer in cells."""
    begun, stream = mechanism.begin(), SeededStream(seed)
    answers = [begun.release(row, bound, stream, turn) for turn, row in enumerate(sums)]
    _, cell = mechanism.grid(bound, sums.shape[1])
    return [np.rint(answer / cell / bound.scale).astype(np.int64) for answer in answers]


def explained(mechanism, answers, sums, bound):
    """The independent noise Z, in cells, with which ``sums`` give these answers."""
    bits, cell = mechanism.grid(bound, sums.shape[1])
    before, found = deque(maxlen=mechanism.bands - 1), []
    for answer, row in zip(answers, sums, strict=True):
        noise = answer - on_grid(row, bound.scale, cell)
        found.append(noise + correlated.correction(before, mechanism.coefficients, bits, row.shape))
        before.appendleft(noise)
    return np.array(found)


@pytest.mark.parametrize(("count", "exponent"), [(1, 0.5), (2, 0.5), (5, 0.5), (5, 0.83), (9, 1.0)])
def test_the_noise_times_c_is_independent_noise(count, exponent):
    mechanism, bound, steps, size = BandedGaussian(3.0, count, exponent), ClipNorm(2.0), 10, 40_000
    cells = released(mechanism, np.zeros((steps, size)), bound)
    _, cell = mechanism.grid(bound, size)
    independent = toeplitz(mechanism.coefficients, steps) @ (np.array(cells) * cell)
    ratios = independent @ independent.T / size / (3.0 * 2.0 * spread(count, exponent)) ** 2
    assert np.abs(ratios - np.eye(steps)).max() < 6 * math.sqrt(2 / size)  # 100 places: below 1e-6


@given(st.data())
def test_neighbours_that_explain_the_same_answers_differ_by_no_more_noise_than_is_paid_for(data):
    count = data.draw(st.integers(1, 6))
    mechanism = BandedGaussian(
        data.draw(st.sampled_from([0.5, 1.0, 7.3, 400.0])),
        count,
        data.draw(st.sampled_from([0.5, 0.77, 1.0])),
    )
    bound, size, steps = ClipNorm(data.draw(st.sampled_from([1e-3, 1.0, 30.0]))), 5, 9
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sums = rng.normal(size=(steps, size)) * data.draw(st.sampled_from([0.0, 1.0, 1e6])) * bound.clip
    first, apart = data.draw(st.integers(0, steps - 1)), data.draw(st.integers(count, 9))
    other, chances = sums.copy(), range(first, steps, apart)
    for turn in chances:
        shift = rng.normal(size=size)
        other[turn] += shift / np.linalg.norm(shift) * bound.clip
    answers = released(mechanism, sums, bound, seed=data.draw(st.integers(0, 2**32)))
    difference = explained(mechanism, answers, other, bound) - explained(mechanism, answers, sums, bound)
    bits, _ = mechanism.grid(bound, size)
    paid = 2.0**bits / mechanism.noise_multiplier  # how far a chance may move Z, in cells
    assert not difference[:first].any()
    for turn in chances:  # the rows from one chance to the next
        assert np.linalg.norm(difference[turn : turn + apart]) <= paid


def test_bands_beyond_the_separation_would_move_more_than_is_paid_for():
    mechanism, bound = BandedGaussian(1.0, 4), ClipNorm(1.0)
    sums, other = np.zeros((8, 3)), np.zeros((8, 3))
    other[[0, 1], 0] = 1.0  # two chances next to each other
    answers = released(mechanism, sums, bound)
    difference = explained(mechanism, answers, other, bound) - explained(mechanism, answers, sums, bound)
    bits, _ = mechanism.grid(bound, 3)
    assert np.linalg.norm(difference) > 1.2 * math.sqrt(2) * 2.0**bits


@pytest.mark.parametrize("rate", [0.2, 1.0])
@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_the_price_of_a_cycle_is_the_exact_one_of_its_rows(rate, epsilon):
    """δ(ε) of one cycle of two turns by integrating over both rows, against the price that is charged."""
    noise, column = 0.8, np.array(coefficients(2, 0.5))
    z = np.linspace(-9, 9, 1801)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    without = np.outer(density, density)
    shift = column / np.linalg.norm(column) / noise  # of both rows, in standard deviations of Z
    moved = np.outer(*(np.exp(-((z - s) ** 2) / 2) / math.sqrt(2 * math.pi) for s in shift))
    with_ = (1 - rate) * without + rate * moved
    pairs = [(with_, without), (without, with_)]
    delta = max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * (z[1] - z[0]) ** 2) for a, b in pairs)
    event = Cyclic(rate / 2, 2).plan(BandedGaussian(noise, 2).unit_event(), 2)
    charged = max(
        math.exp(pld.log_delta(way, epsilon)) for way in pld.directions(event, Adjacency.ADD_REMOVE)
    )
    assert charged == pytest.approx(delta, rel=2e-3)


def test_a_plan_costs_one_chance_a_cycle():
    event = query().plan(ft.Budget(1.0, 1e-5), 9)
    assert event == RepeatedEvent(PoissonEvent(0.4, GaussianEvent(2.0)), 3)


def test_every_record_has_one_chance_in_each_cycle():
    sampler, stream = Cyclic(0.25, groups=4).begin(), SeededStream(3)  # each once a cycle
    cycles = [[sampler.draw(1000, stream, 4 * cycle + turn) for turn in range(4)] for cycle in range(5)]
    for drawn in cycles:
        assert sorted(itertools.chain(*drawn)) == list(range(1000))
        assert all((group == first).all() for group, first in zip(drawn, cycles[0], strict=True))


def test_the_draws_of_a_group_are_poisson_samples():
    sampler, stream = Cyclic(0.05, groups=4).begin(), SeededStream(4)
    sizes = np.array([len(sampler.draw(4000, stream, turn)) for turn in range(400)])
    assert abs(sizes.mean() - 200) < 6 * math.sqrt(200 / 400)


@pytest.mark.parametrize(
    "turns",
    [[0, 1, 2, 7, 8, 9, 10], [3, 4, 5, 6], [0, 1, 2, 3, 4, 6, 5, 7, 8, 9], [5, 4, 3, 2, 8, 12, 13, 1]],
)
def test_after_a_skipped_turn_nobody_is_drawn_until_a_whole_cycle_is_ahead(turns):
    sampler, stream, when = Cyclic(1 / 3, groups=3).begin(), SeededStream(5), {}
    for turn in turns:
        for record in sampler.draw(60, stream, turn):
            when.setdefault(record, []).append(turn)
    for taken in when.values():
        taken.sort()
        assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(taken))
        assert len({turn // 3 for turn in taken}) == len(taken)  # one chance a cycle, whoever divided


@pytest.mark.parametrize("lost", range(1, 8))
def test_a_process_that_takes_over_divides_anew_only_between_cycles(lost):
    stream, when = SeededStream(9), []
    for turns in (range(lost), range(lost, 12)):
        sampler = Cyclic(1 / 3, groups=3).begin()
        when += [(record, turn // 3) for turn in turns for record in sampler.draw(60, stream, turn)]
    assert len(set(when)) == len(when)  # nobody twice in a cycle
    assert len(when) >= 60 * 2


class Interrupted(SeededStream):
    """A stream of which the next division or choice of turns is interrupted, where ``soon``."""

    soon = False

    def uniform_below(self, *args):
        if self.soon:
            self.soon = False
            raise KeyboardInterrupt
        return super().uniform_below(*args)

    def poisson_indices(self, *args):
        if self.soon:
            self.soon = False
            raise KeyboardInterrupt
        return super().poisson_indices(*args)


@pytest.mark.parametrize("groups", [1, 3])
def test_after_an_interrupted_draw_no_turns_of_an_earlier_pass_are_used_again(groups):
    stream, sampler = Interrupted(11), Balanced(8, groups=groups).begin()
    period = sampler.period
    first = [sampler.draw(300, stream, turn) for turn in range(period)]
    stream.soon = True
    with pytest.raises(KeyboardInterrupt):
        sampler.draw(300, stream, period)
    rest = [len(sampler.draw(300, stream, turn)) for turn in range(period + 1, 2 * period)]
    assert not any(rest)  # the turns of the second pass were never drawn, and those of the first are used up
    later = [sampler.draw(300, stream, turn) for turn in range(2 * period, 3 * period)]
    assert sorted(itertools.chain(*later)) == list(range(300))
    assert any(not np.array_equal(*pair) for pair in zip(first, later, strict=True))


@pytest.mark.parametrize("at", [0, 3, 5, 7])
def test_after_an_interrupted_draw_a_record_has_one_chance_in_a_cycle(at):
    stream, sampler, when = Interrupted(12), Cyclic(1 / 3, groups=3).begin(), {}
    for turn in range(15):
        stream.soon = turn == at
        try:
            drawn = sampler.draw(60, stream, turn)
        except KeyboardInterrupt:
            continue
        for record in drawn:
            when.setdefault(record, []).append(turn)
    for taken in when.values():
        assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(taken))
        assert len({turn // 3 for turn in taken}) == len(taken)


def test_noise_whose_keeping_is_interrupted_is_lost_and_not_counted_as_that_of_another_turn():
    class Stopped(deque):
        def appendleft(self, noise):
            raise KeyboardInterrupt

    mechanism, bound, stream, size = BandedGaussian(1.0, 3), ClipNorm(1.0), SeededStream(6), 40_000
    begun = mechanism.begin()
    kept = [begun.release(np.zeros(size), bound, stream, turn) for turn in range(2)]
    begun._history._kept = Stopped(begun._history._kept, maxlen=2)
    with pytest.raises(KeyboardInterrupt):
        begun.release(np.zeros(size), bound, stream, 2)
    begun._history._kept = deque(begun._history._kept, maxlen=2)
    after = begun.release(np.zeros(size), bound, stream, 3)
    limit = 6 / math.sqrt(size) * spread(3, 0.5) ** 2
    assert all(abs(float(after @ earlier) / size) < limit for earlier in kept)


def test_lost_noise_begins_anew_without_the_old():
    mechanism, bound, stream = BandedGaussian(1.0, 3), ClipNorm(1.0), SeededStream(6)
    size = 40_000
    begun = mechanism.begin()
    first = [begun.release(np.zeros(size), bound, stream, turn) for turn in range(3)]
    skipped = begun.release(np.zeros(size), bound, stream, 5)
    limit = 6 / math.sqrt(size) * spread(3, 0.5) ** 2
    assert all(abs(float(skipped @ earlier) / size) < limit for earlier in first)
    assert float(skipped.std()) == pytest.approx(spread(3, 0.5), rel=0.03)
    assert float(first[1] @ first[0]) / size < -0.25 * spread(3, 0.5) ** 2  # these cancel


def test_noise_without_a_plan_is_independent():
    mechanism, stream = BandedGaussian(1.0, 3), SeededStream(7)
    one, two = (mechanism.release(np.zeros(40_000), ClipNorm(1.0), stream, turn) for turn in (0, 1))
    assert abs(float(one @ two)) / 40_000 < 6 / 200 * spread(3, 0.5) ** 2


@pytest.mark.parametrize("sampler", [ft.Everyone(), ft.Poisson(0.1), ft.FixedSize(2, 10), Cyclic(0.1, 3)])
def test_a_query_needs_as_many_turns_between_chances_as_bands(sampler):
    with pytest.raises(Unsupported, match="4 bands needs 4 turns"):
        query(sampler)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cyclic(0.3, 4), "at most 3 groups"),
        (lambda: Cyclic(0.0, 4), "sampling_rate"),
        (lambda: Cyclic(0.1, 0), "groups"),
        (lambda: BandedGaussian(1.0, 0), "bands"),
        (lambda: BandedGaussian(1.0, 2000), "at most 1024"),
        (lambda: BandedGaussian(0.0, 2), "noise_multiplier"),
        (lambda: BandedGaussian(1.0, 2, 1.5), "exponent"),
        (lambda: Cyclic(0.1, 2).draw(10, SeededStream(0), 1), "begin"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(InvalidValue, match=message):
        make()


def test_too_fine_a_grid_is_refused():
    with pytest.raises(Unsupported, match="fewer"):
        BandedGaussian(1e6, 1024).grid(ClipNorm(1.0), 10**6)


def test_a_clip_may_change_on_the_way():
    mechanism, size = BandedGaussian(1.0, 3), 40_000
    begun, stream = mechanism.begin(), SeededStream(8)
    clips = [1.0, 4.0, 0.5]
    noise = [
        begun.release(np.zeros(size), ClipNorm(clip), stream, turn) / clip for turn, clip in enumerate(clips)
    ]
    independent = toeplitz(mechanism.coefficients, 3) @ np.array(noise)
    ratios = independent @ independent.T / size / spread(3, 0.5) ** 2
    assert np.abs(ratios - np.eye(3)).max() < 6 * math.sqrt(2 / size)


@pytest.mark.parametrize(("count", "steps"), [(1, 50), (4, 50), (7, 31)])
def test_the_noise_of_running_sums_is_that_of_the_matrix(count, steps):
    found = choosing.banded_prefix_noise(count, 0.7, steps)
    c = toeplitz(coefficients(count, 0.7), steps)
    sums = np.tril(np.ones((steps, steps))) @ np.linalg.inv(c)
    assert found == pytest.approx(np.linalg.norm(sums) / math.sqrt(steps) * np.linalg.norm(c[:, 0]), rel=1e-9)


def test_shares_add_up_to_the_noise_of_the_sum():
    share, bound, size, steps = BandedShare(3.0, 4, 0.7, survivors=5), ClipNorm(2.0), 20_000, 6
    stream, clients = SeededStream(11), [share.begin() for _ in range(5)]
    sums = [sum(one.release(np.zeros(size), bound, stream, turn) for one in clients) for turn in range(steps)]
    independent = toeplitz(share.coefficients, steps) @ np.array(sums)
    ratios = independent @ independent.T / size / (3.0 * 2.0 * spread(4, 0.7)) ** 2
    assert np.abs(ratios - np.eye(steps)).max() < 6 * math.sqrt(2 / size)


def divided(shift, parts):
    """Whole numbers that add up to ``shift``, each within 1 of an even part."""
    least = shift // parts
    return [least + (place < shift - parts * least) for place in range(parts)]


@given(st.data())
def test_shares_move_by_no_more_noise_than_is_paid_for_whoever_is_there(data):
    """Brute force: the shift of one record, divided among those present, explained by their own noise."""
    survivors, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    share = BandedShare(data.draw(st.sampled_from([0.5, 3.0, 50.0])), count, 0.8, survivors=survivors)
    bound, size, steps = ClipNorm(1.0), 3, 6
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits, cell = share.grid(bound, size)
    turn = data.draw(st.integers(0, steps - 1))
    present = rng.random((steps, survivors)) < 0.6
    present[turn] = True
    moved = rng.normal(size=size)
    moved = np.rint(moved / np.linalg.norm(moved) / cell).astype(np.int64)
    total = 0.0
    for client, part in enumerate(divided(moved, survivors)):
        kept, other, last = deque(maxlen=count - 1), deque(maxlen=count - 1), -2
        for now in np.flatnonzero(present[:, client]):
            if now != last + 1:
                kept.clear(), other.clear()
            noise = rng.normal(size=size) * 2.0**bits
            own = np.rint(noise).astype(np.int64)
            its = own - (part if now == turn else 0)  # the same upload, one record more
            z = [
                one + correlated.correction(before, share.coefficients, bits, (size,))
                for one, before in ((own, kept), (its, other))
            ]
            total += float(np.square(z[0] - z[1]).sum())
            kept.appendleft(own), other.appendleft(its)
            last = now
    assert math.sqrt(total) <= 2.0**bits / share.noise_multiplier  # μ of one whole noise


def test_a_share_costs_what_the_whole_noise_costs():
    share = BandedShare(2.0, 4, survivors=9)
    assert query(mechanism=share).plan(ft.Budget(1.0, 1e-5), 9) == query().plan(ft.Budget(1.0, 1e-5), 9)
    with pytest.raises(InvalidValue, match="survivors"):
        BandedShare(2.0, 4, survivors=0)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_the_price_of_a_plan_covers_every_pattern_of_chances(rate):
    """δ(ε) of three turns and two bands by integrating over all rows, for a record of either group."""
    noise, epsilon, column = 1.1, 0.8, np.array(coefficients(2, 0.7))
    z = np.linspace(-7, 7, 141)
    normal = np.exp(-(z**2) / 2)
    without = normal[:, None, None] * normal[:, None] * normal
    without /= without.sum()

    def world(chances):
        """The density where each of these turns is taken with the probability of a chance."""
        total = np.zeros_like(without)
        for taken in itertools.product([0, 1], repeat=len(chances)):
            shift = np.zeros(3)
            for turn, is_in in zip(chances, taken, strict=True):
                shift[turn : turn + 2] += is_in * column[: 3 - turn]
            shift /= np.linalg.norm(column) * noise
            parts = [np.exp(-((z - s) ** 2) / 2) for s in shift]
            moved = parts[0][:, None, None] * parts[1][:, None] * parts[2]
            chance = math.prod(rate if is_in else 1 - rate for is_in in taken)
            total += chance * moved / normal.sum() ** 3
        return total

    worst = 0.0
    for chances in ([0, 2], [1]):
        with_ = world(chances)
        for a, b in ((with_, without), (without, with_)):
            worst = max(worst, float(np.maximum(a - math.exp(epsilon) * b, 0).sum()))
    event = Cyclic(rate / 2, 2).plan(BandedGaussian(noise, 2, 0.7).unit_event(), 3)
    charged = pld.delta(event, epsilon)
    assert worst <= charged * (1 + 1e-3)
    assert charged <= 1.6 * worst  # the second chance is cut off after one of its two rows


def test_turns_that_draw_nobody_are_known_from_their_numbers():
    beginnings, sampler = correlated.Beginnings(), Cyclic(0.05, groups=4)
    turns = (6, 7, 8, 9, 11, 12, 13, 14, 15, 16)  # 10 was lost
    idle = [beginnings.idle(turn, sampler) for turn in turns]
    assert idle == [True, True, False, False, True, True, True, True, True, False]
    begun, stream = sampler.begin(), SeededStream(0)
    assert idle == [not len(begun.draw(4000, stream, turn)) for turn in turns]
