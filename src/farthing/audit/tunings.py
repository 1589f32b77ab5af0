"""Check laws of tuning: the best of K runs of a small mechanism, computed exactly, against its price.

Each law is a list of complaints. `selections` takes mechanisms of a few outcomes, every order in which their
outcomes can be scored, and the distribution of K that `best_of` draws from, and compares both hockey-stick
divergences of the best run with what `farthing.accounting.tuning` charges. `runs` counts what `best_of` does:
how many runs there are, and that each gets the budget that was paid for. `scores` is the attack on a score
that was looked up in the records, which no price covers.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from farthing.accounting import tuning
from farthing.accounting.tuning import RunCount
from farthing.budget import Adjacency, Budget
from farthing.ledger.ledger import Ledger
from farthing.ledger.tuning import best_of
from farthing.noise.streams import Stream
from farthing.queries.events import GaussianEvent, PureEvent, TuningEvent

Array = NDArray[np.float64]

SHAPES = (-0.5, 0.0, 1.0, None)
_LEVELS = (0.0, 0.2, 0.5, 1.0, 1.5)
_BUDGET = Budget(1.0, 1e-3)


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
