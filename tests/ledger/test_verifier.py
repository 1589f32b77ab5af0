"""An export is believed only if everything in it follows: real ledgers pass, every tampering is caught."""

import ast
import hashlib
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import pld
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.errors import BudgetSpent
from farthing.ledger import verifier
from farthing.ledger.journal import Journal
from farthing.ledger.verifier import verify
from farthing.noise.lattice import SeededStream
from farthing.queries.events import (
    ApproximateEvent,
    BoundedRangeEvent,
    ComposedEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
    encode,
)

SOURCE = Path(verifier.__file__)
ROWS = ft.Rows(np.ones((50, 2)))
W = np.zeros(2)
ADJACENCIES = list(ft.Adjacency)


def query(mechanism, sampler=None, bound=None):
    return ft.Query(
        sampler or ft.Everyone(),
        ft.PerExample(lambda rows, w: rows[0] - w),
        bound or ft.ClipNorm(1.0),
        mechanism,
    )


def exported(ledger):
    buffer = io.StringIO()
    ledger.journal.export(buffer)
    return buffer.getvalue().splitlines()


def sealed(rows):
    """The rows as lines, with a chain that is right whatever they say: what a forger would write."""
    lines, previous = [], "0" * 64
    for seq, row in enumerate(rows):
        row = {**row, "seq": seq, "previous": previous}
        fields = [row[name] for name in ("previous", "seq", "time", "kind", "body", "state")]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        row["hash"] = previous = hashlib.sha256(text.encode()).hexdigest()
        lines.append(json.dumps(row))
    return lines


def encloses(interval, epsilon, above=2e-4):
    """The library's ε is itself an upper bound, so it may lie a little above the interval."""
    low, high = interval
    return low <= epsilon * (1 + 1e-9) and epsilon <= high * (1 + above) + 1e-9


# --- what is in order


EVENTS = [
    GaussianEvent(9.0),
    LaplaceEvent(20.0),
    PureEvent(0.1),
    BoundedRangeEvent(0.2),
    ZcdpEvent(0.01),
    ZcdpEvent(0.01, 1e-7),
    ApproximateEvent(0.1, 1e-7),
    PoissonEvent(0.02, GaussianEvent(2.0)),
    PoissonEvent(0.1, LaplaceEvent(2.0)),
    PoissonEvent(0.1, PureEvent(0.5)),
    FixedSizeEvent(2, 100, GaussianEvent(4.0)),
    FixedSizeEvent(2, 100, BoundedRangeEvent(0.5)),
    DrawnEvent(0.05, GaussianEvent(5.0)),
    RepeatedEvent(GaussianEvent(20.0), 3),
    ComposedEvent((GaussianEvent(30.0), PureEvent(0.05))),
]
FILTERS = [BasicFilter, GdpFilter, RdpFilter, lambda budget: ZcdpFilter(budget, 1e-6)]


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("rule", FILTERS)
def test_filters_and_all_their_events(rule, adjacency):
    ledger = ft.Ledger(ft.Budget(4.0, 1e-5, adjacency), filter=rule)
    priced = 0
    for event in EVENTS:
        try:
            ledger._books.take(event)
            ledger._books.reserve(event, 3)
            ledger._books.reserve(event, 2)  # gives the first three back
            priced += 1
        except (ft.errors.Unsupported, BudgetSpent):
            continue
    verdict = verify(exported(ledger))
    assert (verdict.code, verdict.plan) == (0, None), verdict.reason
    assert priced >= 4
    assert sum(verdict.charged.values()) == 3 * priced
    assert encloses(verdict.spent, ledger.spent.epsilon)
    assert verdict.spent[0] <= ledger.guarantee.epsilon == 4.0
    assert verdict.head == ledger.journal.last().hash
    assert str(ledger.budget) in str(verdict)


