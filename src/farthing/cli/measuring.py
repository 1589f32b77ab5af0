"""Measure a model: on another table without privacy, or on held-out records with noise.

Held-out records cost nothing beyond the charge for the training. A public rule (`farthing.data.splitting`)
decides whether a record, or a person's records, are used for training or held out, and an added or removed
record changes either the training or the figures on held-out records, never both (add-remove; parallel
composition: McSherry 2009, Thm. 4). The figures are μ-GDP, and `paid_mu` takes μ from the ledger that paid
for the training, where they cost no more in each of the totals that the ledger's filter adds up. So for a
held-out record, as for a training record, the sum of all costs is at most the charge, over any number of
runs, and the filter's theorem holds for both. A plan, and basic composition, have no such total: there μ
meets their (ε, δ). The ledger must be closed to other queries: a part that was charged as a whole, or a
ledger in memory. Under replace-one a record may change sides, and the figures are refused.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_regressor
from sklearn.metrics import roc_auc_score

from farthing.accounting import gaussian
from farthing.accounting.filters import GdpFilter, RdpFilter, ZcdpFilter
from farthing.data import table_files
from farthing.ledger.ledger import Ledger
from farthing.linear.selection import Held, placed_predictions
from farthing.noise.summing import Sum
from farthing.queries.bounds import ROWS, ClipNorm
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query, Rows
from farthing.queries.samplers import Everyone
from farthing.report.reading import HELD_OUT

UNPAID = "the held-out records are not measured: no charge of the training covers the figures"
_FARTHER = 1 + 2.0**-30  # noise is rounded up
_BLOCK = 2**14  # records that are measured at a time
_LEAST = 1e-6  # of μ: with a million records of noise no figure means anything

Array = NDArray[np.float64]


def measured(estimator: Any, X: Array, y: NDArray[Any]) -> dict[str, Any]:
    """Return figures of a model on another table, which are not private and say so."""
    told: dict[str, Any] = {"records": len(y), "note": table_files.WITHOUT_PRIVACY}
    found = estimator.predict(X)
    if is_regressor(estimator):
        told["rmse"] = float(np.sqrt(np.mean(np.square(found - y))))
        return {**told, "rmse_of_mean": float(np.std(y))}
    told["accuracy"] = float(np.mean(found == y))
    told["guessing"] = float(np.bincount(y).max() / len(y))
    scores = estimator.decision_function(X)
    if scores.ndim == 1 and 0 < y.sum() < len(y):
        told["auc"] = float(roc_auc_score(y, scores))
    if hasattr(estimator, "predict_log_proba"):
        told["log_loss"] = -float(np.mean(estimator.predict_log_proba(X)[np.arange(len(y)), y]))
    return told


def paid_mu(ledger: Ledger) -> float:
    """Return μ of a Gaussian answer that costs no more than all that ``ledger`` was charged; 0 for none."""
    rule, journal = ledger.filter, ledger.journal
    if journal.path is not None:  # others may ask it too, and what they pay covers nothing here
        return 0.0
    adds_up = isinstance(rule, GdpFilter | ZcdpFilter | RdpFilter)
    if not adds_up or any(row.kind == "promise" for row in journal.rows()):
        epsilon = ledger.spent.epsilon
        return gaussian.mu(epsilon, ledger.budget.delta) if epsilon else 0.0
    charged, each = (
        journal.last().state or rule.start(),
        rule.cost(GaussianEvent(1.0)),
    )  # μ = 1; others cost μ²
    return math.sqrt(min(total / cost for total, cost in zip(charged, each, strict=True) if cost))


def held_out(
    estimator: Any, X: Array, y: Array, paid: Ledger, expected: float = 0.0
) -> dict[str, Any] | None:
    """Return figures of a model on held-out records, all of them from one noisy sum.

    It costs no more than was charged to ``paid``, the ledger of the training; None where that is nothing.
    ``expected``, the public number of records that should be held out, is among the figures where far fewer
    of them count, by their noisy number.
    """
    mu = min(paid_mu(paid), paid.budget.mu)
    if mu <= _LEAST:
        return None
    regression = is_regressor(estimator)
    terms, norm = (_errors, 2.0) if regression else (_hits, math.sqrt(2))
    ledger = Ledger(paid.budget, filter=GdpFilter)
    noise = _FARTHER / mu
    query = Query(
        Everyone(),
        _Figures(estimator, terms),
        ClipNorm(norm),
        Gaussian(noise),
    )
    total = ledger.over(Rows(X, y)).ask(query).value
    deviation = noise * norm
    counts = total[:1] if regression else total[1:]
    few = counts.sum() + 3 * deviation * math.sqrt(len(counts)) < expected / 2
    told = {"note": HELD_OUT, **({"expected": round(expected)} if few else {})}
    return told | (_regressed if regression else _classified)(estimator, total, deviation)


@dataclass(frozen=True, slots=True)
class _Figures:
    """The sum of some figures of records, read block by block."""

    estimator: Any
    terms: Callable[[Any, Array, Array], Array]
    honours: ClassVar[Collection[str]] = ROWS
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Rows, w: Any, bound: Any) -> Array:
        """Return the sum of all records' figures, each record's clipped by ``bound``."""
        X, y = records.arrays
        total = Sum(len(records))
        most = min(_BLOCK, total.rows)
        for start in range(0, max(len(records), 1), most):
            part = slice(start, start + most)
            found = bound.apply(self.terms(self.estimator, np.asarray(X[part]), np.asarray(y[part])))
            total.add(found.sum(axis=0), len(found))
        return total.value


def _clean(X: Array, y: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return records without what is not a number, and which ones have it: those count as nothing."""
    good = np.isfinite(X).all(axis=1) & np.isfinite(y)
    return np.where(good[:, None], X, 0.0), np.where(good, y, 0.0), good


