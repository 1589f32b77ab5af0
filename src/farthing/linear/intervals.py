"""Compute confidence intervals for released coefficients that account for the noise of the mechanism.

A method whose result has noise of a known distribution adds a `LinearEstimate` to its last step. All of it is
public or released, so an interval is post-processing and costs no budget.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from farthing import validate
from farthing.data.tables import Features
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.query import Step

Array = NDArray[np.float64]
Of = Literal["population", "records"]


@dataclass(frozen=True, slots=True, eq=False)
class LinearEstimate:
    """Weights on z without shrinkage, and the covariances of their errors.

    ``noise`` is the covariance of the mechanism's noise; ``sampling`` is that of the records as a sample,
    None if it is not known. ``inflation`` multiplies deviations, to cover the terms that linearising leaves
    out.
    """

    features: Features
    w: Array
    noise: Array
    sampling: Array | None
    inflation: float = 1.0

    def interval(self, level: float, of: Of) -> tuple[Array, Array]:
        """Return an interval for each weight on x."""
        if of not in ("population", "records"):
            raise InvalidValue(f"of must be 'population' or 'records', got {of!r}")
        if of == "population" and self.sampling is None:
            raise Unsupported(
                "this solver does not release the sampling error of the records: of='records' "
                "gives intervals for the same fit without noise"
            )
        covariance = self.noise if of == "records" or self.sampling is None else self.noise + self.sampling
        d, scale = self.features.width, np.asarray(self.features.scale)
        onto = scale.T if scale.ndim == 2 else np.diag(scale)
        variances = np.einsum("ij,jk,ik->i", onto, covariance[:d, :d], onto)
        half = float(ndtri(0.5 + validate.probability(level=level) / 2)) * self.inflation * np.sqrt(variances)
        centre = onto @ self.w[:d]
        return centre - half, centre + half


@dataclass(frozen=True, slots=True, eq=False)
class EstimatedStep(Step):
    """A step with an estimate of the error of its weights; None if the noise is too large for one."""

    estimate: LinearEstimate | None = None


_CLEAR = 1 / 3  # largest noise over the smallest eigenvalue at which errors are nearly linear
_LARGER = 1.03


def of_moments(
    features: Features, moments: Array, noise: float, most: float, records: int
) -> LinearEstimate | None:
    """Return the estimate from noisy moments of [z; (y - origin)/most]; None if the noise is too large.

    Least squares solves A w = b. With errors g of b and G of A the solution is off by A⁻¹(g - G w) to first
    order. Noise on the symmetric matrix, of variance τ² on the diagonal and τ²/2 elsewhere, gives g - G w the
    covariance τ²/2 ((1 + |w|²) I + w wᵀ). The records, as a sample with errors of variance σ² independent of
    z, give σ² A⁻¹/n; σ² is estimated from the moments and raised by two deviations of its noise. Terms of
    second order are of size η, the norm of G over the smallest eigenvalue of A: deviations are multiplied by
    (1 + η)/(1 - η), and by a further 1.03, so that simulated coverage is not below its level.
    """
    size = features.size
    values, vectors = np.linalg.eigh(moments[:size, :size])
    eta = noise * math.sqrt(2 * size) / max(float(values[0]), 1e-300)
    if eta > _CLEAR:
        return None
    inverse = (vectors / values) @ vectors.T
    w = inverse @ moments[:size, size]
    across = np.append(-w, 1.0)
    length = float(across @ across)
    residual = max(float(across @ moments @ across), 0.0) + 2 * noise * length
    spread = noise**2 / 2 * (length * np.eye(size) + np.outer(w, w))
    return LinearEstimate(
        features,
        most * w,
        most**2 * inverse @ spread @ inverse,
        most**2 * residual / records * inverse,
        _LARGER * (1 + eta) / (1 - eta),
    )