TIGHT = [
    [(GaussianEvent(9.0), 5)],
    [(PoissonEvent(0.02, GaussianEvent(1.5)), 300)],
    [(PoissonEvent(0.5, GaussianEvent(4.0)), 2), (LaplaceEvent(20.0), 3)],
    [(FixedSizeEvent(1, 100, GaussianEvent(4.0)), 200), (FixedSizeEvent(5, 5, GaussianEvent(30.0)), 2)],
    [(DrawnEvent(0.1, GaussianEvent(20.0)), 40)],
    [(PureEvent(0.05), 30), (BoundedRangeEvent(0.01), 4)],
    [(PoissonEvent(0.1, PureEvent(0.5)), 10)],
    [(FixedSizeEvent(2, 100, LaplaceEvent(2.0)), 10)],
    [(PoissonEvent(0.01, GaussianEvent(4.0)), 2000), (GaussianEvent(40.0), 3), (PureEvent(0.02), 5)],
    [(RepeatedEvent(PoissonEvent(0.01, GaussianEvent(2.0)), 10), 30)],
]


# each plan under one adjacency quickly, under the others in a slow test
@pytest.mark.parametrize(
    ("plan", "adjacency"),
    [
        pytest.param(plan, adjacency, marks=[pytest.mark.slow] if (place + turn) % 3 else [])
        for place, plan in enumerate(TIGHT)
        for turn, adjacency in enumerate(ADJACENCIES)
    ],
)
def test_promised_plans_of_all_pairs(plan, adjacency):
    ledger = ft.Ledger(ft.Budget(8.0, 1e-6, adjacency))
    try:
        for event, times in plan:
            ledger.promise(event, times)
    except ft.errors.Unsupported:
        pytest.skip("no theorem prices this plan")
    ledger._books.reserve(plan[0][0], plan[0][1])
    verdict = verify(exported(ledger))
    assert verdict.code == 0, verdict.reason
    assert encloses(verdict.plan, ledger.guarantee.epsilon)
    assert encloses(verdict.spent, ledger.spent.epsilon)
    assert verdict.plan[1] - verdict.plan[0] < 0.01 * verdict.plan[1]


def test_the_oracle_of_plans_knows_the_exact_answers():
    """Gaussians compose to a Gaussian; randomised response has δ(ε') = (e^ε - e^ε') / (1 + e^ε)."""
    ledger = ft.Ledger(ft.Budget(5.0, 1e-5))
    ledger.promise(GaussianEvent(8.0), 4)
    low, high = verify(exported(ledger)).plan
    delta = [verifier._gaussian_delta(0.25, epsilon) for epsilon in (low, high)]
    assert 1e-5 * (1 - 1e-4) < delta[1] <= 1e-5 * (1 + 1e-12)
    assert 1e-5 * (1 - 1e-12) <= delta[0] < 1e-5 * (1 + 1e-4)

    ledger = ft.Ledger(ft.Budget(5.0, 1e-3))
    ledger.promise(PureEvent(0.5), 1)
    exact = math.log(math.exp(0.5) - 1e-3 * (1 + math.exp(0.5)))
    low, high = verify(exported(ledger)).plan
    assert low <= exact <= high < low + 1e-6


def test_a_used_ledger_with_everything_in_it(tmp_path):
    budget = ft.Budget(2.0, 1e-6)
    step, count = (
        query(ft.Gaussian(3.0), ft.Poisson(0.1)),
        query(ft.Laplace(40.0), bound=ft.ClipNorm(1.0, order=1)),
    )
    ledger = ft.Ledger(budget, journal=tmp_path / "used.ledger", block=4)
    ledger.promise(step, 30), ledger.promise(count, 5)
    door = ledger.over(ROWS)
    for t in range(9):
        door.ask(step, W)
        door.ask(step, W + t, key=f"step {t}")
    door.ask(count, W, key="count")
    ledger.reserve(count, 2)
    ledger.close()
    ledger = ft.Ledger.open(tmp_path / "used.ledger")
    lines = exported(ledger)
    kinds = {json.loads(line)["kind"] for line in lines}
    assert kinds == {"open", "promise", "charge", "refund", "release"}
    verdict = verify(lines)
    assert verdict.code == 0, verdict.reason
    assert sorted(verdict.charged.values()) == [1, 18]
    assert encloses(verdict.spent, ledger.spent.epsilon)
    assert encloses(verdict.plan, ledger.guarantee.epsilon)
    assert verify(lines, ledger.journal.last().hash).code == 0


