"""After a charge nothing that a record does can be seen but through the noise."""

import traceback
import warnings

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import RdpFilter
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, NotReleased, OutOfMemory, PromiseBroken
from farthing.federated.protocol import Invitation
from farthing.federated.simulated import Simulated
from farthing.ledger import answers
from farthing.linear.losses import LinearGradient, logistic, multinomial
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import Kind

BUDGET = ft.Budget(1.0, 1e-5)
ROWS = ft.Rows(np.tile([3.0, 4.0], (8, 1)) / 5, np.arange(8))
QUIET = ft.Gaussian(1e-3)


def asking(contribution, records=ROWS, w=None, *, sampler=None, mechanism=QUIET, **options):
    """The answer and the share that is spent."""
    ledger = ft.Ledger(ft.Budget(1e9, 1e-5), **options)
    query = ft.Query(sampler or ft.Everyone(), contribution, ft.ClipNorm(1.0), mechanism)
    answer = ledger.over(records).ask(query, w)
    assert ledger.share > 0
    return answer.value


def ill(*numbers, how=None):
    """Rows as they are, but records of these numbers fail, or return what ``how`` makes of the rows."""

    def function(rows, w):
        found = rows[0].copy()
        for place in np.flatnonzero(np.isin(rows[1], numbers)):
            if how is None:
                raise ValueError(f"record {found[place]} is ill")
            found = how(found, place)
        return found

    return ft.PerExample(function)


def wide(found, place):
    return np.hstack([found, found])


def unbounded(found, place):
    return [[1.0], [1.0, 2.0]]


@pytest.mark.parametrize("how", [None, wide, unbounded])
@pytest.mark.parametrize("numbers", [(0,), (7,), (2, 3, 6), tuple(range(8))])
def test_a_record_that_fails_counts_as_zero_and_the_others_stay(numbers, how):
    found = asking(ill(*numbers, how=how))
    assert found == pytest.approx((8 - len(numbers)) * np.array([0.6, 0.8]), abs=0.02)


def test_a_sum_that_is_not_finite_counts_the_record_as_zero():
    class Careless:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            return np.where((records[1] == 5)[:, None], np.nan, records[0]).sum(axis=0)

    assert asking(Careless()) == pytest.approx(7 * np.array([0.6, 0.8]), abs=0.02)


def test_neighbours_cannot_be_told_apart_by_a_failure():
    """With and without the record that fails, the same sum gets the noise."""
    fewer = ROWS.take(np.arange(7))
    with_it, without = (asking(ill(7), records) for records in (ROWS, fewer))
    assert with_it == pytest.approx(without, abs=0.02)


def test_what_a_sample_draws_is_what_is_halved():
    drawn = []

    class Noted:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            drawn.append(set(records[1]))
            if 3 in records[1]:
                raise ValueError
            return records[0].sum(axis=0)

    found = asking(Noted(), sampler=ft.Poisson(1 - 1e-9), mechanism=ft.Gaussian(0.5), filter=RdpFilter)
    assert found == pytest.approx(7 * np.array([0.6, 0.8]), abs=4)
    assert drawn[1] == set(range(8))
    assert all(part < drawn[1] for part in drawn[2:] if part != drawn[1])


def test_what_is_no_sum_becomes_noise_on_its_value_for_nobody():
    class Largest:
        honours, shape = (Kind.NORM,), None

        additive = False

        def bounded_sum(self, records, w, bound):
            if 3 in records[1]:
                raise ValueError
            return np.atleast_1d(records[0].max(initial=0.0))

    assert asking(Largest()) == pytest.approx([0.0], abs=0.02)


def test_a_release_that_fails_is_tried_on_the_zero_sum():
    class Picky(ft.Gaussian):
        def release(self, total, bound, stream, turn=0):
            if total.any():
                raise ValueError("not these")
            return super().release(total, bound, stream, turn)

    assert asking(ill(), mechanism=Picky(1e-3)) == pytest.approx([0.0, 0.0], abs=0.02)


def test_mistakes_of_the_caller_show_before_any_charge():
    ledger = ft.Ledger(BUDGET)
    door = ledger.over(Table(np.eye(3), np.ones(3)))
    query = ft.Query(ft.Everyone(), LinearGradient(logistic, Features(3)), ft.ClipNorm(1.0), ft.Gaussian(9.0))
    for w in (np.zeros(2), np.zeros(5), None):
        with pytest.raises((ValueError, TypeError)) as caught:
            door.ask(query, w)
        assert "nothing is charged" in "".join(caught.value.__notes__)
    with pytest.raises(InvalidValue, match="targets"):
        ledger.over(Table(np.eye(3))).ask(query, np.zeros(4))  # no targets
    assert ledger.share == 0
    door.ask(query, np.zeros(4))
    with pytest.raises(InvalidValue, match="one row per coordinate"):
        door.ask(query, np.zeros(5))  # after a shape that fits
    assert ledger.share == pytest.approx(1 / 81 / ledger.filter.mu**2)


