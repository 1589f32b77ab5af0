"""Release the best of several runs: paid for at once, then computed in ledgers that nobody sees.

`best_of` draws how many runs there are, and a candidate for each; every run gets a ledger in memory with the
same budget, and hands back a model and a score. What is released is the best run's candidate, model and
score, and nothing of the others.

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

**Guarantee.** The theorem of `farthing.accounting.tuning`: under the ledger's adjacency and for its unit,
against whoever sees the best run and not how many there were. The charge is one event, derived from what a
run may ask and from the distribution of their number, and it is durable before the first run. It needs that
a run learns from records through its ledger alone, the score included, and that candidates do not depend on
records. How long all runs take tells their number: whoever can time them learns more than is paid for
(docs/sharp-edges.md). A run that fails counts as the worst, whatever failed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """The best of several runs, and what all of them cost.

    Attributes
    ----------
    candidate
        The candidate of the best run.
    model
        What the best run returned.
    score : float
        Its score, as noisy as it was asked.
    privacy : Guarantee
        What holds of the three together.
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
        ``run(candidate, ledger)`` trains through this ledger only and returns (model, score); the score is
        asked of the ledger too, or is taken on public data. Larger is better.
    candidates : sequence or callable
        What runs choose from, each as likely as the others; or a function of a random
        seed (a whole number) that draws one. They must not depend on records.
    ledger : Ledger
        The ledger that pays. An unused one pays by a promise, one with `BasicFilter` at any time.
    epsilon, delta : float, optional
        The part of it that all runs together may cost; what is left by default.
    runs : float, default 10
        The expected number of runs.
    distribution : {"geometric", "logarithmic", "poisson"} or float, default "geometric"
        The distribution of their number; a number is the shape η of a truncated negative binomial. The
        smaller it is, the less is paid, and the more often there are few runs. With "poisson" there may be
        none.
    plan : Event, optional
        What one run asks, promised in its ledger, such as 1000 batches,
        ``RepeatedEvent(Poisson(0.01).amplify(Gaussian(2.0)), 1000)``. None: Gaussian answers chosen on the
        way, as large a budget of them as fits.

    Returns
    -------
    Tuned

    Raises
    ------
    BudgetSpent
        Where it does not fit; nothing is charged then.
    InvalidValue, Unsupported, PromiseBroken
        For wrong arguments, and where the first question of some candidate is refused, before the charge.
    NotReleased
        If every run failed, or none was drawn; the charge stays.

    Notes
    -----
    Before the charge ``run`` is called for every candidate with a ledger that ends it at its first question.
    With a seeded stream, for tests, errors inside a run are raised as they are.

    Examples
    --------
    >>> import farthing as ft
    >>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    >>> tuned = ft.best_of(lambda rate, ledger: (None, -rate), [0.1, 0.2], ledger, runs=60)
    >>> tuned.candidate in (0.1, 0.2), tuned.score == -tuned.candidate
    (True, True)
    """
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
    best: tuple[float, Any, Any] | None = None
    for _ in range(RunCount(tuned.mean, tuned.shape).draw(stream)):
        candidate = draw()
        found = _result(run, candidate, _run_ledger(ledger, tuned, rule, _RunBooks), stream.sound)
        if found is not None and (best is None or found.score > best[0]):
            best = found.score, candidate, found.model
    if best is None:
        raise NotReleased(
            f"every run failed, or none was drawn: nothing is released of {event}, it is charged"
        )
    return Tuned(best[1], best[2], best[0], _guarantee(ledger, event), receipt)


def run_count(runs: float, distribution: str | float) -> RunCount:
    """Return the distribution of the number of runs, by its name or its shape."""
    if isinstance(distribution, str) and distribution not in SHAPES:
        raise InvalidValue(f"distribution must be one of {sorted(SHAPES)} or a number, got {distribution!r}")
    return RunCount(runs, SHAPES[distribution] if isinstance(distribution, str) else distribution)


def part_of(ledger: Ledger, epsilon: float | None, delta: float | None) -> Budget:
    """Return the part of a ledger that is named, or what is left of it."""
    if (epsilon is None) != (delta is None):
        raise InvalidValue(f"give both epsilon and delta, or neither: {epsilon!r}, {delta!r}")
    part = ledger.rest if epsilon is None or delta is None else ledger.budget.with_(epsilon, delta)
    if part.delta == 0:
        raise InvalidValue(f"the best of several runs needs a delta above 0, got {part}")
    return part


def tuning_event(part: Budget, runs: RunCount, plan: Event | None) -> TuningEvent:
    """The event of a tuning: of a plan, or of as much Gaussian DP as fits."""
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
                "tuning beside other answers, or on a sample, is paid for by basic composition: begin a "
                "ledger with filter=BasicFilter, or tune with one that was not asked"
            )
        books.promise(event, 1)
    return books.take(event)


def _guarantee(ledger: Ledger, event: Event) -> Guarantee:
    """What holds of the best run by itself, with the notes of its ledger."""
    if not isinstance(ledger.filter, BasicFilter):
        return ledger.guarantee
    (epsilon, delta), whole = ledger.filter.cost(event), ledger.guarantee
    found = epsilon if math.isfinite(whole.epsilon) else math.inf
    return replace(whole, epsilon=found, delta=delta, accountant="tuning", theorem=tuning.THEOREM)


def _drawn(candidates: Candidates, stream: Stream) -> Callable[[], Any]:
    if callable(candidates):
        return lambda: candidates(int(stream.integers(1)[0]))
    if not candidates:
        raise InvalidValue("give the candidates to draw from, at least one")
    return lambda: candidates[int(stream.uniform_below(len(candidates), 1)[0])]


# --- one run


class _Asked(Exception):
    """The first question of a rehearsal: everything before it went well."""


class _RunBooks(Books):
    """Books of one run: what it may promise is fixed."""

    closed = False

    def promise(self, event: Event, times: int | None) -> Countdown:
        """Find a promise of the plan; nothing is added to it once it is closed."""
        if self.closed and event not in [known for known, _ in self._plan(self._state(self.journal.last()))]:
            raise PromiseBroken(f"{event} is no part of the plan that a run was paid for: name it in plan=")
        return super().promise(event, times)


class _Rehearsal(_RunBooks):
    def take(self, event: Event, key: str | None = None, request: str | None = None) -> Receipt:
        super().take(event, key, request)
        raise _Asked


def _run_ledger(ledger: Ledger, event: TuningEvent, rule: Filter, kind: type[_RunBooks]) -> Ledger:
    """A ledger in memory that lets through what one run was paid for, and no more."""
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
    books.parent = ledger._books  # what a run assumes is written down there
    return books


def rehearse(run: Callable[[Any, Ledger], Any], candidate: Any, ledger: Ledger, rule: Filter) -> None:
    """Call a run with a ledger of this filter that ends it at its first question, and charge nothing.

    What the run refuses by name before that question is raised.
    """
    _rehearse(run, candidate, ledger._beside(_books(ledger, rule, _Rehearsal), None, None))


def _rule(run: Event, delta: float, terms: Budget) -> Filter:
    """The filter of one run: of Gaussian DP, or one that the promises of a plan fit."""
    match run:
        case GaussianEvent(noise):
            return GdpFilter(terms.with_(gaussian.epsilon(terms.adjacency.shift / noise, delta), delta))
    return GdpFilter(terms.with_(pld.epsilon(run, delta, terms.adjacency) * (1 + 1e-6), delta))


class _Result(NamedTuple):
    model: Any
    score: float


def _rehearse(run: Callable[[Any, Ledger], Any], candidate: Any, ledger: Ledger) -> None:
    """Raise what a run refuses by name before its first question; whatever else fails may be a record's."""
    try:
        run(candidate, ledger)
    except (_Asked, NotReleased):
        return
    except FarthingError:
        raise
    except Exception:
        return


def _result(run: Run, candidate: Any, ledger: Ledger, sound: bool) -> _Result | None:
    """The outcome of one run; None where it failed or has no score."""
    try:
        model, score = run(candidate, ledger)
        score = float(score)
    except Exception:
        if not sound:
            raise
        return None
    return _Result(model, score) if not math.isnan(score) else None
