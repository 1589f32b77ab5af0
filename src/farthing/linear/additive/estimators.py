"""scikit-learn estimators of additive models and boosted trees, whose fit spends a privacy budget.

>>> import numpy as np
>>> import farthing as ft
>>> X = np.random.default_rng(0).uniform(size=(5000, 2))
>>> y = (np.abs(X[:, 0] - 0.5) > 0.25).astype(int)  # no line tells these apart
>>> model = ft.AdditiveClassifier(1.0, 1e-6, bounds=(0, 1)).fit(X, y)
>>> x, effect = model.shape(0)
>>> bool(model.score(X, y) > 0.85), bool(np.interp(0.5, x, effect) < np.interp(0.1, x, effect))
(True, True)
"""

from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from farthing import validate
from farthing.data.columns import limits
from farthing.data.tables import Table
from farthing.errors import BudgetSpent, InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear import base, fitting
from farthing.linear.additive.basis import CELLS, VALUES, Binned, codes_of, mapped
from farthing.linear.additive.method import AdditiveModel, additive
from farthing.linear.base import PUBLIC_SIZE, PrivateEstimator, target_bounds
from farthing.linear.losses import Loss, logistic, multinomial, squared
from farthing.linear.problem import Problem
from farthing.linear.solvers import SolverMethod
from farthing.queries import arrays

Array = NDArray[np.float64]

_PARAMETERS = """
    bounds : (low, high) or "private"
        The public bounds of the features, numbers or one a feature; values beyond are clipped, and cells
        follow from them. "private" buys bounds with a tenth of μ² of the budget (``bounds_``), NaN buys those
        of one feature.
    ledger : Ledger, optional
        The ledger to spend from, shared with whatever else asks it. None makes one in memory for this fit.
    adjacency : {"add-remove", "replace-one", "zero-out"}, optional
        When two tables are neighbours. None: add-remove, or that of the ledger.
    records : int, optional
        The public number of records. None takes the table's own length as public.
    random_state : int or RandomState, optional
        Seeds the noise, for tests: nothing is private then, and ``privacy_`` says so.
"""
_BUDGET = """
    epsilon, delta : float, optional
        The budget of a fit; with ``ledger`` the part of it to take, where None takes what is left.
"""
_CLASSES = """
    classes : array-like, default (0, 1)
        Every label that may occur. Declared, because a label that occurs once names a record.
"""
_TARGET = """
    target_bounds : (low, high)
        The public bounds of the target, which must be declared; values beyond are clipped.
"""
_TREES = """
    trees : int, optional
        The number of trees. None chooses by μ times the number of records: below 250 a linear model, from 250
        on shapes and 60 trees; ``choice_`` says which, and why.
"""
_ATTRIBUTES = """
    model_ : AdditiveModel
        Weights, tables and trees on cells: all that was learnt.
    feature_importances_ : ndarray of shape (n_features,)
        How much each feature's own shape moves predictions, adding up to 1 (without products of features).
    choice_ : str
        Which model was trained, and why.
    n_features_in_, n_iter_ : int
        The number of features, and of the steps taken.
    privacy_ : Guarantee
        What holds of everything that this fit released.
    history_ : tuple of Step
        The steps, each with its model and receipts.

    Notes
    -----
    The guarantee is (ε, δ) of the budget under its adjacency, per record, against anyone who sees all that
    was released, by Gaussian DP (docs/methods.md). A row with a missing value counts as nothing.
"""


