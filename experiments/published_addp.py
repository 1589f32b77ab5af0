"""A-DDP as its authors print it (Cheng et al. 2020, Algorithm 1). **Its claim does not hold.**

Line 11 draws one record, line 14 adds noise for a sensitivity of C. If a record is replaced, or if it is
added or removed while exactly one is drawn, the upload moves by 2C; C is right only where the record's place
stays and its gradient is zero. With H = 2C the paper's theorem, which is exact against an observer of the
draws, gives about twice the claimed ε. (Where the draws stay secret a run costs less than it claims, by tight
accounting, which the paper does not have: `really`.) It is run here beside the sound versions because the
paper's figures are its own, never through a ledger, and on public data only.

Two more lines are taken literally: δ_u is that of the rounds so far (lines 7-10), so that the round with
which δ is exceeded is uploaded as well; and the server's mean is plain (line 17). α is not given in the
paper; it is that of `farthing.federated.methods.addp`, from the same public numbers.

>>> [round(epsilon, 3) for epsilon in really(0.5, 1e-8)]
[1.037, 0.093]
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from experiments.frame import seed
from farthing.accounting import pld, sampling
from farthing.budget import Adjacency
from farthing.federated.methods.addp import MARGIN_NOISE
from farthing.queries.events import FixedSizeEvent, GaussianEvent, RepeatedEvent

Array = NDArray[Any]

CLIP, EACH, PLANNED = 3.0, 100, 10


def sized(epsilon: float, delta: float) -> tuple[float, int]:
    """σ/C (line 5) and the rounds until δ_u > δ (lines 2 and 7), the last of them included."""
    noise = sampling.addp_noise(epsilon, delta, PLANNED, delta / 2)
    return noise, sampling.rounds(noise, 1 / EACH, epsilon, delta) + 1


def really(epsilon: float, delta: float) -> tuple[float, float]:
    """ε at this δ where a record is replaced: before an observer of the draws, and where they stay secret."""
    noise, rounds = sized(epsilon, delta)
    secret = RepeatedEvent(FixedSizeEvent(1, EACH, GaussianEvent(noise)), rounds)  # replacing moves it by 2
    seen = sampling.epsilon(noise / 2, 1 / EACH, rounds, delta)
    return seen, pld.epsilon(secret, delta, Adjacency.REPLACE_ONE)


def published(
    X: Array, y: Array, epsilons: Sequence[float], delta: float, place: object
) -> list[tuple[Array, float, int]]:
    """Weights, the constant and the number of rounds at each ε, of users with `EACH` records in order.

    Rows that do not make up a whole user are left out. Draws are the same at every ε, noise is not.
    """
    random = np.random.default_rng(seed("published A-DDP", place))
    noise, rounds = (np.array(part) for part in zip(*(sized(each, delta) for each in epsilons), strict=True))
    users = len(X) // EACH
    rows = np.column_stack([X, np.ones(len(X))]).astype(np.float32)
    lengths, labels = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None], y.astype(np.float32)[:, None]
    longest = min(math.sqrt(rows.shape[1]), 2 * CLIP)
    deviation = noise * CLIP / math.sqrt(users)  # of the mean of noise over users
    alpha = np.minimum(MARGIN_NOISE / (deviation * np.sqrt(rounds) * longest), 4 / longest**2)
    w = np.zeros((rows.shape[1], len(epsilons)))  # line 1
    first = EACH * np.arange(users)
    for t in range(max(rounds)):  # lines 2 and 6: all users have one budget, so all leave together
        places = first + random.integers(EACH, size=users)  # line 11
        x = rows[places]
        residual = expit(x @ w.astype(np.float32)) - labels[places]  # line 12
        scale = residual / np.maximum(1.0, np.abs(residual) * lengths[places] / CLIP)  # line 13
        noisy = x.T @ scale / users + deviation * random.standard_normal(w.shape)  # line 14
        w -= np.where(t < rounds, alpha, 0.0) * noisy  # lines 8-10 and 17
    return [(w[:-1, k], float(w[-1, k]), int(many)) for k, many in enumerate(rounds)]
