"""The door: charge first, then release; never past the budget; one way of spending a ledger."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import gaussian, pld
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.errors import (
    BudgetSpent,
    FarthingError,
    InvalidValue,
    LedgerLocked,
    NotReleased,
    PromiseBroken,
    Unsupported,
)
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import Kind
from farthing.queries.events import GaussianEvent, PoissonEvent, PureEvent, RepeatedEvent

ROWS = ft.Rows(np.random.default_rng(0).normal(size=(200, 3)))
W = np.zeros(3)
BUDGET = ft.Budget(1.0, 1e-5)


def shifted(rows, w):
    return rows[0] - w


def query(noise=4.0, sampler=None, clip=1.0):
    return ft.Query(sampler or ft.Poisson(0.1), ft.PerExample(shifted), ft.ClipNorm(clip), ft.Gaussian(noise))


def full(noise=40.0):
    return query(noise, ft.Everyone())


def exhaust(door, question, w=W, limit=10_000):
    for count in range(limit):
        try:
            door.ask(question, w)
        except BudgetSpent:
            return count
    raise AssertionError("the budget never ended")


class Ill(ft.PerExample):
    """A contribution that fails wherever there is a record."""

    def __init__(self, error):
        def function(rows, w):
            if len(rows):
                raise error
            return rows[0]

        super().__init__(function)


class Spy:
    """A contribution that notes what the journal held when it was computed."""

    honours, shape = (Kind.NORM,), None

    def __init__(self, ledger):
        self.ledger, self.seen = ledger, []

    def bounded_sum(self, records, w, bound):
        if len(records):
            self.seen.append(self.ledger.journal.last().state)
        return np.zeros(3)


def test_the_charge_is_written_before_anything_is_computed():
    ledger = ft.Ledger(BUDGET)
    spy = Spy(ledger)
    ledger.over(ROWS).ask(ft.Query(ft.Everyone(), spy, ft.ClipNorm(1.0), ft.Gaussian(40.0)), W)
    assert spy.seen == [[pytest.approx(1 / 1600)]]


def test_a_failing_contribution_stays_charged():
    ledger = ft.Ledger(BUDGET, stream=SeededStream(0))
    with pytest.raises(ZeroDivisionError):
        ledger.over(ROWS).ask(
            ft.Query(ft.Everyone(), Ill(ZeroDivisionError()), ft.ClipNorm(1.0), ft.Gaussian(40.0)), W
        )
    assert ledger.share > 0


def test_a_countdown_spends_to_the_last_farthing_and_no_further():
    ledger = ft.Ledger(BUDGET)
    countdown = ledger.promise(query())
    event = PoissonEvent(0.1, GaussianEvent(4.0))
    assert pld.epsilon(RepeatedEvent(event, countdown.times), 1e-5) <= 1.0
    assert pld.epsilon(RepeatedEvent(event, countdown.times + 1), 1e-5) > 1.0
    assert exhaust(ledger.over(ROWS), query()) == countdown.times
    assert countdown.left == 0
    assert ledger.guarantee.epsilon == ledger.spent.epsilon <= 1.0
    assert ledger.share == 1.0


def test_a_plan_of_several_promises_is_priced_together():
    ledger = ft.Ledger(BUDGET)
    first = ledger.promise(full(), times=20)
    second = ledger.promise(query())
    alone = ft.Ledger(BUDGET).promise(query()).times
    assert 0 < second.times < alone
    door = ledger.over(ROWS)
    assert (exhaust(door, full()), exhaust(door, query())) == (first.times, second.times)
    assert ledger.guarantee.epsilon <= 1.0


def test_a_gdp_filter_affords_exactly_what_gaussians_compose_to():
    ledger = ft.Ledger(BUDGET)
    asked = exhaust(ledger.over(ROWS), full())
    assert (
        gaussian.epsilon(np.sqrt(asked) / 40, 1e-5) <= 1.0 < gaussian.epsilon(np.sqrt(asked + 1) / 40, 1e-5)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(5.0, 200.0), min_size=1, max_size=30), st.sampled_from(["gdp", "zcdp", "rdp", "basic"])
)
def test_charges_never_exceed_the_budget_whatever_is_asked_next(noises, kind):
    # law: after any adaptive sequence, the exact composition of what was answered fits the budget
    rules = {"gdp": None, "zcdp": ZcdpFilter, "rdp": RdpFilter, "basic": BasicFilter}
    ledger = ft.Ledger(BUDGET, filter=rules[kind], stream=SeededStream(1))
    door, mu2, pure = ledger.over(ROWS), 0.0, 0.0
    for noise in noises:
        if kind == "basic":
            question = ft.Query(
                ft.Everyone(), ft.PerExample(shifted), ft.ClipNorm(1.0, order=1), ft.Laplace(noise)
            )
        else:
            question = full(noise)
        try:
            door.ask(question, W)
        except BudgetSpent:
            continue
        mu2, pure = mu2 + noise**-2, pure + 1 / noise
    if kind == "basic":
        assert pure <= 1.0 + 1e-12
    elif mu2:
        assert gaussian.epsilon(np.sqrt(mu2), 1e-5) <= 1.0


def test_replace_one_costs_more():
    counts = [
        exhaust(ft.Ledger(ft.Budget(1.0, 1e-5, adjacency)).over(ROWS), full())
        for adjacency in ("add-remove", "replace-one")
    ]
    assert counts[0] // 4 == counts[1]  # four times rho


def test_a_refused_question_costs_nothing():
    ledger = ft.Ledger(BUDGET)
    door = ledger.over(ROWS)
    with pytest.raises(BudgetSpent, match="costs"):
        door.ask(full(0.1), W)
    with pytest.raises(Unsupported, match="promise it"):
        door.ask(query(), W)
    with pytest.raises(InvalidValue, match="finite"):
        door.ask(full(), np.array([0.0, np.nan, 0.0]))
    with pytest.raises(InvalidValue, match="over"):
        ledger.ask(full(), W)
    assert ledger.share == 0.0
    assert ledger.journal.last().seq == 0


def test_a_ledger_spends_in_one_way_only():
    ledger = ft.Ledger(BUDGET)
    ledger.promise(query(), times=3)
    with pytest.raises(PromiseBroken, match="not promised"):
        ledger.over(ROWS).ask(full(), W)
    with pytest.raises(PromiseBroken, match="already promised 3"):
        ledger.promise(query(), times=4)
    assert ledger.promise(query()).times == 3
    ledger.over(ROWS).ask(query(), W)
    with pytest.raises(PromiseBroken, match="before the first answer"):
        ledger.promise(full())
    other = ft.Ledger(BUDGET)
    other.over(ROWS).ask(full(), W)
    with pytest.raises(PromiseBroken, match="before the first answer"):
        other.promise(query())


def test_a_promise_that_does_not_fit_is_refused():
    with pytest.raises(BudgetSpent, match="do not fit"):
        ft.Ledger(BUDGET).promise(query(), times=10**6)
    with pytest.raises(BudgetSpent, match="not even one"):
        ft.Ledger(BUDGET).promise(full(0.1))


def test_a_query_may_change_its_clip_but_not_its_price():
    ledger = ft.Ledger(BUDGET)
    countdown = ledger.promise(query(clip=1.0))
    door = ledger.over(ROWS)
    door.ask(query(clip=0.25), W)  # sensitivity over noise is the promised one
    with pytest.raises(PromiseBroken):
        door.ask(query(noise=3.9), W)
    assert countdown.left == countdown.times - 1


def test_affords_looks_ahead_for_free():
    ledger = ft.Ledger(BUDGET)
    countdown = ledger.promise(query())
    assert ledger.affords(query(), countdown.times)
    assert not ledger.affords(query(), countdown.times + 1)
    assert not ledger.affords(full())
    assert ledger.share == 0.0


def test_seeded_noise_voids_every_guarantee():
    ledger = ft.Ledger(BUDGET, stream=SeededStream(0))
    answers = [ledger.over(ROWS).ask(full(), W).value for _ in range(2)]
    again = ft.Ledger(BUDGET, stream=SeededStream(0)).over(ROWS).ask(full(), W).value
    np.testing.assert_array_equal(answers[0], again)
    assert not np.array_equal(answers[0], answers[1])
    assert ledger.guarantee.epsilon == ledger.spent.epsilon == np.inf
    assert "seeded" in str(ledger.guarantee)


def test_notes_of_other_users_of_a_ledger_are_in_every_guarantee(tmp_path):
    mine, other = (ft.Ledger(BUDGET, journal=tmp_path / "a.ledger") for _ in range(2))
    for place, (ledger, text) in enumerate(
        ((mine, "one"), (other, "two"), (mine, "three"), (other, "one")), 1
    ):
        ledger.note(text)
        for each in (mine, other):
            assert [word in each.guarantee.note for word in ("one", "two", "three")] == [
                place >= 1,
                place >= 2,
                place >= 3,
            ]
            assert each.guarantee.note.count("one") == 1


def test_copies_share_one_balance():
    ledger = ft.Ledger(BUDGET)
    assert copy.deepcopy(ledger) is ledger is copy.copy(ledger)
    assert copy.deepcopy({"ledger": ledger})["ledger"] is ledger
    with pytest.raises(Unsupported, match="journal file"):
        pickle.dumps(ledger)


def test_a_file_ledger_survives_its_process(tmp_path):
    path = tmp_path / "a.ledger"
    with ft.Ledger(BUDGET, journal=path) as ledger:
        countdown = ledger.promise(query())
        for _ in range(5):
            ledger.over(ROWS).ask(query(), W)
        assert countdown.left == countdown.times - 5
        twin = pickle.loads(pickle.dumps(ledger))
        twin.over(ROWS).ask(query(), W)
        twin.close()
    reopened = ft.Ledger.open(path)
    assert reopened.promise(query()).left == countdown.times - 6
    assert reopened.spent.epsilon == pld.epsilon(
        RepeatedEvent(PoissonEvent(0.1, GaussianEvent(4.0)), 6), 1e-5
    )
    with pytest.raises(InvalidValue, match="epsilon"):
        ft.Ledger(ft.Budget(2.0, 1e-5), journal=path)
    with pytest.raises(InvalidValue, match="no ledger"):
        ft.Ledger.open(tmp_path / "missing.ledger")


def test_a_crash_forfeits_what_was_reserved(tmp_path):
    path = tmp_path / "a.ledger"
    ledger = ft.Ledger(BUDGET, journal=path, block=16)
    times = ledger.promise(query()).times
    ledger.over(ROWS).ask(query(), W)
    crashed = ft.Ledger.open(path)  # as another process would see it now
    assert crashed.promise(query()).left == times - 16
    ledger.close()
    assert ft.Ledger.open(path).promise(query()).left == times - 1


def test_reserving_ahead_and_giving_back():
    ledger = ft.Ledger(BUDGET)
    ledger.reserve(full(), 50)
    share = ledger.share
    for _ in range(10):
        receipt = ledger.over(ROWS).ask(full(), W).receipt
    assert (receipt.seq, receipt.ticket) == (1, 10)
    assert ledger.share == share
    assert [row.kind for row in ledger.journal.rows()] == ["open", "charge"]


@pytest.mark.parametrize("question", [query(), query(sampler=ft.FixedSize(5, 200))])
def test_a_kept_answer_is_repeated_at_no_charge(tmp_path, question):
    ledger = ft.Ledger(BUDGET, journal=tmp_path / "a.ledger")
    countdown = ledger.promise(question, times=2)
    door = ledger.over(ROWS)
    first = door.ask(question, W, key="round 1")
    again = door.ask(question, W, key="round 1")
    np.testing.assert_array_equal(first.value, again.value)
    assert first.receipt == again.receipt
    assert countdown.left == 1
    with pytest.raises(InvalidValue):
        door.ask(question, W + 1, key="round 1")
    assert countdown.left == 1


def test_charged_but_never_released_returns_nothing_new():
    ledger = ft.Ledger(BUDGET)
    broken = ft.Query(ft.Everyone(), Ill(KeyboardInterrupt()), ft.ClipNorm(1.0), ft.Gaussian(40.0))
    with pytest.raises(KeyboardInterrupt):
        ledger.over(ROWS).ask(broken, W, key="lost")
    share = ledger.share
    with pytest.raises(NotReleased):
        ledger.over(ROWS).ask(full(), W, key="lost")
    assert ledger.share == share > 0


def test_parts_of_a_budget_add_up():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=BasicFilter)
    parts = [ledger.allot(0.25, 2.5e-6) for _ in range(4)]
    with pytest.raises(BudgetSpent):
        ledger.allot(0.25, 2.5e-6)
    assert exhaust(parts[0].over(ROWS), full()) > 0
    assert ledger.share == 1.0


@pytest.mark.parametrize("kind", [GdpFilter, ZcdpFilter])
def test_parts_cost_what_their_filter_lets_through(kind):
    """mu² of GDP and rho of zCDP add up, and what is left goes to the last part."""
    ledger = ft.Ledger(BUDGET, filter=kind)
    first = ledger.allot(BUDGET.epsilon / 2, BUDGET.delta)
    share = ledger.share
    currency = {GdpFilter: lambda rule: rule.mu**2, ZcdpFilter: lambda rule: rule.rho}[kind]
    assert share == pytest.approx(currency(kind(first.budget)) / currency(kind(BUDGET)))
    assert exhaust(first.over(ROWS), full()) > 0
    rest = ledger.rest
    last = ledger.allot()
    assert last.budget == rest
    assert ledger.share == pytest.approx(1.0)
    with pytest.raises(BudgetSpent):
        ledger.allot()
    with pytest.raises(Unsupported, match="cannot make promises"):
        last.promise(full())
    assert currency(kind(first.budget)) + currency(kind(last.budget)) <= currency(kind(BUDGET))


@pytest.mark.parametrize("terms", [{"epsilon": 50.0}, {"delta": 1e-2}, {"adjacency": "add-remove"}])
@pytest.mark.parametrize("parent", [BasicFilter, ZcdpFilter, GdpFilter])
def test_a_part_is_not_spent_by_a_filter_of_another_budget(parent, terms):
    ledger = ft.Ledger(replace(BUDGET, adjacency="replace-one"), filter=parent)
    kind = GdpFilter if parent is BasicFilter else parent
    with pytest.raises(InvalidValue, match="pass the filter's class"):
        ledger.allot(0.1, 1e-6, filter=lambda part: kind(replace(part, **terms)))
    assert ledger.share == 0


def test_a_part_needs_a_price():
    with pytest.raises(Unsupported):
        ft.Ledger(BUDGET).allot(0.1, 1e-6, filter=BasicFilter)
    with pytest.raises(InvalidValue):
        ft.Ledger(BUDGET).allot(epsilon=0.1)
    promised = ft.Ledger(BUDGET)
    promised.promise(full())
    with pytest.raises(Unsupported):
        promised.allot()


def test_pure_budgets_need_no_delta():
    ledger = ft.Ledger(ft.Budget(1.0, 0.0))
    count = ft.Query(
        ft.Everyone(),
        ft.PerExample(lambda rows, w: np.ones((len(rows), 1))),
        ft.ClipValue(0, 1),
        ft.Laplace(4.0),
    )
    assert exhaust(ledger.over(ROWS), count) == 4
    assert ledger.guarantee.delta == 0.0


def test_an_empty_lot_is_answered_with_noise():
    ledger = ft.Ledger(BUDGET)
    door = ledger.over(ft.Rows(np.zeros((0, 3))))
    question = query(noise=10.0)
    ledger.promise(question, times=3)
    assert door.ask(question, W).value.shape == (3,)


def test_noise_only_depends_on_public_numbers():
    # the same stream, records in or out of the clip: the answers differ by the bounded sum alone
    values = [
        ft.Ledger(BUDGET, stream=SeededStream(3)).over(ft.Rows(rows)).ask(full(), W).value
        for rows in (np.zeros((1, 3)), np.full((1, 3), 1e300), np.full((1, 3), np.nan))
    ]
    assert np.linalg.norm(values[1] - values[0]) <= 1 + 1e-3
    np.testing.assert_array_equal(values[2], values[0])


@pytest.mark.parametrize("kind", [GdpFilter, ZcdpFilter, BasicFilter])
def test_a_refund_gives_back_no_more_than_was_reserved_and_not_used(kind):
    """In exact arithmetic: what stays charged is at least what was used, and at most a hair more."""
    event = PureEvent(0.05) if kind is BasicFilter else GaussianEvent(30.0)
    books = ft.Ledger(BUDGET, filter=kind)._books
    each = [Fraction(cost) for cost in books.rule.cost(event)]
    used = 0
    for count, asked in [(7, 3), (1, 1), (5, 0), (4, 2), (3, 3)]:
        books.reserve(event, count)
        for _ in range(asked):
            books.take(event)
        used += asked
        books.reserve(event, 1)  # gives back what was left
        used += 1
        books.take(event)
        for charged, cost in zip(books.journal.last().state, each, strict=True):
            assert used * cost <= Fraction(charged) <= used * cost * (1 + Fraction(1, 10**12))


def test_a_method_that_cannot_make_its_first_step_says_so():
    @ft.until_spent
    def twice(ledger):
        for t in (1, 2):
            answer = ledger.ask(full(), W)
            yield ft.Step(t, answer.value, (answer.receipt,))

    ledger = ft.Ledger(BUDGET)
    ledger.allot()
    with pytest.raises(ft.BudgetSpent, match="budget exhausted"):
        list(twice(ledger.over(ROWS)))
    almost = ft.Ledger(BUDGET)
    while almost.affords(full(), 2):
        almost.over(ROWS).ask(full(), W)
    assert len(list(twice(almost.over(ROWS)))) == 1


def test_algorithms_end_by_themselves():
    @ft.until_spent
    def forever(ledger, question):
        for t in range(1, 10_000):
            answer = ledger.ask(question, W)
            yield ft.Step(t, answer.value, (answer.receipt,))

    ledger = ft.Ledger(BUDGET)
    times = ledger.promise(query()).times
    outcome = ft.run(forever(ledger.over(ROWS), query()))
    assert outcome.steps == len(outcome.receipts) == times
    early = ft.Ledger(BUDGET)
    early.promise(query())
    assert (
        ft.run(forever(early.over(ROWS), query()), stop=lambda step: step.t == 3).stop_reason
        == "stopped by rule"
    )
    with pytest.raises(BudgetSpent):
        ft.run(forever(ledger.over(ROWS), query()))


def test_pure_events_in_filters():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=BasicFilter)
    assert ledger.affords(PureEvent(0.5), 2)
    assert not ledger.affords(PureEvent(0.5), 3)


def test_opening_to_read_makes_no_files(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("not a ledger")
    with pytest.raises(FarthingError):
        ft.Ledger.open(other)
    assert list(tmp_path.iterdir()) == [other]
    path = tmp_path / "a.ledger"
    ft.Ledger(BUDGET, journal=path).close()
    (tmp_path / "a.ledger.head").unlink()
    with pytest.raises(LedgerLocked):
        ft.Ledger.open(path)
    assert not (tmp_path / "a.ledger.head").exists()


def test_a_key_needs_parameters_that_can_be_compared():
    door = ft.Ledger(BUDGET).over(ROWS)
    with pytest.raises(InvalidValue, match="numbers"):
        door.ask(full(), {"w": object()}, key="k")
    with pytest.raises(InvalidValue):
        door.ask(full(), [W, np.array([np.inf])], key="k")


def test_threads_that_ask_different_things_are_charged_for_their_own():
    """Through one door, which remembers the last price: cheap and dear questions, all at once."""
    ledger = ft.Ledger(ft.Budget(1e6, 1e-5))
    door, asked = ledger.over(ROWS), {10.0: 150, 40.0: 150}

    def ask(noise):
        question = full(noise)
        return [door.ask(question, W).receipt.event.noise for _ in range(asked[noise])]

    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(asked, pool.map(ask, asked), strict=True))
        for noise, events in zip([10.0, 40.0] * 4, pool.map(ask, [10.0, 40.0] * 4), strict=True):
            assert set(events) == {noise}
    assert all(set(events) == {noise} for noise, events in found.items())
    assert ledger.filter.share([5 * (150 / 100 + 150 / 1600)]) == pytest.approx(ledger.share)


def test_a_receipt_says_where_its_query_clipped(tmp_path):
    contribution = ft.PerExample(lambda rows, w: rows[0] - w)
    clipped = ft.Query(ft.Everyone(), contribution, ft.ClipNorm(2), ft.Gaussian(50.0))
    clamped = ft.Query(ft.Everyone(), contribution, ft.ClipValue(0.0, 1.0), ft.Gaussian(50.0))
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=tmp_path / "a.ledger") as ledger:
        door = ledger.over(ft.Rows(np.ones((5, 1))))
        assert door.ask(clipped, np.zeros(1)).receipt.clip == 2.0
        assert door.ask(clamped, np.zeros(1)).receipt.clip is None
        kept = [door.ask(clipped, np.zeros(1), key="kept").receipt for _ in range(2)]
    assert kept[0] == kept[1]
    assert kept[0].clip == 2.0


def test_a_part_is_charged_for_all_that_it_lets_through():
    basic = ft.Ledger(BUDGET, filter=BasicFilter)
    basic.allot(0.5, 2e-6)
    assert basic.journal.last().state == pytest.approx([0.5, 2e-6], rel=1e-9)
    for adjacency in ft.Adjacency:
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5, adjacency))
        ledger.allot(0.5, 1e-5)
        expected = (gaussian.mu(0.5, 1e-5) / gaussian.mu(1.0, 1e-5)) ** 2
        assert ledger.share == pytest.approx(expected, rel=1e-6)
    zcdp = ft.Ledger(BUDGET, filter=lambda budget: ZcdpFilter(budget, 1e-6))
    zcdp.allot(0.5, 5e-6, filter=lambda budget: ZcdpFilter(budget, 2e-7))
    assert zcdp.journal.last().state[1] == pytest.approx(2e-7)


def test_what_is_reserved_is_used_once_and_counts_as_affordable():
    ledger, question = ft.Ledger(BUDGET), full()
    ledger.reserve(question, 3)
    door, reserved = ledger.over(ROWS), ledger.journal.last().seq
    assert [door.ask(question, W).receipt.seq for _ in range(4)] == [reserved] * 3 + [reserved + 1]
    most = 1
    while ledger.affords(question, most + 1):
        most += 1
    ledger.reserve(question, most)
    assert ledger.affords(question, most)
    assert not ledger.affords(question, most + 1)


def test_a_ledger_of_seeded_noise_is_not_opened_again(tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger", stream=SeededStream(0)) as ledger:
        ledger.over(ROWS).ask(full(), W)
    with pytest.raises(Unsupported, match="seeded"):
        ft.Ledger.open(tmp_path / "a.ledger")


@pytest.mark.parametrize("adjacency", ft.Adjacency)
def test_a_plan_guarantees_what_all_its_promises_cost_together(adjacency):
    budget = ft.Budget(2.0, 1e-5, adjacency)
    ledger, first, second = ft.Ledger(budget), GaussianEvent(40.0), GaussianEvent(20.0)
    ledger.promise(first, 10)
    ledger.promise(second, 5)
    shift = 2.0 if adjacency is ft.Adjacency.REPLACE_ONE else 1.0
    mu = shift * (10 / 40**2 + 5 / 20**2) ** 0.5
    assert ledger.guarantee.epsilon == pytest.approx(gaussian.epsilon(mu, 1e-5), rel=1e-6)


def test_what_is_left_of_basic_composition_has_less_of_both():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=BasicFilter)
    ledger.allot(0.25, 4e-6)
    assert (ledger.rest.epsilon, ledger.rest.delta) == pytest.approx((0.75, 6e-6), rel=1e-6)


def test_a_second_promise_must_fit_beside_the_first():
    ledger, first = ft.Ledger(BUDGET), GaussianEvent(40.0)
    most = ledger.promise(first).times
    for times in (1, most // 2):
        with pytest.raises(BudgetSpent, match=r"against anyone beside 1 promise$"):
            ledger.promise(GaussianEvent(20.0), times)
    assert ft.Ledger(BUDGET).promise(GaussianEvent(20.0), most // 5).times == most // 5  # alone it does


def test_an_order_that_prices_no_more_never_fits_again():
    """At order 10,000 this answer has no price; the other order goes on, and that one stays infinite."""
    ledger = ft.Ledger(ft.Budget(50.0, 1e-5), filter=lambda budget: RdpFilter(budget, (2.0, 1e4)))
    for question in (query(0.5), full(), full()):
        ledger.over(ROWS).ask(question, W)
        assert ledger.journal.last().state[1] >= 1e300


def test_a_rehearsal_has_the_balance_and_charges_nothing(tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger") as ledger:
        ledger.allot(BUDGET.epsilon / 2, BUDGET.delta)
        rows, copy = list(ledger.journal.rows()), ledger.rehearsal()
        assert copy.share == ledger.share
        copy.allot()
        with pytest.raises(BudgetSpent):
            copy.allot(BUDGET.epsilon / 2, BUDGET.delta)
        assert list(ledger.journal.rows()) == rows
    plan = ft.Ledger(BUDGET)
    countdown = plan.promise(GaussianEvent(40.0), 3)
    assert plan.rehearsal().promise(GaussianEvent(40.0)).left == countdown.left == 3


def test_a_listener_is_told_of_every_answer_and_goes_along_to_other_records():
    told = []
    ledger = ft.Ledger(BUDGET).with_listener(lambda *answered: told.append(answered))
    question = full()
    answers = [ledger.over(ROWS).ask(question, W + n) for n in range(2)]
    assert [(one[0], one[1][0], one[2]) for one in told] == [(question, n, answers[n]) for n in range(2)]
    with pytest.raises(BudgetSpent):
        ledger.over(ROWS).ask(full(0.1), W)
    assert len(told) == 2


@pytest.mark.parametrize("promised", [False, True])
def test_a_rehearsal_has_the_balance_and_spends_none_of_it(promised, tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger", block=4) as ledger:
        ledger.note("counts are public")
        if promised:
            ledger.promise(full(), 50)
        for _ in range(5):
            ledger.over(ROWS).ask(full(), W)
        before, like = [row.hash for row in ledger.journal.rows()], ledger.rehearsal()
        assert (like.spent, like.guarantee) == (ledger.spent, ledger.guarantee)
        turn = like.over(ROWS).ask(full(), W).receipt.turn
        assert turn == (8 if promised else 0)  # the three that are reserved count as spent there
        assert like.spent.epsilon > ledger.spent.epsilon
        assert [row.hash for row in ledger.journal.rows()] == before
        with pytest.raises(InvalidValue, match="no records"):
            ledger.over(ROWS).rehearsal().ask(full(), W)


def test_noise_that_does_not_answer_to_the_bound_is_refused_after_noise_that_does():
    scores = ft.PerExample(lambda rows, w: rows[0])
    bound = ft.ClipValue(0.0, 1.0)  # of each score for a choice, of one number for noise on a sum
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5)).over(ft.Rows(np.ones((5, 3))))
    ledger.ask(ft.Query(ft.Everyone(), scores, bound, ft.NoisyMax(10.0)))
    before = ledger.share
    with pytest.raises(InvalidValue, match="ClipValue bounds one number"):
        ledger.ask(ft.Query(ft.Everyone(), scores, bound, ft.Gaussian(20.0)))
    assert ledger.share == before


@pytest.mark.parametrize("records", [np.ones((50, 3)), [[1.0]], {"a": [1.0]}, None, "rows"])
def test_an_array_is_no_records(records):
    """``take`` of an array counts single numbers: a row of three would count three times."""
    with pytest.raises(InvalidValue, match="records must"):
        ft.Ledger(ft.Budget(1.0, 1e-5)).over(records)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: ft.Ledger(1.0), "budget must be ft.Budget"),
        (lambda: ft.Ledger((1.0, 1e-5)), "budget must be ft.Budget"),
        (lambda: ft.Ledger(ft.Budget(1.0, 1e-5), filter="gdp"), "filter must be a class"),
        (lambda: ft.Ledger(ft.Budget(1.0, 1e-5), stream=0), "stream must have"),
        (lambda: ft.Ledger(ft.Budget(1.0, 1e-5)).over(ft.Rows(np.ones((2, 1)))).ask("mean"), "a ft.Query"),
        (lambda: ft.count([1], ledger=ft.Budget(1.0, 1e-5)), "ledger must be ft.Ledger"),
        (lambda: ft.LogisticRegression(ledger="my.ledger").fit(np.ones((2, 1)), [0, 1]), "must be ft.Ledger"),
        (lambda: ft.Query(ft.Everyone, None, ft.ClipNorm(1.0), ft.Gaussian(1.0)), "Everyone\\(\\.\\.\\.\\)"),
        (lambda: ft.Query(ft.Everyone(), None, ft.ClipNorm(1.0), 1.0), "mechanism must have check"),
        (lambda: ft.ClipNorm(1.0, scale="x"), "scale must be a number"),
        (lambda: ft.PCA(1, 1.0, 1e-5, centre="x").fit(np.ones((2, 1))), "centre must be a number"),
    ],
)
def test_things_of_the_wrong_kind_are_named(wrong, said):
    with pytest.raises(InvalidValue, match=said):
        wrong()
