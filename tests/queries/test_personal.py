"""Rates and weights by level of budget: who is drawn, what is summed, and what each level pays."""

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.personal import PersonalBudgets
from farthing.budget import Observer
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import SeededStream
from farthing.queries.events import (
    NOTHING,
    DrawnEvent,
    GaussianEvent,
    LaplaceEvent,
    PersonalEvent,
    PoissonEvent,
)
from farthing.queries.personal import Leveled, Personal, PersonalCyclic
from farthing.queries.query import PerExample, Query, Rows
from farthing.torch.kernels.noise import TensorGaussian as TorchGaussian

ONES = PerExample(lambda rows, w: rows[0])


def people(sizes, epsilons=(1.0, 2.0, 3.0)):
    """Records with a one in the column of their level, shuffled."""
    levels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Leveled(Rows(np.eye(len(sizes))[levels]), levels, epsilons)


def test_each_level_is_drawn_at_its_own_rate():
    records, rates, stream = people((4000, 30_000, 2000)), (0.3, 0.01, 0.0), SeededStream(1)
    counts = np.zeros(3)
    for _ in range(50):
        drawn = Personal(rates).draw_from(records, stream)
        assert len(set(drawn.tolist())) == len(drawn)
        counts += np.bincount(records.levels[drawn], minlength=3)
    expected = 50 * np.array([1200, 300, 0])
    spread = np.sqrt(50 * np.array([4000 * 0.3 * 0.7, 30_000 * 0.01 * 0.99, 0]))
    assert (np.abs(counts - expected) <= 6 * spread).all()


def test_a_draw_is_that_of_independent_coins_pair_by_pair():
    records, stream = people((2, 2), (1.0, 2.0)), SeededStream(2)
    seen = np.zeros((4, 4))
    for _ in range(4000):
        member = np.zeros(4)
        member[Personal((0.5, 0.25)).draw_from(records, stream)] = 1
        seen += np.outer(member, member)
    rates = np.array([0.5, 0.25])[records.levels]
    expected = np.where(np.eye(4) == 1, rates, np.outer(rates, rates))
    assert np.abs(seen / 4000 - expected).max() <= 6 * 0.5 / np.sqrt(4000)


def test_everybody_takes_part_where_every_rate_is_1():
    assert Personal((1.0, 1.0), (0.5, 1.0)).draw_from(people((2, 2), (1.0, 2.0)), SeededStream(0)) == slice(
        None
    )


def test_each_level_pays_its_own_rate_and_noise_over_its_weight():
    sampler = Personal((0.01, 0.0, 1.0), (0.5, 1.0, 1.0))
    events = sampler.amplify(GaussianEvent(2.0)).events
    assert events[0] == PoissonEvent(0.01, GaussianEvent(np.nextafter(4.0, 0)))
    assert events[1:] == (NOTHING, GaussianEvent(2.0))


def test_before_a_coordinator_each_level_pays_for_open_draws():
    events = Personal((0.01, 0.02)).amplify(GaussianEvent(2.0), Observer.COORDINATOR).events
    assert events == (DrawnEvent(0.01, GaussianEvent(2.0)), DrawnEvent(0.02, GaussianEvent(2.0)))


def test_contributions_count_a_little_less_than_the_weight_they_are_charged_as():
    sampler, records = Personal((1.0, 1.0), (0.25, 1.0)), people((3, 5), (1.0, 2.0))
    query = Query(sampler, ONES, ft.ClipNorm(1.0), ft.Gaussian(1.0))
    total = query.total(records, slice(None), None)
    assert total == pytest.approx([3 * 0.25, 5.0], rel=3e-3)
    assert total == pytest.approx(np.array(sampler.factors) * [3, 5], rel=1e-12)
    for weight, factor in zip(sampler.weights, sampler.factors, strict=True):
        assert factor * (1 - 2.0**-11) + 2.0**-11 + 2.0**-15 <= weight * (1 + 1e-15)
    assert sampler.expected((3, 5)) == pytest.approx(total.sum())


def test_a_weight_that_rounding_would_pass_counts_nothing_and_costs_nothing():
    sampler = Personal((1.0, 1.0), (2.0**-12, 1.0))
    assert sampler.factors[0] == 0.0
    assert sampler.amplify(GaussianEvent(1.0)).events[0] == NOTHING


