"""Turns: mechanisms and samplers learn how many answers of their plan came before, whatever happened."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import pld
from farthing.errors import BudgetSpent, PromiseBroken, Unsupported
from farthing.ledger.turns import Turns
from farthing.ledger.verifier import verify
from farthing.queries.events import GaussianEvent, RepeatedEvent, TurnEvent, decode, encode, flatten

BUDGET = ft.Budget(1.0, 1e-5)
ROWS = ft.Rows(np.ones((12, 1)))
W = np.zeros(1)
SEEN: list[int] = []


@dataclass(frozen=True)
class Telescoping(ft.Gaussian):
    """Noise z_t - z_(t-1), so that a running sum of the answers has noise z_t only; its price is made up."""

    kept: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def release(self, total, bound, stream, turn=0):
        SEEN.append(turn)
        before = self.kept.get(turn - 1, 0.0)
        self.kept[turn] = float(
            ft.Gaussian(self.noise_multiplier).release(np.zeros(1), bound, stream, turn)[0]
        )
        return total + self.kept[turn] - before

    def plan(self, event, steps):
        return RepeatedEvent(GaussianEvent(self.noise_multiplier / 2), math.ceil(steps / 4))


@dataclass(frozen=True)
class Cycle:
    """Block t mod ``blocks`` of the records at turn t, so that a record takes part once a cycle."""

    blocks: int

    def draw(self, records, stream, turn=0):
        return np.arange(turn % self.blocks, records, self.blocks)

    def amplify(self, step, observer=ft.Observer.ANYONE):
        return ft.Everyone().amplify(step, observer)

    def plan(self, event, steps, observer):
        return RepeatedEvent(event, math.ceil(steps / self.blocks))


def query(mechanism=None, sampler=None):
    mechanism = mechanism or Telescoping(40.0)
    return ft.Query(
        sampler or ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), mechanism
    )


@pytest.fixture(autouse=True)
def forgotten():
    SEEN.clear()


def turns(door, question, count):
    return [door.ask(question, W).receipt.turn for _ in range(count)]


@pytest.mark.parametrize("block", [1, 3, 32])
def test_turns_count_the_answers_of_a_plan_in_memory(block):
    ledger = ft.Ledger(BUDGET, block=block)
    ledger.promise(query(), 20)
    assert turns(ledger.over(ROWS), query(), 20) == SEEN == list(range(20))
    with pytest.raises(BudgetSpent, match="0 of 20"):
        ledger.over(ROWS).ask(query(), W)


@pytest.mark.parametrize("block", [1, 4])
def test_turns_go_on_after_a_clean_close(block, tmp_path):
    for start in (0, 3, 6):
        with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger", block=block) as ledger:
            ledger.promise(query(), 20)
            assert turns(ledger.over(ROWS), query(), 3) == [start, start + 1, start + 2]
    assert list(range(9)) == SEEN


def test_turns_of_a_plain_plan_are_counted_as_well(tmp_path):
    plain = query(ft.Gaussian(40.0))
    for start in (0, 2):
        with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger") as ledger:
            ledger.promise(plain)
            assert turns(ledger.over(ROWS), plain, 2) == [start, start + 1]


def test_two_plans_have_turns_of_their_own():
    ledger = ft.Ledger(BUDGET, block=2)
    one, other = query(Telescoping(40.0)), query(Telescoping(50.0))
    ledger.promise(one, 5), ledger.promise(other, 5)
    asked = [ledger.over(ROWS).ask(each, W).receipt.turn for each in (one, other, one, one, other, other)]
    assert asked == [0, 0, 1, 2, 1, 2]


def test_without_a_promise_every_answer_is_a_plan_of_one_turn():
    ledger = ft.Ledger(BUDGET)
    ledger.reserve(query(), 2)
    assert turns(ledger.over(ROWS), query(), 4) == SEEN == [0, 0, 0, 0]
    assert ledger.spent.accountant == "gdp"


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_turns import *
ledger = ft.Ledger(BUDGET, journal={journal!r}, block=5)
ledger.promise(query(), 40)
door = ledger.over(ROWS)
print(*turns(door, query(), 7), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_turns_that_a_killed_process_had_reserved_are_skipped_for_good(tmp_path):
    journal = tmp_path / "a.ledger"
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path], journal=str(journal))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout.split() == [str(turn) for turn in range(7)]
    with ft.Ledger.open(journal, block=5) as ledger:
        assert turns(ledger.over(ROWS), query(), 2) == [10, 11]  # two blocks were charged
    with ft.Ledger.open(journal) as ledger:
        assert turns(ledger.over(ROWS), query(), 1) == [12]
        assert ledger.promise(query()).left == 40 - 13


def test_processes_that_share_a_plan_never_share_a_turn(tmp_path):
    journal = tmp_path / "a.ledger"
    one, other = (ft.Ledger(BUDGET, journal=journal, block=4) for _ in range(2))
    one.promise(query(), 12)
    taken = turns(one.over(ROWS), query(), 1) + turns(other.over(ROWS), query(), 2)
    assert taken == [0, 4, 5]
    one.close()  # gives 1, 2 and 3 back
    with ft.Ledger.open(journal) as last, contextlib.suppress(BudgetSpent):
        door = last.over(ROWS)
        while True:
            taken += turns(door, query(), 1)
    assert taken == [0, 4, 5, 1, 2, 3, 8, 9, 10, 11]  # 6 and 7 are still reserved by the other
    assert turns(other.over(ROWS), query(), 2) == [6, 7]
    other.close()
    assert verify(exported(journal)).code == 0


def test_a_forked_child_takes_turns_of_its_own(tmp_path):
    ledger = ft.Ledger(BUDGET, journal=tmp_path / "a.ledger", block=4)
    ledger.promise(query(), 20)
    assert turns(ledger.over(ROWS), query(), 1) == [0]
    child = os.fork()
    if not child:
        os._exit(0 if turns(ledger.over(ROWS), query(), 2) == [4, 5] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert turns(ledger.over(ROWS), query(), 4) == [1, 2, 3, 8]


def test_a_kept_answer_keeps_its_turn(tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger", block=4) as ledger:
        ledger.promise(query(), 20)
        door = ledger.over(ROWS)
        first = [door.ask(query(), W, key=f"{n}").receipt.turn for n in range(3)]
        assert (first, turns(door, query(), 1)) == ([0, 1, 2], [3])
    with ft.Ledger.open(tmp_path / "a.ledger") as ledger:
        assert ledger.over(ROWS).ask(query(), W, key="2").receipt.turn == 2
        assert turns(ledger.over(ROWS), query(), 1) == [4]


def test_a_sampler_that_cycles_sees_its_turn_in_the_batch_path():
    seen = []
    blocks = ft.Rows(np.arange(12.0)[:, None])
    question = ft.Query(
        Cycle(3),
        ft.PerExample(lambda rows, w: seen.append(rows[0].ravel().tolist()) or rows[0] - w),
        ft.ClipNorm(1.0),
        ft.Gaussian(40.0),
    )
    ledger = ft.Ledger(BUDGET, block=2)
    ledger.promise(question, 6)
    for _ in range(6):
        ledger.over(blocks).ask(question, W)
    drawn = [part for part in seen if part]
    assert [part[0] for part in drawn] == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert sorted(np.concatenate(drawn[:3])) == list(range(12))


def test_noise_that_telescopes_adds_up_to_the_last_of_it():
    ledger = ft.Ledger(BUDGET)
    question = query(Telescoping(40.0))
    ledger.promise(question, 30)
    answers = [float(ledger.over(ROWS).ask(question, W).value[0]) for _ in range(30)]
    assert sum(answers) == pytest.approx(12 * 30 + question.mechanism.kept[29])


def test_a_plan_is_priced_as_one_event_over_all_of_its_turns():
    ledger = ft.Ledger(BUDGET)
    countdown = ledger.promise(query(Telescoping(40.0)))
    per_cycle = ft.steps_for(GaussianEvent(20.0), BUDGET)
    assert countdown.times == 4 * per_cycle
    plan = RepeatedEvent(GaussianEvent(20.0), per_cycle)
    assert ledger.guarantee.epsilon == pld.epsilon(plan, 1e-5)
    assert ledger.spent.epsilon == 0
    ledger.over(ROWS).ask(query(Telescoping(40.0)), W)
    assert ledger.spent.epsilon == ledger.guarantee.epsilon  # one turn has no price of its own
    assert (
        ledger.promise(query(Telescoping(40.0))).left == countdown.times - 1
    )  # promised again, it is joined
    with pytest.raises(PromiseBroken, match="already promised"):
        ledger.promise(query(Telescoping(40.0)), 3)


def test_a_plain_plan_costs_what_it_cost_before():
    plain = query(ft.Gaussian(40.0), ft.Poisson(0.1))
    assert plain.plan(BUDGET, 7) == RepeatedEvent(plain.price(BUDGET), 7)
    assert plain.promised(BUDGET, 7) == plain.price(BUDGET)


def test_only_what_was_priced_is_answered():
    ledger = ft.Ledger(BUDGET)
    ledger.promise(query(sampler=Cycle(4), mechanism=ft.Gaussian(40.0)), 20)
    for other in (
        query(ft.Gaussian(40.0)),  # the same price, but nobody counts on its memory
        query(sampler=Cycle(3), mechanism=ft.Gaussian(40.0)),
        query(Telescoping(40.0)),
    ):
        with pytest.raises(PromiseBroken):
            ledger.over(ROWS).ask(other, W)
    plain = ft.Ledger(BUDGET)
    plain.promise(query(ft.Gaussian(40.0)), 20)
    with pytest.raises(PromiseBroken, match="was not promised"):
        plain.over(ROWS).ask(query(Telescoping(40.0)), W)
    with pytest.raises(BudgetSpent):
        ft.Ledger(BUDGET).promise(query(Telescoping(1.0)), 20)
    with pytest.raises(BudgetSpent, match="not even one"):
        ft.Ledger(BUDGET).promise(query(Telescoping(1.0)))
    with pytest.raises(Unsupported, match="both depend on the turn"):
        ft.Ledger(BUDGET).promise(query(sampler=Cycle(3)), 2)


def exported(journal):
    out = journal.with_suffix(".jsonl")
    with ft.Ledger.open(journal) as ledger, out.open("w") as file:
        ledger.journal.export(file)
    return out.read_text().splitlines()


def test_the_verifier_prices_a_plan_with_memory_as_one_event(tmp_path):
    journal = tmp_path / "a.ledger"
    with ft.Ledger(BUDGET, journal=journal, block=3) as ledger:
        ledger.promise(query(Telescoping(40.0)), 20)
        turns(ledger.over(ROWS), query(Telescoping(40.0)), 4)
        claimed = ledger.spent.epsilon
    found = verify(exported(journal))
    assert found.code == 0, found.reason
    assert found.spent[0] <= claimed <= found.spent[1] * (1 + 1e-6)


def test_events_of_turns_are_written_and_read():
    event = TurnEvent(RepeatedEvent(GaussianEvent(2.0), 3), 12, "it")
    assert decode(encode(event)) == event
    assert flatten(RepeatedEvent(event, 5)) == flatten(event) == [(GaussianEvent(2.0), 3)]
    assert flatten(RepeatedEvent(event, 13)) == [(GaussianEvent(2.0), 6)]  # more turns than were priced


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), max_size=30))
def test_no_turn_is_held_twice_and_none_is_beyond_what_was_held_at_once(steps):
    found, held, most = Turns(), {}, 0
    for seq, (count, back, of) in enumerate(steps):
        found.charge(seq, count)
        held[seq] = count
        most = max(most, sum(held.values()))
        if of in held:
            back = min(back, held[of])
            found.refund(of, back)
            held[of] -= back
        taken = [turn for seq in held for turn in found.held(seq)]
        assert len(set(taken)) == len(taken) == sum(held.values())
        assert max(taken, default=0) < max(most, 1)


def test_freed_turns_are_taken_from_the_lowest_on():
    found = Turns()
    assert found.charge(1, 3) == [range(3)]
    assert found.charge(2, 3) == [range(3, 6)]
    found.refund(2, 1)
    found.refund(1, 3)
    assert found.charge(5, 6) == [range(3), range(5, 6), range(6, 8)]
    assert list(found.held(2)) == [3, 4]


def banded(noise=4.0, bands=3):
    return query(ft.BandedGaussian(noise, bands), ft.Cyclic(0.1, bands))


WIDE = ft.Rows(np.zeros((12, 20_000)))
AT = np.zeros(20_000)


def covariance(one, other):
    return float(one.value @ other.value) / one.value.size / 16.0


def test_correlated_noise_cancels_over_the_turns_of_one_plan_and_not_over_two():
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5))
    one, other = banded(), banded(bands=2)
    ledger.promise(one, 6), ledger.promise(other, 6)
    private = ledger.over(WIDE)
    a, b, c, d = (private.ask(each, AT) for each in (one, other, one, other))
    assert covariance(a, c) < -0.3  # -0.7, up to 0.06
    assert covariance(b, d) < -0.3
    assert all(abs(covariance(x, y)) < 0.1 for x, y in [(a, b), (a, d), (b, c), (c, d)])


def test_a_plan_that_goes_by_places_is_asked_over_one_set_of_records_and_others_cost_nothing():
    asked = query(ft.Gaussian(40.0), Cycle(3))
    ledger = ft.Ledger(BUDGET)
    ledger.promise(asked, 6)
    ledger.over(ROWS).ask(asked, W)
    rows = len(list(ledger.journal.rows()))
    with pytest.raises(Unsupported, match="use the same records"):
        ledger.over(ft.Rows(np.ones((12, 1)))).ask(asked, W)
    assert len(list(ledger.journal.rows())) == rows
    assert ledger.over(ROWS).ask(asked, W).receipt.turn == 1


def test_over_other_records_noise_and_groups_begin_anew_between_cycles():
    one, two = (ft.Rows(np.full((90, 20_000), sign / 200)) for sign in (1, -1))  # of norm 0.7 each
    asked = query(ft.BandedGaussian(0.5, 3), ft.Cyclic(1 / 3, 3))
    ledger = ft.Ledger(ft.Budget(40.0, 1e-5))
    ledger.promise(asked, 9)
    answers = [ledger.over(records).ask(asked, AT).value for records in (one, two, two, two)]
    sums = [float(value.sum()) for value in answers]  # a deviation is 83, thirty are 3,000
    assert [round(value / 3000) for value in sums] == [1, 0, 0, -1]
    assert abs(float((answers[0] - 30 / 200) @ answers[1])) / 20_000 < 0.025  # 0.17 where noise cancels


def test_a_ledger_that_is_opened_again_goes_on_with_fresh_noise_and_waits_for_a_cycle(tmp_path):
    everybody = ft.Rows(np.ones((90, 20_000)) / 200)  # of norm 0.7 each
    asked, journal = query(ft.BandedGaussian(0.5, 3), ft.Cyclic(1 / 3, 3)), tmp_path / "a.ledger"
    with ft.Ledger(ft.Budget(40.0, 1e-5), journal=journal) as ledger:
        ledger.promise(asked, 9)
        before = ledger.over(everybody).ask(asked, AT)
    with ft.Ledger.open(journal) as ledger:
        private = ledger.over(everybody)
        after = [private.ask(asked, AT) for _ in range(3)]
    assert [answer.receipt.turn for answer in after] == [1, 2, 3]
    sums = [float(answer.value.sum()) for answer in (before, *after)]
    assert [value > 800 for value in sums] == [
        True,
        False,
        False,
        True,
    ]  # a deviation is 83, thirty are 3,000
    noise = before.value - before.value.mean(), after[0].value
    assert abs(float(noise[0] @ noise[1])) / 20_000 < 0.025  # 0.17 where it cancels
    assert verify(exported(journal)).code == 0


def test_threads_over_two_tables_of_the_same_people_draw_nobody_twice_in_a_cycle(monkeypatch):
    """Both threads have begun before either is charged: each must keep the memory that it began with."""
    seen = []
    who = ft.PerExample(lambda rows, w: seen.append(rows[0][:, 0].tolist()) or rows[0] * 0)
    asked = ft.Query(ft.Cyclic(1 / 4, 4), who, ft.ClipNorm(1.0), ft.BandedGaussian(3.0, 4))
    people = np.arange(400.0)[:, None]
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5))
    ledger.promise(asked, 8)
    both, take = threading.Barrier(2), ledger._books.take
    monkeypatch.setattr(ledger._books, "take", lambda *given: both.wait(60) >= 0 and take(*given))
    tables = [ft.Rows(people), ft.Rows(people[::-1].copy())]
    threads = [threading.Thread(target=ledger.over(table).ask, args=(asked, W)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drawn = [person for batch in seen for person in batch]
    assert drawn
    assert len(set(drawn)) == len(drawn)
