"""A-DDP: each client keeps its records, its noise and its books, and leaves when the next round does not fit.

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Algorithm 1. Line 5 (noise
for an estimated number of rounds T, by advanced composition, analytic Gaussian) is the invitation's
``calibration``, or is set by ``epsilon_iter`` and ``delta_iter``; lines 7-10 (δ_u of the rounds so far) its
``accountant``; lines 11-15 are each client's own; α of line 17 is ``rate``.
The defaults are the paper's, and every part is an option: local samples up to the whole local gradient
(``draw``), noise and rounds by advanced composition, the paper's theorem or tight accounting.

Where we deviate. A client checks that the round fits *before* it uploads, not after. Exactly one record a
round moves an upload by 2C, not C (the record that is drawn pushes another out); C is right for ``Poisson``
draws, with an upload of noise alone where the draw is empty, under add-remove and zero-out. Clients who
differ in noise are weighted by its inverse variance; ``weights="plain"`` is the paper's mean. Without a
``rate``, noise moves the margin of a row as long as 2 clip by `MARGIN_NOISE` in the course of all rounds.

The guarantee is each client's own: (ε_u, δ_u) for one record, against a server that sees every upload and not
which record was drawn, by the accountant of its countdown (the paper's Theorem 1 holds even where draws are
seen). It is not local differential privacy of a client; with `Budget.unit` it protects all records of one,
and then an upload hides behind noise for as many clips as it holds records, and no draw is worth anything.
Under other ``trust`` the same holds against who sees sums over clients, or what is released.

>>> import numpy as np
>>> from farthing.budget import Budget
>>> from farthing.federated.simulated import Simulated
>>> from farthing.linear.losses import logistic
>>> from farthing.queries.samplers import Poisson
>>> X = np.random.default_rng(0).uniform(size=(2000, 2))
>>> clients = Simulated.split(X, (X[:, 0] > X[:, 1]) * 1.0, records=100, budgets=Budget(0.5, 1e-8))
>>> steps = addp(clients, Problem(logistic, 2000, 2, unit=False), draw=Poisson(0.01))
>>> step = next(steps)
>>> int(clients.left.min()), round(clients.terms(0).mechanism.noise_multiplier, 1)
(38011, 193.7)
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from farthing import validate
from farthing.data.tables import Features
from farthing.errors import InvalidValue
from farthing.federated.protocol import (
    Accountant,
    Clients,
    Draw,
    Exactly,
    Invitation,
    Trust,
    Weights,
    iteration_noise,
    under,
)
from farthing.linear.losses import Gradient
from farthing.linear.problem import Problem
from farthing.queries.query import Step, until_spent

_ONE = Exactly(1)
MARGIN_NOISE = 1.0  # what noise may do to a margin in the course of all rounds


def addp(
    clients: Clients,
    problem: Problem,
    *,
    clip: float = 3.0,
    draw: Draw = _ONE,
    rounds: int = 10,
    noise: float | None = None,
    epsilon_iter: float | None = None,
    delta_iter: float | None = None,
    calibration: Accountant = Accountant.ADVANCED,
    accountant: Accountant = Accountant.SAMPLING,
    weights: Weights = Weights.PRECISION,
    rate: float | None = None,
    trust: Trust = Trust.LOCAL,
    survivors: int | None = None,
) -> Iterator[Step]:
    """Algorithm 1 of A-DDP, for as long as anyone can afford a round. ``noise`` is over the clip.

    ``epsilon_iter`` and ``delta_iter`` set the noise instead: that with which one round is (ε, δ)-DP by the
    analytic Gaussian mechanism, before its draw. Neither changes what the budget allows in all.
    Under distributed or trusted ``trust`` the sum over clients has one noise, the least that all budgets can
    afford; it goes on while ``survivors`` of them (all, unless told) are left.
    """
    invitation = Invitation(clip, draw, rounds, noise, calibration, accountant)
    if epsilon_iter is not None or delta_iter is not None:
        if epsilon_iter is None or delta_iter is None or noise is not None:
            raise InvalidValue("give epsilon_iter and delta_iter, or noise, or leave all three out")
        invitation = replace(invitation, noise=iteration_noise(clients, invitation, epsilon_iter, delta_iter))
    return descend(clients, problem, under(clients, invitation, trust, survivors), weights, rate)


@until_spent
def descend(
    clients: Clients, problem: Problem, invitation: Invitation, weights: Weights, rate: float | None
) -> Iterator[Step]:
    """The server's side of Algorithm 1, whatever the clients were invited to."""
    features = Features(problem.width, intercept=float(problem.intercept))
    outlook = clients.forecast(invitation, weights)
    clients.invite(invitation, weights)
    if rate is None:
        longest = min(math.hypot(problem.radius, features.intercept), 2 * invitation.clip)
        noise = outlook.deviation * math.sqrt(outlook.rounds) * longest
        rate = min(MARGIN_NOISE / noise, 1 / (problem.loss.curvature * longest**2))
    rate = validate.positive(rate=rate)
    gradient, w = Gradient(problem.loss, features), problem.zeros(features.size)  # line 1
    for t in itertools.count(1):  # line 2
        got = clients.ask(gradient, w)  # lines 3-16
        w = w - rate * got.mean  # line 17
        yield Step(t, features.unfold(w), got.receipts)
