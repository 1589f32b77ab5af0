"""Provide scikit-learn estimators whose fit spends a privacy budget.

>>> import numpy as np
>>> import farthing as ft
>>> rng = np.random.default_rng(0)
>>> X = rng.uniform(size=(2000, 3))
>>> y = (X[:, 0] > X[:, 1]).astype(int)
>>> model = ft.LogisticRegression(epsilon=1.0, delta=1e-6).fit(X, y)
>>> print(model.privacy_)
(1, 1e-06)-DP, add-remove, per record, against anyone, by gdp [the number of records is taken as public]

Facts that the fit needs in advance are declared, never learnt from the records: the classes, the bounds of
features and target, the number of records (``records``; by default the length of the table, taken as public).
The form of the arrays (type, width) is checked, their values are not: a row with a missing value, or with an
undeclared label, counts as zero, because an error would reveal a record that nobody has paid for. Check
``np.isfinite(X).all()`` and ``np.isin(y, classes).all()`` yourself where nobody else sees the result.

With ``ledger`` a fit takes a part of that ledger's budget: (``epsilon``, ``delta``) of it, or the remainder.
`clone`, `GridSearchCV` and `joblib` copy the estimator but never the balance: all copies spend from one
ledger, and a fit that exceeds it raises `BudgetSpent`. Scores on held-out folds are not accounted for.
"""

from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax
from sklearn import linear_model, svm
from sklearn.base import RegressorMixin
from sklearn.compose import TransformedTargetRegressor
from sklearn.preprocessing import QuantileTransformer
from sklearn.utils.validation import check_is_fitted

from farthing import validate
from farthing.data import raw
from farthing.ledger.ledger import Ledger
from farthing.linear import base
from farthing.linear import weights as weighing
from farthing.linear.base import target_bounds
from farthing.linear.fitting import ATTRIBUTES, BOUNDS, BUDGET, PARAMETERS, Algorithm, PrivateLinear
from farthing.linear.losses import Loss, huber_hinge, logistic, multinomial, one_against_rest, squared
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS, Solver, SolverMethod
from farthing.queries import arrays

Array = NDArray[np.float64]

_CLASSIFIER = f"""
    Parameters
    ----------
    {BUDGET.strip()}
    classes : array-like, default (0, 1)
        Every label that may occur. Declared, because a label that occurs once identifies a record.
    class_weight : dict or "balanced", optional
        Public weights by class, 1 for classes that are not listed; "balanced" buys class totals with 0.02 of
        μ² and gives all classes the same total weight.
    {BOUNDS.strip()}
    {PARAMETERS.strip()}

    Attributes
    ----------
    coef_ : ndarray of shape (1, n_features) or (n_classes, n_features)
    intercept_ : ndarray of shape (1,) or (n_classes,)
    classes_ : ndarray of shape (n_classes,)
    {ATTRIBUTES.strip()}

    Notes
    -----
    The guarantee is (ε, δ) of the budget under its adjacency, per record, against an observer of everything
    that was released, by the theorem of the solver (docs/methods.md). A row with a missing value or an
    undeclared label counts as zero.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "left", "right")
"""


