"""Bound ε from below by one training run in which each of many canaries took part with probability 1/2.

A guesser, who sees what the run released, guesses for ``guesses`` of ``canaries`` whether each took part, and
abstains from the others; ``right`` of the guesses are correct. The probability of that bounds ε:

* `epsilon`: Steinke, Nasr & Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2. Under
  ε-DP the number of right guesses is at most (stochastically) binomial with rate e^ε/(e^ε + 1); δ adds
  2 δ canaries times the steepest mean density of that binomial just below the number seen. Where δ canaries
  is above `_FEW` (public numbers decide, ahead) that term is large, and the next theorem is used, with the
  curve of (ε, δ)-DP itself: F(x) = max(0, e^-ε (x - δ), 1 - δ - e^ε (1 - x)). It assumes no more.
* `gaussian_mu`: Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-differential privacy in one run", Theorem 9
  and Algorithm 3, for the curve of N(0, 1) against N(μ, 1). Let p_i be the probability of i right guesses,
  R_i = Σ_{j >= i} p_j j/m and H_i = Σ_{j >= i} p_j (g - j)/m. The theorem ties them, H_i >= F(R_{i+1}) with
  F(x) = Φ(Φ⁻¹(x) - μ), and R_i - R_{i+1} = (H_i - H_{i+1}) i/(g - i) as both are made of p_i. If the tail at
  the number seen were as likely as 1 - confidence, R_0 + H_0 would follow from below; it cannot be above g/m.
  The proof in brief: fix one canary and the coins of the others. "Right about it, and right about i others or
  more" has at most the probability 1 - f("wrong about it, and right about i others or more") by f-DP of its
  coin. 1 - f is concave, so the mean over coins and canaries keeps the inequality: R_{i+1} <= 1 - f(H_i).
* `sampled_epsilon`: the same for the curve of T steps of DP-SGD, of which only the noise is left open.

Canaries must take part independently of each other, each with probability 1/2, and the guesses must not
depend on the answer in any other way than through what was released.

>>> round(epsilon(canaries=1000, guesses=100, right=95, delta=1e-5), 3)
1.917
>>> round(gaussian_mu(canaries=1000, guesses=100, right=95), 3)
0.657

To audit training code in one run: flip a coin for each canary (`canaries_of`), train once with those that
came up, score every canary on what the run released, and hand scores and coins to `one_run`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, bdtrc, ndtr, ndtri

from farthing import validate
from farthing.accounting import gaussian, pld
from farthing.audit.auditing import Mechanism, Verdict, audit_mechanism
from farthing.audit.statistics import Curve, GaussianCurve, SampledCurve
from farthing.audit.thresholds import Statistic
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

Array = NDArray[np.float64]

_MOST_EPSILON, _MOST_MU = 50.0, 20.0
_LEAST_NOISE, _MOST_NOISE, _NEAR = 0.25, 64.0, 0.01
_LEVELS = np.linspace(0.0, 1.0, 24) ** 1.5  # ε at δ = _FAR: the range of the envelope
_FAR = 1e-4
_FEW = 0.02  # δ canaries, up to which the theorem for pairs (ε, δ) is the better one
_HALVINGS = 40


def tail(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of at least ``right`` right guesses, if the run is (ε, δ)-DP."""
    rate = 1 / (1 + math.exp(-epsilon))
    above = float(bdtrc(right - 1, guesses, rate)) if right > 0 else 1.0
    if delta == 0 or right == 0:
        return min(1.0, above)
    below = np.arange(1, right + 1)
    least = right - below - 1  # P(right > B >= right - i), over i
    mass = bdtr(right - 1, guesses, rate) - np.where(
        least >= 0, bdtr(np.maximum(least, 0), guesses, rate), 0.0
    )
    return min(1.0, above + 2 * delta * canaries * float(np.max(mass / below)))


def epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.99) -> float:
    """Return the lower bound on ε at ``delta``."""
    _checked(canaries, guesses, right)
    failure = 1 - confidence

    def refuted(value: float) -> bool:
        if delta * canaries <= _FEW:
            return tail(canaries, guesses, right, value, delta) <= failure
        grow = math.exp(value)
        return _impossible(
            canaries,
            guesses,
            right,
            failure,
            lambda x: max(0.0, (x - delta) / grow, 1 - delta - grow * (1 - x)),
        )

    return _last(refuted, _MOST_EPSILON)


def gaussian_mu(canaries: int, guesses: int, right: int, confidence: float = 0.99) -> float:
    """Return the lower bound on μ."""
    _checked(canaries, guesses, right)

    def refuted(mu: float) -> bool:
        return _impossible(
            canaries, guesses, right, 1 - confidence, lambda x: float(ndtr(ndtri(min(x, 1.0)) - mu))
        )

    return _last(refuted, _MOST_MU)


