"""Check laws of charges, ledgers and federated clients: every answer is charged before it is released."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtr

from farthing.accounting import pld
from farthing.accounting.filters import BasicFilter, GdpFilter
from farthing.audit.games import all_of
from farthing.audit.laws import off_law
from farthing.budget import Adjacency, Budget, Observer, Unit
from farthing.data.tables import Features
from farthing.errors import BudgetSpent, FarthingError
from farthing.federated.noise import ClientNoise
from farthing.federated.protocol import Accountant, Exactly, Invitation, Trust
from farthing.federated.simulated import Simulated
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ROWS, ClipNorm
from farthing.queries.events import RepeatedEvent
from farthing.queries.mechanisms import Gaussian, Laplace
from farthing.queries.query import PerExample, Query, Rows
from farthing.queries.samplers import Everyone, Poisson

_BUDGET = Budget(1.0, 1e-5)


class _Counted:
    """A contribution that counts how often it was computed."""

    honours, shape = ROWS, None

    def __init__(self) -> None:
        self.times = 0

    def bounded_sum(self, records: Any, w: Any, bound: Any, /) -> Any:
        self.times += len(records) > 0
        return bound.apply(records[0]).sum(axis=0)


def answers(stream: Stream) -> list[str]:
    """Check a filter's ledger: as many answers as charges, none beyond the budget, hashes in order."""
    complaints = []
    counted = _Counted()
    query = Query(Everyone(), counted, ClipNorm(1.0), Gaussian(10.0))
    ledger = Ledger(_BUDGET, stream=stream)
    attached = ledger.over(Rows(np.ones((3, 2))))
    given = all_of(lambda: attached.ask(query))
    charged = sum(row.body["count"] for row in ledger.journal.rows() if row.kind == "charge")
    if given != charged:
        complaints.append(f"{given} answers were given and {charged} charged")
    if counted.times != given:
        complaints.append(f"records were read {counted.times} times for {given} answers")
    if given * 0.01 > GdpFilter(_BUDGET).mu ** 2 * (1 + 1e-9):
        complaints.append(f"{given} answers do not fit the budget")
    return complaints + _verified(ledger)


def _verified(ledger: Ledger) -> list[str]:
    try:
        ledger.journal.verify()
    except FarthingError as error:
        return [f"the journal does not verify: {error}"]
    return []


def promises(stream: Stream) -> list[str]:
    """Check a promised plan: exactly as many answers as promised, and they fit the budget."""
    complaints = []
    query = Query(Poisson(0.5), _Counted(), ClipNorm(1.0), Gaussian(4.0))
    ledger = Ledger(_BUDGET, stream=stream)
    times = ledger.promise(query).times
    attached = ledger.over(Rows(np.ones((3, 2))))
    given = all_of(lambda: attached.ask(query))
    if given != times:
        complaints.append(f"{given} answers were given and {times} promised")
    if pld.epsilon(RepeatedEvent(query.price(_BUDGET), given), 1e-5) > 1.0 + 1e-6:
        complaints.append("the answers of a promise do not fit the budget")
    return complaints + _verified(ledger)


def refunds(stream: Stream, folder: str) -> list[str]:
    """Check that a refund is given once: no more answers than without a reservation."""
    complaints = []
    path = f"{folder}/refunds.ledger"
    budget = Budget(1.0, 0.0)
    query = Query(
        Everyone(), _Counted(), ClipNorm(1.0, order=1), Laplace(8.0)
    )  # an eighth each, which is exact in floats
    with Ledger(budget, journal=path, filter=BasicFilter) as ledger:
        ledger.reserve(query, 5)
        attached = ledger.over(Rows(np.ones((3, 2))))
        for _ in range(3):
            attached.ask(query)
    with Ledger.open(path) as ledger:
        attached = ledger.over(Rows(np.ones((3, 2))))
        more = all_of(lambda: attached.ask(query))
        if more != 5:
            complaints.append(f"3 of 8 answers were used before, and {more} came after")
    return complaints


