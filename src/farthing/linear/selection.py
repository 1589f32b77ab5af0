"""Select models privately: folds, scores and choices that a search may use on private rows.

A score on held-out private rows is a release like any other. scikit-learn's scorers do not charge for it, so
a search that uses them has no guarantee, even if its fits are charged. `PrivateScore` is a scorer that
queries the ledger, `Folds` splits so that no record decides the fold of another, and `choose` selects the
best of several models at a price that does not depend on their number.

>>> import numpy as np
>>> import farthing as ft
>>> from sklearn.model_selection import GridSearchCV
>>> rng = np.random.default_rng(0)
>>> X = rng.uniform(size=(2000, 3))
>>> y = (X[:, 0] > X[:, 1]).astype(int)
>>> ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
>>> part = equal_part(ledger, 2 * 3 * 2 + 1)  # 2 candidates, 3 folds, a fit and a score each; the last fit
>>> model = ft.LogisticRegression(part.epsilon, part.delta, ledger=ledger)
>>> score = PrivateScore(ledger, part.epsilon, part.delta, records=2000 // 3)  # a public number
>>> search = GridSearchCV(model, {"bounds": [None, (0, 1)]}, cv=Folds(3), scoring=score, error_score="raise")
>>> _ = search.fit(X, y)
>>> print(f"{ledger.share:.4f}")
1.0000

**Guarantee.** Fits and scores are answers of one ledger; its filter allows any next query on any rows, so the
total holds for the table as a whole. This needs neighbouring tables to be split alike, up to the record in
which they differ. `Folds` assigns every record to a fold independently, which satisfies this under every
adjacency; scikit-learn's `KFold` (by position) does so under replace-one and zero-out only, where the other
records keep their positions, and a stratified split, the default for classifiers, under none: a label decides
the folds of others. A row is one unit of the budget. Models must predict row by row, as scikit-learn's do
except for last bits, which may decide a label: rows are predicted in batches of one size, each at a secret
position (`farthing.data.weighted` has the theorem).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import gaussian, zcdp
from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.budget import Budget
from farthing.data.weighted import drawn_places, rounds
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import choice_epsilon, gaussian_mu, noise_of
from farthing.noise.lattice import Stream
from farthing.noise.summing import summed
from farthing.queries import arrays
from farthing.queries.bounds import ClipValue, Kind
from farthing.queries.mechanisms import Gaussian, Laplace, Mechanism, NoisyMax
from farthing.queries.query import Query
from farthing.queries.samplers import Everyone, Indices

Array = NDArray[np.float64]
Value = Callable[[Any, Any], Any]  # (true targets, predictions) -> one number in [0, 1] per record

_ROUNDED = 1 - 1e-9  # so that float sums of parts still fit
_ONE = ClipValue(0.0, 1.0)
_PLACES = 256  # rows per batch of predictions


def equal_part(ledger: Ledger, times: int) -> Budget:
    """Return the (ε, δ) of which ``times`` parts fit the remainder of a ledger, by the ledger's filter.

    >>> import farthing as ft
    >>> print(equal_part(ft.Ledger(ft.Budget(1.0, 1e-5)), 16))
    (0.220267, 1e-05)-DP, add-remove, per record, against anyone
    """
    return part_of_rest(ledger, 1 / validate.count(times=times))


def part_of_rest(ledger: Ledger, share: float) -> Budget:
    """Return the (ε, δ) of a share of a ledger's remainder: of its μ², its ρ, or its ε and δ."""
    rest = ledger.rest
    match ledger.filter:
        case GdpFilter():
            mu = gaussian.mu(rest.epsilon, rest.delta) * math.sqrt(share) * _ROUNDED
            return rest.with_(gaussian.epsilon(mu, rest.delta), rest.delta)
        case ZcdpFilter():
            rho = zcdp.rho_tight(rest.epsilon, rest.delta) * share * _ROUNDED
            return rest.with_(zcdp.epsilon(rho, rest.delta), rest.delta)
        case BasicFilter():
            return rest.with_(rest.epsilon * share * _ROUNDED, rest.delta * share * _ROUNDED)
    raise Unsupported(f"the {ledger.filter.name} filter has no equal parts: use the GDP or the basic filter")


