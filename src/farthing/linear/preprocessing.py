"""Scale and bin features privately, as scikit-learn transformers for pipelines.

`PrivateScaler` and `PrivateBinner` buy bounds of every feature (`farthing.statistics.ranges`), or take
declared ones. Their output lies in [0, 1] by construction, so the next estimator takes ``bounds=(0, 1)``. In
a pipeline each step is charged separately: pass all of them one ledger and give each its part. `PCA` releases
private principal components.
"""

from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn import decomposition
from sklearn.base import ClassNamePrefixFeaturesOutMixin, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.base import PUBLIC_SIZE, PrivateEstimator
from farthing.linear.methods.dppca import components, dppca
from farthing.queries import arrays
from farthing.queries.query import Rows
from farthing.statistics import ranges
from farthing.statistics.cells import Cells
from farthing.statistics.spending import Allowance

Array = NDArray[np.float64]

_FOR_BOUNDS = 0.5  # share of the budget for bounds, where edges are bought too

_BUDGET = """epsilon, delta : float, optional
        The budget of a fit; with ``ledger`` the part of it to spend, by default the remainder."""
_SHARED = """ledger : Ledger, optional
        The ledger to spend from. None makes one in memory for this fit.
    adjacency : {"add-remove", "replace-one", "zero-out"}, optional
        The definition of neighbouring tables. None: add-remove, or that of the ledger.
    random_state : int or RandomState, optional
        A seed for the noise, for tests: nothing is private then, and ``privacy_`` says so."""


class _Preprocessor(TransformerMixin, PrivateEstimator):  # type: ignore[misc]
    """The base of the scaler and the binner, with declared or bought bounds."""

    records: ClassVar[int | None] = None
    bounds: Any = "private"

    def _declared(self, X: Any) -> tuple[Array, Array] | None:
        """Return the declared bounds of every feature, None if they are to be bought."""
        if isinstance(self.bounds, str):
            return None
        try:
            low, high = (np.broadcast_to(np.asarray(end, np.float64), X.shape[1]) for end in self.bounds)
        except (TypeError, ValueError):
            low = high = np.zeros(1)
        if not validate.interval(low, high).all():
            raise InvalidValue(
                f"bounds must be (low, high) with {validate.APART}, or 'private', got {self.bounds!r}"
            )
        return low, high

    def _dense(self, X: Any) -> Any:
        table = self._checked(X)
        if hasattr(table, "tocsr"):
            raise InvalidValue(f"{type(self).__name__} needs a dense table")
        if isinstance(self.bounds, str) and self.bounds != "private":
            raise InvalidValue(f"bounds must be (low, high) or 'private', got {self.bounds!r}")
        return table

    @arrays.quietly
    def _shares(self, X: Any) -> Array:
        """Return each number as a position between its bounds, from 0 to 1; NaN if it is not finite."""
        low, high = self.bounds_
        table = np.asarray(self._checked(X, reset=False, training=True), dtype=np.float64)
        return np.where(np.isfinite(table), (np.clip(table, low, high) - low) / (high - low), np.nan)


class PrivateScaler(OneToOneFeatureMixin, _Preprocessor):  # type: ignore[misc]
    __doc__ = f"""Scale features to [0, 1] by bounds that are bought within a budget.

    Parameters
    ----------
    {_BUDGET}
    {_SHARED}

    Attributes
    ----------
    bounds_ : (ndarray, ndarray)
        The bounds; numbers beyond them are clipped.
    privacy_ : Guarantee
        The guarantee of everything that this fit released.

    Notes
    -----
    `farthing.statistics.ranges`: two Gaussian (or Laplace) answers.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(17, 90, size=(5000, 1))
    >>> scaled = ft.PrivateScaler(1.0, 1e-6).fit(X).transform(X)
    >>> bool(scaled.min() >= 0), bool(scaled.max() <= 1), bool(scaled.std() > 0.1)
    (True, True, True)
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())

    @arrays.quietly
    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the arguments, charge the budget, and buy the bounds."""
        table = self._dense(X)
        ledger = self._own_ledger(self.ledger)
        self.bounds_ = ranges.of_table(table, Allowance(ledger)).known()
        self.privacy_ = ledger.guarantee
        return self

    def transform(self, X: Any) -> Array:
        """Return features scaled to [0, 1]; NaN stays NaN, so that estimators count the record as zero."""
        check_is_fitted(self)
        return self._shares(X)