def _hits(estimator: Any, X: Array, y: Array) -> Array:
    """Return a row a record: whether the prediction is right, and which label it has."""
    X, y, good = _clean(X, y)
    rows = np.zeros((len(y), 1 + len(estimator.classes_)))
    if len(y):
        labels = y.astype(np.int64)
        rows[:, 0] = placed_predictions(estimator, Held(X, y)) == estimator.classes_[labels]
        rows[np.arange(len(y)), 1 + labels] = 1.0
    return rows * good[:, None]


def _errors(estimator: Any, X: Array, y: Array) -> Array:
    """Return a row a record: 1, the squared error, the target and its square, as shares of the bounds."""
    X, y, good = _clean(X, y)
    low, high = (float(end) for end in estimator.target_bounds)
    target = (y - low) / (high - low)
    found = (estimator.predict(X) - low) / (high - low) if len(y) else target
    rows = np.stack(
        [np.ones(len(y)), np.clip(np.square(found - target), 0, 1), target, np.square(target)], axis=1
    )
    return rows * good[:, None]


def _classified(estimator: Any, total: Array, deviation: float) -> dict[str, Any]:
    counts = np.maximum(total[1:], 0.0)
    size = max(float(counts.sum()), 1.0)
    accuracy = min(max(float(total[0]) / size, 0.0), 1.0)
    error = math.hypot(deviation, math.sqrt(size * accuracy * (1 - accuracy))) / size
    return {
        "records": round(size),
        "accuracy": accuracy,
        "guessing": float(counts.max()) / size,
        "standard_error": min(error, 1.0),
    }


def _regressed(estimator: Any, total: Array, deviation: float) -> dict[str, Any]:
    low, high = (float(end) for end in estimator.target_bounds)
    size = max(float(total[0]), 1.0)
    squared, mean, square = (min(max(float(sum_) / size, 0.0), 1.0) for sum_ in total[1:])
    return {
        "records": round(size),
        "rmse": (high - low) * math.sqrt(squared),
        "rmse_of_mean": (high - low) * math.sqrt(max(square - mean**2, 0.0)),
        "standard_error": (high - low) * math.sqrt(squared + deviation / size)
        - (high - low) * math.sqrt(squared),
    }


def verdict(figures: dict[str, Any]) -> dict[str, str]:
    """Return a sentence where few records count or a model is not better than guessing.

    It follows from figures that are released anyway.
    """
    if "expected" in figures:
        return {
            "verdict": f"only about {figures['records']:,} of about {figures['expected']:,} held-out records "
            "count. The others have a label that the schema does not list, or no number in a numeric column: "
            "compare the schema with the table (--strict names such a column, outside the guarantee)"
        }
    error = figures.get("standard_error", 0.0)
    if "rmse" in figures:
        found, other = figures["rmse"], figures["rmse_of_mean"]
        good, what = found + 2 * error < other, "the mean"
    else:
        found, other = figures["accuracy"], figures["guessing"]
        chance = math.sqrt(max(found * (1 - found), 0.0) / max(figures["records"], 1))
        good, what = found > other + 2 * (error or chance), "the most frequent label"
    if good:
        return {}
    said = (
        f"the model is not clearly better than always predicting {what} ({found:.4g} against {other:.4g}). "
        "Use a larger epsilon, more records, fewer columns or narrower bounds"
    )
    if 2 * error > other / 2:
        said += f". The figures have a standard error of {error:.3g}: hold out more records"
    return {"verdict": said}
