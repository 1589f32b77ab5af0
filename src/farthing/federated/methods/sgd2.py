"""Train by SGD2: every party sends the noisy gradient of all of its records, round after round.

"Multi-party DP Write-up 2: Stochastic Gradient Descent", Algorithm SGD2 (its numbers in brackets): in round k
party i sends G = Σ ∇l(θ; d) + b over its own records, b ~ N(0, σ²)^p [3], and B moves to
θ = Π(θ - η(k) Σ G) and broadcasts it [4].

The write-up leaves σ open. T Gaussian answers of sensitivity Δ compose exactly to μ-GDP with μ = Δ√T/σ, so

    σ = Δ √T / μ(ε, δ),   Δ = L, or 2L where a record is replaced,

is the least that is (ε, δ)-DP (Dong, Roth & Su 2022, Cor. 3.3; Balle & Wang 2018, Thm. 8). If a party is
protected as a whole (`Budget.unit`), Δ is n_i L or 2 n_i L. Each party has its own budget, size and noise. A
record influences other parties' messages only by post-processing of its own party's messages, so the
guarantee depends on that party's σ and ledger alone, against a server that sees every message. (With another
``trust`` than the write-up's, σ is the noise of the sum, for the party with the least budget, against an
observer of sums, or of an aggregator's releases.) The parties and their numbers of records are public; under
add-remove, the neighbour of a party is the party without records, whose messages are noise. At ε = 1, δ =
1e-6, T = 100: σ = 42.25 Δ. The recipe of the proof of Theorem 3 (each round (ε/√(T ln 1/δ), δ/T) by the
classic Gaussian mechanism: `sgd2_published_noise`) takes 227 Δ, for which the true ε is 0.165.

Steps are those of SGD1 for the mean over the n records of the round, so that n cancels:
η(k) n = |C|/√(k (L² + p s²)), where s is the noise on a coordinate of the mean, or 1/(Δ k) if l is Δ-strongly
convex (``convexity`` adds a public term Δ|θ|²/2, whose gradient needs no noise), or ``lr``. |C| is the
diameter.

T need not be known: with a given ``noise_multiplier`` (σ/L) every party stays as long as its own budget
allows, and the sum continues without parties that left; otherwise each party takes the σ with which
``rounds`` rounds spend its budget. Deviations from the write-up: θ is sent with the next question to the
parties that still take part, instead of to all at once, and B returns the last θ without sending it (every θ
is a function of the G's that B has seen, so no party learns more); gradients are clipped to L, which is not
trusted to be a Lipschitz constant; and C is a ball, with θ₀ its centre or given, instead of drawn. The
write-up names no C: a radius of 10 did better than 2 or 5 in single runs on Adult, with 2 and 10 parties at ε
from 0.1, and with 390 at ε from 0.5.

>>> import numpy as np
>>> from farthing.budget import Budget
>>> from farthing.federated.simulated import Simulated
>>> from farthing.linear.losses import logistic
>>> from farthing.queries.query import run
>>> round(sgd2_noise(Budget(1.0, 1e-6), rounds=100), 2)
42.25
>>> x = np.linspace(-1, 1, 3001)[:, None]
>>> clients = Simulated.split(x, 1.0 * (x[:, 0] > 0), records=[1000, 1, 2000], budgets=Budget(1.0, 1e-6))
>>> found = run(sgd2(clients, Problem(logistic, 3001, 1, unit=False), rounds=50))
>>> found.steps, clients.alive, np.shape(found.w[0])
(50, 0, (1,))
"""

import itertools
import math
from collections.abc import Callable, Iterator

from numpy.typing import ArrayLike

from farthing import validate
from farthing.accounting import gaussian
from farthing.budget import Budget, Guarantee, Unit
from farthing.errors import InvalidValue
from farthing.federated.methods.server import L2Projection, lipschitz_of
from farthing.federated.protocol import Clients, Invitation, Trust, Weights, under
from farthing.federated.terms import weights_under
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Step, until_spent


