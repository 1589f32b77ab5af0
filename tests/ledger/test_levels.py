"""A ledger of personal budgets: what holds for whom, in the ledger, its journal and the verifier."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.personal import PersonalBudgets, everyone, plan_rates
from farthing.cli.ledger_output import ledger as ledger_facts
from farthing.cli.ledger_output import ledger_lines, verification, verification_lines
from farthing.errors import BudgetSpent, InvalidValue, PromiseBroken, Unsupported
from farthing.ledger import levels, verifier
from farthing.queries.events import GaussianEvent, PersonalEvent, PoissonEvent, encode
from farthing.queries.personal import Personal
from farthing.queries.query import PerExample, Query, Rows
from farthing.report.document import page
from farthing.report.subject import Subject

DELTA = 1e-5
PEOPLE = PersonalBudgets(np.repeat([1.0, 2.0, 4.0], [300, 500, 200]))
ROWS = Rows(np.ones((1000, 2)))
TOTAL = PerExample(lambda rows, w: rows[0])


def planned(people=PEOPLE, steps=40, sampling_rate=0.1):
    plan = plan_rates(people, DELTA, steps=steps, sampling_rate=sampling_rate)
    return plan, Query(plan.sampler, TOTAL, ft.ClipNorm(1.0), ft.Gaussian(plan.noise_multiplier))


def exported(ledger):
    return [json.dumps(asdict(row)) for row in ledger.journal.rows()]


def test_every_level_ends_at_its_own_budget_and_no_answer_comes_after():
    plan, query = planned()
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE)
    private = ledger.over(PEOPLE.over(ROWS))
    assert ledger.promise(query, plan.steps).times == 40
    for turn in range(40):
        assert private.ask(query).receipt.turn == turn
    with pytest.raises(BudgetSpent):
        private.ask(query)
    assert list(ledger.guarantees) == [1.0, 2.0, 4.0]
    for level, said in ledger.guarantees.items():
        assert level * (1 - 1e-5) <= said.epsilon <= level
        assert "farthing.queries.personal" in said.theorem
    assert ledger.guarantee.epsilon == pytest.approx(4.0)
    assert ledger.share == 1.0


def test_one_more_answer_than_the_smallest_level_allows_is_not_promised():
    plan, query = planned()
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE)
    with pytest.raises(BudgetSpent):
        ledger.promise(query, plan.steps + 1)
    assert ledger.promise(query).times == plan.steps


def test_swapped_rates_do_not_fit():
    plan, query = planned()
    swapped = Query(Personal(plan.sampling_rates[::-1]), TOTAL, query.bound, query.mechanism)
    with pytest.raises(BudgetSpent):
        ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE).promise(swapped, plan.steps)


def test_the_statement_says_that_budgets_and_sizes_are_public():
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE)
    ledger.over(PEOPLE.over(ROWS))
    assert "300 at epsilon 1, 500 at epsilon 2, 200 at epsilon 4" in ledger.guarantee.note
    assert "taken as public" in ledger.guarantee.note
    ledger.over(PEOPLE.over(ROWS))
    assert sum(row.kind == "note" for row in ledger.journal.rows()) == 1


def test_weighted_answers_of_everybody_may_be_chosen_on_the_way():
    budget, sampler = PEOPLE.budget(DELTA), everyone(PEOPLE(PEOPLE.budget(DELTA)))
    ledger = ft.Ledger(budget, filter=PEOPLE)
    private, mu = ledger.over(PEOPLE.over(ROWS)), ledger.budget.mu
    for share in (0.5, 0.3, 0.2):
        query = Query(sampler, TOTAL, ft.ClipNorm(2.0), ft.Gaussian(1 / (mu * np.sqrt(share))))
        answer = private.ask(query)
        noise = 2 / (mu * np.sqrt(share))
        assert np.abs(answer.value - sampler.expected(PEOPLE.sizes)).max() < 8 * noise
    with pytest.raises(BudgetSpent):
        private.ask(query)
    for level, said in levels.spent(ledger._books).items():
        assert said.epsilon == pytest.approx(level, rel=1e-6)
    assert [said.epsilon for said in ledger.guarantees.values()] == [1.0, 2.0, 4.0]
    found = verifier.verify(exported(ledger))
    assert found.code == 0, found.reason
    assert found.levels.keys() == {1.0, 2.0, 4.0}


def test_records_of_other_levels_than_the_ledgers_are_refused():
    others = PersonalBudgets([1.0, 3.0])
    with pytest.raises(InvalidValue, match="epsilons 1, 3, but the ledger has 1, 2, 4"):
        ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE).over(others.over(Rows(np.ones((2, 1)))))
    with pytest.raises(InvalidValue, match="the ledger has 4"):
        ft.Ledger(PEOPLE.budget(DELTA)).over(PEOPLE.over(ROWS))


def test_personal_rates_need_records_with_levels_before_anything_is_charged():
    plan, query = planned()
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE)
    ledger.promise(query, plan.steps)
    with pytest.raises(Unsupported, match="Leveled"):
        ledger.over(ROWS).ask(query)
    assert ledger.share == 0.0


def test_a_record_that_fails_counts_as_nothing_also_with_weights():
    def failing(rows, w):
        if (rows[0] == 7).any():
            raise ValueError("seven")
        return rows[0]

    values = np.ones((1000, 2))
    values[17] = 7.0
    sampler = everyone(PEOPLE(PEOPLE.budget(DELTA)))
    query = Query(sampler, PerExample(failing), ft.ClipNorm(2.0), ft.Gaussian(4.0))
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE).over(PEOPLE.over(Rows(values)))
    level = sampler.factors[PEOPLE.levels[17]]
    expected = sampler.expected(PEOPLE.sizes) - level
    assert np.abs(ledger.ask(query).value - expected).max() < 64


def test_a_plain_promise_costs_every_level_the_same():
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE)
    times = ledger.promise(PoissonEvent(0.1, GaussianEvent(3.0))).times
    alone = ft.Ledger(ft.Budget(1.0, DELTA)).promise(PoissonEvent(0.1, GaussianEvent(3.0))).times
    assert times == alone, "the smallest budget decides"


def test_no_part_of_personal_budgets_is_handed_on():
    with pytest.raises(Unsupported, match="personal filter"):
        ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE).allot(0.5, 1e-6)


def test_a_ledger_of_one_budget_has_one_level():
    ledger = ft.Ledger(ft.Budget(1.0, DELTA))
    assert list(ledger.guarantees) == [1.0]
    assert ledger.guarantees[1.0] == ledger.guarantee


# --- the journal


def test_a_journal_is_opened_again_with_its_levels_and_goes_on(tmp_path):
    plan, query = planned()
    path = tmp_path / "people.ledger"
    with ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE, journal=path, block=8) as ledger:
        private = ledger.over(PEOPLE.over(ROWS))
        ledger.promise(query, plan.steps)
        for _ in range(13):
            private.ask(query)
    with ft.Ledger.open(path) as again:
        assert again.filter.epsilons == (1.0, 2.0, 4.0)
        countdown = again.promise(query, plan.steps)
        assert countdown.left == 27
        assert again.over(PEOPLE.over(ROWS)).ask(query).receipt.turn == 13
    with pytest.raises(Exception, match="was created differently"):
        ft.Ledger(PEOPLE.budget(DELTA), journal=path)


def test_a_killed_process_forfeits_what_it_reserved_and_no_level_passes_its_budget(tmp_path):
    path = tmp_path / "people.ledger"
    script = f"""
