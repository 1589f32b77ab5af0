"""Fit linear models: the base of the estimators, from rows and a public problem to weights on raw rows.

A fit checks its declared bounds, buys what is not declared (bounds, totals of weights), and lets a method of
`farthing.linear.solvers` spend the rest of its ledger. Docstrings of parameters that estimators share are
also here.

``bounds="private"`` buys the bounds of features if nobody can declare them. The fit's ledger pays: a share of
its μ² (or ρ) goes to `farthing.statistics.ranges`, and the method spends the remainder, so that the whole fit
is within its budget by the ledger's filter. The bounds are released with the model.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, normalize
from sklearn.utils.validation import check_is_fitted

from farthing import validate
from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.accounting.personal import PersonalBudgets
from farthing.budget import Adjacency, Guarantee, Observer, Unit
from farthing.data.columns import limits
from farthing.data.tables import Table
from farthing.data.weighted import WeightedTable
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.base import PUBLIC_SIZE, PrivateEstimator, clipped, compact
from farthing.linear.intervals import EstimatedStep, Of
from farthing.linear.losses import Loss
from farthing.linear.problem import Problem
from farthing.linear.solvers import PURE, Solver, SolverMethod
from farthing.linear.weights import RecordWeights, over
from farthing.queries.query import Step, until_spent
from farthing.statistics import ranges
from farthing.statistics.spending import Allowance, spendable

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


def steps_of(method: SolverMethod, ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Yield the steps of a method, each checked, until its budget is spent."""
    found: Any = method.algorithm(ledger, problem)
    if not isinstance(found, Iterable):
        raise InvalidValue(f"a solver must be a generator of ft.Step, it returned {type(found).__name__}")
    for step in until_spent(lambda: iter(found))():
        yield checked_step(step, problem)


def checked_step(step: Any, problem: Problem) -> Step:
    """Return a solver's step; raise `InvalidValue` if its type or the shape of its weights is wrong."""
    sizes = f"{problem.width} weights and a constant" + f" for each of {problem.outputs}" * (
        problem.outputs > 0
    )
    wanted = f"a solver must yield ft.Step(t, (weights, constant), receipts) with {sizes}"
    if not isinstance(step, Step):
        raise InvalidValue(f"{wanted}; it yielded {type(step).__name__}")
    if not isinstance(step.w, tuple) or len(step.w) != 2:
        raise InvalidValue(f"{wanted}; w of its step {step.t} is {type(step.w).__name__}, not a pair")
    outputs = (problem.outputs,) if problem.outputs else ()
    shapes = np.shape(step.w[0]), np.shape(step.w[1])
    if shapes[0] != (problem.width, *outputs) or shapes[1] not in (outputs, (1,)):
        raise InvalidValue(f"{wanted}; w of its step {step.t} has the shapes {shapes[0]} and {shapes[1]}")
    return step


