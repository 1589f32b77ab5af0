"""One step of training with a canary in a coordinate that no other record moves, all runs side by side.

In that coordinate the sum is what the canary contributes, or 0 where it was not drawn or is not there. So a
run is one number, and a million runs are one release of a million coordinates through the query's own
sampler, contribution, bound and noise: the same code as at the ledger's door, less the books.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.audit.auditing import judge
from farthing.audit.curves import Curve, SampledCurve
from farthing.audit.test_statistics import value
from farthing.audit.verdict import Verdict
from farthing.budget import Budget
from farthing.data.tables import Features, Table
from farthing.errors import Unsupported
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query
from farthing.queries.samplers import FixedSize, Poisson

Array = NDArray[np.float64]

_AT_ONCE = 2**20  # runs of one release


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """Steps of ``query`` at ``w``; ``canary`` is the record as the contribution takes it, alone."""

    query: Query
    canary: Any
    w: Any = None

    def __call__(self, present: bool, runs: int, stream: Stream) -> Array:
        """What is released in the canary's own direction, one number a run."""
        moved, mechanism, bound = self.length(), self.query.mechanism, self.query.bound
        if not isinstance(mechanism, Gaussian) or not isinstance(bound, ClipNorm):
            raise Unsupported("a canary's coordinate is looked at under ClipNorm and Gaussian noise")
        parts = []
        for start in range(0, runs, _AT_ONCE):
            size = min(_AT_ONCE, runs - start)
            total = np.zeros(size)
            if present:
                total[self._drawn(size, stream)] = moved
            parts.append(mechanism.release(total, bound, stream))
        return np.concatenate(parts)

    def length(self) -> float:
        """The norm of what the canary contributes, clipped."""
        one = self.query.contribution.bounded_sum(self.canary, self.w, self.query.bound)
        return float(np.linalg.norm(np.asarray(one)))

    def _drawn(self, runs: int, stream: Stream) -> Any:
        """The runs in which the canary was drawn."""
        match self.query.sampler:
            case FixedSize(size, of) if size < of:
                return np.array([of - 1 in stream.choose(size, of) for _ in range(runs)])
        return self.query.sampler.draw(runs, stream)


def per_step(
    step: CanaryStep,
    claim: Budget,
    steps: int,
    trials: int = 1_000_000,
    confidence: float = 0.99,
    *,
    stream: Stream,
    worlds: Callable[[bool, int, Stream], Array] | None = None,
) -> Verdict:
    """What ``trials`` single steps a world show of ``steps`` of them, a Gaussian on Poisson samples each.

    Runs above half of the canary's length are flagged: there the two densities of a step cross, whatever the
    noise. ``worlds`` is what is attacked, ``step`` itself by default.
    """
    sampler = step.query.sampler
    rate = sampler.rate if isinstance(sampler, Poisson) else 1.0
    curve: Curve = SampledCurve(rate, steps)
    run = step if worlds is None else worlds
    without, within = (run(present, trials, stream) for present in (False, True))
    return judge(
        without,
        within,
        claim,
        [("canary in an unused coordinate, per step", value)],
        confidence,
        threshold=step.length() / 2,
        curve=curve,
    )


def canary_table(records: int, width: int, came: NDArray[np.bool_]) -> Table:
    """``records`` rows on the first ``width`` features, and canaries that came, each on one of its own."""
    canaries = len(came)
    x = np.zeros((records + int(came.sum()), width + canaries))
    places = np.arange(records)
    x[places, places % width] = 1.0
    x[records + np.arange(int(came.sum())), width + np.flatnonzero(came)] = 1.0
    return Table(x, np.append(places // width % 2, np.ones(int(came.sum()))).astype(np.float64))


def train_once(
    door: Ledger, query: Query, canaries: int, steps: int, records: int, length: float = 0.5
) -> Array:
    """One run of DP-SGD on a `canary_table`, and a score for each canary, from released answers only.

    A canary's score is the log-likelihood ratio of its coordinate, step by step, between a record of the
    bound's full length that is drawn with the sampler's rate, and none.
    """
    sampler, mechanism, clip = query.sampler, query.mechanism, query.bound.norm()
    if not isinstance(sampler, Poisson) or not isinstance(mechanism, Gaussian):
        raise Unsupported("canaries are scored for Gaussian noise on Poisson lots")
    features: Features = query.contribution.features  # type: ignore[attr-defined]
    w, scores = np.zeros(features.size), np.zeros(canaries)
    for _ in range(steps):
        answer = door.ask(query, w).value
        seen = -answer[-canaries:] / clip  # a record of label 1 pulls its gradient down
        ratio = (seen - 0.5) / mechanism.noise**2
        scores += np.log1p(sampler.rate * np.expm1(np.minimum(ratio, 500.0)))
        w = w - length * answer / (sampler.rate * records)
    return scores
