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
    clip: float = 3.0,
    draw: Draw = _ONE,
    rounds: int = 10,
    rate: float | None = None,
) -> Iterator[Step]:
    """SGD with the budget divided evenly among T rounds."""
    return _fixed(clients, problem, clip, draw, rounds, rate, Accountant.BASIC)


def sgd_adv(
    clients: Clients,
    problem: Problem,
    *,
    clip: float = 3.0,
    draw: Draw = _ONE,
    rounds: int = 10,
    rate: float | None = None,
) -> Iterator[Step]:
    """SGD by advanced composition and amplification by sampling, T rounds."""
    return _fixed(clients, problem, clip, draw, rounds, rate, Accountant.AMPLIFIED)


def sgd_pass(
    clients: Clients, problem: Problem, *, clip: float = 3.0, rounds: int = 10, rate: float | None = None
) -> Iterator[Step]:
    """SGD in T passes, each record in turn."""
    return _fixed(clients, problem, clip, InTurn(), rounds, rate, Accountant.ADVANCED)


def _fixed(
    clients: Clients,
    problem: Problem,
    clip: float,
    draw: Draw,
    rounds: int,
    rate: float | None,
    by: Accountant,
) -> Iterator[Step]:
    invitation = Invitation(clip, draw, rounds, calibration=by, accountant=by)
    return descend(clients, problem, invitation, Weights.PLAIN, rate)


def non_private(table: Table, problem: Problem, *, rounds: int = 1000, rate: float = 1.0) -> Iterator[Step]:
    """Gradient descent over all clients' records at once, without privacy: ε = ∞."""
    features = Features(problem.width, intercept=float(problem.intercept))
    gradient, bound, w = Gradient(problem.loss, features), ClipNorm(_NO_CLIP), problem.zeros(features.size)
    validate.positive(rate=rate)
    for t in range(1, validate.count(rounds=rounds) + 1):
        w = w - rate * gradient.bounded_sum(table, w, bound) / max(1, len(table))
        yield Step(t, features.unfold(np.asarray(w)))