import os, numpy as np, farthing as ft
from tests.ledger.test_levels import PEOPLE, ROWS, planned, DELTA
plan, query = planned()
ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE, journal={str(path)!r}, block=8)
private = ledger.over(PEOPLE.over(ROWS))
ledger.promise(query, plan.steps)
for _ in range(10):
    private.ask(query)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    _plan, query = planned()
    with ft.Ledger.open(path) as ledger:
        private = ledger.over(PEOPLE.over(ROWS))
        for _ in range(40 - 16):
            private.ask(query)
        with pytest.raises(BudgetSpent):
            private.ask(query)
        assert ledger.share == 1.0


def test_the_verifier_recomputes_every_level_from_the_rows():
    plan, query = planned(steps=12)
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE, block=4)
    private = ledger.over(PEOPLE.over(ROWS))
    ledger.promise(query, plan.steps)
    for _ in range(6):
        private.ask(query)
    found = verifier.verify(exported(ledger))
    assert found.code == 0, found.reason
    for level, (low, high) in found.levels.items():
        assert low <= level <= high * (1 + 1e-6)
        assert high - low < 1e-3 * level
    assert "level    2: epsilon from" in str(found)


def forged(rates, steps, epsilons=(1.0, 2.0, 4.0), noise=2.0):
    """An export whose promise was never checked against the levels' budgets."""
    people = PersonalBudgets([max(epsilons)], epsilons=epsilons)
    ledger = ft.Ledger(ft.Budget(max(epsilons), DELTA), filter=people)
    event = Personal(rates).amplify(GaussianEvent(noise))
    books = ledger._books
    books._promised = lambda last, event, times: (
        {"event": encode(event), "times": times},
        [*books._state(last), 0.0],
    )
    ledger.promise(event, steps)
    return exported(ledger)


