"""List the statistics as targets: their queries, and the functions that people call, end to end."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from farthing.accounting import pld
from farthing.accounting.filters import BasicFilter, GdpFilter
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import Verdict, judge
from farthing.audit.statistics import Curve, GaussianCurve, Unknown
from farthing.audit.targets import DELTA, RATIO, AskedTarget, Tick
from farthing.audit.transcripts import log_ratio
from farthing.budget import Budget
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax
from farthing.queries.query import Answer, Query, Rows
from farthing.queries.samplers import Everyone
from farthing.statistics import bounds, count, mean, quantiles
from farthing.statistics.cells import Cells, Sums
from farthing.statistics.ranges import COARSE, by_power
from farthing.statistics.ranks import QuantileScores, Tree


@dataclass(slots=True)
class Hearing:
    """What a statistic asked, in order: queries with ``w``, answers, records, and parts of the budget."""

    asked: list[tuple[Query, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    parts: list[Ledger] = field(default_factory=list)


@dataclass(slots=True)
class HeardLedger:
    """A ledger that notes in ``told`` what is asked of it and of parts of its budget."""

    ledger: Ledger
    told: Hearing = field(default_factory=Hearing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)

    def over(self, records: Any) -> Any:
        """Return this ledger over these records."""
        return replace(self, ledger=self.ledger.over(records))

    def allot(self, *given: Any, **named: Any) -> Any:
        """Return a part of the budget that is listened to as well."""
        self.told.parts.append(self.ledger.allot(*given, **named))
        return replace(self, ledger=self.told.parts[-1])

    def ask(self, query: Query, w: Any = None) -> Answer:
        """Return the answer."""
        answer = self.ledger.ask(query, w)
        self.told.asked.append((query, w))
        self.told.answers.append(answer)
        self.told.records.append(self.ledger._records)
        return answer


@dataclass(slots=True)
class RepeatedLedger(HeardLedger):
    """A ledger that gives the answers of another run again, at no charge, whatever its records are.

    So a statistic asks of other records what it would have asked of them, had it heard the same.
    """

    before: Hearing = field(default_factory=Hearing)

    def allot(self, *given: Any, **named: Any) -> Any:
        """Return the part of the other run."""
        self.told.parts.append(self.before.parts[len(self.told.parts)])
        return replace(self, ledger=self.told.parts[-1])

    def ask(self, query: Query, w: Any = None) -> Answer:
        """Return the answer of the other run."""
        self.told.records.append(self.ledger._records)
        return self.before.answers[len(self.told.records) - 1]


@dataclass(frozen=True, slots=True)
class ReleasedTarget:
    """A statistic as people call it, ``release(values, ledger)``, of columns that differ in one record.

    The attacker sees every answer that the statistic was made of, and knows what it asks of both columns.
    """

    release: Callable[[Any, Any], Any]
    pair: tuple[Rows, Rows]
    claim: Budget
    curve: Curve = field(default_factory=Unknown)
    threshold: float = 0.0
    runs: int = 3000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        """Return what attacks on the answers, and on the released values, find."""
        rule = (GdpFilter if self.claim.delta else BasicFilter)(self.claim)  # made once, as it takes longest
        untouched = Ledger(self.claim, filter=lambda _: rule, stream=stream)
        ratios, values = [], []
        for mine in (0, 1):
            losses, found = [], []
            for _ in range(max(50, round(self.runs * scale))):
                loss, released = self._run(mine, untouched, stream)
                losses.append(loss)
                found.append(np.ravel(np.asarray(released, dtype=np.float64)))
                tick()
            ratios.append(np.array(losses))
            values.append(np.array(found))
        by_answers: list[tuple[str, Any]] = [(RATIO, test_statistics.value)]
        by_values: list[tuple[str, Any]] = [
            ("the largest value", test_statistics.largest),
            ("the first value", test_statistics.value),
        ]
        return [
            judge(ratios[0], ratios[1], self.claim, by_answers, confidence, self.threshold, self.curve),
            judge(values[0], values[1], self.claim, by_values, confidence, attack="what is released"),
        ]

    def _run(self, mine: int, untouched: Ledger, stream: Stream) -> tuple[float, Any]:
        """Return the log-likelihood ratio of one run's answers, and what it released."""
        first = HeardLedger(Ledger(self.claim, filter=lambda _: untouched.filter, stream=stream))
        released = self.release(self.pair[mine][0], first)
        again = RepeatedLedger(untouched, before=first.told)
        self.release(self.pair[1 - mine][0], again)
        loss, sign = 0.0, 1.0 if mine else -1.0
        for (query, w), answer, own, other in zip(
            first.told.asked, first.told.answers, first.told.records, again.told.records, strict=True
        ):
            loss += sign * log_ratio(query, w, answer.value, other, own)
        return loss, released


def far_edge_pair() -> tuple[Rows, Rows]:
    """Return numbers whose 0.9-quantile one more moves as far as a choice allows.

    Without the last number every edge up to 0.92 has the score 0, and those beyond have -1; it lowers the
    former by 0.9 and raises the latter by as much, where a choice was improbable.
    """
    values = np.append(np.zeros(9), [0.92, 1.0])
    return Rows(values[:-1]), Rows(values)


def targets() -> dict[str, AskedTarget | ReleasedTarget]:
    """Return the statistics, by name."""
    gaussian = Budget(pld.epsilon(GaussianEvent(1.0), DELTA), DELTA)
    pure, whole = Budget(2.0, 0.0), Budget(2.0, 1e-3)
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
            Query(Everyone(), sums, ClipNorm(sums.norms[0], order=1), Laplace(0.5)),
            (Rows(*pair[0]), Rows(*pair[1])),
            pure,
            runs=6000,
            statistics=(test_statistics.largest, test_statistics.lowest_bit),
            threshold=1.9,
        ),
        "bounds": AskedTarget(
            Query(Everyone(), Cells(2, COARSE), ClipNorm(np.sqrt(2)), Gaussian(1.0)),
            (Rows(by_power(table[0])), Rows(by_power(table[1]))),
            gaussian,
            GdpFilter,
            GaussianCurve(),
        ),
        "quantile-choice": AskedTarget(
            Query(Everyone(), QuantileScores(0.9, 0.0, 1.0), ClipValue(-0.9, 0.9), NoisyMax(1.0)),
            far_edge_pair(),
            pure,
            runs=8000,
            threshold=0.0,
        ),
        "quantile-tree": AskedTarget(
            Query(Everyone(), Tree(0.0, 1.0), ClipNorm(3.0, order=1), Laplace(0.5)),
            (near, far),
            pure,
            runs=6000,
            threshold=1.9,  # all three counts of its path lie beyond the record
        ),
        "count-released": ReleasedTarget(
            lambda v, ledger: count(v, ledger=ledger).value, (near, far), pure, threshold=1.9
        ),
        "mean-released": ReleasedTarget(
            lambda v, ledger: mean(v, (0, 1), ledger=ledger).value, (near, far), pure, threshold=1.9
        ),
        "quantiles-released": ReleasedTarget(
            lambda v, ledger: quantiles(v, 0.9, (0, 1), ledger=ledger).value, far_edge_pair(), pure, runs=5000
        ),
        "bounds-released": ReleasedTarget(
            # of numbers whose range is narrowed by a second answer
            lambda v, ledger: bounds(v, ledger=ledger),
            (Rows(np.full(400, 1.5)), Rows(np.full(401, 1.5))),
            whole,
            GaussianCurve(),
            runs=2000,
        ),
    }
