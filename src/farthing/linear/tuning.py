"""Tune estimators: find parameters and a model with them, for little more than one fit costs.

`tune` fits and scores a random number of candidates and releases the best (`farthing.ledger.tuning`). It is a
function and not an estimator, so that its cost is visible in one call: a search that is cloned and fitted
again would pay again.

>>> import numpy as np
>>> import farthing as ft
>>> rng = np.random.default_rng(0)
>>> X = rng.uniform(size=(5000, 3))
>>> y = (X[:, 0] > X[:, 1]).astype(int)
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
>>> tuned = tune(ft.LogisticRegression(), {"bounds": [None, (0, 1), (0, 100)]}, X, y, ledger, runs=5)
>>> print(tuned.privacy)
(1, 1e-05)-DP, add-remove, per record, against anyone, by tuning [the number of records is taken as public]
>>> tuned.candidate["bounds"] in (None, (0, 1), (0, 100))
True

A candidate is scored on the rows that it was fitted on: a private fit depends little on any of them, and none
is set aside. Score and fit share the run's budget as composed Gaussian answers.

`search` tries a number of candidates that is not fixed in advance, and keeps a part for the last fit.
`GridSearchCV` is paid for in equal parts, whose number must be known (`farthing.linear.selection`). Here
every trial costs the same, the next candidate may depend on all scores so far, and the search ends with the
candidates, by a rule, or before a trial that would use the part kept for the last fit.

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
Both allow the number and the prices of further parts to depend on earlier answers. Every score is released;
if only the best run is needed, `tune` costs less.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone, is_regressor
from sklearn.model_selection import ParameterGrid

from farthing import validate
from farthing.accounting import gaussian
from farthing.accounting.filters import BasicFilter, GdpFilter
from farthing.budget import Budget, Guarantee
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.ledger.tuning import Candidates, Tuned, part_of, rehearse, released, run_count, tuning_event
from farthing.linear.base import PUBLIC_SIZE
from farthing.linear.selection import Held, PrivateScore, Value, part_of_rest
from farthing.queries import arrays
from farthing.queries.events import PoissonEvent

_ROUNDED = 1 - 1e-9  # so that the float sum of both parts still fits

Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]] | Callable[[int], Mapping[str, Any]]


def tune(
    estimator: Any,
    candidates: Parameters,
    X: Any,
    y: Any,
    ledger: Ledger,
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    runs: float = 10.0,
    distribution: str | float = "geometric",
    score_share: float = 0.1,
    value: Value | None = None,
    records: int | None = None,
    sampling_rate: float | None = None,
) -> Tuned:
    """Fit a random number of candidates within one budget and return the one with the best noisy score.

    Parameters
    ----------
    estimator : estimator
        An estimator of farthing, or one with parameters ``ledger``, ``epsilon`` and ``delta``, that spends
        Gaussian answers (every solver except those that promise a plan). It must also fit no rows at all.
    candidates : dict or sequence of dict or callable
        Parameters to draw from: a grid, a list, or a function of a random seed (an integer). They must not
        depend on records.
    X, y : array-like
        The private rows and their targets.
    ledger : Ledger
        The ledger that pays: one without answers, or one with ``filter=BasicFilter``.
    epsilon, delta : float, optional
        The part of the budget for all runs together; by default the remainder.
    runs : float, default 10
        The expected number of runs.
    distribution : {"geometric", "logarithmic", "poisson"} or float, default "geometric"
        The distribution of the number of runs (`best_of`).
    score_share : float, default 0.1
        The share of a run's μ² that pays for its score.
    value : callable, optional
        A number in [0, 1] per record from targets and predictions, as for `PrivateScore`; by default whether
        they agree. A regressor needs one.
    records : int, optional
        The public number of records. None takes the length of the table as public.
    sampling_rate : float, optional
        Tune on a Poisson sample of the records, drawn once, which costs less; fit on all of them afterwards
        from the remainder. It needs ``filter=BasicFilter`` and add-remove.

    Returns
    -------
    Tuned
        ``candidate`` (the parameters), ``model`` (fitted), ``score`` (noisy) and ``privacy``.

    Raises
    ------
    BudgetSpent
        If it does not fit the budget; nothing is charged then.
    InvalidValue, Unsupported
        For invalid arguments and candidates, before the charge.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(4000, 2))
    >>> y = (X[:, 0] > X[:, 1]).astype(int)
    >>> ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    >>> tuned = ft.tune(ft.LogisticRegression(), {"bounds": [(0, 1), (0, 50)]}, X, y, ledger, runs=6)
    >>> sorted(tuned.candidate)
    ['bounds']
    """
    share = validate.probability(score_share=score_share)
    if value is None and is_regressor(estimator):
        raise InvalidValue("a regressor needs value=, a number in [0, 1] per record: larger is better")
    count, part = run_count(runs, distribution), part_of(ledger, epsilon, delta)
    # an empty sample of a list would have no columns, and be refused
    rows = Held(arrays.features(X) if sampling_rate is not None and isinstance(X, list | tuple) else X, y)
    size = len(rows) if records is None else validate.count(records=records)
    event: Any
    if sampling_rate is None:
        event = tuning_event(part, count, None)
    else:
        rate = validate.rate(sampling_rate=sampling_rate)
        event = PoissonEvent(rate, tuning_event(_before_sampling(part, rate), count, None))
        rows = rows.take(np.flatnonzero(ledger._stream.bernoulli(rate, len(rows))))
        size = max(1, round(size * rate))

    def run(candidate: Mapping[str, Any], own: Ledger) -> tuple[Any, float]:
        fit, score = (share_of(own, each) for each in (1 - share, share))
        model = made(estimator, candidate)
        # rows may be none: to fail then would reveal it
        model.set_params(ledger=own, epsilon=fit.epsilon, delta=fit.delta, records=size).fit(rows.X, rows.y)
        if records is None:
            own.note(PUBLIC_SIZE)
        return model, PrivateScore(own, score.epsilon, score.delta, value, records=size)(
            model, rows.X, rows.y
        )

    tuned = released(run, _listed(estimator, candidates), ledger, event)
    tuned.model.set_params(ledger=ledger)
    tuned.model.privacy_ = tuned.privacy
    return tuned


def share_of(ledger: Ledger, share: float) -> Budget:
    """Return the part of a ledger's Gaussian DP with this share of its μ²."""
    assert isinstance(ledger.filter, GdpFilter)
    mu, delta = ledger.filter.mu * math.sqrt(share) * _ROUNDED, ledger.budget.delta
    return ledger.budget.with_(gaussian.epsilon(mu, delta), delta)