def test_with_a_seeded_stream_errors_are_raised_as_they_are():
    with pytest.raises(ValueError, match="is ill"):
        asking(ill(2), stream=SeededStream(0))


def test_errors_that_no_record_decides_are_raised():
    class Refuses:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            if len(records):
                raise NotReleased("a rank is gone")
            return np.zeros(2)

    with pytest.raises(NotReleased, match="rank"):
        asking(Refuses())


def test_a_record_that_asks_for_too_much_memory_counts_as_zero():
    class Greedy:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            if len(records) and records[0][:, 0].max() > 1e6:  # such as np.zeros(int(largest))
                raise MemoryError("Unable to allocate 4.32 GiB for an array with shape (8, 72351239)")
            return records[0].sum(axis=0)

    rows = np.full((100, 2), 0.1)
    rows[7] = 1e9
    ledger = ft.Ledger(ft.Budget(1e6, 1e-5)).over(ft.Rows(rows))
    answer = ledger.ask(ft.Query(ft.Everyone(), Greedy(), ft.ClipNorm(1.0), ft.Gaussian(0.01)))
    assert np.abs(answer.value - 9.9).max() < 1.0


def test_a_batch_that_is_too_large_for_memory_is_summed_in_parts():
    class Wide:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            if len(records) > 20:
                raise MemoryError
            return records[0].sum(axis=0)

    ledger = ft.Ledger(ft.Budget(1e6, 1e-5)).over(ft.Rows(np.full((100, 2), 0.1)))
    answer = ledger.ask(ft.Query(ft.Everyone(), Wide(), ft.ClipNorm(1.0), ft.Gaussian(0.01)))
    assert np.abs(answer.value - 10.0).max() < 1.0


def test_without_memory_for_noise_it_is_refused_without_a_word_of_the_records():
    class Greedy(ft.Gaussian):
        def release(self, total, bound, stream, turn=0):
            raise MemoryError("Unable to allocate 4.32 GiB for an array with shape (8, 72351239)")

    ledger = ft.Ledger(ft.Budget(1.0, 1e-5)).over(ft.Rows(np.ones((4, 2))))
    query = ft.Query(ft.Everyone(), ft.PerExample(lambda rows, w: rows[0]), ft.ClipNorm(1.0), Greedy(20.0))
    with pytest.raises(OutOfMemory, match="charged") as caught:
        ledger.ask(query)
    assert "GiB" not in "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value, MemoryError)
    assert ledger.share > 0


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_goes_through(stop):
    class Stops:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            if len(records):
                raise stop
            return np.zeros(2)

    with pytest.raises(stop):
        asking(Stops())


def test_a_failed_answer_is_kept_under_its_key_like_any_other():
    door = ft.Ledger(BUDGET).over(ROWS)
    query = ft.Query(ft.Everyone(), ill(1), ft.ClipNorm(1.0), ft.Gaussian(9.0))
    first, second = (door.ask(query, key="one") for _ in range(2))
    assert first.value.tolist() == second.value.tolist()


def test_no_warning_tells_about_a_record(recwarn):
    zero = ft.PerExample(lambda rows, w: 1 / np.where((rows[1] == 3)[:, None], 0.0, rows[0]))
    asking(zero)
    assert not recwarn.list


def test_a_label_that_the_weights_have_no_column_for_cannot_be_seen():
    table = Table(np.eye(3), np.array([0, 1, 2]))
    w = np.zeros((4, 2))  # two columns, three labels
    found = asking(LinearGradient(multinomial, Features(3)), table, w)
    fewer = asking(LinearGradient(multinomial, Features(3)), table.take(np.arange(2)), w)
    assert found == pytest.approx(fewer, abs=0.02)


def test_a_sum_of_another_shape_for_nobody_is_refused_before_the_charge():
    door = ft.Ledger(BUDGET).over(ROWS)
    query = ft.Query(
        ft.Everyone(),
        ft.PerExample(lambda rows, w: np.array(list(rows[0]))),
        ft.ClipNorm(1.0),
        ft.Gaussian(9.0),
    )
    with pytest.raises(InvalidValue, match="one row per record"):
        door.ask(query)


class Picky:
    """A logistic loss that knows no label 2."""

    curvature, slope, value = logistic.curvature, logistic.slope, logistic.value

    def residual(self, margins, y):
        if (y == 2).any():
            raise IndexError("label 2")
        return logistic.residual(margins, y)


