"""Noise by buffers: the norm of its columns, and what neighbours can do to it, by brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import correlated as choosing
from farthing.accounting import gaussian, pld
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import SeededStream, on_grid
from farthing.queries import buffered
from farthing.queries.bounds import ClipNorm
from farthing.queries.buffered import BufferedGaussian, column, column_norm
from farthing.queries.correlated import Cyclic

ROWS = ft.PerExample(lambda rows, w: rows[0] - w)
PAIRS = [((0.3,), (0.9,)), ((0.2, 0.5), (0.97, 0.6)), ((0.4, 0.3, 0.3), (0.99, 0.7, 0.1))]


def noise_of(multiplier=1.0, weights=(0.2, 0.3), decays=(0.95, 0.6), steps=12, groups=4):
    return BufferedGaussian(multiplier, weights, decays, steps, groups)


def query(sampler=None, mechanism=None):
    return ft.Query(sampler or Cyclic(0.25, groups=4), ROWS, ClipNorm(1.0), mechanism or noise_of())


def toeplitz(first):
    return sum(c * np.eye(len(first), k=-j) for j, c in enumerate(first))


@pytest.mark.parametrize(("weights", "decays"), PAIRS)
@pytest.mark.parametrize(("steps", "groups"), [(1, 1), (7, 3), (9, 9), (8, 1), (10, 4)])
def test_the_norm_covers_every_pattern_of_chances_that_are_far_enough_apart(weights, decays, steps, groups):
    matrix = toeplitz(column(weights, decays, steps))
    worst = 0.0
    for chances in range(1, -(-steps // groups) + 1):
        for turns in itertools.combinations(range(steps), chances):
            if all(b - a >= groups for a, b in itertools.pairwise(turns)):
                worst = max(worst, np.sum(matrix[:, turns].sum(axis=1) ** 2) / chances)
    found = column_norm(weights, decays, steps, groups)
    assert worst <= found**2 <= worst * (1 + 1e-6)


def test_contributions_that_point_elsewhere_move_no_further():
    """The theorem's last step, for random directions."""
    weights, decays = PAIRS[1]
    matrix, rng = toeplitz(column(weights, decays, 12)), np.random.default_rng(0)
    found = column_norm(weights, decays, 12, 3)
    for _ in range(200):
        turns = np.cumsum(rng.integers(3, 5, size=3)) - 3
        given_ = np.zeros((12, 4))
        given_[turns] = rng.normal(size=(3, 4))
        given_[turns] /= np.linalg.norm(given_[turns], axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ given_) <= math.sqrt(3) * found


def released(mechanism, sums, bound, seed=0):
    begun, stream = mechanism.begin(), SeededStream(seed)
    answers = [begun.release(row, bound, stream, turn) for turn, row in enumerate(sums)]
    _, cell = mechanism.grid(bound, sums.shape[1])
    return [np.rint(answer / cell / bound.scale).astype(np.int64) for answer in answers]


def explained(mechanism, answers, sums, bound):
    """The independent noise Z, in cells, with which ``sums`` give these answers."""
    bits, cell, units = mechanism.lattice(bound, sums.shape[1])
    kept, found = [], []
    for answer, row in zip(answers, sums, strict=True):
        noise = answer - on_grid(row, bound.scale, cell)
        found.append(noise + buffered.correction(kept, mechanism.weights, units, row.shape))
        kept = buffered.followed(kept, mechanism.decays, noise, bits, units)
    return np.array(found)


@pytest.mark.parametrize(("weights", "decays"), PAIRS)
def test_the_noise_times_c_is_independent_noise(weights, decays):
    mechanism, bound, steps, size = noise_of(3.0, weights, decays, 10, 5), ClipNorm(2.0), 10, 40_000
    cells = released(mechanism, np.zeros((steps, size)), bound)
    _, cell = mechanism.grid(bound, size)
    independent = toeplitz(column(weights, decays, steps)) @ (np.array(cells) * cell)
    ratios = independent @ independent.T / size / (3.0 * 2.0 * mechanism.column_norm) ** 2
    assert np.abs(ratios - np.eye(steps)).max() < 8 * math.sqrt(2 / size)  # 100 places: below 1e-12