class _Shapes(PrivateEstimator):
    """The base of additive and boosted models: the public problem, the steps, and predictions by cells."""

    bounds: Any
    records: int | None
    trees: int | None = 0
    _followed: fitting.Algorithm | None = None

    def follow(self, algorithm: fitting.Algorithm) -> None:
        """Train by this generator of steps from now on: one that calls `additive` and shows what it does."""
        self._followed = algorithm

    def _train(self, X: Any, y: Array, loss: Loss, outputs: int = 0) -> None:
        if self.bounds is None:
            raise InvalidValue(
                "declare bounds=(low, high) of the features, or buy them by bounds='private': cells follow "
                "from them"
            )
        size = int(X.shape[0]) if self.records is None else validate.count(records=self.records)
        bounds, missing = self.bounds, fitting.unknown(self.bounds, X.shape[1])
        if self.trees:
            validate.count(trees=self.trees)
        if missing is None:
            limits(bounds, X)  # refuses wrong ones before anything is charged
        else:
            fitting.refuse(X, SolverMethod(additive), None, self.ledger)
        ledger = self._own_ledger(self.ledger)
        self.__dict__.pop("bounds_", None)
        if missing is not None:
            bounds = self.bounds_ = fitting.bought(ledger, X, bounds, missing)
        table, (low, high) = Table(X, y, bounds=bounds), limits(bounds, X)
        if self.records is None:
            ledger.note(PUBLIC_SIZE)
        problem = Problem(loss, size, X.shape[1], outputs, unit=False)
        attached = ledger.over(Binned(table, codes_of(X, low, high)))
        steps = self._followed or partial(additive, trees=self.trees)
        self.history_ = tuple(steps(attached, problem))
        if not self.history_:
            raise BudgetSpent(f"{ledger.budget} does not allow a single step")
        self.model_: AdditiveModel = self.history_[-1].w
        self.privacy_, self.n_iter_ = ledger.guarantee, self.history_[-1].t
        self.choice_, self._limits = self.model_.why, (low, high)

    @property
    def feature_importances_(self) -> Array:
        """Return how much each feature's own shape moves predictions, adding up to 1."""
        check_is_fitted(self)
        effects = self.model_.effects
        return np.asarray(effects / effects.sum() if effects.any() else effects)

    def _margins(self, X: Any) -> Array:
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        return self.model_.margins(mapped(X, *self._limits), codes_of(X, *self._limits))

    def shape(self, feature: int) -> tuple[Array, Array]:
        """Return what a feature adds to the prediction over its range, to be drawn.

        Parameters
        ----------
        feature : int
            The number of the feature.

        Returns
        -------
        x, effect : ndarray
            Values from the lower to the upper bound, and what each adds to the margin (a column a class, if
            there are several) or to the target. Products with other features, in trees, do not count.
        """
        check_is_fitted(self)
        if not 0 <= feature < self.n_features_in_:
            raise InvalidValue(f"feature must be from 0 to {self.n_features_in_ - 1}, got {feature!r}")
        low, high = (limit[feature] for limit in self._limits)
        cells, found = np.arange(1, CELLS), self.model_
        effect = np.multiply.outer(VALUES[cells], found.weights[feature]) + found.tables[feature][cells]
        return low + (high - low) * VALUES[cells], found.scale * effect


class _ShapeClassifier(base.PrivateClassifierMixin, _Shapes):
    """A classifier whose declared classes become 0, 1, ..., K-1: one margin for two, K for more."""

    classes: Any

    @arrays.quietly
    def fit(self, X: Any, y: Any) -> Self:
        """Check everything, charge the budget, and train until it is spent."""
        classes = base.declared(self.classes)
        X, y = self._supervised(X, y)
        several = len(classes) > 2
        loss: Loss = multinomial if several else logistic
        self._train(X, base.codes(y, classes), loss, len(classes) if several else 0)
        self.classes_ = classes
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the signed distance from the border, or one score a class."""
        return self._margins(X)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest class of every row."""
        scores = self._margins(X)
        best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of every class."""
        scores = self._margins(X)
        if scores.ndim == 1:
            return np.column_stack([log_expit(-scores), log_expit(scores)])
        return np.asarray(log_softmax(scores, axis=1))

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of every class."""
        return np.exp(self.predict_log_proba(X))


