"""Describe a linear problem by public numbers: all that a method may know without a query."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from farthing.data.tables import Features, Table
from farthing.errors import Unsupported
from farthing.linear.losses import Logistic, Loss, Softmax

Array = NDArray[np.float64]

_ALIKE, _CLEAR = 0.98, 0.05  # the squared norm of the mean of unit rows, and the noise on that norm


@dataclass(frozen=True, slots=True)
class Problem:
    """A loss over ``records`` rows (a public number) of ``width`` features in [0, 1] or of norm 1 (``unit``).

    ``outputs`` is 0 for a weight vector, or the number of classes for a weight matrix. Methods yield the
    weights on x and the constant as `Step.w`, in whatever space they work. ``penalty`` is the alpha of
    scikit-learn's Ridge, for regression: Σ (y - x·u - constant)² + penalty |u|² is minimised. ``sizes`` are
    the public numbers of records on each level of personal budgets, if there are any. ``sparse`` says whether
    rows are stored as a sparse matrix, which is public form; methods then avoid dense matrices of many
    features. ``start`` is a pair of released weights and constant on x to begin at, if any (`begin`).
    """

    loss: Loss
    records: int
    width: int
    outputs: int = 0
    intercept: bool = True
    unit: bool = True
    penalty: float = 0.0
    sizes: tuple[int, ...] = ()
    sparse: bool = False
    start: tuple[Array, Array] | None = None

    @property
    def radius(self) -> float:
        """The largest norm of a row x."""
        return 1.0 if self.unit else math.sqrt(self.width)

    def zeros(self, size: int) -> Array:
        """Return zero weights, for z of length ``size``."""
        return np.zeros((size, self.outputs) if self.outputs else size)

    def begin(self, features: Features) -> Array:
        """Return initial weights on z: those of ``start``, mapped back by `Features.unfold`, or zeros."""
        w, d = self.zeros(features.size), features.width
        if self.start is None:
            return w
        u, constant = self.start
        scale = np.asarray(features.scale)
        w[:d] = np.linalg.solve(scale.T, u) if scale.ndim == 2 else (u.T / scale).T
        if features.intercept:
            w[-1] = (constant + features.centre @ u) / features.intercept
        return w

    def warn_if_alike(self, mean: Array, deviation: float) -> None:
        """Warn if the released mean shows that unit rows are nearly parallel: features had other units."""
        least = _ALIKE - 6 * deviation  # three standard deviations of the norm of the mean, squared
        if self.unit and math.sqrt(self.width) * deviation < _CLEAR and float(mean @ mean) > least:
            warnings.warn(
                "bounds=None divided rows by their norms, after which they are nearly parallel, by their "
                "released mean: features are in different units. Pass bounds=(low, high) with one number per "
                "feature, or bounds='private'",
                UserWarning,
                stacklevel=2,
            )

    def rows(self) -> Features:
        """Return the map to z of bounded norm, `Features.radius`, for methods without a map of their own.

        Unit rows get a constant of 0.3 beside them, which lengthens them by 4 % only; other rows, whose norm
        is not known, are shrunk to norm 1 together with a constant 1. Shrinking keeps the sign of a margin.
        """
        if not self.unit:
            return Features(self.width, intercept=float(self.intercept), radius=1.0)
        constant = 0.3 if self.intercept else 0.0
        return Features(self.width, intercept=constant, radius=math.hypot(1.0, constant))

    def probabilities(
        self, w: tuple[Array, Array], X: Any, *, clip_norm: float = math.inf, features: Features | None = None
    ) -> Array:
        """Return the probabilities that weights learnt from clipped gradients give to rows X.

        The weights were learnt in ``features`` (`rows`) from gradients clipped at ``clip_norm``.

        The result is the probability of label 1 per row, or one column per class. It is post-processing by
        public numbers, in two steps: a margin is that of z, not of x; and clipping leaves weights stationary
        where Σ π_k f_k (p - e_k) = 0, with p the predicted probabilities and f_k = min(1, clip / |p -
        e_k||z|), so that the true probabilities are π_k ∝ p_k / f_k.
        """
        if not isinstance(self.loss, Logistic | Softmax):
            raise Unsupported(
                f"{type(self.loss).__name__} gives no probabilities: use logistic or multinomial"
            )
        parts = [np.zeros((0, self.outputs) if self.outputs else 0)]
        for block in Table(X, unit=self.unit).blocks(features or self.rows()):
            margins = block.margins(*w)
            if margins.ndim == 2:
                p = softmax(margins, axis=1)
                residual = np.sqrt(np.maximum(np.square(p).sum(axis=1)[:, None] + 1 - 2 * p, 0.0))
            else:
                p = np.stack([expit(-margins), expit(margins)], axis=1)
                residual = 1 - p
            odds = p * np.maximum(1.0, residual * block.norm[:, None] / clip_norm)
            truth = odds / odds.sum(axis=1)[:, None]
            parts.append(truth if margins.ndim == 2 else truth[:, 1])
        return np.concatenate(parts)
