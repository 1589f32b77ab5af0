"""Release the best of several runs: paid for at once, then computed in ledgers that nobody sees.

`best_of` draws the number of runs, and a candidate for each. Every run has a ledger in memory with the same
budget, and returns a model and a score. Only the best run's candidate, model and score are released.

>>> import numpy as np, farthing as ft
>>> rows = ft.Rows(np.random.default_rng(0).normal(2.0, 1.0, size=(5000, 1)))
>>> def mean_within(clip, ledger):
...     noise = ft.Gaussian(ledger.budget.adjacency.shift / ledger.filter.mu * (1 + 1e-9))
...     total = ft.Query(ft.Everyone(), ft.PerExample(lambda r, w: r[0]), ft.ClipNorm(clip), noise)
...     mean = float(ledger.over(rows).ask(total).value[0]) / 5000
...     return mean, -abs(mean - 2.0)  # how good it is, here by a public number
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
>>> tuned = best_of(mean_within, [0.1, 1.0, 4.0], ledger, runs=20)
>>> print(tuned.privacy)
(1, 1e-05)-DP, add-remove, per record, against anyone, by tuning
>>> round(ledger.share, 6)
1.0

**Guarantee.** The theorem of `farthing.accounting.tuning`, under the ledger's adjacency and for its unit,
against an observer who sees the best run and not the number of runs. The charge is one event, derived from
the budget of a run and the distribution of their number, and it is durable before the first run. Assumptions:
a run reads records through its ledger only, also for the score, and candidates do not depend on records. The
total running time reveals the number of runs: an observer who can measure it learns more than was paid for
(docs/sharp-edges.md). A run that fails counts as the worst, for any failure. Warnings of runs are off, and
notes are kept of the best one only, as they would count the others.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from farthing import validate
from farthing.accounting import gaussian, pld, tuning
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter
from farthing.accounting.tuning import SHAPES, RunCount
from farthing.budget import Budget, Guarantee
from farthing.errors import FarthingError, InvalidValue, NotReleased, PromiseBroken, Unsupported
from farthing.ledger.books import Books, Countdown, header_of
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.noise.streams import Stream
from farthing.queries.events import (
    Event,
    GaussianEvent,
    PoissonEvent,
    TuningEvent,
    flatten,
)
from farthing.queries.query import Receipt

Run = Callable[[Any, Ledger], tuple[Any, float]]
Candidates = Sequence[Any] | Callable[[int], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """The best of several runs, and the cost of all of them.

    Attributes
    ----------
    candidate
        The candidate of the best run.
    model
        The model that the best run returned.
    score : float
        Its score, with the noise of its query.
    privacy : Guarantee
        The joint guarantee of candidate, model and score.
    receipt : Receipt
        The charge in the ledger's journal.

    Examples
    --------
    >>> import farthing as ft
    >>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    >>> tuned = ft.best_of(lambda candidate, ledger: (None, candidate), [1, 2], ledger, runs=50)
    >>> tuned.score == tuned.candidate, tuned.receipt.event.mean
    (True, 50.0)
    """

    candidate: Any
    model: Any
    score: float
    privacy: Guarantee
    receipt: Receipt


def best_of(
    run: Run,
    candidates: Candidates,
    ledger: Ledger,
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    runs: float = 10.0,
    distribution: str | float = "geometric",
    plan: Event | None = None,
) -> Tuned:
    """Run a random number of candidates within one budget and return the best.

    Parameters
    ----------
    run : callable
        ``run(candidate, ledger)`` trains through this ledger only and returns (model, score). The score comes
        from a query to the ledger or from public data. Larger is better.
    candidates : sequence or callable
        The candidates of a run, each with the same probability; or a function that draws one from a random
        seed (an integer). They must not depend on records.
    ledger : Ledger
        The ledger that pays. An unused one pays by a promise, one with `BasicFilter` at any time.
    epsilon, delta : float, optional
        The part of the budget for all runs together; by default the remainder.
    runs : float, default 10
        The expected number of runs.
    distribution : {"geometric", "logarithmic", "poisson"} or float, default "geometric"
        The distribution of the number of runs; a number is the shape η of a truncated negative binomial. A
        smaller shape costs less and makes small numbers of runs more likely. "poisson" may draw no run at
        all.
    plan : Event, optional
        The answers of one run, promised in its ledger, for example 1000 batches,
        ``RepeatedEvent(Poisson(0.01).amplify(Gaussian(2.0)), 1000)``. None: adaptively chosen Gaussian
        answers, with the largest budget that fits.

    Returns
    -------
    Tuned

    Raises
    ------
    BudgetSpent
        If the event does not fit the budget; nothing is charged then.
    InvalidValue, Unsupported, PromiseBroken
        For invalid arguments, or if the first query of a candidate is refused; both before the charge.
    NotReleased
        If every run failed or none was drawn; the charge stays.

    Notes
    -----
    Before the charge, ``run`` is called for every candidate with a ledger that ends it at its first query.
    With a seeded stream, for tests, errors inside a run are raised.

    Examples
    --------
    >>> import farthing as ft
    >>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    >>> tuned = ft.best_of(lambda rate, ledger: (None, -rate), [0.1, 0.2], ledger, runs=60)
    >>> tuned.candidate in (0.1, 0.2), tuned.score == -tuned.candidate
    (True, True)
    """
    if not callable(run):
        raise InvalidValue(f"run must be a function of a candidate and a ledger, got {type(run).__name__}")
    count = run_count(runs, distribution)
    part = part_of(ledger, epsilon, delta)
    return released(run, candidates, ledger, tuning_event(part, count, plan))


def released(run: Run, candidates: Candidates, ledger: Ledger, event: TuningEvent | PoissonEvent) -> Tuned:
    """Charge an event, a tuning or one on a sample, and return the best run."""
    tuned = event.event if isinstance(event, PoissonEvent) else event
    assert isinstance(tuned, TuningEvent)
    stream = ledger._stream
    draw, rule = _drawn(candidates, stream), _rule(tuned.event, tuned.delta, ledger.budget)
    for candidate in candidates if isinstance(candidates, Sequence) else [draw()]:
        _rehearse(run, candidate, _run_ledger(ledger, tuned, rule, _Rehearsal))
    receipt = _paid(ledger, event)
    best: _Result | None = None
    for _ in range(RunCount(tuned.mean, tuned.shape).draw(stream)):
        found = _result(run, draw(), _run_ledger(ledger, tuned, rule, _RunBooks), stream.sound)
        if found is not None and (best is None or found.score > best.score):
            best = found
    if best is None:
        raise NotReleased(
            f"every run failed, or the random number of runs was 0: {event} is charged, and nothing is "
            "released"
        )
    for text in best.notes:
        ledger.note(text)
    return Tuned(best.candidate, best.model, best.score, _guarantee(ledger, event), receipt)


def run_count(runs: float, distribution: str | float) -> RunCount:
    """Return the distribution of the number of runs from its name or shape."""
    validate.positive(runs=runs)
    if isinstance(distribution, str) and distribution not in SHAPES:
        raise InvalidValue(f"distribution must be one of {sorted(SHAPES)} or a number, got {distribution!r}")
    return RunCount(runs, SHAPES[distribution] if isinstance(distribution, str) else distribution)


def part_of(ledger: Ledger, epsilon: float | None, delta: float | None) -> Budget:
    """Return the requested part of a ledger's budget, or its remainder."""
    if (epsilon is None) != (delta is None):
        raise InvalidValue(f"pass both epsilon and delta, or neither, got {epsilon!r} and {delta!r}")
    part = ledger.rest if epsilon is None or delta is None else ledger.budget.with_(epsilon, delta)
    if part.delta == 0:
        raise InvalidValue(f"the best of several runs needs a delta above 0, got {part}")
    return part