def test_an_unused_ledger_and_one_full_to_the_brim():
    for rule in FILTERS:
        assert verify(exported(ft.Ledger(ft.Budget(1.0, 1e-5), filter=rule))).spent == (0.0, 0.0)
    for rule, event in [
        (GdpFilter, GaussianEvent(15.0)),
        (RdpFilter, PoissonEvent(0.02, GaussianEvent(2.0))),
    ]:
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=rule)
        while ledger.affords(event):
            ledger._books.take(event)
        assert verify(exported(ledger)).code == 0
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    ledger.promise(PoissonEvent(0.01, GaussianEvent(1.1)))
    verdict = verify(exported(ledger))
    assert verdict.code == 0
    assert verdict.plan[0] <= 1.0


def test_a_cost_beyond_all_numbers_closes_its_order_for_good():
    ledger = ft.Ledger(ft.Budget(4.0, 1e-5), filter=RdpFilter)
    event = FixedSizeEvent(1, 32_000, GaussianEvent(1.0))
    assert math.inf in ledger._books.rule.cost(event)
    ledger._books.reserve(event, 2)
    ledger._books.reserve(event, 1)
    state = ledger.journal.last().state
    assert max(state) == 1e300
    assert all(math.isfinite(total) for total in state)
    assert verify(exported(ledger)).code == 0


@pytest.mark.parametrize("kind", [GdpFilter, ZcdpFilter, BasicFilter])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-6), (4.0, 1e-5), (0.4, 1e-5), (10.0, 1e-6)])
def test_the_whole_budget_is_in_order_and_never_more_than_itself(kind, epsilon, delta):
    ledger = ft.Ledger(ft.Budget(epsilon, delta), filter=kind)
    ledger.allot(epsilon, delta)
    verdict = verify(exported(ledger))
    assert verdict.code == 0, verdict.reason
    assert f"{epsilon:.6g} to {epsilon:.6g}" in str(verdict)
    assert verdict.spent[1] <= epsilon * (1 + 2e-9)


def test_a_total_beyond_the_tolerance_is_overspent_for_the_verifier_too():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=BasicFilter)
    ledger._books.rule = BasicFilter(ft.Budget(1.1, 1e-6))
    ledger._books.take(ApproximateEvent(1.0 * (1 + 1e-10), 0.0))
    assert "overspent" in verify(exported(ledger)).reason
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    ledger._books.rule = GdpFilter(ft.Budget(1.1, 1e-6))
    ledger._books.take(GaussianEvent(1 / (ft.Budget(1.0, 1e-6).mu * (1 + 1e-8))))
    assert "overspent" in verify(exported(ledger)).reason


@pytest.mark.parametrize("promised", [True, False])
def test_what_is_taken_on_trust_about_refunds_is_said(promised):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    step = query(ft.Gaussian(40.0))
    if promised:
        ledger.promise(step, 60)
    ledger.reserve(step, 8)
    ledger.reserve(step, 2)  # gives eight back
    verdict = verify(exported(ledger))
    assert verdict.code == 0, verdict.reason
    assert sum(verdict.refunded.values()) == 8
    assert sum(verdict.charged.values()) == 2
    whole = ft.epsilon(ft.Gaussian(40.0), steps=10, delta=1e-5)
    assert verdict.unrefunded[0] * (1 - 1e-5) <= whole <= verdict.unrefunded[1] * (1 + 1e-5)
    assert verdict.spent[1] < verdict.unrefunded[0]
    assert "8 answers were given back as never released; had all of them been, epsilon is" in str(verdict)
    untouched = ft.Ledger(ft.Budget(1.0, 1e-5))
    untouched.reserve(step, 2)
    assert "trusted" not in str(verify(exported(untouched)))


# --- what is not


@pytest.fixture
def plan():
    """Rows of a promised ledger: open, promise, charge 8, refund 2, keyed charge, release, charge 1."""
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    step = query(ft.Gaussian(4.0), ft.Poisson(0.1))
    ledger.promise(step, 60)
    ledger.reserve(step, 8)
    ledger.reserve(step, 2)
    ledger.over(ROWS).ask(step, W, key="kept")
    ledger.over(ROWS).ask(step, W)
    ledger.over(ROWS).ask(step, W)
    ledger.over(ROWS).ask(step, W)
    return [json.loads(line) for line in exported(ledger)]


