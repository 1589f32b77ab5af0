"""Search with a number of fits that is not known ahead: while trials fit, and with a part kept for last.

`GridSearchCV` is paid for in equal parts, whose number has to be known (`farthing.linear.selection`). Here
every trial costs the same, the next candidate may follow from all scores so far, and the search ends when
the candidates do, when a rule says so, or when one more trial would touch what is set aside for the last fit.

>>> import numpy as np
>>> import farthing as ft
>>> rng = np.random.default_rng(0)
>>> X = rng.uniform(size=(5000, 3))
>>> y = (X[:, 0] > X[:, 1]).astype(int)
>>> def wider(trials):  # until it gets no better
...     if len(trials) > 2 and trials[-1].score < trials[-2].score:
...         return None
...     return {"bounds": (0, 2.0 ** len(trials))}
>>> ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
>>> found = search(ft.LogisticRegression(), wider, X, y, ledger, 0.3, 1e-5)
>>> 1 <= len(found.trials) <= 20, round(ledger.share, 6)
(True, 1.0)

**Guarantee.** Trials and the last fit are parts of one ledger, by its GDP filter or by basic composition.
Both allow the number and the prices of further parts to follow from earlier answers. Every score is released;
where only the best run is needed, `farthing.linear.tuning` costs less.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from farthing import validate
from farthing.accounting.filters import BasicFilter, GdpFilter
from farthing.budget import Budget, Guarantee
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.ledger.tuning import rehearse
from farthing.linear.base import PUBLIC_SIZE
from farthing.linear.selection import Held, PrivateScore, Value, part_of_rest
from farthing.linear.tuning import made, share_of


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that was tried, and its noisy score."""

    candidate: Mapping[str, Any]
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best candidate, a model fitted with all that was left, every trial, and what holds of them all."""

    candidate: Mapping[str, Any]
    model: Any
    trials: tuple[Trial, ...]
    privacy: Guarantee


Next = Callable[[tuple[Trial, ...]], Mapping[str, Any] | None]


def search(
    estimator: Any,
    candidates: Iterable[Mapping[str, Any]] | Next,
    X: Any,
    y: Any,
    ledger: Ledger,
    epsilon: float,
    delta: float,
    *,
    keep: float = 0.5,
    score_share: float = 0.1,
    value: Value | None = None,
    records: int | None = None,
) -> Found:
    """Try candidates one after the other while their trials fit, and fit the best with what is left.

    Parameters
    ----------
    estimator : estimator
        As for `tune`.
    candidates : iterable of dict, or callable
        Parameters to try, or a function from the trials so far to the next ones, None to end.
    X, y : array-like
        The private rows and their targets.
    ledger : Ledger
        The ledger that pays, by the GDP filter or by basic composition.
    epsilon, delta : float
        What one trial costs: a fit and a score.
    keep : float, default 0.5
        The part of what is left at the beginning that no trial may touch; in μ², or in ε and δ.
    score_share : float, default 0.1
        The part of a trial's budget, in μ², that its score costs.
    value, records
        As for `tune`.

    Returns
    -------
    Found

    Raises
    ------
    BudgetSpent
        If not one trial fits beside what is kept; nothing is charged then.
    InvalidValue, Unsupported
        For wrong arguments, and candidates that the estimator refuses, before their trial is charged.
    """
    share, kept = validate.probability(score_share=score_share), validate.probability(keep=keep)
    if not isinstance(ledger.filter, GdpFilter | BasicFilter):
        raise Unsupported(f"a search is paid for by the GDP or the basic filter, not by {ledger.filter.name}")
    rows, trial = Held(X, y), ledger.budget.with_(epsilon, validate.probability(delta=delta))
    size = len(rows) if records is None else validate.count(records=records)
    last, trials = part_of_rest(ledger, kept), tuple[Trial, ...]()

    def fitted(candidate: Mapping[str, Any], part: Ledger) -> Any:
        fit = share_of(part, 1 - share)
        model = made(estimator, candidate).set_params(ledger=part, epsilon=fit.epsilon, delta=fit.delta)
        return model.set_params(records=size).fit(rows.X, rows.y)

    following = candidates if callable(candidates) else _in_order(candidates)
    while (candidate := following(trials)) is not None:
        rehearse(fitted, candidate, ledger, GdpFilter(trial))
        if not _fits(ledger, trial, last):
            break
        part = ledger.allot(trial.epsilon, trial.delta, filter=GdpFilter)
        model, score = fitted(candidate, part), share_of(part, share)
        noisy = PrivateScore(part, score.epsilon, score.delta, value, records=size)(model, rows.X, rows.y)
        trials = (*trials, Trial(candidate, noisy))
    if not trials:
        raise BudgetSpent(f"not one trial of {trial} fits what is left of {ledger.budget} beside {last}")
    best = max(trials, key=lambda one: one.score).candidate
    model = made(estimator, best).set_params(ledger=ledger, epsilon=None, delta=None, records=size)
    model.fit(rows.X, rows.y)
    if records is None:
        ledger.note(PUBLIC_SIZE)
    return Found(best, model, trials, ledger.guarantee)


def _fits(ledger: Ledger, trial: Budget, last: Budget) -> bool:
    """Whether one more trial leaves what is kept, tried on a ledger in memory."""
    like = ledger.rehearsal()
    try:
        for part in (trial, last):
            like.allot(part.epsilon, part.delta, filter=GdpFilter)
    except BudgetSpent:
        return False
    return True


def _in_order(candidates: Iterable[Mapping[str, Any]]) -> Next:
    try:
        waiting = iter(candidates)
    except TypeError:
        raise InvalidValue(f"candidates must be several, or a function, got {candidates!r}") from None
    return lambda trials: next(waiting, None)
