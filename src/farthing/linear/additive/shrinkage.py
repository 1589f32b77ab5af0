"""Tell signal from noise in weights that noisy steps have found.

`Residue` follows what the noise of every step leaves on each weight. `kept` says which part of the squares is
signal. A weight, or a group of them, whose square is R times what noise leaves has a signal of λ times the
noise, and R (1 + λ)⁻¹ ν is then χ² with ν degrees of freedom. The λ of coordinates that are alike are drawn
from one distribution on `SIGNALS`, which is fitted to all of their ratios by expectation maximisation
(empirical Bayes with a mixture of normals of mean zero: Stephens 2017, "False discovery rates: a new
approach"); the part is the mean of λ / (1 + λ) given R. So many weak signals keep each other, and a few
strong ones do not keep the noise of others.

All of it is computed from released numbers.

>>> left = Residue(1)
>>> for averaged in (False, True):
...     left.step(np.ones(1), np.ones(1), 3.0, averaged)
>>> bool(np.isclose(left.noise[0, 2, 2], 3.0**2 * (1 + 0.5**2)))
True
>>> strong, weak = kept(np.array([1000.0] + [1.0] * 8), np.ones(9))[:2]  # one strong signal beside noise
>>> bool(strong > 0.9), bool(weak < 0.3)
(True, True)
"""

import numpy as np
from numpy.typing import NDArray

from farthing.linear.methods.descent import MOMENTUM

Array = NDArray[np.float64]

INFLATED = 1.3  # times the noise that `Residue` finds: the loss is not quadratic, coordinates are correlated
SIGNALS = np.concatenate([[0.0], 2.0 ** np.arange(-2, 13)])  # λ, in units of the noise
_ROUNDS, _LARGEST = 50, 1e9


class Residue:
    """What noise and sampling leave on weights, coordinate by coordinate, if the loss is quadratic.

    ``noise`` holds the covariance of a weight, its velocity and the sum of its averaged iterates, ``slope``
    their response to a slope of 1 in every step, as the records' own deviation from their population is.
    """

    def __init__(self, size: int) -> None:
        self.noise, self.slope = np.zeros((size, 3, 3)), np.zeros((size, 3))

    def step(self, rates: Array, curvatures: Array, noise: float, averaged: bool) -> None:
        """Follow one step with momentum, of these rates."""
        moves = np.zeros_like(self.noise)
        moves[:, 1, 0], moves[:, 1, 1] = -rates * curvatures, MOMENTUM
        moves[:, 0] = moves[:, 1]
        moves[:, 0, 0] += 1
        moves[:, 2] = moves[:, 0] * averaged
        moves[:, 2, 2] = 1
        push = -rates[:, None] * np.array([1.0, 1.0, averaged])
        self.slope = np.einsum("kij,kj->ki", moves, self.slope) + push
        self.noise = moves @ self.noise @ moves.transpose(0, 2, 1)
        self.noise += noise**2 * push[:, :, None] * push[:, None, :]

    def scale(self, weights: Array, units: Array) -> None:
        """Multiply weights, and slopes by the inverse of ``units``."""
        self.noise *= np.square(weights)[:, None, None]
        self.slope *= (weights * units)[:, None]

    def grow(self, more: int) -> None:
        """Add coordinates on which nothing was learnt yet."""
        self.noise = np.concatenate([self.noise, np.zeros((more, 3, 3))])
        self.slope = np.concatenate([self.slope, np.zeros((more, 3))])


def kept(ratios: Array, freedoms: Array) -> Array:
    """Return which part of squares is signal.

    Parameters
    ----------
    ratios : ndarray
        The square of each weight, or of each group of weights, over what noise alone would leave of it.
    freedoms : ndarray
        How many equal squares each is worth.
    """
    seen = np.minimum(ratios / INFLATED, _LARGEST)[:, None]
    logs = -freedoms[:, None] / 2 * (np.log1p(SIGNALS) + seen / (1 + SIGNALS))
    likely = np.exp(logs - logs.max(axis=1, keepdims=True))
    chances = likely / likely.sum(axis=1, keepdims=True)
    for _ in range(_ROUNDS):
        weights = chances.sum(axis=0) + 1 / len(SIGNALS)  # as if one more had been seen, of any signal
        chances = likely * weights
        chances /= chances.sum(axis=1, keepdims=True)
    return np.asarray(chances @ (SIGNALS / (1 + SIGNALS)))
