"""placeholder: noisy gradient descent with momentum."""

from collections.abc import Iterator

from farthing.algorithms.problem import Problem
from farthing.bounds import ClipNorm
from farthing.ledger import Ledger
from farthing.losses import Gradient
from farthing.mechanisms import Gaussian
from farthing.query import Query, Step, until_spent
from farthing.samplers import Everyone
from farthing.tables import Features


@until_spent
def descent(ledger: Ledger, problem: Problem, *, steps: int = 40) -> Iterator[Step]:
    features = Features(problem.width, intercept=float(problem.intercept))
    mu = ledger.budget.mu
    query = Query(
        Everyone(), Gradient(problem.loss, features), ClipNorm(0.5), Gaussian(steps**0.5 / mu * 1.0000001)
    )
    w = problem.zeros(features.size)
    v = 0 * w
    for t in range(1, steps + 1):
        answer = ledger.ask(query, w)
        v = 0.8 * v - 2 * answer.value / problem.records
        w = w + v
        yield Step(t, features.unfold(w), (answer.receipt,))
