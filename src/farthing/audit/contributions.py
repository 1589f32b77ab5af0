"""Check laws of contributions: each record's part is within its bound, and parts add up over records.

`contributions` records the methods' own queries and tries records with extreme gradients.
"""

import itertools
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtr

from farthing.audit import methods
from farthing.audit.laws import off_law
from farthing.audit.targets import TrainedTarget
from farthing.budget import Adjacency
from farthing.data.tables import Features, Table
from farthing.ledger import failsafe
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import Gradient, Gram, Moments, logistic
from farthing.linear.methods.perturbation import Convex, Minimiser, Objective, ObjectiveNoise
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipCoordinates, ClipNorm, ClipOuter, ClipValue
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Answer, PerExample, Query
from farthing.queries.samplers import Everyone

_HARD = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1e-3, 1.0]])


_LISTENED = "descent dpagd dpsgd privgene least-squares adassp sufficient gradient functional pca majority"


def contributions(stream: Stream, names: str = _LISTENED) -> list[str]:
    """Check that one record's part of every query is within the bound, and that parts add up."""
    complaints = []
    for name in names.split():
        target = methods.targets()[name]
        assert isinstance(target, TrainedTarget)
        asked: list[tuple[Query, Any]] = []
        ledger = Ledger(target.claim, filter=target.rule, stream=stream).over(target.pair[1])
        for _ in target.run(ledger.with_listener(partial(_noted, asked))):
            pass
        width = target.pair[1].X.shape[1]
        records = [Table(row[None, :width], np.array([label])) for row in _HARD for label in (0.0, 1.0)]
        for query, w in asked[:: max(1, len(asked) // 6)]:
            complaints += [f"{name}: {text}" for text in _within(query, w, records)]
    return complaints


def _noted(asked: list[tuple[Query, Any]], query: Query, w: Any, _: Answer) -> None:
    asked.append((query, w))


def _within(query: Query, w: Any, records: list[Table]) -> list[str]:
    kind = type(query.contribution).__name__
    bound: Any = query.bound
    parts = [np.asarray(query.contribution.bounded_sum(record, w, bound)) for record in records]
    complaints = set()
    for part in parts:
        scaled = part / np.asarray(bound.scale)
        if isinstance(bound, ClipValue):
            fits = bool(((scaled >= bound.low - 1e-9) & (scaled <= bound.high + 1e-9)).all())
        elif isinstance(bound, ClipNorm) and bound.order == 1:
            fits = float(np.abs(scaled).sum()) <= bound.norm(1) * (1 + 1e-9)
        else:
            fits = float(np.linalg.norm(scaled)) <= bound.norm() * (1 + 1e-9)
        if not fits:
            complaints.add(f"a record's part of {kind} is beyond its bound")
    if kind != "Smallest":  # an eigenvalue, which is not a sum over records
        both = Table(
            np.vstack([record.X for record in records[:4]]),
            np.concatenate([record.y for record in records[:4]]),
        )
        together = np.asarray(query.contribution.bounded_sum(both, w, bound))
        if not np.allclose(together, sum(parts[:4]), rtol=1e-9, atol=1e-9):
            complaints.add(f"parts of {kind} do not add up over records")
    return sorted(complaints)


def pairs() -> list[str]:
    """Check that a contribution interprets its bound as the price does, or that the pair is refused."""
    features = Features(3, intercept=0.0)
    rows = np.vstack([np.zeros((1, 3)), 1e3 * np.eye(3), np.full((2, 3), [[1e6], [-1e6]])])
    table, w = Table(rows, np.resize([0.0, 1.0], len(rows))), np.array([1.0, -2.0, 0.5])
    kinds: list[Any] = [PerExample(lambda table, w: table.X), Moments(features), Gram(features)]
    bounds: list[Any] = [ClipNorm(0.1), ClipNorm(10.0), ClipNorm(1.0, order=1), ClipNorm(1.0, 0.1)]
    bounds += [ClipOuter(0.1), ClipOuter(10.0), ClipValue(-1.0, 1.0), ClipNorm(1.0, np.ones(1))]
    bounds += [ClipCoordinates(np.full(size, 0.5)) for size in (1, 3, 6)]
    complaints = set()
    for contribution, bound in itertools.product([*kinds, Gradient(logistic, features)], bounds):
        try:
            query = Query(Everyone(), contribution, bound, Gaussian(1.0))
            nobody = failsafe.zero_sum(contribution, table, w, bound)
            query.mechanism.check(bound, failsafe.shape_of(nobody))
        except Exception:  # any refusal before a charge will do
            continue
        sums = [contribution.bounded_sum(table.take(np.array([n])), w, bound) for n in range(len(rows))]
        terms = np.array(sums).reshape(len(rows), -1) / np.asarray(bound.scale)
        apart = np.linalg.norm(terms[:, None] - terms[None], axis=-1).max()
        alone = np.linalg.norm(terms, axis=-1).max()
        for adjacency, moved in ((Adjacency.ADD_REMOVE, alone), (Adjacency.REPLACE_ONE, apart)):
            if moved > bound.sensitivity(adjacency) * (1 + 2.0**-20):
                complaints.add(f"{type(contribution).__name__} moves further than {bound.kind} is priced for")
    return sorted(complaints)


def objectives(stream: Stream, runs: int = 120) -> list[str]:
    """Check that the noise in a perturbed objective, recovered from its minimiser, is what was priced."""

    size = 20
    table = Table(np.eye(size), np.arange(size) % 2.0)
    features = Features(size, intercept=0.0, radius=1.0)
    bound = Convex(logistic, 1.0)
    mechanism = ObjectiveNoise(2.0, 50.0, 3.0, 1.0)

    behind = Objective(features, 1e-9).bounded_sum(table, None, bound)
    implied = []
    for _ in range(runs):
        w = mechanism.release(behind, bound, stream)
        implied.append(behind._look(logistic, np.zeros(size), 3.0, w)[1] / 2.0)
    levels = np.array([-1.5, -0.5, 0.0, 0.5, 1.5])
    return (
        ["noise in an objective is not what was priced"]
        if off_law(np.concatenate(implied), ndtr, levels)
        else []
    )


def minimisers(stream: Stream) -> list[str]:
    """Check that a minimiser moves no further than its bound when an extreme record is added."""
    features = Features(1, intercept=0.0, radius=1.0)
    minimiser = Minimiser(logistic, features, 0.5, 1e-9)
    bound = ClipNorm(minimiser.reach)
    without = Table(-np.ones((3, 1)), np.ones(3))
    within = Table(np.append(-np.ones(3), 1.0)[:, None], np.ones(4))
    ends = [minimiser.bounded_sum(table, None, bound) for table in (without, within)]
    # far from 0, so that the record's residual is near 1 and it moves the minimiser by at least half of R/λ
    moved = float(np.linalg.norm(ends[0] - ends[1]))
    return ["a minimiser moves further than it says"] if moved > minimiser.reach * (1 + 1e-9) else []