class PrivateBinner(_Preprocessor):
    __doc__ = f"""Put features into bins of about equally many records, as indicators, within a budget.

    Parameters
    ----------
    bins : int, default 8
        The number of bins of a feature, from 2 to 64.
    {_BUDGET}
    bounds : (low, high) or "private", default "private"
        Public bounds, numbers or one per feature, or bounds that are bought.
    {_SHARED}

    Attributes
    ----------
    bounds_ : (ndarray, ndarray)
        The bounds that the bins divide.
    edges_ : list of ndarray
        The inner edges of each feature's bins, ascending; fewer if many records share one value.
    privacy_ : Guarantee
        The guarantee of everything that this fit released.

    Notes
    -----
    Half of the budget buys bounds (`farthing.statistics.ranges`), the other half buys counts in 64 equal
    cells between them, with one cell per record and feature: a Gaussian (or Laplace) sum of L2 norm √d. The
    edges are computed from these counts.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).uniform(17, 90, size=(5000, 1))
    >>> ft.PrivateBinner(4, epsilon=1.0, delta=1e-6).fit(X).transform(X).sum(axis=1)[:3]
    array([1., 1., 1.])
    """

    def __init__(
        self,
        bins: int = 8,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        bounds: Any = "private",
        ledger: Ledger | None = None,
        adjacency: str | None = None,
        random_state: Any = None,
    ) -> None:
        self._remember(locals())

    @arrays.quietly
    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the arguments, charge the budget, and buy bounds and edges."""
        bins = validate.count(bins=self.bins)
        if not 2 <= bins <= ranges.FINE:
            raise InvalidValue(f"bins must be from 2 to {ranges.FINE}, got {bins}")
        table = self._dense(X)
        declared = self._declared(table)
        ledger = self._own_ledger(self.ledger)
        part = _FOR_BOUNDS if declared is None else 0.0
        low, high = self.bounds_ = declared or ranges.of_table(table, Allowance(ledger), part).known()
        cells = Cells(table.shape[1], ranges.FINE)
        shares = Rows(ranges.Shares(table, low, high))
        counts, _ = Allowance(ledger).ask(shares, cells, cells.norms, 1 - part)
        self.edges_ = [_inner_edges(row, bins) for row in counts]
        self.privacy_ = ledger.guarantee
        return self

    def transform(self, X: Any) -> Array:
        """Return one indicator per bin, feature by feature; all NaN for a record that has a NaN."""
        check_is_fitted(self)
        shares = self._shares(X)
        parts = [
            np.eye(len(edges) + 1)[np.searchsorted(edges, shares[:, place], side="right")]
            for place, edges in enumerate(self.edges_)
        ]
        return np.where(np.isnan(shares).any(axis=1, keepdims=True), np.nan, np.hstack(parts))

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return a name for each indicator: its feature and the number of the bin."""
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None) if input_features is None else input_features
        names = [f"x{place}" for place in range(self.n_features_in_)] if names is None else names
        pairs = zip(names, self.edges_, strict=True)
        return np.array([f"{name}_{bin}" for name, edges in pairs for bin in range(len(edges) + 1)], object)


def _inner_edges(counts: Array, bins: int) -> Array:
    """Return edges, as positions between the bounds, that divide noisy counts about equally."""
    below = np.cumsum(np.maximum(counts, 0.0))
    if not below[-1]:
        return np.arange(1, bins) / bins
    places = np.searchsorted(below, below[-1] * np.arange(1, bins) / bins) + 1
    places = np.unique(places[places < len(counts)])
    return places / len(counts)


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, PrivateEstimator):  # type: ignore[misc]
    """Principal components of rows of bounded norm, within a budget.

    Second moments are released with noise, about a noisy mean if that makes the noise smaller. The components
    are those of second moments, not of variances: directions from the origin (``centre``, a public point, is
    subtracted first if given).

    Parameters
    ----------
    n_components : int, optional
        The number of components. None keeps all.
    epsilon, delta : float, optional
        The budget of a fit; with ``ledger`` the part of it to spend, by default the remainder.
    clip_norm : float, default 1.0
        The public bound on the norm of a row (minus ``centre``); longer rows are shrunk to it.
    centre : float or array-like, default 0.0
        A public point, one number or one per feature.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory for this fit.
    adjacency : {"add-remove", "replace-one", "zero-out"}, optional
        The definition of neighbouring tables. None: add-remove, or that of the ledger.
    records : int, optional
        The public number of records. None takes the length of the table as public.
    random_state : int or RandomState, optional
        A seed for the noise, for tests: nothing is private then, and ``privacy_`` says so.

    Attributes
    ----------
    components_ : ndarray of shape (n_components, n_features)
    mean_ : ndarray of shape (n_features,)
        ``centre``.
    moments_ : ndarray of shape (n_features, n_features)
        The noisy Σ x xᵀ.
    explained_ : ndarray of shape (n_components,)
        Its leading eigenvalues, noise included.
    privacy_ : Guarantee
        The guarantee of everything that this fit released.
    history_ : tuple of Step

    Raises
    ------
    BudgetSpent
        If the part exceeds the remainder of the ledger. Nothing is charged then.

    Notes
    -----
    The method is `farthing.linear.methods.dppca`: one or two Gaussian answers, μ-GDP under every adjacency.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X = np.random.default_rng(0).normal(size=(5000, 3)) * [3.0, 1.0, 0.1]
    >>> pca = ft.PCA(1, epsilon=1.0, delta=1e-6, clip_norm=5.0).fit(X)
    >>> bool(abs(pca.components_[0, 0]) > 0.9)
    True
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
        self._remember(locals())

    @arrays.quietly
    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the arguments, charge the budget, and release the second moments."""
        X = self._checked(X)
        width = X.shape[1]
        count = width if self.n_components is None else validate.count(n_components=self.n_components)
        if count > width:
            raise InvalidValue(f"n_components must be at most the number of features, {width}, got {count}")
        table, features = Table(X), Features(width, self.centre, intercept=0.0)
        clip_norm = validate.positive(clip_norm=self.clip_norm)
        size = len(table) if self.records is None else validate.count(records=self.records)
        ledger = self._own_ledger(self.ledger)
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
        """Return the coordinates of rows along the components; not finite for rows that are not finite."""
        check_is_fitted(self)
        table = self._checked(X, reset=False, training=True)
        with np.errstate(all="ignore"):  # a warning would reveal a record
            return np.asarray(table @ self.components_.T - self.mean_ @ self.components_.T)

    def inverse_transform(self, X: ArrayLike) -> Array:
        """Return features from coordinates along the components."""
        check_is_fitted(self)
        return np.asarray(np.asarray(X) @ self.components_ + self.mean_)

    def to_sklearn(self) -> Any:
        """Return the components as a fitted `PCA` of scikit-learn."""
        check_is_fitted(self)
        model = decomposition.PCA(self.n_components_)
        model.components_, model.mean_, model.n_components_ = self.components_, self.mean_, self.n_components_
        model.explained_variance_ = self.explained_
        model.n_features_in_ = self.n_features_in_
        return model