def _before_sampling(part: Budget, rate: float) -> Budget:
    """Return the budget that sampling amplifies to this part: the inverse of (log(1 + q(e^ε - 1)), qδ)."""
    return part.with_(math.log1p(math.expm1(part.epsilon) / rate) * _ROUNDED, min(part.delta / rate, 0.5))


def _listed(estimator: Any, candidates: Parameters) -> Candidates:
    """Return candidates as `best_of` expects them; refuse unknown parameter names."""
    if callable(candidates):
        return candidates
    listed = list(ParameterGrid(candidates) if isinstance(candidates, Mapping) else candidates)
    for candidate in listed:
        made(estimator, candidate)
    return listed


def made(estimator: Any, candidate: Mapping[str, Any]) -> Any:
    """Return an estimator with a candidate's parameters."""
    try:
        return clone(estimator).set_params(**candidate)
    except (TypeError, ValueError) as error:
        raise InvalidValue(
            f"{candidate!r} are not parameters of {type(estimator).__name__}: {error}"
        ) from None


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that was tried, and its noisy score."""

    candidate: Mapping[str, Any]
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best candidate, a model fitted with the remaining budget, all trials, and their guarantee."""

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
    """Try candidates in turn while their trials fit, and fit the best one with the remaining budget.

    Parameters
    ----------
    estimator : estimator
        As for `tune`.
    candidates : iterable of dict, or callable
        Parameters to try, or a function from the trials so far to the next parameters, None to end.
    X, y : array-like
        The private rows and their targets.
    ledger : Ledger
        The ledger that pays, by the GDP filter or by basic composition.
    epsilon, delta : float
        The cost of one trial: a fit and a score.
    keep : float, default 0.5
        The share of the initial remainder that no trial may use; of μ², or of ε and δ.
    score_share : float, default 0.1
        The share of a trial's μ² that pays for its score.
    value, records
        As for `tune`.

    Returns
    -------
    Found

    Raises
    ------
    BudgetSpent
        If not even one trial fits beside the part that is kept; nothing is charged then.
    InvalidValue, Unsupported
        For invalid arguments, and for candidates that the estimator refuses, before their trial is charged.
    """
    share, kept = validate.probability(score_share=score_share), validate.probability(keep=keep)
    if not isinstance(ledger.filter, GdpFilter | BasicFilter):
        raise Unsupported(f"a search needs the GDP or the basic filter, got {ledger.filter.name}")
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
    """Return whether one more trial leaves the part that is kept, tried on a ledger in memory."""
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