def copies(stream: Stream) -> list[str]:
    """Check that copies share a balance, parts are charged, kept answers repeat, seeds guarantee nothing."""
    complaints = []
    budget = Budget(1.0, 0.0)
    query = Query(Everyone(), _Counted(), ClipNorm(1.0, order=1), Laplace(2.5))
    ledger = Ledger(budget, filter=BasicFilter, stream=stream)
    attached = ledger.over(Rows(np.ones((3, 2))))
    other = copy.deepcopy(attached)
    given = all_of(lambda: attached.ask(query), 10) + all_of(lambda: other.ask(query), 10)
    if given > 2:
        complaints.append(f"a ledger and its copy answered {given} times on a budget for 2")
    whole = Ledger(budget, filter=BasicFilter, stream=stream)
    if all_of(lambda: whole.allot(0.4, 0.0), 5) > 2:
        complaints.append("parts of a budget add up to more than it")
    kept = Ledger(budget, filter=BasicFilter, stream=stream).over(Rows(np.ones((3, 2))))
    try:
        first, second = (kept.ask(query, key="one").value for _ in range(2))
        if not np.array_equal(first, second):
            complaints.append("an answer that is kept was drawn again")
    except FarthingError as error:
        complaints.append(f"an answer that is kept is gone: {error}")
    if math.isfinite(ledger.guarantee.epsilon) and type(stream) is not Stream:
        complaints.append("a ledger with seeded noise promises something")
    fresh = [
        Ledger(budget, filter=BasicFilter).over(Rows(np.ones((1, 2)))).ask(query).value for _ in range(2)
    ]
    if np.array_equal(fresh[0], fresh[1]):
        complaints.append("two ledgers add the same noise")
    return complaints


def order(stream: Stream) -> list[str]:
    """Check that the charge comes first: a failing computation was charged, a refused one never runs."""
    complaints = []
    seen = []

    def fail(rows: Any, w: Any) -> Any:
        if not len(rows):
            return rows[0]
        seen.append(ledger.share)
        raise ZeroDivisionError

    query = Query(Everyone(), PerExample(fail), ClipNorm(1.0, order=1), Laplace(2.0))
    ledger = Ledger(Budget(1.0, 0.0), filter=BasicFilter, stream=stream)
    attached = ledger.over(Rows(np.ones((1, 1))))
    for _ in range(3):
        try:
            attached.ask(query)
        except ZeroDivisionError:
            pass
        except BudgetSpent:
            break
    if len(set(seen)) != 2 or seen[0] == 0:
        complaints.append("records were read before their charge was written, or past the budget")
    return complaints


def failures() -> list[str]:
    """Check that a failing record causes no error, and leaves the sum of the others unchanged."""

    def wide(rows: Any) -> Any:
        return np.hstack([rows[0], rows[0]])

    def broken(rows: Any) -> Any:
        raise ValueError(f"record {rows[1][-1]} is ill")

    def unbounded(rows: Any) -> Any:
        return np.full(2, np.nan)

    complaints = set()
    rows = Rows(np.tile([0.6, 0.8], (9, 1)), np.arange(9))
    for fails in (wide, broken, unbounded):
        ledger = Ledger(Budget(1e6, 1e-5))  # real noise: seeded noise lets errors through
        query = Query(Everyone(), _Failing(fails), ClipNorm(1.0), Gaussian(0.01))
        try:
            found = np.asarray(ledger.over(rows).ask(query).value)
        except Exception as error:
            complaints.add(f"a record's failure is raised after the charge, {type(error).__name__}")
            continue
        # 20 standard deviations
        if found.shape != (2,) or not np.abs(found - [8 * 0.6, 8 * 0.8]).max() < 0.2:
            complaints.add("a record that fails moves the sum of the others")
    return sorted(complaints)


class _Failing:
    """A contribution that fails where record 5 takes part."""

    honours, shape = ROWS, None

    def __init__(self, fails: Callable[[Any], Any]) -> None:
        self.fails = fails

    def bounded_sum(self, records: Any, w: Any, bound: Any, /) -> Any:
        if 5 in records[1]:
            return np.asarray(self.fails(records)).sum(axis=0)
        return bound.apply(records[0]).sum(axis=0)