@given(st.data())
def test_neighbours_that_explain_the_same_answers_differ_by_no_more_noise_than_is_paid_for(data):
    weights, decays = data.draw(st.sampled_from(PAIRS))
    groups, steps, size = data.draw(st.integers(1, 5)), 12, 5
    multiplier = data.draw(st.sampled_from([0.5, 1.0, 7.3, 400.0]))
    mechanism = noise_of(multiplier, weights, decays, steps, groups)
    bound = ClipNorm(data.draw(st.sampled_from([1e-3, 1.0, 30.0])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sums = rng.normal(size=(steps, size)) * data.draw(st.sampled_from([0.0, 1.0, 1e6])) * bound.clip
    other, turns = sums.copy(), range(data.draw(st.integers(0, groups - 1)), steps, groups)
    direction = rng.normal(size=size)
    for turn in turns:  # one direction is the worst case
        other[turn] += direction / np.linalg.norm(direction) * bound.clip
    answers = released(mechanism, sums, bound, seed=data.draw(st.integers(0, 2**32)))
    difference = explained(mechanism, answers, other, bound) - explained(mechanism, answers, sums, bound)
    bits, _ = mechanism.grid(bound, size)
    for ended in range(1, steps + 1):  # whenever the asking ends
        chances = -(-ended // groups)
        assert np.linalg.norm(difference[:ended]) <= math.sqrt(chances) * 2.0**bits / multiplier


def test_noise_far_out_is_clamped_and_moves_neighbours_no_further():
    mechanism, bound = noise_of(1.0, (0.5, 0.5), (0.9999, 0.9), 12, 4), ClipNorm(1.0)
    bits, _, units = mechanism.lattice(bound, 3)
    huge = np.full(3, 2 ** (bits + 9))
    kept = [[], []]
    for turn in range(12):
        for side, shift in enumerate((0, 1000)):
            kept[side] = buffered.followed(kept[side], mechanism.decays, huge + shift, bits, units)
        apart = [np.abs(a - b).max() for a, b in zip(*kept, strict=True)]
        assert max(apart) == 0.0, turn
        assert all((np.abs(one) <= 2.0**52).all() for one in kept[0])


def test_a_pass_costs_one_gaussian_answer():
    event = query().plan(ft.Budget(1.0, 1e-5), 12)
    charged = [math.exp(pld.log_delta(way, 2.0)) for way in pld.directions(event, Adjacency.ADD_REMOVE)]
    assert max(charged) == pytest.approx(gaussian.delta(math.sqrt(3), 2.0), rel=1e-3)


@pytest.mark.parametrize(
    "sampler",
    [ft.Poisson(0.25), ft.Everyone(), ft.FixedSize(5, 20), Cyclic(1 / 3, 3), Cyclic(0.2, 4), Cyclic(0.1, 8)],
)
def test_draws_without_a_theorem_are_refused(sampler):
    with pytest.raises(Unsupported, match="no price on draws"):
        query(sampler)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": (0.6, 0.6)},
        {"weights": (0.5, -0.1)},
        {"weights": (0.5,)},
        {"weights": (), "decays": ()},
        {"decays": (1.0, 0.5)},
        {"decays": (0.0, 0.5)},
        {"decays": (float("nan"), 0.5)},
        {"steps": 0},
        {"groups": 0},
        {"steps": 2**20, "groups": 1},
    ],
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(InvalidValue):
        noise_of(**wrong)


def test_more_turns_than_the_noise_is_for_are_refused_before_anything_is_charged():
    ledger = ft.Ledger(ft.Budget(10.0, 1e-5))
    with pytest.raises(InvalidValue, match="at most 12 turns"):
        ledger.promise(query(), 13)
    assert ledger.spent.epsilon == 0
    with pytest.raises(InvalidValue, match="got turn 12"):
        noise_of().begin().release(np.zeros(2), ClipNorm(1.0), SeededStream(0), 12)


def test_a_skipped_turn_begins_with_empty_buffers():
    mechanism, bound, fresh = noise_of().begin(), ClipNorm(1.0), noise_of().begin()
    mechanism.release(np.zeros(3), bound, SeededStream(1), 0)
    late = mechanism.release(np.zeros(3), bound, SeededStream(2), 2)
    assert np.array_equal(late, fresh.release(np.zeros(3), bound, SeededStream(2), 2))


def test_a_promise_is_asked_to_its_end_and_no_further():
    ledger = ft.Ledger(ft.Budget(12.0, 1e-5))
    ledger.promise(query(), 12)
    private = ledger.over(ft.Rows(np.ones((40, 2))))
    for _ in range(12):
        private.ask(query(), np.zeros(2))
    with pytest.raises(ft.BudgetSpent):
        private.ask(query(), np.zeros(2))


@pytest.mark.parametrize(("steps", "groups"), [(60, 60), (90, 30), (50, 5), (3, 2), (1, 1)])
def test_the_chosen_buffers_leave_less_noise_than_their_neighbours_and_than_none(steps, groups):
    found = choosing.choose_buffers(ft.Budget(1.0, 1e-5), groups, steps)
    assert found.gain <= 1 + 1e-3
    running = choosing.buffered_prefix_noise(found.weights, found.decays, steps, groups)
    inverse = np.linalg.inv(toeplitz(column(found.weights, found.decays, steps)))
    sums = np.linalg.norm(np.tril(np.ones((steps, steps))) @ inverse) / math.sqrt(steps)
    assert running == pytest.approx(sums * found.mechanism.column_norm, rel=1e-6)
    for factor in (0.8, 1.25):
        if steps >= 50 and groups > 5:
            weights = tuple(weight * factor for weight in found.weights)
            assert choosing.buffered_prefix_noise(weights, found.decays, steps, groups) > running * (1 - 1e-6)
    assert choosing.buffered_row_noise(found.weights, found.decays, steps) == pytest.approx(
        np.linalg.norm(inverse[-1]), rel=1e-6
    )


def test_too_many_buffers_are_refused():
    with pytest.raises(InvalidValue, match="at most 8"):
        choosing.choose_buffers(ft.Budget(1.0, 1e-5), 10, 10, buffers=9)
