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
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax
from sklearn import decomposition, linear_model, svm
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, QuantileTransformer, normalize
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from farthing import validate
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter
from farthing.budget import Adjacency, Budget, Guarantee, Observer, Unit
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import Loss, huber_hinge, logistic, multinomial, one_against_rest, squared
from farthing.linear.methods.dppca import components, dppca
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS, Method, Solver
from farthing.noise.lattice import SeededStream
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
PUBLIC_SIZE = "the number of records is taken as public"


class _Private(BaseEstimator):  # type: ignore[misc]
    """What all estimators share: scikit-learn's checks, and a budget or a part of a ledger's."""

    epsilon: float | None
    delta: float | None
    ledger: Ledger | None
    adjacency: str | None
    random_state: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _checked(self, X: Any, *, reset: bool = True) -> Any:
        """A table of real numbers as wide as (``reset``: from now on as wide as) that of `fit`."""
        table = arrays.features(X)
        if table.shape[1] == 0:
            raise InvalidValue("features: found 0 feature(s) (shape=(, 0)) while a minimum of 1 is required.")
        if reset and table.shape[0] == 0 and self.records is None:
            raise InvalidValue("features: found 0 sample(s), and their number is taken as public")
        if not reset and not np.isfinite(table.data if hasattr(table, "indptr") else table).all():
            raise InvalidValue("rows to predict must hold finite numbers only, without NaN or infinity")
        refused: FarthingError
        try:
            validate_data(self, X, reset=reset, skip_check_array=True)  # width and names of columns
            return table
        except ValueError as error:
            refused = InvalidValue(str(error))
        except TypeError as error:
            refused = Unsupported(str(error))
        raise refused

    def _supervised(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        """A table and one target, of whatever kind, a row."""
        table = self._checked(X)
        if y is None:
            raise InvalidValue(f"{type(self).__name__} requires y to be passed, but the target y is None")
        said = "targets must be one number or label a row"
        values = arrays.attempt(lambda: column_or_1d(y, warn=True), said=said)
        if len(values) != table.shape[0]:
            raise InvalidValue(said)  # how many there are is no one's business
        return table, np.asarray(values)

    def _door(self, shared: Ledger | None, filter: Callable[[Budget], Filter] | None = GdpFilter) -> Ledger:
        """The ledger that this fit may spend to its end. A part of a ``shared`` one is charged here.

        ``filter`` is how the method likes to spend; None if it promises a plan.
        """
        if shared is None:
            if self.epsilon is None or self.delta is None:
                raise InvalidValue("give epsilon and delta, or a ledger to spend from")
            relation = validate.choice(Adjacency, adjacency=self.adjacency or Adjacency.ADD_REMOVE)
            budget = Budget(self.epsilon, self.delta, relation)
            return Ledger(budget, filter=filter, stream=self._stream())
        if self.random_state is not None:
            raise InvalidValue("random_state must be None with a ledger, which draws its own noise")
        if self.adjacency not in (None, shared.budget.adjacency):
            raise InvalidValue(
                f"adjacency must be the ledger's, {shared.budget.adjacency}, got {self.adjacency}"
            )
        if isinstance(shared.filter, BasicFilter):
            return shared.allot(self.epsilon, self.delta, filter=filter)
        if (
            filter is None or filter is RdpFilter
        ):  # these need a ledger of their own: this one, if it is unused
            fits = filter is None or isinstance(shared.filter, RdpFilter)
            if fits and self.epsilon is None and self.delta is None and shared.share == 0:
                return shared
            kind = "promises a plan" if filter is None else "asks batches"
            unused = "a fresh ledger" + ("" if filter is None else " with filter=RdpFilter")
            raise Unsupported(
                f"solver {self.solver!r} {kind}: give it {unused} and no epsilon, or a ledger with "
                "filter=BasicFilter"
            )
        return shared.allot(self.epsilon, self.delta)

    def _stream(self) -> SeededStream | None:
        if self.random_state is None:
            return None
        seed = self.random_state
        return SeededStream(seed if isinstance(seed, int) else int(check_random_state(seed).randint(2**31)))


class _PrivateLinear(_Private):
    """What the linear models share: the public problem, a method's steps, and weights on raw rows."""

    bounds: Any
    solver: str | Solver | Algorithm | Method
    fit_intercept: bool
    records: int | None

    def _method(self, known: dict[str, Method]) -> Method:
        if isinstance(self.solver, Method):
            return self.solver
        if isinstance(self.solver, Solver):
            return self.solver.method
        if isinstance(self.solver, type) and issubclass(self.solver, Solver):
            raise InvalidValue(f"solver must be an object: {self.solver.__name__}(), not the class itself")
        if callable(self.solver):
            return Method(self.solver)
        if self.solver not in known:
            raise InvalidValue(
                f"solver must be one of {sorted(known)}, an object such as ft.DPAGD() or a function, got "
                f"{self.solver!r}"
            )
        return known[self.solver]

    def _train(
        self, X: Any, y: Array, loss: Loss, outputs: int, method: Method, penalty: float = 0.0
    ) -> tuple[Array, Array]:
        """Spends a budget; returns weights and constant on rows as they came (with unit rows, on those)."""
        unit = self.bounds is None
        table = Table(X, y, bounds=self.bounds, unit=unit)
        size = len(table) if self.records is None else validate.count(records=self.records)
        problem = Problem(loss, size, X.shape[1], outputs, bool(self.fit_intercept), unit, penalty)
        self._limits = None if unit else _limits(self.bounds, X.shape[1])
        if not method.private:
            self.history_, self.privacy_ = (method.algorithm(table, problem),), _NO_PRIVACY
        else:
            self._spend(table, problem, method)
        self.n_iter_ = self.history_[-1].t
        u, constant = self.history_[-1].w
        if self._limits is None:
            return u, constant
        low, high = self._limits
        u = (u.T / (high - low)).T
        return u, constant - low @ u

    def _spend(self, table: Table, problem: Problem, method: Method) -> None:
        if self.ledger is not None and not method.rehearsed:
            # what a method refuses, it refuses here, before anything is charged
            blank = Table(np.zeros((2, problem.width)), np.zeros(2), unit=problem.unit)
            door = self._door(self.ledger.rehearsal(), method.filter).over(blank)
            next(iter(method.algorithm(door, problem)), None)
        ledger = self._door(self.ledger, method.filter)
        if self.records is None:
            ledger.note(PUBLIC_SIZE)
        self.history_ = tuple(method.algorithm(ledger.over(table), problem))
        if not self.history_:
            raise BudgetSpent(f"{ledger.budget} does not allow a single step of {self.solver!r}")
        self.privacy_ = ledger.guarantee

    def _rows(self, X: Any) -> Any:
        """Features ready for the weights: divided by their norms or clipped, as `fit` does with its own."""
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        if self._limits is not None:
            return _clipped(X, *self._limits)
        return normalize(X) if X.shape[0] else X

    def _exported(self, model: Any, coef: Array, intercept: Any) -> Pipeline:
        """``model`` with weights on rows as `fit` sees them, behind what makes such rows of others.

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


class _PrivateClassifier(ClassifierMixin, _PrivateLinear):  # type: ignore[misc]
    """Declared classes become 0, 1, ..., K-1; two of them share one weight vector, more have one each.

    Parameters
    ----------
    epsilon, delta : the budget of a fit; with ``ledger``, the part of it to take (None: what is left).
    classes : every label that may occur. Declared, because a label that occurs once names a record.
    bounds : (low, high) of the features, numbers or one a feature; values beyond are clipped. None: rows
        are divided by their norms instead, which needs no bounds.
    solver : "auto", the name of another method, an object that has its settings, `DPAGD` (growth=0.2) for
        instance, a function (ledger, problem) -> steps, or a `Method`.
    fit_intercept : whether to learn a constant as well.
    ledger : a `Ledger` to spend from, shared with whatever else asks it.
    adjacency : "add-remove" (None), "replace-one" or "zero-out"; with a ledger, the ledger's.
    records : the public number of records. None takes the table's own length as public.
    random_state : for tests only: seeded noise, and so no privacy at all (``privacy_`` says so).

    Attributes
    ----------
    coef_, intercept_, classes_, n_features_in_, n_iter_ : as in scikit-learn.
    privacy_ : the `Guarantee` of everything this fit released.
    history_ : the `Step`s taken, each with its weights and receipts.
    """

    losses: ClassVar[tuple[Loss, Loss]]  # for two classes, and for more

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        classes: ArrayLike = (0, 1),
        bounds: Any = None,
        solver: str | Solver | Algorithm | Method = "auto",
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

    def fit(self, X: Any, y: Any) -> Self:
        """Checks everything, charges the budget, and trains until it is spent."""
        classes = _declared(self.classes)
        method = self._method(CLASSIFIERS)
        X, y = self._supervised(X, y)
        codes = _codes(y, classes)
        several = len(classes) > 2
        u, constant = self._train(X, codes, self.losses[several], len(classes) if several else 0, method)
        self.classes_ = classes
        self.coef_, self.intercept_ = np.atleast_2d(u.T), np.atleast_1d(constant)
        return self

    def decision_function(self, X: Any) -> Array:
        """Signed distance from the border, or one score a class."""
        scores = np.asarray(self._rows(X) @ self.coef_.T + self.intercept_)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of every row."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[places])


class LogisticRegression(_PrivateClassifier):
    __doc__ = (
        f"Logistic regression, binary or multinomial, within a budget.\n\n    {_PrivateClassifier.__doc__}"
    )

    losses = (logistic, multinomial)

    def predict_proba(self, X: Any) -> Array:
        """The probability of every class."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Its logarithm."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([log_expit(-scores), log_expit(scores)])
        return np.asarray(log_softmax(scores, axis=1))

    def to_sklearn(self) -> Any:
        """The same model as scikit-learn's own, ready to predict."""
        return self._exported(linear_model.LogisticRegression(), self.coef_, self.intercept_)


class LinearSVC(_PrivateClassifier):
    __doc__ = (
        f"A linear SVM with a smooth (Huber) hinge, within a budget.\n\n    {_PrivateClassifier.__doc__}"
    )

    losses = (huber_hinge, one_against_rest)

    def to_sklearn(self) -> Any:
        """The same model as scikit-learn's own, ready to predict."""
        return self._exported(svm.LinearSVC(), self.coef_, self.intercept_)


class LinearRegression(RegressorMixin, _PrivateLinear):  # type: ignore[misc]
    """Least squares, with a ridge penalty if asked for, within a budget.

    Parameters and attributes as in `LogisticRegression` (without classes), and

    target_bounds : (low, high) of the target; must be declared. Values beyond are clipped.
    alpha : the penalty alpha |w|² of scikit-learn's `Ridge`, on features and target mapped to [0, 1].
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        alpha: float = 0.0,
        solver: str | Solver | Algorithm | Method = "auto",
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

    def fit(self, X: Any, y: Any) -> Self:
        """Checks everything, charges the budget, and trains until it is spent."""
        low, high = _target_bounds(self.target_bounds)
        method, penalty = self._method(REGRESSORS), validate.non_negative(alpha=self.alpha)
        X, y = self._supervised(X, y)
        numbers = np.asarray(arrays.target(y), dtype=np.float64)
        scaled = np.where(np.isfinite(numbers), (np.clip(numbers, low, high) - low) / (high - low), np.nan)
        u, constant = self._train(X, scaled, squared, 0, method, penalty)
        self.coef_, self.intercept_ = u * (high - low), float(constant * (high - low) + low)
        self._range = low, high
        return self

    def predict(self, X: Any) -> Array:
        """The expected target of every row, within ``target_bounds``."""
        return np.asarray(np.clip(self._rows(X) @ self.coef_ + self.intercept_, *self._range))

    def to_sklearn(self) -> Any:
        """The same model as scikit-learn's own, ready to predict: a `TransformedTargetRegressor`.

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


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Private):  # type: ignore[misc]
    """Principal components of rows of bounded norm, within a budget (`algorithms.dppca`).

    Second moments are released with noise, about a noisy mean where that makes the noise smaller. They are
    second moments all the same, not variances: components are directions from the origin (``centre``, a
    public point, is subtracted first if given).

    Parameters
    ----------
    n_components : how many. None: all.
    epsilon, delta, ledger, adjacency, records, random_state : as in `LogisticRegression`.
    clip_norm : the public bound on the norm of a row (less ``centre``); longer rows are shrunk onto it.
    centre : a public point, a number or one a feature.

    Attributes
    ----------
    components_, mean_, n_components_, n_features_in_ : as in scikit-learn (mean_ is ``centre``).
    moments_ : the noisy Σ x xᵀ itself; explained_ : its leading eigenvalues, noise included.
    privacy_, history_ : as in `LogisticRegression`.
    """

    def __init__(
        self,
        n_components: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        clip_norm: float = 1.0,
        centre: ArrayLike = 0.0,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        records: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.epsilon = epsilon
        self.delta = delta
        self.clip_norm = clip_norm
        self.centre = centre
        self.ledger = ledger
        self.adjacency = adjacency
        self.records = records
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Checks everything, charges the budget, and releases the second moments once."""
        X = self._checked(X)
        width = X.shape[1]
        count = width if self.n_components is None else validate.count(n_components=self.n_components)
        if count > width:
            raise InvalidValue(f"n_components must be at most the number of features, {width}, got {count}")
        table, features = Table(X), Features(width, self.centre, intercept=0.0)  # type: ignore[arg-type]
        clip_norm = validate.positive(clip_norm=self.clip_norm)
        size = len(table) if self.records is None else validate.count(records=self.records)
        ledger = self._door(self.ledger)
        if self.records is None:
            ledger.note(PUBLIC_SIZE)
        self.history_ = tuple(dppca(ledger.over(table), features, clip_norm=clip_norm, records=size))
        if not self.history_:
            raise BudgetSpent(f"nothing is left of {ledger.budget}")
        self.moments_ = self.history_[-1].w
        self.explained_, self.components_ = components(self.moments_, count)
        self.mean_, self.n_components_ = features.centre, count
        self.privacy_ = ledger.guarantee
        return self

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def transform(self, X: Any) -> Array:
        """Coordinates along the components."""
        check_is_fitted(self)
        return np.asarray(
            self._checked(X, reset=False) @ self.components_.T - self.mean_ @ self.components_.T
        )

    def inverse_transform(self, X: ArrayLike) -> Array:
        """Back to features."""
        check_is_fitted(self)
        return np.asarray(np.asarray(X) @ self.components_ + self.mean_)

    def to_sklearn(self) -> Any:
        """The same components as scikit-learn's own, ready to transform."""
        check_is_fitted(self)
        model = decomposition.PCA(self.n_components_)
        model.components_, model.mean_, model.n_components_ = self.components_, self.mean_, self.n_components_
        model.explained_variance_ = self.explained_
        model.n_features_in_ = self.n_features_in_
        return model


def _limits(bounds: Any, width: int) -> tuple[Array, Array]:
    """Bounds that a table took, one number a feature each."""
    low, high = (np.broadcast_to(np.asarray(bound, dtype=np.float64), width) for bound in bounds)
    return low, high


def _clipped(X: Any, low: Array, high: Array) -> Any:
    """Rows between their bounds; zeros that are not stored stay so where they are."""
    if not hasattr(X, "indptr"):
        return np.clip(X, low, high)
    if (low > 0).any() or (high < 0).any():
        return np.clip(X.toarray(), low, high)
    X = X.astype(np.float64)
    X.data = np.clip(X.data, low[X.indices], high[X.indices])
    return X


def _declared(classes: ArrayLike) -> NDArray[Any]:
    """The declared classes, sorted."""
    known = np.unique(np.asarray(classes))
    if np.ndim(classes) != 1 or known.size < 2:
        raise InvalidValue(f"classes must list two labels or more, not one class or none; got {classes!r}")
    if known.dtype.kind == "f" and not (np.isfinite(known) & (known == np.rint(known))).all():
        raise InvalidValue("Unknown label type: classes must be whole numbers or texts, these are continuous")
    return known


def _codes(y: NDArray[Any], classes: NDArray[Any]) -> Array:
    """The place of every label among the classes, NaN for one that is not declared."""
    if "O" in (y.dtype.kind, classes.dtype.kind):
        known = {label: place for place, label in enumerate(classes.tolist())}
        return np.array([_place(label, known) for label in y.tolist()], dtype=np.float64)
    texts = [values.dtype.kind in "US" for values in (y, classes)]
    if texts[0] != texts[1] or y.dtype.kind not in "biufUS":
        raise InvalidValue(
            f"y must hold labels of the kind of classes={classes.tolist()}, got {y.dtype.type.__name__}"
        )
    places = np.searchsorted(classes, y).clip(0, len(classes) - 1)
    return np.where(classes[places] == y, places, np.nan)


def _place(label: Any, known: dict[Any, int]) -> float:
    try:
        return float(known.get(label, np.nan))
    except TypeError:  # nothing that could be looked up
        return float("nan")


def _target_bounds(bounds: tuple[float, float] | None) -> tuple[float, float]:
    try:
        low, high = bounds  # type: ignore[misc]
    except (TypeError, ValueError):
        raise InvalidValue(f"declare target_bounds=(low, high) of the target, got {bounds!r}") from None
    if not validate.finite(low=low) < validate.finite(high=high):
        raise InvalidValue(f"target_bounds must be (low, high) with low < high, got {bounds!r}")
    return float(low), float(high)