@dataclass(frozen=True, slots=True)
class Folds:
    """``cv=`` for scikit-learn: assigns every record independently to one of ``splits`` folds.

    Folds are therefore only approximately equal in size. Each call of `split` draws anew.
    """

    splits: int = 5
    stream: Stream = field(default_factory=Stream, repr=False)

    def __post_init__(self) -> None:
        if validate.count(splits=self.splits) < 2:
            raise InvalidValue(f"splits must be at least 2, got {self.splits!r}")

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Return the number of splits."""
        return self.splits

    def split(
        self, X: Any, y: Any = None, groups: Any = None
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Yield the positions of training and held-out rows; records of the same ``groups`` stay together."""
        if groups is None:
            fold = self.stream.uniform_below(self.splits, arrays.length(X))
        else:
            member = _members(arrays.column(groups, "groups"))
            fold = self.stream.uniform_below(self.splits, int(member.max(initial=-1)) + 1)[member]
        for place in range(self.splits):
            yield np.flatnonzero(fold != place), np.flatnonzero(fold == place)


def _members(names: NDArray[Any]) -> NDArray[np.intp]:
    """Return the number of every record's group; a value that cannot be hashed is its own group."""
    if names.dtype.kind != "O":
        return np.unique(names, return_inverse=True)[1]
    known: dict[Any, int] = {}
    found = np.empty(len(names), np.intp)
    for place, name in enumerate(names.tolist()):
        try:
            found[place] = known.setdefault(name, len(known))
        except Exception:  # the value belongs to one record only
            found[place] = known.setdefault(object(), len(known))
    return found


@dataclass(frozen=True, slots=True)
class PrivateScore:
    """``scoring=`` for scikit-learn: the accuracy on held-out rows, noisy and charged.

    Every call takes the part (``epsilon``, ``delta``) of ``ledger``, or raises `BudgetSpent`. ``value`` may
    compute another number in [0, 1] per record (values beyond are clipped) from true targets and predictions.
    The sum is divided by ``records``, a public number of held-out rows (for N rows in k folds, N/k): the true
    number is private, and dividing by it would reveal it. Noise may move a score below 0 or above 1; it is
    not clipped, so that means of several scores are unbiased.
    """

    ledger: Ledger
    epsilon: float
    delta: float
    value: Value | None = None
    records: int = field(kw_only=True)

    def __post_init__(self) -> None:
        validate.count(records=self.records)

    def __call__(self, estimator: Any, X: Any, y: Any) -> float:
        """Return the noisy score of a fitted model."""
        rows = Held(X, y)
        part = _part(self.ledger, self.epsilon, self.delta)
        relation = part.budget.adjacency
        noise: Mechanism
        if isinstance(part.filter, BasicFilter):
            noise = Laplace(_ONE.sensitivity(relation, 1) / (_ONE.norm(1) * part.budget.epsilon) / _ROUNDED)
        else:
            noise = Gaussian(noise_of(_ONE, relation, gaussian_mu(part)))
        query = Query(Everyone(), _Values((estimator,), self.value), _ONE, noise)
        return float(part.over(rows).ask(query).value.item()) / self.records