@pytest.fixture
def spending():
    """Rows of a filter ledger: open, charge, charge 3, refund 3, charge."""
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    for noise in (20.0, 30.0):
        ledger.over(ROWS).ask(query(ft.Gaussian(noise)), W)
        ledger.reserve(query(ft.Gaussian(40.0)), 3)
        ledger.reserve(query(ft.Gaussian(40.0)), 1)
    return [json.loads(line) for line in exported(ledger)]


def lines(rows):
    return [json.dumps(row) for row in rows]


def find(rows, kind, number=0):
    return [row for row in rows if row["kind"] == kind][number]


def test_the_examples_are_in_order_before_they_are_tampered_with(plan, spending):
    assert verify(lines(plan)).code == verify(lines(spending)).code == 0
    assert verify(sealed(plan)).code == verify(sealed(spending)).code == 0


@pytest.mark.parametrize("kind", ["open", "promise", "charge", "refund", "release"])
@pytest.mark.parametrize("field", ["time", "body", "state", "kind", "hash", "previous", "seq"])
def test_any_field_of_any_row(plan, kind, field):
    row = find(plan, kind)
    row[field] = {"body": {**row["body"], "x": 1}, "state": [*row["state"], 0.0], "seq": 99}.get(field, "x")
    assert verify(lines(plan)).code == (2 if (kind, field) == ("open", "kind") else 1)


def test_rows_dropped_reordered_repeated_or_cut_off(plan):
    for place in range(1, len(plan) - 1):
        assert verify(lines(plan[:place] + plan[place + 1 :])).code == 1
        swapped = (
            [*plan[: place - 1], plan[place], plan[place - 1], *plan[place + 1 :]]
            if place > 1
            else plan[::-1]
        )
        assert verify(lines(swapped)).code in (1, 2)
        assert verify(lines([*plan[: place + 1], *plan[place:]])).code == 1
    short = verify(lines(plan[:-1]))
    assert short.code == 0  # a chain alone cannot tell
    assert verify(lines(plan[:-1]), head=plan[-1]["hash"]).code == 1  # who kept the head can


def forge_count(rows):
    next(row for row in rows if row["body"].get("count", 1) > 1)["body"]["count"] -= 1


def forge_noise(rows):
    find(rows, "charge")["body"]["event"] = encode(GaussianEvent(400.0))


def forge_state(rows):
    rows[-1]["state"] = [total * 0.9 for total in rows[-1]["state"]]


def forge_short_state(rows):
    rows[-1]["state"] = rows[-1]["state"][:-1]


def drop_a_charge(rows):
    del rows[next(i for i, row in enumerate(rows) if row["kind"] == "charge")]


def too_large_a_refund(rows):
    refund = find(rows, "refund")
    refund["body"]["count"] += 1


def refund_of_nothing(rows):
    find(rows, "refund")["body"]["of"] = 0


def refund_twice(rows):
    rows.append(find(rows, "refund"))


def refund_of_another_event(rows):
    find(rows, "refund")["body"]["event"] = encode(GaussianEvent(3.0))


def late_promise(rows):
    body = {"event": encode(GaussianEvent(50.0)), "times": 1}
    rows.append({**rows[-1], "kind": "promise", "body": body, "state": [*rows[-1]["state"], 0.0]})


def negative_charge(rows):
    rows.append({**rows[-1], "kind": "charge", "body": {**find(rows, "charge")["body"], "count": -1}})


def fractional_charge(rows):
    rows.append({**rows[-1], "kind": "charge", "body": {**find(rows, "charge")["body"], "count": 0.5}})


def second_opening(rows):
    rows.append({**rows[0], "state": rows[-1]["state"]})


def seeded_noise(rows):
    rows[0]["body"]["noise"] = "seeded noise: no privacy at all, for tests only"


