"""Provide the base of the estimators: scikit-learn's checks, and a budget or a part of a ledger's.

This module also checks declared bounds and classes, clips rows to bounds, and encodes labels by class.

>>> clipped(np.array([[-1.0, 5.0]]), np.zeros(2), np.array([1.0, 2.0])).tolist()
[[0.0, 2.0]]
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import column_or_1d, validate_data

from farthing import validate
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter
from farthing.accounting.menu import MenuFilter
from farthing.accounting.personal import PersonalBudgets, PersonalFilter
from farthing.budget import Adjacency, Budget
from farthing.data import raw
from farthing.data.columns import limits
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import SeededStream
from farthing.queries import arrays
from farthing.statistics.spending import spendable

PUBLIC_SIZE = "the number of records is taken as public"


class PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of all estimators: scikit-learn's checks, and a budget or a part of a ledger's budget."""

    epsilon: float | None
    delta: float | None
    ledger: Ledger | None
    adjacency: str | None
    random_state: Any

    def _remember(self, given: dict[str, Any]) -> None:
        """Set every parameter of ``__init__`` as an attribute, from the local variables there."""
        for name, value in given.items():
            if name != "self":
                setattr(self, name, value)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _checked(self, X: Any, *, reset: bool = True, training: bool = False) -> Any:
        """Return a table of real numbers with as many columns as that of `fit` (``reset``: sets this number).

        Rows to predict must be finite. For ``training`` rows that a pipeline passes through a private
        transformer, no record may decide whether they are refused: the next estimator counts rows that are
        not finite as zero.
        """
        table = arrays.features(X)
        if table.shape[1] == 0:
            raise InvalidValue("features: found 0 feature(s) (shape=(, 0)) while a minimum of 1 is required.")
        if reset and table.shape[0] == 0 and self.records is None:
            raise InvalidValue("features: found 0 sample(s) (the number of records is taken as public)")
        refuses = not reset and not training
        if refuses and not np.isfinite(table.data if hasattr(table, "indptr") else table).all():
            raise InvalidValue("rows to predict must hold finite numbers only, without NaN or infinity")
        refused: FarthingError
        try:
            # width and column names; a list has none that could come from its first row
            named = table if isinstance(X, list | tuple) else X
            validate_data(self, named, reset=reset, skip_check_array=True)
            return table
        except ValueError as error:
            refused = InvalidValue(str(error))
        except TypeError as error:
            refused = Unsupported(str(error))
        raise refused

    def _supervised(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        """Return a table and one target per row, of any type."""
        table = self._checked(X)
        if y is None:
            raise InvalidValue(f"{type(self).__name__} requires y to be passed, but the target y is None")
        said = "targets must be one number or label per row"
        if not arrays.typed(y) or isinstance(y, np.ma.MaskedArray):  # the type must not depend on a record
            values = arrays.column(y, "targets")
        else:
            values = arrays.attempt(lambda: column_or_1d(y, warn=True), said=said)
        if len(values) != table.shape[0]:
            raise InvalidValue(said)  # the lengths are private
        return table, np.asarray(values)

    def _numbers(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        """Return a table and one number per row, of any real type."""
        table, values = self._supervised(X, y)
        given = y if isinstance(y, list | tuple) else values
        return table, arrays.target(given)

    def _people(self, budgets: Any, records: int) -> PersonalBudgets:
        """Return the budget level of every record, as levels of the ledger if there is one."""
        if self.epsilon is not None:
            raise InvalidValue("epsilon must be None with budgets, which set it for each record")
        if self.records is not None:
            raise InvalidValue("records must be None with budgets, whose number is public")
        rule = None if self.ledger is None else self.ledger.filter
        if rule is not None and not isinstance(rule, PersonalFilter):
            raise InvalidValue(
                "budgets need a ledger of personal budgets: people = ft.PersonalBudgets(budgets), then "
                "ledger=ft.Ledger(people.budget(delta), filter=people)"
            )
        people = PersonalBudgets(budgets, epsilons=None if rule is None else rule.epsilons)
        if len(people) != records:
            raise InvalidValue("budgets must be one epsilon per row")  # the lengths are private
        return people

    def _own_ledger(
        self,
        shared: Ledger | None,
        filter: Callable[[Budget], Filter] | None = GdpFilter,
        people: PersonalBudgets | None = None,
    ) -> Ledger:
        """Return the ledger that this fit may spend to its end; charge a part of a ``shared`` one.

        ``filter`` is the method's preferred filter; None if it promises a plan.
        """
        shared = spendable(shared)
        if shared is None:
            epsilon = self.epsilon if people is None else people.epsilons[-1]
            if epsilon is None or self.delta is None:
                raise InvalidValue("pass epsilon and delta, or a ledger to spend from")
            relation = validate.choice(Adjacency, adjacency=self.adjacency or Adjacency.ADD_REMOVE)
            budget = Budget(epsilon, self.delta, relation)
            return Ledger(budget, filter=people or filter, stream=self._stream())
        if self.random_state is not None:
            raise InvalidValue("random_state must be None with a ledger, which draws its own noise")
        if self.adjacency not in (None, shared.budget.adjacency):
            raise InvalidValue(
                f"adjacency must be the ledger's, {shared.budget.adjacency}, got {self.adjacency}"
            )
        if people is not None:
            if self.delta is not None or shared.share > 0:
                raise Unsupported("personal budgets are spent as a whole: pass a fresh ledger, and no delta")
            return shared
        if isinstance(shared.filter, BasicFilter):
            return shared.allot(self.epsilon, self.delta, filter=filter)
        if filter is None or filter is RdpFilter:  # these need a separate ledger: this one, if it is unused
            fits = filter is None or isinstance(shared.filter, RdpFilter | MenuFilter)
            if fits and self.epsilon is None and self.delta is None and shared.share == 0:
                return shared
            kind = "promises a plan" if filter is None else "uses batches"
            unused = "a fresh ledger" + ("" if filter is None else " with filter=RdpFilter")
            raise Unsupported(
                f"solver {self.solver!r} {kind}: pass {unused} and no epsilon, or a ledger with "
                "filter=BasicFilter"
            )
        return shared.allot(self.epsilon, self.delta)

    def _stream(self) -> SeededStream | None:
        if self.random_state is None:
            return None
        seed = self.random_state
        return SeededStream(seed if isinstance(seed, int) else int(check_random_state(seed).randint(2**31)))


Array = NDArray[np.float64]


def clipped(X: Any, low: Array, high: Array) -> Any:
    """Return rows clipped to their bounds; sparse tables stay sparse where possible."""
    if not hasattr(X, "indptr"):
        return np.clip(X, low, high)
    if (low > 0).any() or (high < 0).any():
        return np.clip(X.toarray(), low, high)
    X = X.astype(np.float64)
    X.data = np.clip(X.data, low[X.indices], high[X.indices])
    return X


_FEWEST, _MOST = 2**14, 2**28  # table sizes, in entries, for which a compact copy pays off
_BLOCK = 2**18


def compact(X: Any, bounds: Any, records: int) -> tuple[Any, Any]:
    """Return a table and its bounds, mapped onto [0, 1] in float32 if this makes passes faster.

    Each row is mapped by itself with public numbers. A row that is not finite becomes NaN and counts as zero.
    Files (`numpy.memmap`), sparse tables and very large ones are left unchanged. ``records`` is the public
    number of records: with a private number, one more record might change the rounding of all.
    """
    low, high = limits(bounds, X)
    unmapped = not low.any() and bool((high == 1).all())
    worth = _FEWEST <= records * X.shape[1] <= _MOST
    stays = isinstance(X, np.memmap) or not isinstance(X, np.ndarray) or not worth
    if stays or (unmapped and X.dtype.char in "fB?"):
        return X, bounds
    scale = 1 / (high - low)
    if (quick := raw.mapped(X, low, scale)) is not None:
        return quick, (0.0, 1.0)
    found, step = np.empty(X.shape, np.float32), max(1, _BLOCK // X.shape[1])
    mapped = np.empty((min(step, len(X)), X.shape[1]))
    for start in range(0, len(X), step):
        rows = np.asarray(X[start : start + step], dtype=np.float64)
        part, share = found[start : start + step], mapped[: len(rows)]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(np.subtract(rows, low, out=share), scale, out=share)
            np.minimum(np.maximum(share, 0.0, out=share), 1.0, out=share)
        part[...] = share
        if not (np.isfinite(rows.min()) and np.isfinite(rows.max())):
            part[~np.isfinite(rows)] = np.nan
    return found, (0.0, 1.0)


class PrivateClassifierMixin(ClassifierMixin):  # type: ignore[misc]
    """scikit-learn's classifier mixin, with a warning about undeclared test labels."""

    classes_: NDArray[Any]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy without noise, which no guarantee covers."""
        accuracy = float(super().score(X, y, sample_weight))
        if np.isnan(codes(np.ravel(y), self.classes_)).any():
            warnings.warn(
                f"some labels of y are not among classes={self.classes_.tolist()}: they are never predicted, "
                "and training rows with them count as zero. Declare every label with classes=[...]",
                UserWarning,
                stacklevel=2,
            )
        return accuracy


def target_bounds(bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Return the declared bounds of a target."""
    try:
        low, high = bounds  # type: ignore[misc]
    except (TypeError, ValueError):
        raise InvalidValue(f"declare target_bounds=(low, high) of the target, got {bounds!r}") from None
    if not validate.interval(validate.finite(low=low), validate.finite(high=high)):
        raise InvalidValue(f"target_bounds must be (low, high) with {validate.APART}, got {bounds!r}")
    return float(low), float(high)


def declared(classes: ArrayLike) -> NDArray[Any]:
    """Return the declared classes, sorted."""
    few = "classes must list two labels or more, not one class or none, all numbers or all texts"
    said = f"{few}; got {classes!r}"
    labels = arrays.attempt(lambda: np.asarray(classes), said=said)
    known = arrays.attempt(np.unique, labels, said=said)
    if labels.ndim != 1 or known.size < 2:
        raise InvalidValue(said)
    if known.dtype.kind in "US" and len({isinstance(label, str | bytes) for label in classes}) > 1:  # type: ignore[union-attr]
        raise InvalidValue(said)  # numpy would make texts of all
    if known.dtype.kind == "f" and not (np.isfinite(known) & (known == np.rint(known))).all():
        raise InvalidValue("Unknown label type: classes must be whole numbers or texts, these are continuous")
    return known


def codes(y: NDArray[Any], classes: NDArray[Any], filed: bool = False) -> Array:
    """Return the index of every label among the classes, NaN for an undeclared one.

    For a long table that lies in a file the result lies in a file too (``filed``).
    """
    if "O" in (y.dtype.kind, classes.dtype.kind):
        known = {label: place for place, label in enumerate(classes.tolist())}
        return np.array([_place(label, known) for label in y.tolist()], dtype=np.float64)
    texts = [values.dtype.kind if values.dtype.kind in "US" else "" for values in (y, classes)]
    if texts[0] != texts[1] or y.dtype.kind not in "biufUS":
        raise InvalidValue(
            f"y must hold labels of the kind of classes={classes.tolist()}, got {y.dtype.type.__name__}"
        )
    found = raw.scratch(len(y), filed)
    for part in raw.slices(len(y)):
        places = np.searchsorted(classes, y[part]).clip(0, len(classes) - 1)
        found[part] = np.where(classes[places] == y[part], places, np.nan)
    return found


def _place(label: Any, known: dict[Any, int]) -> float:
    try:
        return float(known.get(label, np.nan))
    except Exception:  # not hashable or not comparable
        return float("nan")