def planned_guesses(canaries: int, mu: float, confidence: float = 0.99) -> int:
    """Return the number of guesses that gives the best expected bound for a Gaussian mechanism with this μ.

    Scores of such a mechanism beyond ±t are right with probability Φ(μ/2 - t) / (Φ(μ/2 - t) + Φ(-μ/2 - t)).
    """
    best, most = 2, -1.0
    for threshold in np.linspace(0.0, 3.0, 13) + mu / 4:
        right, wrong = (float(ndtr(sign * mu / 2 - threshold)) for sign in (1, -1))
        guesses = 2 * max(1, round(canaries * (right + wrong) / 2))
        if guesses > canaries:
            continue
        shown = gaussian_mu(canaries, guesses, math.floor(guesses * right / (right + wrong)), confidence)
        best, most = (guesses, shown) if shown > most else (best, most)
    return best


def sampled_epsilon(
    canaries: int,
    guesses: int,
    right: int,
    rate: float,
    steps: int,
    delta: float,
    confidence: float = 0.99,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> float:
    """Return the lower bound on ε for ``steps`` Gaussian steps on Poisson samples of ``rate``.

    The unknown is their noise; the curve of a noise is the envelope of its certified profile δ(ε).
    """
    _checked(canaries, guesses, right)

    def plan(noise: float) -> RepeatedEvent:
        return RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps)

    def refuted(log_noise: float) -> bool:
        levels, deltas = _profile(plan(math.exp(log_noise)), adjacency)
        shrink = np.exp(-levels)

        # the bound on H, given R = x: both x <= e^ε H + δ and 1 - H <= e^ε (1 - x) + δ
        def least(x: float) -> float:
            return float(max(np.max(shrink * (x - deltas)), np.max(1 - deltas - (1 - x) / shrink), 0.0))

        return _impossible(canaries, guesses, right, 1 - confidence, least)

    low, high = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
    if not refuted(high):
        return 0.0
    while high - low > _NEAR:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return pld.epsilon(plan(math.exp(high)), delta, adjacency)


def _profile(event: RepeatedEvent, adjacency: Adjacency) -> tuple[Array, Array]:
    """Return levels ε in the range that matters, and δ there, the larger of both directions."""
    levels = _LEVELS * pld.epsilon(event, _FAR, adjacency)
    ways = pld.directions(event, adjacency)
    deltas = [[math.exp(pld.log_delta(way, float(level))) for level in levels] for way in ways]
    return levels, np.max(deltas, axis=0)


def _impossible(
    canaries: int, guesses: int, right: int, likely: float, least: Callable[[float], float]
) -> bool:
    """Return whether a tail with probability ``likely`` contradicts a curve, whose F is ``least``."""
    share = guesses / canaries
    r, h = likely * right / canaries, likely * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        more = max(h, least(r))
        if more == h:  # converged
            break
        r, h = r + i / (guesses - i) * (more - h), more
        if r + h > share:
            return True
    return r + h > share


def _last(refuted: Callable[[float], bool], most: float) -> float:
    """Return the largest value that is refuted, by bisection; 0 where none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    if refuted(most):
        return most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _checked(canaries: int, guesses: int, right: int) -> None:
    validate.count(canaries=canaries)
    if not 0 <= right <= guesses <= canaries:
        raise InvalidValue(
            f"right <= guesses <= canaries must hold, got {right}, {guesses} and {canaries} of them"
        )


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

    A sound mechanism fails in a fraction 1 - confidence of runs at most; with a `SeededStream` the result is
    always the same.

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
    """Flip a fair coin for each canary, which decides whether it takes part in the run.

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
    Without a curve by Steinke, Nasr & Jagielski 2023; with one, or where δ times the number of canaries is
    above 0.02, by Mahloujifar, Melis & Chaudhuri 2024.

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
        guesses = planned_guesses(m, claim.mu if claim.delta else claim.epsilon, confidence)
    side = max(1, validate.count(guesses=guesses) // 2)
    if 2 * side > m:
        raise InvalidValue(f"guesses must be at most the number of canaries, {m}, got {guesses}")
    order = np.argsort(values, kind="stable")
    right = int(truth[order[m - side :]].sum() + (~truth[order[:side]]).sum())
    match curve:
        case SampledCurve(rate, steps, fixed_size):
            neighbours = Adjacency.ADD_REMOVE if fixed_size else claim.adjacency
            least = sampled_epsilon(m, 2 * side, right, rate, steps, claim.delta, confidence, neighbours)
        case GaussianCurve():
            mu = gaussian_mu(m, 2 * side, right, confidence)
            least = gaussian.epsilon(mu, claim.delta)
        case _:
            least = epsilon(m, 2 * side, right, claim.delta, confidence)
    assumption = "" if curve is None else curve.assumption
    return Verdict(least, claim, m, confidence, attack, assumption, "canaries in one run")