def strange_row(rows):
    rows.append({**rows[-1], "kind": "gift", "body": {**find(rows, "charge")["body"]}})


def seen_by_the_coordinator(rows):
    rows[0]["body"]["budget"]["observer"] = "coordinator"
    find(rows, "charge")["body"]["event"] = encode(PoissonEvent(0.1, GaussianEvent(40.0)))


@pytest.mark.parametrize(
    "forge",
    [
        forge_count,
        forge_noise,
        forge_state,
        forge_short_state,
        drop_a_charge,
        too_large_a_refund,
        refund_of_nothing,
        refund_twice,
        refund_of_another_event,
        late_promise,
        negative_charge,
        fractional_charge,
        second_opening,
        seeded_noise,
        strange_row,
        seen_by_the_coordinator,
    ],
)
@pytest.mark.parametrize("which", ["plan", "spending"])
def test_a_forger_who_recomputes_every_hash(forge, which, request):
    rows = request.getfixturevalue(which)
    forge(rows)
    verdict = verify(sealed(rows))
    assert verdict.code == 1, str(verdict)
    assert "hash" not in verdict.reason


def test_an_overspending_charge_with_the_right_state_and_hashes(plan, spending):
    body = {"event": find(plan, "promise")["body"]["event"], "count": 60}
    state = [*plan[-1]["state"][:-1], plan[-1]["state"][-1] + 60]
    verdict = verify(sealed([*plan, {**plan[-1], "kind": "charge", "body": body, "state": state}]))
    assert verdict.code == 1
    assert "overspent" in verdict.reason

    body = {"event": encode(GaussianEvent(2.0)), "count": 1}
    state = [spending[-1]["state"][0] + 1 / 4]
    verdict = verify(sealed([*spending, {**spending[-1], "kind": "charge", "body": body, "state": state}]))
    assert verdict.code == 1
    assert "overspent" in verdict.reason


# each of these is in order but for the one thing that its reason names


def hashed(row):
    fields = [row[name] for name in ("previous", "seq", "time", "kind", "body", "state")]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def test_a_row_in_the_middle_rewritten_with_a_hash_of_its_own(spending):
    spending[1]["time"] = spending[0]["time"]
    spending[1]["hash"] = hashed(spending[1])
    verdict = verify(lines(spending))
    assert (verdict.code, verdict.rows) == (1, 3)
    assert "does not follow" in verdict.reason


def appended(rows, kind, body, state):
    return sealed([*rows, {**rows[-1], "kind": kind, "body": body, "state": state}])


def test_a_negative_charge_with_the_right_state(spending):
    body, total = {"event": encode(GaussianEvent(20.0)), "count": -1}, spending[-1]["state"][0]
    assert "there cannot be -1" in verify(appended(spending, "charge", body, [total - 1 / 400])).reason


def test_a_refund_of_another_event_with_the_right_state(spending):
    held = find(spending, "charge", 3)
    assert held["body"]["count"] == 1
    body, total = (
        {"event": encode(GaussianEvent(20.0)), "count": 1, "of": held["seq"]},
        spending[-1]["state"][0],
    )
    verdict = verify(appended(spending, "refund", body, [total - 1 / 400]))
    assert f"refund of what row {held['seq']} did not charge" in verdict.reason


def test_a_key_charged_twice_with_the_right_state(plan):
    charge = find(plan, "charge", 2)
    state = [*plan[-1]["state"][:-1], plan[-1]["state"][-1] + 1]
    assert "a key is charged once" in verify(appended(plan, "charge", charge["body"], state)).reason


def test_draws_hide_nobody_from_who_sees_them():
    ledger = ft.Ledger(ft.Budget(4.0, 1e-5, observer="coordinator"), filter=RdpFilter)
    ledger._books.take(PoissonEvent(0.02, GaussianEvent(2.0)))
    assert "sees who is drawn" in verify(exported(ledger)).reason


def test_a_charge_that_does_not_fit_is_overspent_even_if_it_is_given_back(spending):
    total, event = spending[-1]["state"][0], encode(GaussianEvent(2.0))
    over = {**spending[-1], "kind": "charge", "body": {"event": event, "count": 3}, "state": [total + 3 / 4]}
    back = {"event": event, "count": 3, "of": len(spending)}
    verdict = verify(appended([*spending, over], "refund", back, [total]))
    assert (verdict.code, verdict.rows) == (1, len(spending) + 1)
    assert "overspent" in verdict.reason


