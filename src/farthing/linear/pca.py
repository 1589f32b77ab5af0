"""Private principal components as a scikit-learn transformer."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn import decomposition
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.base import PUBLIC_SIZE, PrivateEstimator
from farthing.linear.methods.dppca import components, dppca

Array = NDArray[np.float64]


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, PrivateEstimator):  # type: ignore[misc]
    """Principal components of rows of bounded norm, within a budget.

    Second moments are released with noise, about a noisy mean where that makes the noise smaller. They are
    second moments all the same, not variances: components are directions from the origin (``centre``, a
    public point, is subtracted first if given).

    Parameters
    ----------
    n_components : int, optional
        How many components to keep. None keeps all.
    epsilon, delta : float, optional
        The budget of a fit; with ``ledger`` the part of it to take, where None takes what is left.
    clip_norm : float, default 1.0
        The public bound on the norm of a row (less ``centre``); longer rows are shrunk onto it.
    centre : float or array-like, default 0.0
        A public point, one number or one a feature.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory for this fit.
    adjacency : {"add-remove", "replace-one", "zero-out"}, optional
        When two tables are neighbours. None: add-remove, or that of the ledger.
    records : int, optional
        The public number of records. None takes the table's own length as public.
    random_state : int or RandomState, optional
        Seeds the noise, for tests: nothing is private then, and ``privacy_`` says so.

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
        What holds of everything that this fit released.
    history_ : tuple of Step

    Raises
    ------
    BudgetSpent
        Where the part does not fit what is left of the ledger. Nothing is charged then.

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
        """Check everything, charge the budget, and release the second moments once."""
        X = self._checked(X)
        width = X.shape[1]
        count = width if self.n_components is None else validate.count(n_components=self.n_components)
        if count > width:
            raise InvalidValue(f"n_components must be at most the number of features, {width}, got {count}")
        table, features = Table(X), Features(width, self.centre, intercept=0.0)  # type: ignore[arg-type]
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
        """Return the coordinates of rows along the components; not finite for a row that is not."""
        check_is_fitted(self)
        table = self._checked(X, reset=False, training=True)
        with np.errstate(all="ignore"):  # a warning would tell about a record
            return np.asarray(table @ self.components_.T - self.mean_ @ self.components_.T)

    def inverse_transform(self, X: ArrayLike) -> Array:
        """Return features from coordinates along the components."""
        check_is_fitted(self)
        return np.asarray(np.asarray(X) @ self.components_ + self.mean_)

    def to_sklearn(self) -> Any:
        """Return the components as scikit-learn's own `PCA`, ready to transform."""
        check_is_fitted(self)
        model = decomposition.PCA(self.n_components_)
        model.components_, model.mean_, model.n_components_ = self.components_, self.mean_, self.n_components_
        model.explained_variance_ = self.explained_
        model.n_features_in_ = self.n_features_in_
        return model