def tuning_event(part: Budget, runs: RunCount, plan: Event | None) -> TuningEvent:
    """Return the event of a tuning: of a plan, or of the largest Gaussian DP budget that fits."""
    if plan is None:
        mu = tuning.largest_mu(part, runs)
        run = part.with_(gaussian.epsilon(mu, part.delta), part.delta)
        plan = GaussianEvent(part.adjacency.shift / GdpFilter(run).mu)
    return TuningEvent(plan, runs.mean, runs.shape, part.delta)


def _paid(ledger: Ledger, event: Event) -> Receipt:
    """Charge one event durably: to a filter that prices it, or as a plan of this one answer."""
    books = ledger._books
    if not isinstance(books.rule, BasicFilter):
        if isinstance(event, PoissonEvent) or ledger.share > 0:
            raise Unsupported(
                "tuning beside other answers, or on a sample, needs basic composition: create a "
                "ledger with filter=BasicFilter, or use a ledger without answers"
            )
        books.promise(event, 1)
    return books.take(event)


def _guarantee(ledger: Ledger, event: Event) -> Guarantee:
    """Return the guarantee of the best run by itself, with the notes of its ledger."""
    if not isinstance(ledger.filter, BasicFilter):
        return ledger.guarantee
    (epsilon, delta), whole = ledger.filter.cost(event), ledger.guarantee
    found = epsilon if math.isfinite(whole.epsilon) else math.inf
    return replace(whole, epsilon=found, delta=delta, accountant="tuning", theorem=tuning.THEOREM)


