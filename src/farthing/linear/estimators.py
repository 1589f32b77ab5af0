"""scikit-learn estimators whose fit spends a privacy budget, and nothing but that budget.

>>> import numpy as np
>>> import farthing as ft
>>> rng = np.random.default_rng(0)
>>> X = rng.uniform(size=(2000, 3))
>>> y = (X[:, 0] > X[:, 1]).astype(int)
>>> model = ft.LogisticRegression(epsilon=1.0, delta=1e-6).fit(X, y)
>>> print(model.privacy_)
(1, 1e-06)-DP, add-remove, per record, against anyone, by gdp [the number of records is taken as public]

What must be known beforehand is declared, never learnt from the records: the classes, the bounds of features
and target, the number of records (``records``; by default the table's own length, taken as public). The form
of the arrays is checked (type, width), their values are not: a row with a missing value, or with a label that
is not declared, counts as nothing, because an error would tell of a record for which nobody has paid. Check
``np.isfinite(X).all()`` and ``np.isin(y, classes).all()`` yourself where nobody else sees what comes out.

With ``ledger`` a fit takes a part of that ledger's budget: (``epsilon``, ``delta``) of it, or what is left.
`clone`, `GridSearchCV` and `joblib` copy the estimator but never a balance: all copies spend from one
ledger, and a fit that does not fit raises `BudgetSpent`. Scores on held-out folds are not accounted for.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax
from sklearn import linear_model, svm
from sklearn.base import (
    ClassifierMixin,
    RegressorMixin,
)
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, QuantileTransformer, normalize
from sklearn.utils.validation import check_is_fitted

from farthing import validate
from farthing.accounting.personal import PersonalBudgets
from farthing.budget import Adjacency, Guarantee, Observer, Unit
from farthing.data.columns import limits
from farthing.data.tables import Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear import labels, private_bounds
from farthing.linear.base import PUBLIC_SIZE, PrivateEstimator
from farthing.linear.checks import clipped, compact, target_bounds
from farthing.linear.losses import Loss, huber_hinge, logistic, multinomial, one_against_rest, squared
from farthing.linear.personal import over
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS, Solver, SolverMethod
from farthing.queries import arrays
from farthing.queries.query import Step

Array = NDArray[np.float64]
Algorithm = Callable[[Ledger, Problem], Iterator[Step]]

_NO_PRIVACY = Guarantee(
    float("inf"),
    0.0,
    Adjacency.ADD_REMOVE,
    Unit.RECORD,
    Observer.ANYONE,
    "nothing",
    note="fitted on the records themselves: no privacy at all",
)


class _PrivateLinear(PrivateEstimator):
    """The base of the linear models: the public problem, a method's steps, and weights on raw rows."""

    bounds: Any
    solver: str | Solver | Algorithm | SolverMethod
    fit_intercept: bool
    records: int | None

    def _method(self, known: dict[str, SolverMethod]) -> SolverMethod:
        if isinstance(self.solver, SolverMethod):
            return self.solver
        if isinstance(self.solver, Solver):
            return self.solver.method
        if isinstance(self.solver, type) and issubclass(self.solver, Solver):
            raise InvalidValue(f"solver must be an object: {self.solver.__name__}(), not the class itself")
        if callable(self.solver):
            return SolverMethod(self.solver)
        if self.solver not in known:
            raise InvalidValue(
                f"solver must be one of {sorted(known)}, an object such as ft.DPAGD() or a function, got "
                f"{self.solver!r}"
            )
        return known[self.solver]

    def _train(
        self,
        X: Any,
        y: Array,
        loss: Loss,
        outputs: int,
        method: SolverMethod,
        budgets: Any,
        penalty: float = 0.0,
    ) -> tuple[Array, Array]:
        """Spend a budget; return weights and constant on rows as they came (with unit rows, on those)."""
        rows, ledger = int(X.shape[0]), None
        bounds, unit = self.bounds, self.bounds is None
        size = rows if self.records is None else validate.count(records=self.records)
        people = None if budgets is None else self._people(budgets, rows)
        problem = Problem(loss, size, X.shape[1], outputs, bool(self.fit_intercept), unit, penalty)
        problem = replace(problem, sparse=hasattr(X, "indptr"))
        missing = private_bounds.unknown(bounds, X.shape[1])
        self.__dict__.pop("bounds_", None)
        if missing is not None:
            private_bounds.refuse(X, method, people)
            self._rehearse(problem, method, people)
            ledger = self._own_ledger(self.ledger, method.filter)
            bounds = self.bounds_ = private_bounds.bought(ledger, X, bounds, missing)
        X, mapped = (X, None) if unit else compact(X, bounds, size)
        table = Table(X, y, bounds=mapped, unit=unit)
        self._limits = None if unit else limits(bounds, X)
        if people is not None and method.personal is None:
            raise Unsupported(
                "this solver treats all records alike, so none can have a budget of its own: use 'auto', or "
                "'sgd-ma' for batches"
            )
        if not method.private:
            self.history_, self.privacy_ = (method.algorithm(table, problem),), _NO_PRIVACY
            self.guarantees_: dict[float, Guarantee] = {}
        else:
            self._spend(table, problem, method, people, ledger)
        self.n_iter_ = self.history_[-1].t
        u, constant = self.history_[-1].w
        if self._limits is None:
            return u, constant
        low, high = self._limits
        u = (u.T / (high - low)).T
        return u, constant - low @ u

    def _rehearse(self, problem: Problem, method: SolverMethod, people: PersonalBudgets | None) -> None:
        """Try a method on made-up rows: what it refuses, it refuses here, before anything is charged."""
        if self.ledger is None or method.rehearsed:
            return
        blank = Table(np.zeros((2, problem.width)), np.zeros(2), unit=problem.unit)
        made_up = self._own_ledger(self.ledger.rehearsal(), method.filter, people)
        weighed = method.personal == "weights"
        next(iter(method.algorithm(*over(made_up, blank, problem, people, weighed))), None)

    def _spend(
        self,
        table: Table,
        problem: Problem,
        method: SolverMethod,
        people: PersonalBudgets | None,
        ledger: Ledger | None = None,
    ) -> None:
        weighed = method.personal == "weights"
        if ledger is None:
            self._rehearse(problem, method, people)
            ledger = self._own_ledger(self.ledger, method.filter, people)
        if self.records is None:
            ledger.note(PUBLIC_SIZE)
        self.history_ = tuple(method.algorithm(*over(ledger, table, problem, people, weighed)))
        if not self.history_:
            raise BudgetSpent(f"{ledger.budget} does not allow a single step of {self.solver!r}")
        self.privacy_, self.guarantees_ = ledger.guarantee, ledger.guarantees

    def _rows(self, X: Any) -> Any:
        """Return features ready for the weights: divided by their norms or clipped, as `fit` does."""
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        if self._limits is not None:
            return clipped(X, *self._limits)
        return normalize(X) if X.shape[0] else X

    def _exported(self, model: Any, coef: Array, intercept: Any) -> Pipeline:
        """Return ``model`` with weights on rows as `fit` sees them, behind a step that makes such rows.

        Bounds are mapped onto [0, 1], and beyond them is clipped (`MinMaxScaler`, which takes dense rows).
        """
        check_is_fitted(self)
        if self._limits is None:
            rows = Normalizer().fit(np.atleast_2d(self.coef_))
        else:
            low, high = self._limits
            rows = MinMaxScaler(clip=True).fit(np.stack([low, high]))
            coef, intercept = coef * (high - low), intercept + coef @ low
        model.coef_, model.intercept_, model.n_features_in_ = coef, intercept, self.n_features_in_
        for owner, name in ((model, "classes_"), (model, "n_iter_"), (rows, "feature_names_in_")):
            if hasattr(self, name):
                setattr(owner, name, getattr(self, name))
        return Pipeline([("rows", rows), ("model", model)])