def uploads_allowed(stream: Stream) -> list[str]:
    """Check that no client uploads more often than its accountant allows, against tight accounting."""
    complaints = []
    x = np.linspace(0, 1, 8)[:, None]
    budget = Budget(1.0, 1e-5, Adjacency.REPLACE_ONE)
    plans: list[tuple[Accountant, Exactly | Poisson, int]] = []
    plans = [
        (by, Exactly(size), rounds) for by in Accountant.of_rounds() for size, rounds in ((1, 5), (4, 1))
    ]
    tight = [(Accountant.TIGHT, Poisson(0.25), 5)]  # the oracle is slow for other draws
    for by, draw, planned in [*(plan for plan in plans if plan[0] is not Accountant.TIGHT), *tight]:
        clients = Simulated.split(x, x[:, 0], clients=2, budgets=budget, stream=stream)
        clients.invite(Invitation(1.0, draw, planned, calibration=by, accountant=by))
        terms = clients.terms(0)
        rounds = min(terms.rounds, 40)
        price = RepeatedEvent(terms.price(replace(budget, observer=Observer.SERVER)), max(terms.rounds, 1))
        if pld.delta(price, 1.0, Adjacency.REPLACE_ONE) > 1.001e-5:
            complaints.append(f"{terms.rounds} rounds by the {by} accountant do not fit")
        gradient = LinearGradient(logistic, Features(1))
        given = all_of(partial(clients.ask, gradient, np.zeros(2)), rounds + 1)
        if terms.rounds <= 40 and given != terms.rounds:
            complaints.append(f"{given} rounds were taken by the {by} accountant, {terms.rounds} agreed to")
    return complaints


def shares(stream: Stream, size: int = 20_000) -> list[str]:
    """Check that noise shares add up to the whole, and that a client's sum is bounded by its records."""

    complaints = []
    levels = np.array([-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0])
    shared = Budget(1.0, 1e-5, observer=Observer.AGGREGATE)
    terms = Invitation(1.0, noise_multiplier=2.0, rounds=5, trust=Trust.DISTRIBUTED, survivors=4).terms(
        shared, 10
    )
    total = sum(terms.mechanism.release(np.zeros(size), terms.bound, stream) for _ in range(4))
    if off_law(np.asarray(total) / 2.0, ndtr, levels):
        complaints.append("shares of noise do not add up to what was priced")
    whole = Budget(1.0, 1e-5, unit=Unit.USER, observer=Observer.SERVER)
    terms = Invitation(1.0, rounds=5).terms(whole, 3)
    assert isinstance(terms.mechanism, ClientNoise)
    far = np.zeros(size)
    far[0] = 1e6
    answer = terms.mechanism.release(far, terms.bound, stream)
    if answer[0] > 3.0 + 8 * math.sqrt(terms.variance):
        complaints.append("a client's sum is longer than its records could make it")
    event = terms.price(whole)
    if off_law(answer[1:] / (3.0 * event.noise), ndtr, levels):  # type: ignore[union-attr]
        complaints.append("the noise that hides a client is not what was priced")
    return complaints


def uploads(stream: Stream, rounds: int = 400) -> list[str]:
    """Check that a simulated release carries the noise that its clients agreed to, summed or each."""

    complaints = []
    x = np.zeros((6, 50))
    levels = np.array([-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0])
    for kind in ("sum", "each"):
        clients = Simulated.split(
            x,
            np.zeros(6),
            clients=3,
            budgets=Budget(8.0, 1e-5),
            noise=kind,
            stream=stream,
        )
        clients.invite(Invitation(1.0, rounds=rounds))
        values = []
        for _ in range(rounds):
            got = clients.ask(LinearGradient(logistic, Features(50, intercept=0.0)), np.zeros(50))
            values.append(got.total / math.sqrt(3 * clients.terms(0).variance))
        if off_law(np.concatenate(values), ndtr, levels):
            complaints.append(f"noise={kind!r} is not what clients agreed to")
    return complaints