def test_the_verifier_finds_a_level_beyond_its_own_budget_within_the_largest():
    fine = forged((0.02, 0.05, 0.1), 10)
    assert verifier.verify(fine).code == 0
    swapped = verifier.verify(forged((0.5, 0.05, 0.02), 10))
    assert swapped.code == 1
    assert "of a personal 1" in swapped.reason


def test_the_verifier_refuses_events_of_other_levels_and_levels_that_do_not_rise():
    ledger = ft.Ledger(ft.Budget(2.0, DELTA), filter=PersonalBudgets([1.0, 2.0]))
    ledger.promise(PersonalEvent((GaussianEvent(50.0), GaussianEvent(50.0))), 2)
    lines = exported(ledger)
    assert verifier.verify(lines).code == 0
    audit = verifier._Audit()
    header = json.loads(lines[0])["body"]
    for epsilons in ([2.0, 1.0], [1.0, 3.0], []):
        with pytest.raises(ValueError, match="personal budgets are"):
            audit._open(header["noise"], header["budget"], "personal", epsilons=epsilons)
    audit._open(header["noise"], header["budget"], "personal", epsilons=[0.5, 1.0, 2.0])
    body = json.loads(lines[1])["body"]
    with pytest.raises(ValueError, match="2 levels of budget, and the ledger 3"):
        audit._apply(1, "promise", body, None)


def test_promises_are_made_before_the_first_answer_here_as_well():
    plan, query = planned()
    ledger = ft.Ledger(PEOPLE.budget(DELTA), filter=PEOPLE)
    private = ledger.over(PEOPLE.over(ROWS))
    private.ask(Query(everyone(ledger.filter), TOTAL, ft.ClipNorm(1.0), ft.Gaussian(50.0 / ledger.budget.mu)))
    with pytest.raises(PromiseBroken):
        ledger.promise(query, plan.steps)


# --- in words


def test_the_command_line_and_the_report_say_what_holds_for_whom(tmp_path):
    people = PersonalBudgets(np.repeat([0.1, 1.0, 2.0], [1, 500, 499]))
    plan, query = planned(people, 20)
    assert plan.sampling_rates[0] == 0
    path = tmp_path / "people.ledger"
    with ft.Ledger(people.budget(DELTA), filter=people, journal=path) as ledger:
        private = ledger.over(people.over(ROWS))
        ledger.promise(query, plan.steps)
        private.ask(query)
        report = page(Subject.of(ledger, title="people", method="sums"))
    words = ledger_lines(ledger_facts(path))["for whom"]
    assert words[0] == "budget 0.1: takes no part, so nothing about these records is released"
    assert words[2].startswith("budget 2: epsilon 2 in all, 0.")
    assert "0 of 0.1; 1 of 1; 2 of 2" in report
    assert "Each record at the rate of its own level of budget" in report
    checked = verification(path)
    assert checked["ok"], checked["verdict"]
    assert verification_lines(checked)["levels"][0] == "budget 0.1: epsilon 0"