def test_an_overspending_plan(plan):
    """Nothing else is wrong with it: only recomputing the plan's own price shows that it does not fit."""
    times = find(plan, "promise")["body"]["times"]
    assert pld.epsilon(RepeatedEvent(PoissonEvent(0.1, GaussianEvent(4.0)), 2 * times), 1e-5) > 1.0
    find(plan, "promise")["body"]["times"] = 2 * times
    verdict = verify(sealed(plan))
    assert verdict.code == 1
    assert "overspent" in verdict.reason
    assert verdict.spent[1] < 1.0 < verdict.plan[0]


def test_an_edited_budget(plan, spending):
    for rows in (plan, spending):
        rows[0]["body"]["budget"]["epsilon"] = 0.05
        assert "hash" in verify(lines(rows)).reason
        assert "overspent" in verify(sealed(rows)).reason
    head = spending[-1]["hash"]
    spending[0]["body"]["budget"]["epsilon"] = 50.0  # hides nothing from who kept the head
    assert verify(sealed(spending), head=head).code == 1


def test_keyed_answers_are_charged_once_and_never_given_back(plan):
    charge, release = find(plan, "charge", 2), find(plan, "release")
    assert "answer" in charge["body"]
    again = {**plan[-1], "kind": "release", "body": release["body"]}
    assert verify(sealed([*plan, again])).code == 1
    other = {"answer": {**release["body"]["answer"], "key": "never charged"}}
    assert verify(sealed([*plan, {**again, "body": other}])).code == 1
    state = [*plan[-1]["state"][:-1], plan[-1]["state"][-1] - 1]
    back = {"event": charge["body"]["event"], "count": 1, "of": charge["seq"]}
    assert verify(sealed([*plan, {**again, "kind": "refund", "body": back, "state": state}])).code == 1


def test_a_price_the_oracle_does_not_know_is_a_failure(plan):
    rows = plan[:2]
    rows[1]["body"]["event"] = encode(ZcdpEvent(0.001))
    verdict = verify(sealed(rows))
    assert verdict.code == 1
    assert "not recomputed" in verdict.reason


@pytest.mark.parametrize("noise", [0, -1.0, "4", None, 1e999, True])
def test_numbers_no_event_can_have(spending, noise):
    if noise == 1e999:
        text = sealed(spending)[1].replace("20.0", "1e999")
        assert verify([*sealed(spending)[:1], text]).code == 2
        return
    find(spending, "charge")["body"]["event"]["noise"] = noise
    assert verify(sealed(spending)).code == 1


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"seq": 0}', "null", "[" * 100_000])
def test_what_is_not_an_export(text):
    assert verify(text.splitlines()).code == 2


def test_a_journal_that_is_no_ledger():
    buffer = io.StringIO()
    Journal(None, {"epsilon": 1.0}).export(buffer)
    assert verify(buffer.getvalue().splitlines()).code == 2


def test_a_ledger_with_seeded_noise_never_passes():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), stream=SeededStream(1))
    assert verify(exported(ledger)).code == 1


# --- the file