class _ShapeRegressor(RegressorMixin, _Shapes):  # type: ignore[misc]
    """A regressor whose target is mapped from its declared bounds onto [0, 1]."""

    target_bounds: Any

    @arrays.quietly
    def fit(self, X: Any, y: Any) -> Self:
        """Check everything, charge the budget, and train until it is spent."""
        low, high = target_bounds(self.target_bounds)
        X, numbers = self._numbers(X, y)
        scaled = np.where(np.isfinite(numbers), (np.clip(numbers, low, high) - low) / (high - low), np.nan)
        self._train(X, scaled, squared)
        self._range = low, high
        return self

    def predict(self, X: Any) -> Array:
        """Return the expected target of every row, within ``target_bounds``."""
        scaled = np.clip(self._margins(X), 0.0, 1.0)
        low, high = self._range
        return np.asarray(low + (high - low) * scaled)

    def shape(self, feature: int) -> tuple[Array, Array]:
        """Return what a feature adds to the target over its range, to be drawn.

        Parameters
        ----------
        feature : int
            The number of the feature.

        Returns
        -------
        x, effect : ndarray
            Values from the lower to the upper bound, and what each adds to the target.
        """
        x, effect = super().shape(feature)
        low, high = self._range
        return x, effect * (high - low)


class AdditiveClassifier(_ShapeClassifier):
    __doc__ = f"""An additive classifier within a privacy budget: a shape of each feature, which can be drawn.

    Parameters
    ----------
    {_BUDGET.strip()}
    {_CLASSES.strip()}
    {_PARAMETERS.strip()}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {_ATTRIBUTES.strip()}

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(-1, 1, size=(5000, 2))
    >>> model = ft.AdditiveClassifier(1.0, 1e-6, bounds=(-1, 1)).fit(X, np.abs(X[:, 0]) > 0.5)
    >>> bool(model.score(X, np.abs(X[:, 0]) > 0.5) > 0.85), model.choice_
    (True, 'additive: asked for')
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        classes: ArrayLike = (0, 1),
        bounds: Any = None,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())


class AdditiveRegressor(_ShapeRegressor):
    __doc__ = f"""An additive regressor within a privacy budget: a shape of each feature, which can be drawn.

    Parameters
    ----------
    {_BUDGET.strip()}
    {_TARGET.strip()}
    {_PARAMETERS.strip()}

    Attributes
    ----------
    {_ATTRIBUTES.strip()}

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(-1, 1, size=(5000, 2))
    >>> model = ft.AdditiveRegressor(1.0, 1e-6, bounds=(-1, 1), target_bounds=(0, 1)).fit(X, X[:, 0] ** 2)
    >>> bool(model.score(X, X[:, 0] ** 2) > 0.7)
    True
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())


class GradientBoostingClassifier(_ShapeClassifier):
    __doc__ = f"""Boosted trees on top of an additive classifier, within a privacy budget.

    Parameters
    ----------
    {_BUDGET.strip()}
    {_TREES.strip()}
    {_CLASSES.strip()}
    {_PARAMETERS.strip()}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {_ATTRIBUTES.strip()}

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(5000, 2))
    >>> y = ((X[:, 0] > 0.5) & (X[:, 1] > 0.5)).astype(int)
    >>> model = ft.GradientBoostingClassifier(1.0, 1e-6, bounds=(0, 1)).fit(X, y)
    >>> bool(model.score(X, y) > 0.9), model.choice_
    (True, 'boosted: the budget is worth 1,184 records, a boosted model needs 250')
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        trees: int | None = None,
        classes: ArrayLike = (0, 1),
        bounds: Any = None,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())


class GradientBoostingRegressor(_ShapeRegressor):
    __doc__ = f"""Boosted trees on top of an additive regressor, within a privacy budget.

    Parameters
    ----------
    {_BUDGET.strip()}
    {_TREES.strip()}
    {_TARGET.strip()}
    {_PARAMETERS.strip()}

    Attributes
    ----------
    {_ATTRIBUTES.strip()}

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(9000, 2))
    >>> y = X[:, 0] * X[:, 1]  # shapes of single features explain 0.86 of it
    >>> model = ft.GradientBoostingRegressor(2.0, 1e-6, bounds=(0, 1), target_bounds=(0, 1)).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        trees: int | None = None,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())
