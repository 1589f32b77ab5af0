"""Provide regressors with other losses than squares: Huber, quantiles and Poisson counts.

They take the parameters of `LinearRegression` and have the same features: a declared range of the target,
predictions within it, weights, `partial_fit`, `to_sklearn`. The method is `farthing.linear.methods.descent`.
"""

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn import linear_model
from sklearn.metrics import d2_tweedie_score

from farthing import validate
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.estimators import PrivateRegressor
from farthing.linear.fitting import ATTRIBUTES, BOUNDS, BUDGET, PARAMETERS, Algorithm
from farthing.linear.losses import Huber, LogLinear, Loss, Pinball
from farthing.linear.solvers import GENERALISED, Solver, SolverMethod

Array = NDArray[np.float64]

_SHARED = f"""{BOUNDS.strip()}
    {PARAMETERS.strip()}

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
    intercept_ : float
    {ATTRIBUTES.strip()}

    Notes
    -----
    `farthing.linear.methods.descent`: clipped gradients with Gaussian noise, by the ledger's GDP filter,
    under every adjacency. Predictions are clipped to ``target_bounds``.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(5000, 2))"""
_TARGET = """target_bounds : (low, high)
        The public bounds of the target, which must be declared; values beyond are clipped."""


class _GeneralisedRegressor(PrivateRegressor):
    """The base of the regressors in this module."""

    solvers: ClassVar[dict[str, SolverMethod]] = GENERALISED

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        solver: str | Solver | Algorithm | SolverMethod = "auto",
        fit_intercept: bool = True,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        max_sample_weight: float | None = None,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())


class HuberRegressor(_GeneralisedRegressor):
    __doc__ = f"""Linear regression with the Huber loss, within a privacy budget.

    Parameters
    ----------
    {BUDGET.strip()}
    threshold : float, optional
        The residual beyond which the loss is linear, in the unit of the target. None: a tenth of the width of
        ``target_bounds``. (scikit-learn calls it ``epsilon``.)
    {_TARGET}
    {_SHARED}
    >>> model = ft.HuberRegressor(1.0, 1e-6, target_bounds=(0, 10), bounds=(0, 1)).fit(X, 8 * X[:, 0])
    >>> bool(abs(model.coef_[0] - 8) < 2), model.privacy_.epsilon
    (True, 1.0)
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        threshold: float | None = None,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        solver: str | Solver | Algorithm | SolverMethod = "auto",
        fit_intercept: bool = True,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        max_sample_weight: float | None = None,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())

    def _objective(self, low: float, high: float) -> tuple[Loss, float]:
        if self.threshold is None:
            return Huber(), 0.0
        return Huber(validate.positive(threshold=self.threshold) / (high - low)), 0.0


class QuantileRegressor(_GeneralisedRegressor):
    __doc__ = f"""Linear regression for a quantile of the target, within a privacy budget.

    Parameters
    ----------
    {BUDGET.strip()}
    quantile : float, default 0.5
        The quantile, above 0 and below 1.
    {_TARGET}
    {_SHARED}
    >>> model = ft.QuantileRegressor(1.0, 1e-6, target_bounds=(0, 10), bounds=(0, 1)).fit(X, 8 * X[:, 0])
    >>> bool(abs(model.coef_[0] - 8) < 2), model.privacy_.epsilon
    (True, 1.0)
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        quantile: float = 0.5,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        solver: str | Solver | Algorithm | SolverMethod = "auto",
        fit_intercept: bool = True,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        max_sample_weight: float | None = None,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())

    def _objective(self, low: float, high: float) -> tuple[Loss, float]:
        return Pinball(validate.probability(quantile=self.quantile)), 0.0


class PoissonRegressor(_GeneralisedRegressor):
    __doc__ = f"""Poisson regression of counts with a log link, within a privacy budget.

    Parameters
    ----------
    {BUDGET.strip()}
    target_bounds : (0, high)
        The public bounds of the counts, which must be declared; counts and predicted means beyond them are
        clipped.
    {_SHARED}
    >>> counts = np.random.default_rng(1).poisson(np.exp(1 + X[:, 0]))
    >>> model = ft.PoissonRegressor(1.0, 1e-6, target_bounds=(0, 30), bounds=(0, 1)).fit(X, counts)
    >>> bool(abs(model.coef_[0] - 1) < 0.3), model.privacy_.epsilon
    (True, 1.0)
    """

    def _ends(self, bounds: tuple[float, float]) -> tuple[float, float]:
        if bounds[0] != 0:
            raise InvalidValue(f"target_bounds of counts must be (0, high), got {bounds!r}")
        return bounds

    def _objective(self, low: float, high: float) -> tuple[Loss, float]:
        if not self.fit_intercept:
            raise InvalidValue("counts need their constant, the scale of the target: fit_intercept=True")
        return LogLinear(), 0.0

    def _in_units(self, u: Array, constant: float) -> tuple[Array, float]:
        return u, constant + math.log(self._range[1])

    def predict(self, X: Any) -> Array:
        """Return the mean count of every row, within ``target_bounds``."""
        with np.errstate(over="ignore"):
            return np.asarray(np.clip(np.exp(self._rows(X) @ self.coef_ + self.intercept_), *self._range))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the explained share of the deviance, D², as scikit-learn does."""
        means = np.maximum(self.predict(X), np.finfo(np.float64).tiny)
        return float(d2_tweedie_score(y, means, sample_weight=sample_weight, power=1))

    def _inner(self) -> Any:
        model = linear_model.PoissonRegressor()
        model._base_loss = model._get_loss()
        return self._exported(model, self.coef_, self.intercept_ - math.log(self._range[1]))