def test_on_the_command_line_without_farthing(tmp_path, plan):
    script, export = tmp_path / "alone.py", tmp_path / "export.jsonl"
    script.write_text(SOURCE.read_text())

    def run(*arguments):
        command = [sys.executable, "-I", str(script), str(export), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    export.write_text("\n".join(lines(plan)) + "\n")
    done = run()
    assert done.returncode == 0, done.stderr
    assert plan[-1]["hash"] in done.stdout
    assert "(1, 1e-05)-DP, add-remove, per record, against anyone" in done.stdout
    assert run("0" * 64).returncode == 1
    export.write_text("\n".join(lines(plan[:1] + plan[2:])))
    assert run().returncode == 1
    export.write_text("nothing")
    assert run().returncode == 2
    export.write_bytes(b"\xff\xfe")
    assert run().returncode == 2
    export.unlink()
    assert run().returncode == 2


def test_the_file_stands_alone_and_is_short():
    source = SOURCE.read_text()
    tree = ast.parse(source)
    roots = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    roots |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "farthing" not in roots
    assert roots - set(sys.stdlib_module_names) == {"numpy"}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    assert len(source.splitlines()) <= 620


@pytest.fixture(scope="module")
def from_a_menu():
    """The export of a ledger that spent from a menu, and its rows."""
    menu = ft.Menu(ft.Poisson(0.2).amplify(ft.Gaussian(noise)) for noise in (4.0, 8.0))
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=menu)
    for noise in (4.0, 8.0, 10.0, 4.0):
        query = ft.Query(
            ft.Poisson(0.2), ft.PerExample(lambda rows, w: rows[0]), ft.ClipNorm(1.0), ft.Gaussian(noise)
        )
        ledger.over(ft.Rows(np.zeros((20, 2)))).ask(query)
    buffer = io.StringIO()
    ledger.journal.export(buffer)
    return buffer.getvalue().splitlines()


def rehashed(rows):
    """Rows with hashes of their own, as somebody who rewrites a whole journal would make them."""
    previous, lines = "0" * 64, []
    for row in rows:
        row["previous"] = previous
        values = [row[name] for name in verifier.FIELDS]
        previous = row["hash"] = hashlib.sha256(verifier._text(values).encode()).hexdigest()
        lines.append(json.dumps(row))
    return lines


def test_a_ledger_that_spends_from_a_menu_is_verified(from_a_menu):
    found = verify(from_a_menu)
    assert found.code == 0, found.reason
    assert found.rule == "the menu filter"
    assert sum(found.charged.values()) == 4


def test_prices_that_let_a_strategy_pass_the_budget_are_found(from_a_menu):
    rows = [json.loads(line) for line in from_a_menu]
    rows[0]["body"]["filter"]["steps"] = [
        count + max(1, count // 10) for count in rows[0]["body"]["filter"]["steps"]
    ]
    found = verify(rehashed(rows))
    assert found.code == 1
    assert "a strategy from the menu reaches delta" in found.reason


def test_more_units_than_a_menu_has_are_found(from_a_menu):
    rows = [json.loads(line) for line in from_a_menu]
    charge = rows[-1]
    more = rows[0]["body"]["filter"]["units"] * rows[0]["body"]["filter"]["steps"][0]
    charge["body"]["count"] = 1 + more
    charge["state"][0] += more
    found = verify(rehashed(rows))
    assert found.code == 1
    assert "units are used" in found.reason


def test_pure_answers_that_a_menu_charges_as_another_kind_are_verified():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=ft.Menu([PureEvent(0.1), GaussianEvent(40.0)]))
    for event in (BoundedRangeEvent(0.05), LaplaceEvent(20.0), GaussianEvent(50.0)):
        ledger._books.take(event)
    buffer = io.StringIO()
    ledger.journal.export(buffer)
    found = verify(buffer.getvalue().splitlines())
    assert found.code == 0, found.reason


def test_choices_are_verified_by_their_range_and_dearer_ones_are_found():
    entries = [BoundedRangeEvent(0.1), PoissonEvent(0.2, BoundedRangeEvent(0.4)), PureEvent(0.1)]
    ledger = ft.Ledger(ft.Budget(1.0, 1e-4), filter=ft.Menu(entries, units=32), block=1)
    asked = [BoundedRangeEvent(0.08), PoissonEvent(0.1, BoundedRangeEvent(0.4)), PureEvent(0.05)]
    for event in asked:
        ledger._books.take(event)
    buffer = io.StringIO()
    ledger.journal.export(buffer)
    lines = buffer.getvalue().splitlines()
    found = verify(lines)
    assert found.code == 0, found.reason
    rows = [json.loads(line) for line in lines]
    body = rows[0]["body"]["filter"]
    body["prices"] = [max(1, int(0.8 * price)) for price in body["prices"]]
    found = verify(rehashed(rows))
    assert found.code == 1
    assert "a strategy from the menu reaches delta" in found.reason
