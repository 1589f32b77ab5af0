"""Lower bounds on ε from one training run, in which each of many canaries took part with probability 1/2.

A guesser, who sees what the run released, names for ``guesses`` of ``canaries`` whether each took part, and
abstains from the others; ``right`` of the guesses are. How likely that is bounds ε:

* `epsilon`: Steinke, Nasr & Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2. Under
  ε-DP the number of right guesses is at most (stochastically) binomial with rate e^ε/(e^ε + 1); δ adds
  2 δ canaries times the steepest mean density of that binomial just below the number seen.
* `gaussian_mu`: Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-differential privacy in one run", Theorem 9
  and Algorithm 3, for the curve of N(0, 1) against N(μ, 1). Let p_i be the probability of i right guesses,
  R_i = Σ_{j >= i} p_j j/m and H_i = Σ_{j >= i} p_j (g - j)/m. The theorem ties them, H_i >= F(R_{i+1}) with
  F(x) = Φ(Φ⁻¹(x) - μ), and R_i - R_{i+1} = (H_i - H_{i+1}) i/(g - i) as both are made of p_i. If the tail at
  the number seen were as likely as 1 - confidence, R_0 + H_0 would follow from below; it cannot be above g/m.
* `sampled_epsilon`: the same for the curve of T steps of DP-SGD, of which only the noise is left open.

Canaries must take part independently of each other, each with probability 1/2, and the guesses must not
depend on the answer in any other way than through what was released.

>>> round(epsilon(canaries=1000, guesses=100, right=95, delta=1e-5), 3)
1.917
>>> round(gaussian_mu(canaries=1000, guesses=100, right=95), 3)
0.657
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, ndtr, ndtri

from farthing import validate
from farthing.accounting import pld
from farthing.budget import Adjacency
from farthing.errors import InvalidValue
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

Array = NDArray[np.float64]

_MOST_EPSILON, _MOST_MU = 50.0, 20.0
_LEAST_NOISE, _MOST_NOISE, _NEAR = 0.25, 64.0, 0.01
_LEVELS = np.linspace(0.0, 1.0, 24) ** 1.5  # of the ε at δ = _FAR: where the envelope is taken
_FAR = 1e-4
_HALVINGS = 40


def tail(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The probability of so many right guesses or more is at most this, if the run is (ε, δ)-DP."""
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
    """The lower bound on ε at ``delta``."""
    _checked(canaries, guesses, right)
    failure = 1 - confidence
    return _last(lambda value: tail(canaries, guesses, right, value, delta) <= failure, _MOST_EPSILON)


def gaussian_mu(canaries: int, guesses: int, right: int, confidence: float = 0.99) -> float:
    """The lower bound on μ."""
    _checked(canaries, guesses, right)

    def refuted(mu: float) -> bool:
        return _impossible(
            canaries, guesses, right, 1 - confidence, lambda x: float(ndtr(ndtri(min(x, 1.0)) - mu))
        )

    return _last(refuted, _MOST_MU)


def planned_guesses(canaries: int, mu: float, confidence: float = 0.99) -> int:
    """Return the number of guesses that shows the most of a Gaussian mechanism with this μ on average.

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
    """The lower bound on ε if the curve is that of ``steps`` Gaussian steps on Poisson samples of ``rate``.

    What is searched for is their noise; the curve of a noise is the envelope of its certified profile δ(ε).
    """
    _checked(canaries, guesses, right)

    def plan(noise: float) -> RepeatedEvent:
        return RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps)

    def refuted(log_noise: float) -> bool:
        levels, deltas = _profile(plan(math.exp(log_noise)), adjacency)
        shrink = np.exp(-levels)

        def least(x: float) -> float:  # of H, given R = x: both x <= e^ε H + δ and 1 - H <= e^ε (1 - x) + δ
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
    """Levels ε, as far as they matter, and δ there, the larger of both directions."""
    levels = _LEVELS * pld.epsilon(event, _FAR, adjacency)
    ways = pld.directions(event, adjacency)
    deltas = [[math.exp(pld.log_delta(way, float(level))) for level in levels] for way in ways]
    return levels, np.max(deltas, axis=0)


def _impossible(
    canaries: int, guesses: int, right: int, likely: float, least: Callable[[float], float]
) -> bool:
    """Return whether a tail that is as ``likely`` contradicts a curve, ``least`` being its F."""
    share = guesses / canaries
    r, h = likely * right / canaries, likely * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        more = max(h, least(r))
        if more == h:  # nothing grows any more
            break
        r, h = r + i / (guesses - i) * (more - h), more
        if r + h > share:
            return True
    return r + h > share


def _last(refuted: Callable[[float], bool], most: float) -> float:
    """The largest value refuted, by bisection; 0 where none is."""
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