class PrivateLinear(PrivateEstimator):
    """The base of the linear models: the public problem, a method's steps, and weights on raw rows."""

    bounds: Any
    solver: str | Solver | Algorithm | SolverMethod
    fit_intercept: bool
    records: int | None
    warm_start: bool = False
    _seen: int
    _payer: Ledger | None  # the ledger that paid for the last released weights

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without the ledger of the last fit."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "_payer" in state and state["_payer"] is not self.ledger:
            state["_payer"] = None
        return state

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
        shared = spendable(self.ledger)
        delta = shared.budget.delta if shared is not None and self.delta is None else self.delta
        if delta != 0 or self.solver in ("nonprivate", *PURE):
            return known[self.solver]
        names = [name for name in PURE if name in known]
        if self.solver == "auto" and names:
            return known[names[0]]
        instead = f"use solver={names[0]!r}" if names else "none here is proven at delta 0"
        raise Unsupported(f"solver {self.solver!r} needs a delta above 0: {instead}")

    def _train(
        self,
        X: Any,
        y: Array,
        loss: Loss,
        outputs: int,
        method: SolverMethod,
        budgets: Any,
        penalty: float = 0.0,
        weights: RecordWeights | None = None,
        more: bool = False,
    ) -> tuple[Array, Array]:
        """Spend a budget; return weights and constant for the original rows (for unit rows, for those).

        ``more`` is for rows that come after those of earlier calls (`partial_fit`).
        """
        rows, ledger = int(X.shape[0]), None
        before = self._before(X, outputs, method, more)
        bounds, unit = self.bounds, self.bounds is None
        if before is not None:
            bounds = getattr(self, "bounds_", bounds)  # released by an earlier call
        size = rows if self.records is None else validate.count(records=self.records)
        intercept = validate.flag(fit_intercept=self.fit_intercept)
        people = None if budgets is None else self._people(budgets, rows)
        problem = Problem(loss, size, X.shape[1], outputs, intercept, unit, penalty)
        problem = replace(problem, sparse=hasattr(X, "indptr"))
        missing = unknown(bounds, X.shape[1])
        if missing is not None:
            refuse(X, method, people)
        if weights is not None:
            weights.refuse(method, people)
        if missing is not None or weights is not None:
            self._rehearse(problem, method, people)
            ledger = self._own_ledger(self.ledger, method.filter)
        if before is None:
            self.__dict__.pop("bounds_", None)
        if missing is not None:
            assert ledger is not None
            bounds = self.bounds_ = bought(ledger, X, bounds, missing)
        X, mapped = (X, None) if unit else compact(X, bounds, size)
        plain = Table(X, y, bounds=mapped, unit=unit)
        table: Table | WeightedTable = plain
        self._limits = None if unit else limits(bounds, X)
        if before is not None and method.warm:
            problem = replace(problem, start=self._inward(*before))
        if weights is not None:
            assert ledger is not None
            shares, total, largest = weights.settled(ledger, method, size)
            table = WeightedTable(plain, shares)
            problem = replace(problem, records=total, penalty=penalty / largest)
        if people is not None and method.personal is None:
            raise Unsupported(
                "this solver does not support personal budgets: use 'auto', or 'sgd-ma' for batches"
            )
        if not method.private:
            self.history_: tuple[Any, ...] = (method.algorithm(table, problem),)
            self.privacy_ = _NO_PRIVACY
            self.guarantees_: dict[float, Guarantee] = {}
        else:
            self._spend(table, problem, method, people, ledger)
        if before is not None and self.ledger is not None:
            self.privacy_, self.guarantees_ = self.ledger.guarantee, self.ledger.guarantees
        self.n_iter_ = self.history_[-1].t
        found = self._outward(*self.history_[-1].w)
        if more and before is not None:
            part = size / (self._seen + size)
            u, constant = ((1 - part) * old + part * new for old, new in zip(before, found, strict=True))
            found = u, constant
        self._averaged = more and before is not None
        self._seen, self._released = size + (self._seen if more and before is not None else 0), found
        self._payer = self.ledger if method.private else None
        return found

    def _before(self, X: Any, outputs: int, method: SolverMethod, more: bool) -> tuple[Array, Array] | None:
        """Return released weights and constant to begin at, for the original rows; None for a new fit."""
        before: tuple[Array, Array] | None = getattr(self, "_released", None)
        if before is None or not (more or self.warm_start):
            return None
        if not (more or method.warm):
            raise Unsupported("warm_start needs solver 'auto' or 'sgd-ma' of a classifier")
        if self.ledger is None:
            raise InvalidValue(
                "pass a ledger: several fits of one model must be paid from one budget, and "
                "without a ledger each fit has its own budget"
            )
        if not method.private or self._payer is not self.ledger:
            raise InvalidValue(
                "another ledger paid for the earlier weights, so this one cannot state the guarantee of "
                "both fits: make a new estimator, and pay for all of its fits from one ledger"
            )
        if before[0].shape != ((X.shape[1], outputs) if outputs else (X.shape[1],)):
            raise InvalidValue("features and classes must be those of the earlier fit: make a new estimator")
        return before

    def _outward(self, u: Array, constant: Array) -> tuple[Array, Array]:
        """Return weights and constant for the original rows from those for mapped rows."""
        if self._limits is None:
            return u, constant
        low, high = self._limits
        u = (u.T / (high - low)).T
        return u, constant - low @ u

    def _inward(self, u: Array, constant: Array) -> tuple[Array, Array]:
        """Return weights and constant for mapped rows: the inverse of `_outward`."""
        if self._limits is None:
            return u, constant
        low, high = self._limits
        return (u.T * (high - low)).T, constant + low @ u

    def _rehearse(self, problem: Problem, method: SolverMethod, people: PersonalBudgets | None) -> None:
        """Try a method on made-up rows, so that its refusals are raised before anything is charged."""
        if self.ledger is None or method.rehearsed:
            return
        blank = Table(np.zeros((2, problem.width)), np.zeros(2), unit=problem.unit)
        made_up = self._own_ledger(self.ledger.rehearsal(), method.filter, people)
        weighed = method.personal == "weights"
        next(steps_of(method, *over(made_up, blank, problem, people, weighed)), None)

    def _spend(
        self,
        table: Table | WeightedTable,
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
        self.history_ = tuple(steps_of(method, *over(ledger, table, problem, people, weighed)))
        if not self.history_:
            name = getattr(self.solver, "__name__", repr(self.solver))
            raise BudgetSpent(f"{ledger.budget} does not allow a single step of {name}, or it yielded none")
        self.privacy_, self.guarantees_ = ledger.guarantee, ledger.guarantees

    def _rows(self, X: Any) -> Any:
        """Return features as the weights expect them: divided by their norms or clipped, as in `fit`."""
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        if self._limits is not None:
            return clipped(X, *self._limits)
        return normalize(X) if X.shape[0] else X

    def coef_interval(self, level: float = 0.95, of: Of = "population") -> tuple[Array, Array]:
        """Return an interval for each coefficient that accounts for the noise.

        Parameters
        ----------
        level : float, default 0.95
            The probability that an interval covers its coefficient, for each coefficient by itself.
        of : {"population", "records"}, default "population"
            "population": the coefficients of the population that the records are a sample of, with errors of
            one variance (``solver="sufficient"``). "records": the coefficients of the same fit on these
            records without noise (``"sufficient"`` and ``"output"``).

        Returns
        -------
        (ndarray, ndarray)
            The lower and the upper ends, shaped like ``coef_``. They cost no budget.
        """
        check_is_fitted(self)
        step = self.history_[-1]
        if not isinstance(step, EstimatedStep) or self._averaged:
            raise Unsupported(
                "the noise distribution of these coefficients is not known: fit with solver='sufficient' "
                "(regression, alpha=0) or 'output' (two classes), in one call of fit"
            )
        if step.estimate is None:
            raise Unsupported(
                "the noise is too large beside the second moments of the features for an interval (or alpha "
                "is not 0): take a larger budget, more records or fewer features"
            )
        low, high = step.estimate.interval(level, of)
        unit = self._unit_of_coefficients()
        return np.reshape(low * unit, self.coef_.shape), np.reshape(high * unit, self.coef_.shape)

    def _unit_of_coefficients(self) -> Array:
        """Return the factor from weights on mapped rows to coefficients."""
        if self._limits is None:
            return np.ones(self.n_features_in_)
        low, high = self._limits
        return np.asarray(1 / (high - low))

    def _exported(self, model: Any, coef: Array, intercept: Any) -> Pipeline:
        """Return ``model`` with the fitted weights, behind a step that maps rows as `fit` does.

        `MinMaxScaler` maps bounds onto [0, 1] and clips values beyond them; it takes dense rows.
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


PARAMETERS = """
    solver : str, Solver, callable or Method, default "auto"
        The name of a method, an object with its settings such as ``ft.DPAGD(growth=0.2)``, or a function
        (ledger, problem) -> steps.
    fit_intercept : bool, default True
        Whether to fit a constant.
    ledger : Ledger, optional
        The ledger to spend from, possibly shared. None makes one in memory for this fit.
    adjacency : {"add-remove", "replace-one", "zero-out"}, optional
        The definition of neighbouring tables. None: add-remove, or that of the ledger.
    records : int, optional
        The public number of records. None takes the table's own length as public.
    max_sample_weight : float, optional
        The largest ``sample_weight``, which must be declared to use any; larger ones are clamped. A record
        counts by its weight divided by this number.
    warm_start : bool, default False
        Whether a later `fit` begins at the weights that the last one released. Needs a ledger, which is
        charged for each fit.
    random_state : int or RandomState, optional
        A seed for the noise, for tests: nothing is private then, and ``privacy_`` says so.
"""
BUDGET = """
    epsilon, delta : float, optional
        The budget of a fit; with ``ledger`` the part of it to spend, by default the remainder.
"""
BOUNDS = """
    bounds : (low, high), "private" or None, default None
        The public bounds of the features, numbers or one per feature; values beyond them are clipped.
        "private" buys bounds with a tenth of μ² of the budget (``bounds_``), NaN buys those of one feature.
        None divides rows by their norms instead; this needs no bounds, but features in the same unit.
"""
ATTRIBUTES = """
    n_features_in_, n_iter_ : int
        The number of features, and of steps.
    privacy_ : Guarantee
        The guarantee of everything that this fit released.
    guarantees_ : dict of float to Guarantee
        The guarantee for the records of each personal budget, by its ε; one if all have the same.
    history_ : tuple of Step
        The steps, each with its weights and receipts.

    Raises
    ------
    InvalidValue, Unsupported
        For wrong parameters and arrays, before anything is charged.
    BudgetSpent
        If the part exceeds the remainder of the ledger. Nothing is charged then.
"""


SHARE = 0.1  # share of μ² for private bounds


def unknown(bounds: Any, width: int) -> NDArray[np.bool_] | None:
    """Return which features have no bounds ("private" or NaN); None if all have bounds or need none."""
    if isinstance(bounds, str):
        if bounds != "private":
            raise InvalidValue(f"bounds must be (low, high), 'private' or None, got {bounds!r}")
        return np.ones(width, np.bool_)
    try:
        low, high = (np.broadcast_to(np.asarray(end, np.float64), width) for end in bounds)
    except (TypeError, ValueError):
        return None  # the table refuses wrong bounds
    missing = np.isnan(low)
    if (missing != np.isnan(high)).any():
        raise InvalidValue(f"bounds must be NaN at both ends of a feature, which buys them, got {bounds!r}")
    return missing if missing.any() else None


def refuse(X: Any, method: SolverMethod, people: Any, ledger: Ledger | None = None) -> None:
    """Refuse private bounds where they are not possible, before anything is charged."""
    if ledger is not None and not isinstance(ledger.filter, GdpFilter | ZcdpFilter | BasicFilter):
        raise Unsupported("bounds='private' needs a ledger with a GDP, zCDP or basic filter")
    if hasattr(X, "tocsr"):
        raise InvalidValue("bounds='private' needs a dense table: declare (0, high) for a sparse one")
    if people is not None:
        raise Unsupported("bounds='private' gives all records the same budget: declare bounds with budgets")
    if method.filter not in (GdpFilter, ZcdpFilter):
        raise Unsupported("bounds='private' needs a solver with a GDP or zCDP filter, such as 'auto'")


def bought(ledger: Ledger, X: Any, bounds: Any, missing: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return bounds of every feature; missing ones are paid for by a share of the ledger's budget."""
    bounds_of = ranges.of_table(ranges.Chosen(X, missing), Allowance(ledger), SHARE)
    low, high = bounds_of.known(np.flatnonzero(missing))
    if missing.all():
        return low, high
    ends = [np.array(np.broadcast_to(np.asarray(end, np.float64), len(missing))) for end in bounds]
    ends[0][missing], ends[1][missing] = low, high
    return ends[0], ends[1]
