"""Attack tuning by an order of scores that an adversary chose, and check laws of its price.

Each law is a list of complaints. `selections` takes mechanisms of a few outcomes, every order in which their
outcomes can be scored, and the distribution of K that `best_of` draws from, and compares both hockey-stick
divergences of the best run with what `farthing.accounting.tuning` charges. `runs` counts what `best_of` does:
how many runs there are, and that each gets the budget that was paid for.

`TuningGame` attacks: a run is one Gaussian answer, with as much noise as a run of a tuned budget gets, and
the adversary chooses how runs are scored. Best are answers that speak most against the canary, then those
that speak for it, then the rest: the order of the proof of `farthing.accounting.tuning`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.accounting import tuning
from farthing.accounting.tuning import RunCount
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import Verdict, judge
from farthing.budget import Adjacency, Budget
from farthing.ledger.ledger import Ledger
from farthing.ledger.tuning import best_of
from farthing.noise.streams import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.events import GaussianEvent, PureEvent, TuningEvent
from farthing.queries.mechanisms import Gaussian

Array = NDArray[np.float64]

SHAPES = (-0.5, 0.0, 1.0, None)
_LEVELS = (0.0, 0.2, 0.5, 1.0, 1.5)
_BUDGET = Budget(1.0, 1e-3)
_AGAINST = -1.645  # deviations: a twentieth of the answers speak so much against the canary


def selections() -> list[str]:
    """Check that no order of the outcomes of randomised response makes the best of K exceed its price."""
    complaints = []
    for shape, (epsilon, mean) in itertools.product(SHAPES, ((0.3, 4.0), (1.0, 2.5))):
        event = TuningEvent(PureEvent(epsilon), mean, shape, 1e-3)
        pmf = distribution(RunCount(mean, shape))
        for law, order in itertools.product(_mechanisms(epsilon), itertools.permutations(range(3))):
            one, other = (best(world, order, pmf) for world in law)
            for level in _LEVELS:
                found = max(apart(one, other, level), apart(other, one, level))
                if found > tuning.delta(event, level, Adjacency.ADD_REMOVE) * (1 + 1e-9):
                    complaints.append(f"{event} reaches δ={found:.3g} at ε={level}, more than it is priced")
    return complaints


def _mechanisms(epsilon: float) -> list[tuple[Array, Array]]:
    """Return ε-DP mechanisms of three outcomes: randomised response, and two with a weaker outcome."""
    high = math.exp(epsilon)
    told = np.array([high, 1.0, 0.0]) / (1 + high)
    rest = np.array([high, 1.0, math.sqrt(high)]) / (1 + high + math.sqrt(high))
    return [(law, law[[1, 0, 2]]) for law in (told, rest, 0.1 * told + np.array([0.0, 0.0, 0.9]))]


def distribution(runs: RunCount) -> Array:
    """Return the distribution of K that is drawn from."""
    totals = tuning._totals(runs)
    return np.diff([total / totals[-1] for total in totals], prepend=0.0)


def best(law: Array, order: tuple[int, ...], pmf: Array) -> Array:
    """Return the distribution of the best of K outcomes, ordered from worst to best; no outcome is last."""
    below = np.concatenate([[0.0], np.cumsum(law[list(order)])]).clip(0.0, 1.0)
    found = np.zeros(len(law) + 1)
    found[list(order)] = np.diff([float((x ** np.arange(len(pmf))) @ pmf) for x in below])
    found[-1] = pmf[0]
    return found


def apart(first: Array, second: Array, epsilon: float) -> float:
    """Return the hockey-stick divergence."""
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def runs(stream: Stream) -> list[str]:
    """Check that `best_of` draws its number of runs as stated, and that no run exceeds its charge."""
    counts, shares = [], []
    for _ in range(120):
        seen: list[float] = []

        def run(candidate: int, own: Ledger, seen: list[float] = seen) -> tuple[None, float]:
            seen.append(own.filter.mu)  # type: ignore[attr-defined]
            return None, 0.0

        ledger = Ledger(_BUDGET, stream=stream)
        tuned = best_of(run, [0], ledger, runs=4.0)
        counts.append(len(seen) - 1)  # the first is a rehearsal
        event = tuned.receipt.event
        assert isinstance(event, TuningEvent)
        assert isinstance(event.event, GaussianEvent)
        shares.append(max(seen) * event.event.noise)
    complaints = []
    pmf = distribution(RunCount(4.0))
    gap = max(abs(np.mean(np.array(counts) <= k) - pmf[: k + 1].sum()) for k in range(1, 40))
    if gap > math.sqrt(math.log(2e9) / 2 / len(counts)):  # Dvoretzky, Kiefer & Wolfowitz: one in 1e9
        complaints.append(f"the number of runs has another distribution: they are {gap:.2f} apart")
    if max(shares) > 1 + 1e-9:
        complaints.append(f"a run gets {max(shares):.3f} times what it was paid for")
    if tuning.epsilon(event, _BUDGET.delta) > _BUDGET.epsilon:
        complaints.append(f"{event} is charged to {_BUDGET}, and costs more")
    return complaints


@dataclass(frozen=True, slots=True)
class TuningGame:
    """The best of K Gaussian answers to attack, in an order of scores that the adversary chose."""

    claim: Budget
    mean: float = 10.0
    runs: int = 20_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        runs, law = max(200, round(self.runs * scale)), RunCount(self.mean)
        mu, heard = tuning.largest_mu(self.claim, law), []
        for present in (0.0, 1.0):
            heard.append(released(law, mu, present, runs, stream))
            tick()
        named = [("the answer of the best run", test_statistics.value)]
        return [judge(heard[0], heard[1], self.claim, named, confidence)]


def released(law: RunCount, mu: float, present: float, times: int, stream: Stream) -> Array:
    """Return the best runs' answers, so many times; a canary that is ``present`` moves answers by 1."""
    counts = np.array([law.draw(stream) for _ in range(times)])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    answers = np.asarray(Gaussian(1 / mu).release(np.full(counts.sum(), present), ClipNorm(1.0), stream))
    z = (answers - 1) * mu
    scores = np.where(z < _AGAINST, 2, np.where(z > 0, 1, 0))
    best = np.maximum.reduceat(scores, starts)
    first = np.flatnonzero(scores == np.repeat(best, counts))
    owner = np.repeat(np.arange(times), counts)[first]
    chosen: Array = answers[first[np.unique(owner, return_index=True)[1]]]
    return chosen