_PARAMETERS = """
    solver : str, Solver, callable or Method, default "auto"
        The name of a method, an object with its settings such as ``ft.DPAGD(growth=0.2)``, or a function
        (ledger, problem) -> steps.
    fit_intercept : bool, default True
        Whether to learn a constant as well.
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
_BOUNDS = """
    bounds : (low, high), "private" or None, default None
        The public bounds of the features, numbers or one a feature; values beyond are clipped. "private"
        buys bounds with a tenth of μ² of the budget (``bounds_``), NaN buys those of one feature. None
        divides rows by their norms instead, which needs no bounds, but features in one unit.
"""
_ATTRIBUTES = """
    n_features_in_, n_iter_ : int
        The number of features, and of the steps taken.
    privacy_ : Guarantee
        What holds of everything that this fit released.
    guarantees_ : dict of float to Guarantee
        What holds for the records of each budget, by its ε; one where all have the same.
    history_ : tuple of Step
        The steps, each with its weights and receipts.

    Raises
    ------
    InvalidValue, Unsupported
        For wrong parameters and arrays, before anything is charged.
    BudgetSpent
        Where the part does not fit what is left of the ledger. Nothing is charged then.
"""
_CLASSIFIER = f"""
    Parameters
    ----------
    {_BUDGET.strip()}
    classes : array-like, default (0, 1)
        Every label that may occur. Declared, because a label that occurs once names a record.
    {_BOUNDS.strip()}
    {_PARAMETERS.strip()}

    Attributes
    ----------
    coef_ : ndarray of shape (1, n_features) or (n_classes, n_features)
    intercept_ : ndarray of shape (1,) or (n_classes,)
    classes_ : ndarray of shape (n_classes,)
    {_ATTRIBUTES.strip()}

    Notes
    -----
    The guarantee is (ε, δ) of the budget under its adjacency, per record, against anyone who sees all that
    was released, by the theorem of the solver (docs/methods.md). A row with a missing value or with a label
    that is not declared counts as nothing.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(size=(2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "left", "right")
"""


class _PrivateClassifier(ClassifierMixin, _PrivateLinear):  # type: ignore[misc]
    """A classifier whose declared classes become 0, 1, ..., K-1: one weight vector for two, K for more."""

    losses: ClassVar[tuple[Loss, Loss]]  # for two classes, and for more

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        classes: ArrayLike = (0, 1),
        bounds: Any = None,
        solver: str | Solver | Algorithm | SolverMethod = "auto",
        fit_intercept: bool = True,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.classes = classes
        self.bounds = bounds
        self.solver = solver
        self.fit_intercept = fit_intercept
        self.ledger = ledger
        self.adjacency = adjacency
        self.records = records
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, budgets: Any = None) -> Self:
        """Check everything, charge the budget, and train until it is spent.

        ``budgets`` are public and give each row an ε of its own, with ``delta`` or a ledger of such levels.
        """
        classes = labels.declared(self.classes)
        method = self._method(CLASSIFIERS)
        X, y = self._supervised(X, y)
        codes = labels.codes(y, classes)
        several = len(classes) > 2
        outputs = len(classes) if several else 0
        u, constant = self._train(X, codes, self.losses[several], outputs, method, budgets)
        self.classes_ = classes
        self.coef_, self.intercept_ = np.atleast_2d(u.T), np.atleast_1d(constant)
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the signed distance from the border, or one score a class."""
        scores = np.asarray(self._rows(X) @ self.coef_.T + self.intercept_)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest class of every row."""
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
        """Return the model as scikit-learn's own, ready to predict."""
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
        """Return the model as scikit-learn's own, ready to predict."""
        return self._exported(svm.LinearSVC(), self.coef_, self.intercept_)


class LinearRegression(RegressorMixin, _PrivateLinear):  # type: ignore[misc]
    __doc__ = f"""Least squares, with a ridge penalty if asked for, within a privacy budget.

    Parameters
    ----------
    {_BUDGET.strip()}
    target_bounds : (low, high)
        The public bounds of the target, which must be declared; values beyond are clipped.
    {_BOUNDS.strip()}
    alpha : float, default 0.0
        The penalty alpha |w|² of scikit-learn's `Ridge`, on features and target mapped to [0, 1].
    {_PARAMETERS.strip()}

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
    intercept_ : float
    {_ATTRIBUTES.strip()}

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
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.target_bounds = target_bounds
        self.bounds = bounds
        self.alpha = alpha
        self.solver = solver
        self.fit_intercept = fit_intercept
        self.ledger = ledger
        self.adjacency = adjacency
        self.records = records
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, budgets: Any = None) -> Self:
        """Check everything, charge the budget, and train until it is spent.

        ``budgets`` are public and give each row an ε of its own, with ``delta`` or a ledger of such levels.
        """
        low, high = target_bounds(self.target_bounds)
        method, penalty = self._method(REGRESSORS), validate.non_negative(alpha=self.alpha)
        X, y = self._supervised(X, y)
        numbers = np.asarray(arrays.target(y), dtype=np.float64)
        scaled = np.where(np.isfinite(numbers), (np.clip(numbers, low, high) - low) / (high - low), np.nan)
        u, constant = self._train(X, scaled, squared, 0, method, budgets, penalty)
        self.coef_, self.intercept_ = u * (high - low), float(constant * (high - low) + low)
        self._range = low, high
        return self

    def predict(self, X: Any) -> Array:
        """Return the expected target of every row, within ``target_bounds``."""
        return np.asarray(np.clip(self._rows(X) @ self.coef_ + self.intercept_, *self._range))

    def to_sklearn(self) -> Any:
        """Return the model as scikit-learn's own, ready to predict: a `TransformedTargetRegressor`.

        Its linear model tells where between the target's bounds a row lies, from 0 to 1; two quantiles make a
        number of that, and of what is beyond them the bound.
        """
        check_is_fitted(self)
        low, high = self._range
        inner = self._exported(
            linear_model.LinearRegression(), self.coef_ / (high - low), (self.intercept_ - low) / (high - low)
        )
        bounds = QuantileTransformer(n_quantiles=2).fit([[low], [high]])
        model = TransformedTargetRegressor(inner, transformer=bounds, check_inverse=False)
        model.regressor_, model.transformer_, model._training_dim = inner, bounds, 1
        return model