def choose(
    models: Sequence[Any],
    X: Any,
    y: Any,
    ledger: Ledger,
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    value: Value | None = None,
) -> int:
    """Return the index of the model that is right most often on these rows, by the exponential mechanism.

    One record raises each count by at most 1, so the gap of two counts changes by 1 under add-remove and by 2
    under replace-one (`NoisyMax`). The price, the part (``epsilon``, ``delta``) of the ledger or its
    remainder, does not grow with the number of models; the counts are not released. ``value`` as in
    `PrivateScore`.

    >>> import farthing as ft
    >>> from sklearn.dummy import DummyClassifier
    >>> X, y = np.zeros((500, 1)), np.ones(500, dtype=int)
    >>> no, yes = (DummyClassifier(strategy="constant", constant=k).fit([[0], [0]], [0, 1]) for k in (0, 1))
    >>> choose([no, yes], X, y, ft.Ledger(ft.Budget(1.0, 1e-5)))
    1
    """
    if not models:
        raise InvalidValue("give the models to choose among, at least one")
    rows = Held(X, y)
    part = _part(ledger, epsilon, delta)
    shift = part.budget.adjacency.shift
    noise = NoisyMax(shift / choice_epsilon(part))
    query = Query(Everyone(), _Values(tuple(models), value), _ONE, noise)
    return int(part.over(rows).ask(query).value)


def _part(ledger: Ledger, epsilon: float | None, delta: float | None) -> Ledger:
    """Return a part of a ledger with its filter; under basic composition one answer is best made pure."""
    return ledger.allot(
        epsilon, delta, filter=BasicFilter if isinstance(ledger.filter, BasicFilter) else None
    )


class Held:
    """Held-out rows of any type that scikit-learn accepts, as records."""

    def __init__(self, X: Any, y: Any) -> None:
        self.X = arrays.indexed(X)
        self.y = arrays.column(y, "targets")  # one more label must not change the type of the others
        if self.y.dtype.kind == "V" or len(self.y) != arrays.length(self.X):
            raise InvalidValue("targets must be one number or label per row")  # the lengths are private

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Indices) -> "Held":
        """Return the rows at ``indices`` by the container's own indexing."""
        if isinstance(indices, slice) and indices == slice(None):
            return self
        rows = self.X.iloc if hasattr(self.X, "iloc") else self.X if hasattr(self.X, "shape") else None
        taken = [self.X[place] for place in np.asarray(indices)] if rows is None else rows[indices]
        return Held(taken, self.y[indices])


@dataclass(frozen=True, slots=True)
class _Values:
    """The value of each record for each model, with one column per model."""

    models: tuple[Any, ...]
    value: Value | None
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.models),)

    def bounded_sum(self, records: Held, w: Any, bound: ClipValue) -> Array:
        totals = [self._of(model, records, bound) for model in self.models]
        return np.concatenate(totals)

    def _of(self, model: Any, records: Held, bound: ClipValue) -> Array:
        # estimators cannot predict zero rows; check the shape of ``value`` all the same
        predicted = placed_predictions(model, records) if len(records) else records.y
        found = _right(records.y, predicted) if self.value is None else self.value(records.y, predicted)
        each = np.asarray(found, dtype=np.float64)
        if each.shape != records.y.shape:
            raise InvalidValue(f"value must give one number per record, got {each.ndim} dimensions")
        return summed(bound.apply, each[:, None])


def placed_predictions(model: Any, records: Held) -> NDArray[Any]:
    """Return a model's predictions of all rows, each at a secret position in a batch of a public size.

    Empty positions are filled with an existing row, whose prediction is ignored.
    """
    at, order, parts = drawn_places(len(records), _PLACES), list[Any](), list[Any]()
    for members in rounds(at):
        places = np.full(_PLACES, members[0])
        places[at[members]] = members
        found = np.asarray(model.predict(records.take(places).X))
        if found.shape[:1] != (_PLACES,):
            raise InvalidValue("a model must predict one number or label per row")
        order.append(members)
        parts.append(found[at[members]])
    return np.asarray(np.concatenate(parts)[np.argsort(np.concatenate(order))])


def _right(y: NDArray[Any], predicted: NDArray[Any]) -> Any:
    """Return which predictions equal the targets; arrays of objects are compared one by one."""
    if y.dtype.kind != "O" or predicted.shape != y.shape:
        return y == predicted
    pairs = zip(y.tolist(), predicted.tolist(), strict=True)
    return np.array([_equal(one, other) for one, other in pairs], np.bool_)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared, such as pandas.NA
        return False
