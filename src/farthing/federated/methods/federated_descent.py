"""Train by federated descent, the default: whole local gradients, momentum, the mean of later iterates.

In each of `ROUNDS` rounds every client uploads the clipped sum of *all* its gradients. Clients do not sample
records, so the costs are Gaussian and compose exactly: more rounds cost nothing (noise grows with √T and
averages out), and the relative noise of an upload of n_u records is n_u times smaller than that of a single
record. ``trust`` selects who adds the noise: each client all of it (local, the default), each client a share
(distributed, sized for ``survivors`` honest clients, by default all), or an aggregator (trusted).

All parameters follow from public numbers. Let s be the standard deviation of the noise on the mean gradient
for a clipping norm of 1, with all rounds taken as one: 1/√(Σ n_u²μ_u²) under local noise. The clipping norm
is a fraction of the largest gradient norm, `CLIP` √(`NOISE`/s), limited to [`CLIP`, 1]. With the learning
rate chosen here, noise moves margins by `MARGIN_NOISE` over all rounds; the rate is smaller if steps would be
unstable (2 (1 + momentum) over the largest curvature). The intercept column, 1 before both it and the row are
shrunk to norm 1, is √(s/`CONSTANT`) if that is larger: with much noise, little can be learnt beyond the
frequencies of the labels. As clients leave, steps shrink with the remaining precision. The constants were
chosen on folds of Adult, BANK and IPUMS-BR at ε from 0.1 to 1.6, with 100 records per client, under local and
distributed noise. Labels use the weights directly; probabilities use `Problem.probabilities` in `learnt_in`.

Each client has its own guarantee (ε_u, δ_u) for one record, or for all of its records (`Budget.unit`), under
its adjacency, against the server (local), an observer of sums (distributed, with that many honest survivors)
or an observer of released values (trusted), by exact composition of Gaussians (Dong, Roth & Su 2022, Cor.
3.3).

>>> from farthing.budget import Budget
>>> from farthing.federated.simulated import Simulated
>>> from farthing.linear.losses import logistic
>>> from farthing.queries.query import run
>>> X = np.random.default_rng(0).uniform(size=(20_000, 2))
>>> clients = Simulated.split(X, (X[:, 0] > X[:, 1]) * 1.0, records=100, budgets=Budget(1.0, 1e-6))
>>> trained = run(federated_descent(clients, Problem(logistic, 20_000, 2, unit=False)))
>>> trained.steps, bool(trained.w[0][0] > 1 > -1 > trained.w[0][1])
(100, True)
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from farthing.data.tables import Features
from farthing.federated.protocol import Clients, Invitation, Trust, under
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.queries.query import Step, until_spent

ROUNDS, MOMENTUM, AVERAGED = 100, 0.9, 0.5
CLIP, NOISE = 0.4, 0.002
CONSTANT = 0.008
MARGIN_NOISE = 2.0
STABLE = 3.0  # rate times curvature; momentum allows 2 (1 + MOMENTUM)


@until_spent
def federated_descent(
    clients: Clients, problem: Problem, *, trust: Trust = Trust.LOCAL, survivors: int | None = None
) -> Iterator[Step]:
    """Train by noisy gradient descent with momentum over clients; all parameters follow from public numbers.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    trust : Trust, default "local"
        The party that adds the noise: each client, each client a share, or an aggregator.
    survivors : int, optional
        The least number of honest clients in a round under distributed trust; by default all clients.

    Returns
    -------
    Iterator of Step
        One step per round; its weights are the mean of the later iterates.

    Notes
    -----
    Each client has its own guarantee, by exact composition of Gaussians (Dong, Roth & Su 2022, Cor. 3.3).
    """
    invitation = under(clients, Invitation(1.0, rounds=ROUNDS), trust, survivors)
    spread = clients.forecast(invitation).deviation / math.sqrt(ROUNDS)
    features = _rows(problem, spread)
    assert features.radius is not None
    largest = min(problem.loss.slope, math.sqrt(2)) * features.radius
    clip = largest * min(1.0, CLIP * max(1.0, math.sqrt(NOISE / spread)))
    invitation = replace(invitation, clip_norm=clip)
    outlook = clients.forecast(invitation)
    clients.invite(invitation)
    length = MARGIN_NOISE / (outlook.deviation * math.sqrt(ROUNDS) * features.radius)
    rate = min(length * (1 - MOMENTUM), STABLE / (problem.loss.curvature * features.radius**2))
    gradient, w = LinearGradient(problem.loss, features), problem.zeros(features.size)
    velocity, total, count = np.zeros_like(w), np.zeros_like(w), 0
    for t in itertools.count(1):
        got = clients.ask(gradient, w)
        velocity = MOMENTUM * velocity - rate * min(1.0, outlook.deviation**2 / got.variance) * got.mean
        w = w + velocity
        if t > outlook.rounds * (1 - AVERAGED):
            total, count = total + w, count + 1
        yield Step(t, features.unfold(total / count if count else w), got.receipts)


def learnt_in(
    clients: Clients, problem: Problem, *, trust: Trust = Trust.LOCAL, survivors: int | None = None
) -> Features:
    """Return the feature map in which `federated_descent` trains, for `Problem.probabilities`."""
    outlook = clients.forecast(under(clients, Invitation(1.0, rounds=ROUNDS), trust, survivors))
    return _rows(problem, outlook.deviation / math.sqrt(ROUNDS))


def _rows(problem: Problem, spread: float) -> Features:
    if problem.unit or not problem.intercept:
        return problem.rows()
    return Features(problem.width, intercept=max(1.0, math.sqrt(spread / CONSTANT)), radius=1.0)
