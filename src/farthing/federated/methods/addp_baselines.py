"""A-DDP's baselines: SGD with T fixed beforehand, over the same clients, and SGD without privacy.

The four baselines of Cheng et al. 2020 ("Contrast algorithms"), as far as the paper describes them. All draw
one record a round (2C, see `farthing.federated.methods.addp`; C with ``Poisson``), clip it and add Gaussian
noise, calibrated exactly; they differ in how the budget is divided.

`sgd_maj`: (ε/T, δ/T) a round, basic composition, T rounds.
`sgd_adv`: advanced composition over rounds amplified by sampling (Bassily, Smith & Thakurta 2014), with the
exact amplification of Balle, Barthe & Gaboardi 2018, Theorems 8 and 9, which needs no ε <= 1; T rounds.
`sgd_pass`: each record is visited T times in turn, by advanced composition over its own visits; T passes,
for zero-out and replace-one (a record that goes would move the turns of others).
`non_private`: no noise, no clip, no guarantee, ε = ∞; it reads a table and asks no ledger.

>>> from farthing.budget import Budget
>>> from farthing.federated.simulated import Simulated
>>> from farthing.linear.losses import logistic
>>> from farthing.queries.query import run
>>> X = np.random.default_rng(0).uniform(size=(500, 2))
>>> clients = Simulated.split(X, (X[:, 0] > 0.5) * 1.0, records=100, budgets=Budget(1.0, 1e-6))
>>> run(sgd_adv(clients, Problem(logistic, 500, 2, unit=False))).steps
10
"""

from collections.abc import Iterator

import numpy as np

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.federated.methods.addp import descend
from farthing.federated.protocol import Accountant, Clients, Draw, Exactly, InTurn, Invitation, Weights
from farthing.linear.losses import Gradient
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Step

_ONE = Exactly(1)
_NO_CLIP = 1e150


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
        T, after which every client leaves.
    lr : float, optional
        The learning rate; by default from public numbers.

    Returns
    -------
    Iterator of Step
        A step a round.
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
        T, after which every client leaves.
    lr : float, optional
        The learning rate; by default from public numbers.

    Returns
    -------
    Iterator of Step
        A step a round.
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
        A step a round, of which a pass has as many as the client has records.
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
        A step a round, without receipts.
    """
    features = Features(problem.width, intercept=float(problem.intercept))
    gradient, bound, w = Gradient(problem.loss, features), ClipNorm(_NO_CLIP), problem.zeros(features.size)
    validate.positive(lr=lr)
    for t in range(1, validate.count(rounds=rounds) + 1):
        w = w - lr * gradient.bounded_sum(table, w, bound) / max(1, len(table))
        yield Step(t, features.unfold(np.asarray(w)))
