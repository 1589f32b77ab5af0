"""Provide baselines for every method: the most frequent class, and a fit without privacy.

`majority` selects the most frequent class by one exponential mechanism (McSherry & Talwar 2007; Gumbel noise,
`NoisyMax`). A record adds 1 to one count, so the gap of two counts changes by 1 under add-remove and by 2
under replace-one: ε-DP with noise 1/ε or 2/ε. It spends the largest price that the ledger's filter affords.
The weights are zero and the constant predicts that class.

`nonprivate` minimises the loss plus λ/2 |w|² (without the constant) by L-BFGS and uses no ledger: it has no
guarantee at all, ε = ∞.

>>> import farthing as ft
>>> from farthing.linear.losses import logistic
>>> table = Table(np.ones((900, 1)), np.arange(900) % 3 > 0)
>>> ledger = ft.Ledger(ft.Budget(1.0, 0.0)).over(table)
>>> ft.run(majority(ledger, Problem(logistic, 900, 1))).w
(array([0.]), array(1.))
>>> u, constant = nonprivate(table, Problem(logistic, 900, 1)).w
>>> bool(abs(u[0] + constant - np.log(2)) < 1e-3)
True
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features, Table, Weighted
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import choice_epsilon
from farthing.linear.losses import Loss
from farthing.linear.problem import Problem
from farthing.noise.summing import summed
from farthing.queries.bounds import ClipValue, Kind
from farthing.queries.mechanisms import NoisyMax
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]


@until_spent
def majority(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Choose the most frequent class, for the whole budget. Classes are 0 and 1, or 0 to K-1."""
    shift = ledger.budget.adjacency.shift
    bound, contribution = ClipValue(0.0, 1.0), Counts(problem.outputs or 2)
    query = Query(Everyone(), contribution, bound, NoisyMax(shift / choice_epsilon(ledger)))
    answer = ledger.ask(query)
    weights = problem.zeros(problem.width)
    if problem.outputs:
        constant = (np.arange(problem.outputs) == answer.value).astype(np.float64)
    else:
        constant = np.array(1.0 if answer.value else -1.0)
    yield Step(1, (weights, constant), (answer.receipt,))


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of records of each of ``classes``; other labels count as zero."""

    classes: int
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.classes,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipValue) -> Array:
        labels = np.asarray(records.y)[:, None] == np.arange(self.classes)
        return summed(bound.apply, labels)


def nonprivate(table: Table, problem: Problem, *, penalty: float = 1.0, tolerance: float = 1e-5) -> Step:
    """Minimise Σ loss + penalty/2 |u|², with u the weights on x. **No privacy of any kind.**

    Parameters
    ----------
    penalty : float, default 1.0
        The weight of |u|²/2.
    tolerance : float, default 1e-5
        It stops when no entry of the mean gradient exceeds this.
    """
    from scipy.optimize import minimize  # slow to import

    if table.y is None:
        raise InvalidValue("the table must have targets")
    validate.non_negative(penalty=penalty), validate.positive(tolerance=tolerance)
    features = Features(problem.width, intercept=float(problem.intercept))
    start, n = problem.zeros(features.size), max(1, len(table))

    def mean(flat: Array) -> tuple[float, Array]:
        w = flat.reshape(start.shape)
        value, gradient = _value_and_gradient(table, problem.loss, features, w)
        weights = w[: problem.width]
        gradient[: problem.width] += penalty * weights
        return (value + penalty / 2 * float(np.square(weights).sum())) / n, gradient.ravel() / n

    options = {"maxiter": 1000, "maxfun": 2000, "gtol": tolerance, "ftol": 1e-14, "maxcor": 20}
    found = minimize(mean, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return Step(int(found.nit), features.unfold(found.x.reshape(start.shape)))


def _value_and_gradient(table: Table, loss: Loss, features: Features, w: Array) -> tuple[float, Array]:
    """Return both in one pass over the blocks."""
    u, constant = features.unfold(w)
    value, total = 0.0, Weighted(len(table), features, u.shape[1:])
    for block in table.blocks(features):
        margins = block.margins(u, constant)
        y = np.nan_to_num(block.y)  # NaN belongs to blank rows, whose z is zero
        value += float(loss.value(margins, y).sum())
        total.add(block, loss.residual(margins, y))
    return value, total.value