def _drawn(candidates: Candidates, stream: Stream) -> Callable[[], Any]:
    if callable(candidates):
        return lambda: candidates(int(stream.integers(1)[0]))
    if not candidates:
        raise InvalidValue("candidates must have at least one entry")
    return lambda: candidates[int(stream.uniform_below(len(candidates), 1)[0])]


# --- one run


class _Asked(Exception):
    """The first query of a rehearsal: everything before it succeeded."""


class _RunBooks(Books):
    """The books of one run, whose promises are fixed."""

    closed = False

    def promise(self, event: Event, times: int | None) -> Countdown:
        """Return a promise of the plan; nothing can be added to the plan once it is closed."""
        if self.closed and event not in [known for known, _ in self._plan(self._state(self.journal.last()))]:
            raise PromiseBroken(f"{event} is not in the plan of a run: add it to plan=")
        return super().promise(event, times)


class _Rehearsal(_RunBooks):
    def take(self, event: Event, key: str | None = None, request: str | None = None) -> Receipt:
        super().take(event, key, request)
        raise _Asked


def _run_ledger(ledger: Ledger, event: TuningEvent, rule: Filter, kind: type[_RunBooks]) -> Ledger:
    """Return a ledger in memory that allows the charges of one run and no more."""
    books = _books(ledger, rule, kind)
    books.plans = not isinstance(event.event, GaussianEvent)
    if books.plans:
        for part, times in flatten(event.event):
            books.promise(part, times)
        books.closed = True
    return ledger._beside(books, None, None)


def _books(ledger: Ledger, rule: Filter, kind: type[_RunBooks]) -> _RunBooks:
    noise = ledger._books.noise
    books = kind(rule, Journal(None, header_of(rule, noise)), noise, ledger._books._block)
    if kind is _Rehearsal:
        books.parent = ledger._books  # records what any run may assume; of the others, only the best's notes
    return books


def rehearse(run: Callable[[Any, Ledger], Any], candidate: Any, ledger: Ledger, rule: Filter) -> None:
    """Call a run with a ledger of this filter that ends it at its first query, and charge nothing.

    Errors that the run raises by name before that query are passed on.
    """
    _rehearse(run, candidate, ledger._beside(_books(ledger, rule, _Rehearsal), None, None))


def _rule(run: Event, delta: float, terms: Budget) -> Filter:
    """Return the filter of one run: of Gaussian DP, or one that the promises of a plan fit."""
    match run:
        case GaussianEvent(noise):
            return GdpFilter(terms.with_(gaussian.epsilon(terms.adjacency.shift / noise, delta), delta))
    return GdpFilter(terms.with_(pld.epsilon(run, delta, terms.adjacency) * (1 + 1e-6), delta))


class _Result(NamedTuple):
    candidate: Any
    model: Any
    score: float
    notes: list[str]


def _rehearse(run: Callable[[Any, Ledger], Any], candidate: Any, ledger: Ledger) -> None:
    """Raise the library's errors before a run's first query; other errors may depend on a record."""
    try:
        run(candidate, ledger)
    except (_Asked, NotReleased):
        return
    except FarthingError:
        raise
    except Exception:
        return


def _result(run: Run, candidate: Any, ledger: Ledger, sound: bool) -> _Result | None:
    """Return the outcome of one run; None if it failed or has no score.

    Warnings are off: they would count the runs, and may name answers of runs that are not released.
    """
    try:
        with warnings.catch_warnings():
            if sound:
                warnings.simplefilter("ignore")
            model, score = run(candidate, ledger)
            score = float(score)
    except Exception:
        if not sound:
            raise
        return None
    return None if math.isnan(score) else _Result(candidate, model, score, ledger._books.notes())
