"""Helpers for tests, and for auditing training code in one run with many canaries.

One run: flip a coin for each canary (`canaries_of`), train once with those that came up, score every canary
on what the run released, and hand scores and coins to `one_run`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.accounting import gaussian
from farthing.audit import canaries as bounds
from farthing.audit.auditing import Mechanism, Statistic, Verdict, audit_mechanism
from farthing.audit.statistics import Curve, GaussianCurve, SampledCurve
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream


def assert_private(
    mechanism: Mechanism,
    neighbours: tuple[Any, Any],
    claim: Budget,
    statistic: Statistic | Sequence[Statistic] | None = None,
    trials: int = 10_000,
    confidence: float = 0.9999,
    *,
    threshold: float | None = None,
    curve: Curve | None = None,
    stream: Stream | None = None,
) -> None:
    """Raise AssertionError if an audit breaks the claim; for tests.

    A sound mechanism fails once in 1 / (1 - confidence) runs at most; with a `SeededStream` it always does or
    never.

    Parameters
    ----------
    mechanism, neighbours, claim, statistic, trials, threshold, curve, stream
        As in `audit_mechanism`.
    confidence : float, default 0.9999
        The probability with which the bound holds at least.

    Examples
    --------
    >>> from farthing.audit import each
    >>> assert_private(each(lambda data, stream: 0.0), (1, 2), Budget(0.1, 0.0), trials=100)
    """
    verdict = audit_mechanism(
        mechanism,
        neighbours,
        claim,
        statistic,
        trials,
        confidence,
        threshold=threshold,
        curve=curve,
        stream=stream,
    )
    if verdict.broken:
        raise AssertionError(str(verdict))


def canaries_of(canaries: int, stream: Stream | None = None) -> NDArray[np.bool_]:
    """Flip a fair coin for each canary: whether it takes part in the run.

    Parameters
    ----------
    canaries : int
        How many.
    stream : Stream, optional
        Where the coins come from.

    Returns
    -------
    ndarray of bool

    Examples
    --------
    >>> canaries_of(3).shape
    (3,)
    """
    return (Stream() if stream is None else stream).bernoulli(0.5, validate.count(canaries=canaries))


def one_run(
    scores: ArrayLike,
    took_part: ArrayLike,
    claim: Budget,
    guesses: int | None = None,
    confidence: float = 0.95,
    *,
    curve: Curve | None = None,
    attack: str = "many canaries",
) -> Verdict:
    """Judge a claim by one run in which canaries took part by fair coins.

    Parameters
    ----------
    scores : array-like of shape (canaries,)
        One number a canary; large ones speak for "took part".
    took_part : array-like of bool
        The coins (`canaries_of`).
    claim : Budget
        What is claimed of the run.
    guesses : int, optional
        The ``guesses`` // 2 largest scores are named "in", as many of the smallest "out", and the others are
        left out. It must not be tuned on the run; None lets the claim decide (`canaries.planned_guesses`).
    confidence : float, default 0.95
        The probability with which the bound holds at least.
    curve : GaussianCurve or SampledCurve, optional
        What may be assumed of the run. None assumes nothing.
    attack : str, default "many canaries"
        A name for the verdict.

    Returns
    -------
    Verdict

    Notes
    -----
    Without a curve by Steinke, Nasr & Jagielski 2023, with one by Mahloujifar, Melis & Chaudhuri 2024.

    Examples
    --------
    >>> coins = np.arange(200) % 2 == 0
    >>> one_run(np.where(coins, 1.0, 0.0), coins, Budget(1.0, 1e-5)).broken  # every guess is right
    True
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(took_part, dtype=np.bool_)
    if values.ndim != 1 or values.shape != truth.shape or not np.isfinite(values).all():
        raise InvalidValue(
            f"scores must be finite, one a canary, got shape {values.shape} for {truth.shape} coins"
        )
    m = len(values)
    if guesses is None:
        guesses = bounds.planned_guesses(m, claim.mu if claim.delta else claim.epsilon, confidence)
    side = max(1, validate.count(guesses=guesses) // 2)
    if 2 * side > m:
        raise InvalidValue(f"guesses must be at most the number of canaries, {m}, got {guesses}")
    order = np.argsort(values, kind="stable")
    right = int(truth[order[m - side :]].sum() + (~truth[order[:side]]).sum())
    match curve:
        case SampledCurve(rate, steps):
            epsilon = bounds.sampled_epsilon(
                m, 2 * side, right, rate, steps, claim.delta, confidence, claim.adjacency
            )
        case GaussianCurve():
            mu = bounds.gaussian_mu(m, 2 * side, right, confidence)
            epsilon = gaussian.epsilon(mu, claim.delta)
        case _:
            epsilon = bounds.epsilon(m, 2 * side, right, claim.delta, confidence)
    assumption = "" if curve is None else curve.assumption
    return Verdict(epsilon, claim, m, confidence, attack, assumption, "canaries in one run")