@pytest.mark.parametrize("noise", ["sum", "each"])
def test_among_simulated_clients_a_record_that_fails_counts_as_zero(noise):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), np.tile([0, 1], 6)

    def one(labels, stream=None):
        clients = Simulated.split(
            x, labels, clients=3, budgets=ft.Budget(1e9, 1e-5), noise=noise, stream=stream
        )
        clients.invite(Invitation(1.0, rounds=1, noise_multiplier=1e-4))
        return clients.ask(gradient, np.zeros(4)).mean

    gradient, odd = LinearGradient(Picky(), Features(3)), y.copy()
    odd[5] = 2
    rest = gradient.bounded_sum(Table(np.delete(x, 5, 0), np.delete(y, 5)), np.zeros(4), ft.ClipNorm(1.0))
    assert one(odd) == pytest.approx(rest / 12, abs=1e-2)
    with pytest.raises(IndexError):
        one(odd, SeededStream(0))


def test_halving_reads_each_good_record_once_in_the_sum():
    def sums(places):
        if {2, 3, 9} & set(places.tolist()):
            raise RuntimeError
        return np.bincount(places, minlength=16).astype(float)

    total = answers.without_failing(sums, np.arange(16), np.zeros(16))
    assert np.flatnonzero(total == 0).tolist() == [2, 3, 9]
    assert total.max() == 1


def test_a_public_term_counts_once_however_often_a_batch_is_split():
    def sums(part):
        if 3 in part:
            raise ValueError
        return np.array([len(part) - 7.0])  # each record 1, and a penalty of 7

    whole = answers.without_failing(lambda part: np.array([len(part) - 7.0]), np.arange(8), np.array([-7.0]))
    split = answers.without_failing(sums, np.arange(8), np.array([-7.0]))
    assert (whole[0], split[0]) == (1.0, 0.0)


class Knob:
    """A mechanism of a caller's own, whose noise can be turned."""

    def __init__(self, noise_multiplier):
        self.noise_multiplier = noise_multiplier

    def unit_event(self):
        return ft.Gaussian(self.noise_multiplier).unit_event()

    def event(self, bound, adjacency, sampled):
        return ft.Gaussian(self.noise_multiplier).event(bound, adjacency, sampled)

    def check(self, bound, shape):
        ft.Gaussian(self.noise_multiplier).check(bound, shape)

    def release(self, total, bound, stream, turn=0):
        return ft.Gaussian(self.noise_multiplier).release(total, bound, stream, turn)


@pytest.mark.parametrize("promised", [False, True])
def test_a_mechanism_that_changes_between_two_answers_is_priced_anew(promised):
    knob = Knob(100.0)
    query = ft.Query(ft.Everyone(), ft.PerExample(lambda rows, w: rows[0]), ft.ClipNorm(1.0), knob)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5)).over(ft.Rows(np.ones((10, 2))))
    if promised:
        ledger.promise(query, 5)
    ledger.ask(query)
    knob.noise_multiplier = 0.01
    with pytest.raises(PromiseBroken if promised else BudgetSpent):
        ledger.ask(query)


def test_many_parts_are_added_without_loss():
    """One part a record here: a plain sum of these would lose each small term beside the large one."""
    terms = np.full(2**14, 2.0**-54)
    terms[-1] = 1.0  # the last part is added first

    def sums(places):
        if len(places) > 1:
            raise ValueError
        return np.array([terms[places].sum()])

    total = answers.without_failing(sums, np.arange(len(terms)), np.zeros(1))
    assert total[0] - 1.0 == pytest.approx(2.0**-40, rel=0.01, abs=0)


def test_records_that_grow_beyond_what_a_price_holds_for_are_refused():
    class Growing:
        def __init__(self):
            self.rows = [np.ones(2)] * 4

        def __len__(self):
            return len(self.rows)

        def take(self, indices):
            return ft.Rows(np.array(self.rows).reshape(-1, 2)[indices])

    records, ledger = Growing(), ft.Ledger(BUDGET, filter=RdpFilter)
    contribution = ft.PerExample(lambda rows, w: rows[0])
    query = ft.Query(ft.TruncatedPoisson(0.5, 2, of=4), contribution, ft.ClipNorm(1.0), ft.Gaussian(90.0))
    private = ledger.over(records)
    private.ask(query)
    spent = ledger.share
    records.rows.append(np.ones(2))
    with pytest.raises(InvalidValue, match="more records than of=4"):
        private.ask(query)
    assert ledger.share == spent


def test_a_record_whose_row_is_complex_counts_as_zero_without_a_warning():
    def rows(records, w):
        return records[0] * (1 + 1j) if 5 in records[1] else records[0]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = asking(ft.PerExample(rows))
    assert not said
    assert found == pytest.approx(7 * np.array([0.6, 0.8]), abs=0.02)
