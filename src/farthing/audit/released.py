"""List the statistics as targets: their queries, and the functions that people call, end to end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from farthing.accounting import pld
from farthing.accounting.filters import GdpFilter
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import Verdict, judge
from farthing.audit.statistics import GaussianCurve
from farthing.audit.targets import DELTA, AskedTarget, Tick
from farthing.budget import Budget
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax
from farthing.queries.query import Query, Rows
from farthing.queries.samplers import Everyone
from farthing.statistics import bounds, count, mean, quantiles
from farthing.statistics.cells import Cells, Sums
from farthing.statistics.ranges import COARSE, by_power
from farthing.statistics.ranks import QuantileScores, Tree


@dataclass(frozen=True, slots=True)
class ReleasedTarget:
    """A statistic as people call it, ``release(values, ledger)``, of columns that differ in one record."""

    release: Callable[[Any, Ledger], Any]
    pair: tuple[Rows, Rows]
    claim: Budget
    runs: int = 2000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        """Return what attacks on the released values find."""
        answers = []
        for values in self.pair:
            found = []
            for _ in range(max(50, round(self.runs * scale))):
                released = self.release(values[0], Ledger(self.claim, stream=stream))
                found.append(np.ravel(np.asarray(released, dtype=np.float64)))
                tick()
            answers.append(np.array(found))
        named = [("the largest value", test_statistics.largest), ("the first value", test_statistics.value)]
        return [judge(answers[0], answers[1], self.claim, named, confidence)]


def targets() -> dict[str, AskedTarget | ReleasedTarget]:
    """Return the statistics, by name."""
    gaussian = Budget(pld.epsilon(GaussianEvent(1.0), DELTA), DELTA)
    pure, whole = Budget(1.0, 0.0), Budget(2.0, 1e-3)
    few = np.zeros(4), np.append(np.zeros(4), 1.0)
    sums, pair = Sums(2, 0.0, 1.0), [(np.zeros(len(one), np.int64), one) for one in few]
    table = [np.column_stack([one, 100 * one]) for one in few]
    near, far = Rows(few[0]), Rows(few[1])
    return {
        "count": AskedTarget(
            Query(Everyone(), Cells(1, 2), ClipNorm(1.0), Gaussian(1.0)),
            (Rows(few[0].astype(np.int64)), Rows(few[1].astype(np.int64))),
            gaussian,
            GdpFilter,
            GaussianCurve(),
        ),
        "mean": AskedTarget(
            Query(Everyone(), sums, ClipNorm(sums.norms[0], order=1), Laplace(1.0)),
            (Rows(*pair[0]), Rows(*pair[1])),
            pure,
            runs=6000,
            statistics=(test_statistics.largest, test_statistics.lowest_bit),
        ),
        "bounds": AskedTarget(
            Query(Everyone(), Cells(2, COARSE), ClipNorm(np.sqrt(2)), Gaussian(1.0)),
            (Rows(by_power(table[0])), Rows(by_power(table[1]))),
            gaussian,
            GdpFilter,
            GaussianCurve(),
        ),
        "quantile-choice": AskedTarget(
            Query(Everyone(), QuantileScores(0.9, 0.0, 1.0), ClipValue(-0.9, 0.9), NoisyMax(2.0)),
            (near, far),
            pure,
            runs=3000,
        ),
        "quantile-tree": AskedTarget(
            Query(Everyone(), Tree(0.0, 1.0), ClipNorm(3.0, order=1), Laplace(1.0)), (near, far), pure
        ),
        "count-released": ReleasedTarget(
            lambda v, ledger: count(v, ledger=ledger).value, (near, far), pure, runs=1000
        ),
        "mean-released": ReleasedTarget(
            lambda v, ledger: mean(v, (0, 1), ledger=ledger).value, (near, far), pure, runs=1000
        ),
        "quantiles-released": ReleasedTarget(
            lambda v, ledger: quantiles(v, [0.5, 0.9], (0, 1), ledger=ledger).value,
            (near, far),
            whole,
            runs=600,
        ),
        "bounds-released": ReleasedTarget(
            lambda v, ledger: bounds(v, ledger=ledger), (near, far), whole, runs=600
        ),
    }
