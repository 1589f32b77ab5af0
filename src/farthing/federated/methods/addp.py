"""Train by A-DDP: each client keeps its records, noise and ledger, and leaves when no further round fits.

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Algorithm 1. The
invitation's ``calibration`` chooses the noise of line 5 (for an estimated number of rounds T, by advanced
composition and the analytic Gaussian mechanism), unless ``epsilon_iter`` and ``delta_iter`` set it. Its
``accountant`` computes lines 7-10 (δ_u of the rounds so far). Each client runs lines 11-15. α of line 17 is
``lr``. The defaults are the paper's. Options change the local sample, up to the whole local gradient
(``draw``), and the accounting of noise and rounds: advanced composition, the paper's theorem or tight
accounting.

Deviations. A client checks that the round fits *before* it uploads, not after. With exactly one record a
round, the sensitivity of an upload is 2C, not C (the drawn record displaces another); C is right for
``Poisson`` draws under add-remove and zero-out, where an empty draw uploads noise alone. Clients with
different noise are weighted by its inverse variance; ``weights="plain"`` is the paper's mean. Without a
``lr``, noise moves the margin of the longest row (taken as at most 2C) by `MARGIN_NOISE` over all rounds.

Each client has its own guarantee: (ε_u, δ_u) for one record, against a server that sees every upload but not
which record was drawn, by the accountant that counts its rounds (the paper's Theorem 1 holds even if draws
are seen). It is not local differential privacy of a client. With `Budget.unit` it protects all records of a
client; the noise then covers as many clipping norms as an upload holds records, and sampling amplifies
nothing. With another ``trust`` it holds against an observer of sums over clients, or of released values.

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

The module also has the four baselines of Cheng et al. 2020 ("Contrast algorithms"), as far as the paper
describes them: SGD with T fixed beforehand, and SGD without privacy. The private ones draw one record a round
(sensitivity 2C, as above; C with ``Poisson``), clip it and add Gaussian noise, calibrated exactly. They
differ in how they divide the budget.

`sgd_maj`: (ε/T, δ/T) a round, basic composition, T rounds.
`sgd_adv`: advanced composition over rounds amplified by sampling (Bassily, Smith & Thakurta 2014), with the
exact amplification of Balle, Barthe & Gaboardi 2018, Theorems 8 and 9, which needs no ε <= 1; T rounds.
`sgd_pass`: T passes that visit each record in turn, by advanced composition over a record's own visits, for
zero-out and replace-one (a removed record would shift the turns of others).
`non_private`: no noise, no clipping, no guarantee, ε = ∞; it reads a table and asks no ledger.

>>> from farthing.budget import Budget
>>> from farthing.federated.simulated import Simulated
>>> from farthing.linear.losses import logistic
>>> from farthing.queries.query import run
>>> X = np.random.default_rng(0).uniform(size=(500, 2))
>>> clients = Simulated.split(X, (X[:, 0] > 0.5) * 1.0, records=100, budgets=Budget(1.0, 1e-6))
>>> run(sgd_adv(clients, Problem(logistic, 500, 2, unit=False))).steps
10
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue
from farthing.federated.protocol import (
    Accountant,
    Clients,
    Draw,
    Exactly,
    InTurn,
    Invitation,
    Trust,
    Weights,
    iteration_noise,
    under,
)
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Step, until_spent

_ONE = Exactly(1)
MARGIN_NOISE = 1.0  # the effect of noise on a margin over all rounds


def addp(
    clients: Clients,
    problem: Problem,
    *,
    clip_norm: float = 3.0,
    draw: Draw = _ONE,
    rounds: int = 10,
    noise_multiplier: float | None = None,
    epsilon_iter: float | None = None,
    delta_iter: float | None = None,
    calibration: Accountant = Accountant.ADVANCED,
    accountant: Accountant = Accountant.SAMPLING,
    weights: Weights = Weights.PRECISION,
    lr: float | None = None,
    trust: Trust = Trust.LOCAL,
    survivors: int | None = None,
) -> Iterator[Step]:
    """Train by Algorithm 1 of A-DDP, for as long as any client can afford a round.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    clip_norm : float, default 3.0
        C, the norm at which a record's gradient is clipped.
    draw : Everyone, Poisson or Exactly, default Exactly(1)
        The records that a client draws in a round.
    rounds : int, default 10
        T, the number of rounds for which the noise is calibrated.
    noise_multiplier : float, optional
        σ/C, in place of the noise that ``calibration`` chooses.
    epsilon_iter, delta_iter : float, optional
        Set the noise so that one round is (ε, δ)-DP before its draw, by the analytic Gaussian mechanism. They
        do not change the total that a budget allows.
    calibration : Accountant, default "advanced"
        Chooses the noise for ``rounds``.
    accountant : Accountant, default "sampling"
        Counts the rounds that the noise affords.
    weights : Weights, default "precision"
        How uploads are added up; "plain" is the paper's mean.
    lr : float, optional
        α, the learning rate; by default from public numbers.
    trust : Trust, default "local"
        The party that adds the noise. Under "distributed" and "trusted" the sum over clients has one noise,
        the least that all budgets can afford.
    survivors : int, optional
        The least number of honest clients in a round under distributed trust; by default all clients.

    Returns
    -------
    Iterator of Step
        One step per round.

    Raises
    ------
    InvalidValue
        If a value is out of range, or if several options set the noise.
    BudgetSpent
        If no client can afford a single round.

    Notes
    -----
    The module's docstring states the guarantee and the deviations from Cheng et al. 2020.
    """
    invitation = Invitation(clip_norm, draw, rounds, noise_multiplier, calibration, accountant)
    if epsilon_iter is not None or delta_iter is not None:
        if epsilon_iter is None or delta_iter is None or noise_multiplier is not None:
            raise InvalidValue("give epsilon_iter and delta_iter, or noise_multiplier, or none of them")
        invitation = replace(
            invitation, noise_multiplier=iteration_noise(clients, invitation, epsilon_iter, delta_iter)
        )
    return descend(clients, problem, under(clients, invitation, trust, survivors), weights, lr)


@until_spent
def descend(
    clients: Clients, problem: Problem, invitation: Invitation, weights: Weights, lr: float | None
) -> Iterator[Step]:
    """Run the server's side of Algorithm 1 for an invitation."""
    features = Features(problem.width, intercept=float(problem.intercept))
    outlook = clients.forecast(invitation, weights)
    clients.invite(invitation, weights)
    if lr is None:
        longest = min(math.hypot(problem.radius, features.intercept), 2 * invitation.clip_norm)
        noise = outlook.deviation * math.sqrt(outlook.rounds) * longest
        lr = min(MARGIN_NOISE / noise, 1 / (problem.loss.curvature * longest**2))
    lr = validate.positive(lr=lr)
    gradient, w = LinearGradient(problem.loss, features), problem.zeros(features.size)  # line 1
    for t in itertools.count(1):  # line 2
        got = clients.ask(gradient, w)  # lines 3-16
        w = w - lr * got.mean  # line 17
        yield Step(t, features.unfold(w), got.receipts)