class _PrivateClassifier(base.PrivateClassifierMixin, PrivateLinear):
    """A classifier with declared classes as 0, 1, ..., K-1: one weight vector for two classes, K for more."""

    losses: ClassVar[tuple[Loss, Loss]]  # for two classes, and for more than two

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        classes: ArrayLike = (0, 1),
        class_weight: Any = None,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, budgets: Any = None) -> Self:
        """Check the arguments, charge the budget, and train until it is spent.

        ``sample_weight`` is private and at most ``max_sample_weight``. ``budgets`` are public and give each
        row its own ε, with ``delta`` or a ledger of these levels.
        """
        return self._fit(X, y, self.classes, sample_weight, budgets)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Charge another part of the ledger, train on these rows, and average with the earlier weights.

        The first call is a `fit`, for which ``classes`` may be declared here. Later calls begin at the
        released weights and average by the number of rows.
        """
        if more := hasattr(self, "_released"):
            self._checked(X, reset=False, training=True)
        classes = getattr(self, "classes_", self.classes) if classes is None else classes
        return self._fit(X, y, classes, sample_weight, None, more)

    @arrays.quietly
    def _fit(
        self, X: Any, y: Any, declared: Any, sample_weight: Any, budgets: Any, more: bool = False
    ) -> Self:
        classes = base.declared(declared)
        method = self._method(CLASSIFIERS)
        X, y = self._supervised(X, y)
        codes, weights = base.codes(y, classes, isinstance(X, np.memmap)), None
        if sample_weight is not None or self.class_weight is not None:
            by_class = weighing.of_classes(self.class_weight, classes)
            shares, most = weighing.read(sample_weight, self.max_sample_weight, len(codes))
            weights = weighing.RecordWeights(shares, most, codes, len(classes), by_class)
        several = len(classes) > 2
        outputs = len(classes) if several else 0
        u, constant = self._train(
            X, codes, self.losses[several], outputs, method, budgets, weights=weights, more=more
        )
        self.classes_ = classes
        self.coef_, self.intercept_ = np.atleast_2d(u.T), np.atleast_1d(constant)
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the signed distance from the decision boundary, or one score per class."""
        scores = np.asarray(self._rows(X) @ self.coef_.T + self.intercept_)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of every row."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[places])


class LogisticRegression(_PrivateClassifier):
    __doc__ = f"""Logistic regression, binary or multinomial, within a privacy budget.
{_CLASSIFIER}
    >>> model = ft.LogisticRegression(1.0, 1e-6, classes=["left", "right"], bounds=(0, 1)).fit(X, y)
    >>> bool(model.score(X, y) > 0.8), model.privacy_.epsilon
    (True, 1.0)
    """

    losses = (logistic, multinomial)

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of every class."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of every class."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([log_expit(-scores), log_expit(scores)])
        return np.asarray(log_softmax(scores, axis=1))

    def to_sklearn(self) -> Any:
        """Return the fitted model as an estimator of scikit-learn."""
        return self._exported(linear_model.LogisticRegression(), self.coef_, self.intercept_)


class LinearSVC(_PrivateClassifier):
    __doc__ = f"""A linear support vector machine with a smooth (Huber) hinge, within a privacy budget.
{_CLASSIFIER}
    >>> model = ft.LinearSVC(1.0, 1e-6, classes=["left", "right"], bounds=(0, 1)).fit(X, y)
    >>> bool(model.score(X, y) > 0.8), model.privacy_.epsilon
    (True, 1.0)
    """

    losses = (huber_hinge, one_against_rest)

    def to_sklearn(self) -> Any:
        """Return the fitted model as an estimator of scikit-learn."""
        return self._exported(svm.LinearSVC(), self.coef_, self.intercept_)