@until_spent
def sgd2(
    clients: Clients,
    problem: Problem,
    *,
    rounds: int = 100,
    noise_multiplier: float | None = None,
    lipschitz: float | None = None,
    radius: float = 10.0,
    convexity: float = 0.0,
    lr: Callable[[int], float] | None = None,
    start: ArrayLike | None = None,
    weights: Weights = Weights.RECORDS,
    trust: Trust = Trust.LOCAL,
    survivors: int | None = None,
    exact: bool = True,
) -> Iterator[Step]:
    """Train by SGD2: every party sends the noisy gradient of all its records, until budgets are spent.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    rounds : int, default 100
        T, the number of rounds for which the noise is calibrated.
    noise_multiplier : float, optional
        σ/L, in place of the least noise for ``rounds``.
    lipschitz : float, optional
        L, the clipping norm of gradients; by default from the loss and the largest row norm.
    radius : float, default 10.0
        The radius of C, the ball that steps are projected onto.
    convexity : float, default 0.0
        Δ, which makes the loss strongly convex.
    lr : callable, optional
        η(k), which multiplies the plain sum.
    start : array_like, optional
        θ₀, which must be public; by default the centre of C.
    weights : Weights, default "records"
        The weights of uploads: "records" is the write-up's plain sum.
    trust : Trust, default "local"
        The party that adds the noise.
    survivors : int, optional
        The least number of honest parties in a round under distributed trust; by default all parties.
    exact : bool, default True
        If False, use the noise of `sgd2_published_noise`, the largest of all parties, and end after
        ``rounds``.

    Returns
    -------
    Iterator of Step
        One step per round.

    Notes
    -----
    The module's docstring states the guarantee and the deviations from the write-up.
    """
    if not exact:
        if noise_multiplier is not None:
            raise InvalidValue("give noise_multiplier, or exact=False for the noise of Theorem 3, not both")
        pairs = set(zip(clients.budgets, clients.records.tolist(), strict=True))
        noise_multiplier = max(sgd2_published_noise(one, rounds, records=size) for one, size in pairs)
    features, projection = problem.rows(), L2Projection(radius)
    clip = lipschitz_of(problem, features, lipschitz)
    convexity = validate.non_negative(convexity=convexity)
    w = projection.start(start, problem.zeros(features.size))
    if lr and weights_under(trust, weights) is not Weights.RECORDS:
        raise InvalidValue(f"lr applies to a plain sum, the weights are {str(weights)!r}: use 'records'")
    clients.invite(
        under(clients, Invitation(clip, rounds=rounds, noise_multiplier=noise_multiplier), trust, survivors),
        weights,
    )
    gradient = LinearGradient(problem.loss, features)
    for t in itertools.count(1) if exact else range(1, rounds + 1):
        given = validate.positive(lr=lr(t)) if lr else None
        got = clients.ask(gradient, w)
        length = projection.length(t, clip**2 + w.size * got.variance, convexity)
        length = length if given is None else given * got.divisor
        w = projection.project(w - length * (got.mean + convexity * w))
        yield Step(t, features.unfold(w), got.receipts)


def sgd2_noise(budget: Budget, rounds: int, lipschitz: float = 1.0, records: int = 1) -> float:
    """Return σ with which ``rounds`` rounds spend the budget of a party with ``records`` records."""
    one = gaussian.noise(budget.epsilon, budget.delta)
    sensitivity = _sensitivity(budget, lipschitz, records)
    return sensitivity * math.sqrt(validate.count(rounds=rounds)) * one * (1 + 1e-15)


def sgd2_published_noise(budget: Budget, rounds: int, lipschitz: float = 1.0, records: int = 1) -> float:
    """Return σ of the proof of Theorem 3: a round is (ε/√(T ln 1/δ), δ/T)-DP by the classic Gaussian bound.

    >>> round(sgd2_published_noise(Budget(1.0, 1e-6), rounds=100), 2)
    226.97
    """
    rounds, delta = validate.count(rounds=rounds), validate.probability(delta=budget.delta)
    most = math.sqrt(rounds * math.log(1 / delta))  # Lemma 2 needs ε < 1 in each round
    if not budget.epsilon < most:
        raise InvalidValue(
            f"epsilon must be below {most:.4g} for SGD2's noise, got {budget.epsilon!r}: use exact noise"
        )
    each = budget.epsilon / most
    return _sensitivity(budget, lipschitz, records) * gaussian.classic_noise(each, delta / rounds)


def sgd2_epsilon(budget: Budget, noise: float, rounds: int, records: int = 1) -> float:
    """Return ε, at the budget's δ, of ``rounds`` rounds with ``noise`` = σ/L; the budget's ε is not used."""
    noise, rounds = validate.positive(noise=noise), validate.count(rounds=rounds)
    return gaussian.epsilon(_sensitivity(budget, 1.0, records) * math.sqrt(rounds) / noise, budget.delta)


def sgd2_published(clients: Clients, noise: float, client: int, rounds: int) -> list[Guarantee]:
    """Return the guarantees that ``rounds`` rounds with noise σ/L give a record of party ``client``."""
    budget = clients.budgets[client]
    return [
        Guarantee(
            sgd2_epsilon(budget, noise, rounds, int(clients.records[client])),
            budget.delta,
            budget.adjacency,
            budget.unit,
            budget.observer,
            "gaussian",
            "Dong, Roth & Su 2022, Cor. 3.3, and Balle & Wang 2018, Thm. 8",
            f"{rounds} rounds with noise {noise:.6g} x L",
        )
    ]


def _sensitivity(budget: Budget, lipschitz: float, records: int) -> float:
    units = 1 if budget.unit is Unit.RECORD else validate.count(records=records)
    return units * ClipNorm(lipschitz).sensitivity(budget.adjacency)