_NO_CLIP = 1e100


def sgd_maj(
    clients: Clients,
    problem: Problem,
    *,
    clip_norm: float = 3.0,
    draw: Draw = _ONE,
    rounds: int = 10,
    lr: float | None = None,
) -> Iterator[Step]:
    """Train by SGD with the budget divided evenly among T rounds (basic composition).

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    clip_norm : float, default 3.0
        C, the norm at which a record's gradient is clipped.
    draw : Everyone, Poisson or Exactly, default Exactly(1)
        The records that a client draws in a round.
    rounds : int, default 10
        T, the number of rounds.
    lr : float, optional
        The learning rate; by default from public numbers.

    Returns
    -------
    Iterator of Step
        One step per round.
    """
    return _fixed(clients, problem, clip_norm, draw, rounds, lr, Accountant.BASIC)


def sgd_adv(
    clients: Clients,
    problem: Problem,
    *,
    clip_norm: float = 3.0,
    draw: Draw = _ONE,
    rounds: int = 10,
    lr: float | None = None,
) -> Iterator[Step]:
    """Train by SGD over T rounds, by advanced composition of rounds amplified by sampling.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    clip_norm : float, default 3.0
        C, the norm at which a record's gradient is clipped.
    draw : Everyone, Poisson or Exactly, default Exactly(1)
        The records that a client draws in a round.
    rounds : int, default 10
        T, the number of rounds.
    lr : float, optional
        The learning rate; by default from public numbers.

    Returns
    -------
    Iterator of Step
        One step per round.
    """
    return _fixed(clients, problem, clip_norm, draw, rounds, lr, Accountant.AMPLIFIED)


def sgd_pass(
    clients: Clients, problem: Problem, *, clip_norm: float = 3.0, rounds: int = 10, lr: float | None = None
) -> Iterator[Step]:
    """Train by SGD in T passes, each record in turn (advanced composition over its own visits).

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    clip_norm : float, default 3.0
        C, the norm at which a record's gradient is clipped.
    rounds : int, default 10
        T, the number of passes.
    lr : float, optional
        The learning rate; by default from public numbers.

    Returns
    -------
    Iterator of Step
        One step per round; a pass has as many rounds as the client has records.
    """
    return _fixed(clients, problem, clip_norm, InTurn(), rounds, lr, Accountant.ADVANCED)


def _fixed(
    clients: Clients,
    problem: Problem,
    clip_norm: float,
    draw: Draw,
    rounds: int,
    lr: float | None,
    by: Accountant,
) -> Iterator[Step]:
    invitation = Invitation(clip_norm, draw, rounds, calibration=by, accountant=by)
    return descend(clients, problem, invitation, Weights.PLAIN, lr)


def non_private(table: Table, problem: Problem, *, rounds: int = 1000, lr: float = 1.0) -> Iterator[Step]:
    """Train by gradient descent over all records at once, without privacy: ε = ∞.

    Parameters
    ----------
    table : Table
        All clients' records.
    problem : Problem
        The loss and the public numbers of the table.
    rounds : int, default 1000
        The number of steps.
    lr : float, default 1.0
        The learning rate.

    Returns
    -------
    Iterator of Step
        One step per round, without receipts.
    """
    features = Features(problem.width, intercept=float(problem.intercept))
    gradient, bound, w = (
        LinearGradient(problem.loss, features),
        ClipNorm(_NO_CLIP),
        problem.zeros(features.size),
    )
    validate.positive(lr=lr)
    for t in range(1, validate.count(rounds=rounds) + 1):
        w = w - lr * gradient.bounded_sum(table, w, bound) / max(1, len(table))
        yield Step(t, features.unfold(np.asarray(w)))