class PrivateRegressor(RegressorMixin, PrivateLinear):  # type: ignore[misc]
    """The base of the regressors, whose target is clipped to declared bounds and mapped onto [0, 1]."""

    target_bounds: tuple[float, float] | None
    max_sample_weight: float | None
    solvers: ClassVar[dict[str, SolverMethod]] = REGRESSORS

    def _objective(self, low: float, high: float) -> tuple[Loss, float]:
        """Return the loss of a target mapped onto [0, 1], and the penalty."""
        raise NotImplementedError

    def _ends(self, bounds: tuple[float, float]) -> tuple[float, float]:
        """Return the numbers that are mapped onto 0 and 1."""
        return bounds

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, budgets: Any = None) -> Self:
        """Check the arguments, charge the budget, and train until it is spent.

        ``sample_weight`` is private and at most ``max_sample_weight``. ``budgets`` are public and give each
        row its own ε, with ``delta`` or a ledger of these levels.
        """
        return self._fit(X, y, sample_weight, budgets)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Charge another part of the ledger, train on these rows, and average with the earlier weights.

        The average is by the number of rows. The first call is a `fit`.
        """
        if more := hasattr(self, "_released"):
            self._checked(X, reset=False, training=True)
        return self._fit(X, y, sample_weight, None, more)

    @arrays.quietly
    def _fit(self, X: Any, y: Any, sample_weight: Any, budgets: Any, more: bool = False) -> Self:
        low, high = self._ends(target_bounds(self.target_bounds))
        method = self._method(self.solvers)
        loss, penalty = self._objective(low, high)
        X, numbers = self._numbers(X, y)
        scaled = raw.scratch(len(numbers), isinstance(X, np.memmap))
        for part in raw.slices(len(numbers)):
            some, to = np.asarray(numbers[part], dtype=np.float64), scaled[part]
            np.clip(some, low, high, out=to)
            to -= low
            to /= high - low
            if not (finite := np.isfinite(some)).all():
                to[~finite] = np.nan
        weights = None
        if sample_weight is not None:
            shares, most = weighing.read(sample_weight, self.max_sample_weight, len(scaled))
            weights = weighing.RecordWeights(shares, most, 0.0 * scaled, 1, np.ones(1))  # NaN stays NaN
        u, constant = self._train(X, scaled, loss, 0, method, budgets, penalty, weights, more)
        self._range = low, high
        self.coef_, self.intercept_ = self._in_units(u, float(constant))
        return self

    def _in_units(self, u: Array, constant: float) -> tuple[Array, float]:
        """Return weights and constant in the unit of the target."""
        low, high = self._range
        return u * (high - low), constant * (high - low) + low

    def _unit_of_coefficients(self) -> Array:
        return super()._unit_of_coefficients() * (self._range[1] - self._range[0])

    def predict(self, X: Any) -> Array:
        """Return the prediction for every row, within ``target_bounds``."""
        return np.asarray(np.clip(self._rows(X) @ self.coef_ + self.intercept_, *self._range))

    def to_sklearn(self) -> Any:
        """Return the fitted model as a `TransformedTargetRegressor` of scikit-learn.

        Its linear model predicts the position of a row between the target's bounds, from 0 to 1; a
        transformer maps it back to the target and clips it to the bounds.
        """
        check_is_fitted(self)
        inner, (low, high) = self._inner(), self._range
        bounds = QuantileTransformer(n_quantiles=2).fit([[low], [high]])
        model = TransformedTargetRegressor(inner, transformer=bounds, check_inverse=False)
        model.regressor_, model.transformer_, model._training_dim = inner, bounds, 1
        return model

    def _inner(self) -> Any:
        """Return the model of a target mapped onto [0, 1] as an estimator of scikit-learn."""
        (low, high), model = self._range, linear_model.LinearRegression()
        return self._exported(model, self.coef_ / (high - low), (self.intercept_ - low) / (high - low))


class LinearRegression(PrivateRegressor):
    __doc__ = f"""Least squares, with an optional ridge penalty, within a privacy budget.

    Parameters
    ----------
    {BUDGET.strip()}
    target_bounds : (low, high)
        The public bounds of the target, which must be declared; values beyond are clipped.
    {BOUNDS.strip()}
    alpha : float, default 0.0
        The penalty alpha |w|² of scikit-learn's `Ridge`, on features and target mapped to [0, 1].
    {PARAMETERS.strip()}

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
    intercept_ : float
    {ATTRIBUTES.strip()}

    Notes
    -----
    The guarantee is that of `LogisticRegression`. Predictions are clipped to ``target_bounds``.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(5000, 2))
    >>> model = ft.LinearRegression(1.0, 1e-6, target_bounds=(0, 10), bounds=(0, 1)).fit(X, 8 * X[:, 0])
    >>> bool(abs(model.coef_[0] - 8) < 2), model.privacy_.epsilon
    (True, 1.0)
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        alpha: float = 0.0,
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
        return squared, validate.non_negative(alpha=self.alpha)
