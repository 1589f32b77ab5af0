"""For tests, `assert_private`; for training code that nobody can look into, one run with many canaries.

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
    """Fails a test whose mechanism is broken; sound ones fail once in 1 / (1 - confidence) runs at most.

    With a `SeededStream` they always do or never.
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
    """A fair coin for each canary: whether it takes part."""
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
    """The verdict on one run in which canaries took part by fair coins; large scores speak for "took part".

    The ``guesses`` // 2 largest scores are named "in", as many of the smallest "out", and the others are left
    out. How many must not be tuned on the run; by default the claim says it (`canaries.planned_guesses`).
    Without a ``curve`` by Steinke, Nasr & Jagielski 2023, with `GaussianCurve` or `SampledCurve` by
    Mahloujifar, Melis & Chaudhuri 2024.
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