def test_a_public_term_of_a_sum_counts_once_whatever_the_weights():
    class Penalised(PerExample):
        def bounded_sum(self, records, w, bound):
            return PerExample.bounded_sum(self, records, w, bound) + 100.0

    query = Query(
        Personal((1.0, 1.0), (0.5, 1.0)), Penalised(lambda rows, w: rows[0]), ft.ClipNorm(1.0), ft.Gaussian(1)
    )
    assert query.total(people((2, 2), (1.0, 2.0)), slice(None), None) == pytest.approx([101, 102], rel=1e-3)


def test_a_drawn_batch_is_weighted_by_level():
    sampler, records = Personal((0.5, 0.5), (0.5, 1.0)), people((50, 50), (1.0, 2.0))
    query = Query(sampler, ONES, ft.ClipNorm(1.0), ft.Gaussian(1.0))
    drawn = sampler.draw_from(records, SeededStream(3))
    counts = np.bincount(records.levels[drawn], minlength=2)
    assert query.total(records, drawn, None) == pytest.approx(counts * sampler.factors)


def test_weights_are_for_gaussian_noise_on_float64_sums_over_records():
    weighted = Personal((1.0, 1.0), (0.5, 1.0))
    with pytest.raises(Unsupported, match="need Gaussian noise"):
        weighted.amplify(LaplaceEvent(1.0))
    with pytest.raises(Unsupported, match="float32"):
        Query(weighted, ONES, ft.ClipNorm(1.0), TorchGaussian(1.0))
    with pytest.raises(Unsupported, match="above 0"):
        Query(weighted, ONES, ft.ClipValue(1.0, 2.0), ft.Gaussian(1.0))

    class Largest(PerExample):
        additive = False

    with pytest.raises(Unsupported, match="not a sum over records"):
        Query(weighted, Largest(lambda rows, w: rows[0]), ft.ClipNorm(1.0), ft.Gaussian(1.0))


@pytest.mark.parametrize(
    ("rates", "weights"),
    [
        ((), ()),
        ((0.1, 1.1), ()),
        ((0.1, -0.1), ()),
        ((0.1,), (0.5, 0.5)),
        ((float("nan"),), ()),
        ((0.1,) * 33, ()),
    ],
)
def test_rates_and_weights_that_are_none_are_refused(rates, weights):
    with pytest.raises(InvalidValue):
        Personal(rates, weights)


@pytest.mark.parametrize("levels", [[0, 1], [0, 1, 2], [0, -1, 1], [0.0, 1.0, 0.0], [[0, 1, 0]]])
def test_levels_must_be_a_place_for_each_record(levels):
    with pytest.raises(InvalidValue, match="from 0 to 1, one for each record"):
        Leveled(Rows(np.ones((3, 1))), np.array(levels), (1.0, 2.0))


def test_a_number_of_records_does_not_say_who_is_on_which_level():
    with pytest.raises(Unsupported):
        Personal((0.1,)).draw(10, SeededStream(0))


def test_budgets_and_records_have_the_same_length():
    with pytest.raises(InvalidValue, match="one budget per record"):
        PersonalBudgets([1.0, 2.0]).over(Rows(np.ones((3, 1))))


def test_correlated_noise_has_no_price_on_personal_draws():
    class Correlated(ft.Gaussian):
        def plan(self, event, steps):
            return event

    query = Query(Personal((0.1, 0.2)), ONES, ft.ClipNorm(1.0), Correlated(1.0))
    with pytest.raises(Unsupported, match="personal sampling rates"):
        query.plan(ft.Budget(1.0, 1e-5), 10)
    assert isinstance(query.price(ft.Budget(1.0, 1e-5)), PersonalEvent)


def test_turns_of_personal_rates_are_priced_by_level_and_as_many_as_groups_apart():
    sampler = PersonalCyclic((0.0, 0.01, 0.1), groups=4)
    event = sampler.plan(GaussianEvent(2.0), 10)
    assert event.count == 3
    assert event.event.events == (
        NOTHING,
        PoissonEvent(0.04, GaussianEvent(2.0)),
        PoissonEvent(0.4, GaussianEvent(2.0)),
    )
    query = Query(sampler, ONES, ft.ClipNorm(1.0), ft.BandedGaussian(2.0, 4))
    assert query.remembers
    with pytest.raises(Unsupported, match="5 bands"):
        Query(sampler, ONES, query.bound, ft.BandedGaussian(2.0, 5))


def test_impossible_turns_of_personal_rates_cannot_be_made():
    with pytest.raises(InvalidValue, match="at most 1"):
        PersonalCyclic((0.1, 0.3), groups=4)
    with pytest.raises(Unsupported, match="weights"):
        PersonalCyclic((0.1, 0.1), (0.5, 1.0), groups=4)
