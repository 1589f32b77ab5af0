"""Attack personal budgets: a canary of each level, against the claim of its own level.

All runs are vectorised, each with one canary, which moves a coordinate that no other record moves. The code
that training uses (`farthing.queries.personal`) draws the canaries and weights them; the attacker sees every
answer, knows rates, weights and noise, and tests the log-likelihood ratio of all answers.

>>> target = PersonalTarget((0.5, 2.0), 0.01, 5, runs=2000)
>>> [verdict.broken for verdict in target.verdicts(1.0, 0.999999, Stream(), lambda: None)]
[False, False]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farthing.accounting.personal import PersonalBudgets, plan_rates, plan_weights
from farthing.audit import statistics as test_statistics
from farthing.audit.auditing import Verdict, judge
from farthing.audit.strategies import GameBatch
from farthing.budget import Budget
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.mechanisms import Gaussian
from farthing.queries.personal import Leveled
from farthing.queries.query import PerExample, Query, Rows

Array = NDArray[np.float64]

_BOUND, _CANARY = ClipNorm(1.0), PerExample(lambda rows, w: rows[0])
_RATE, _EACH = 0.3, 1000  # the mean sampling rate, and how many are on each level


@dataclass(frozen=True, slots=True)
class PersonalTarget:
    """A target of Gaussian batches of records with personal budgets, by rates or by weights."""

    epsilons: tuple[float, ...]
    delta: float
    steps: int
    way: Literal["rates", "weights"] = "rates"
    runs: int = 40_000

    def verdicts(
        self, scale: float, confidence: float, stream: Stream, tick: Callable[[], None]
    ) -> list[Verdict]:
        query, budget = self.planned()
        runs, found = max(200, round(self.runs * scale)), []
        for level, epsilon in enumerate(self.epsilons):
            heard = [self.played(query, level, present, runs, stream) for present in (False, True)]
            tick()
            named = [(f"canary of budget {epsilon:g}, likelihood ratio", test_statistics.value)]
            claim = budget.with_(epsilon, self.delta)
            found.append(judge(heard[0], heard[1], claim, named, confidence, threshold=epsilon))
        return found

    def planned(self) -> tuple[Query, Budget]:
        """Return the query whose ``steps`` answers spend every level, and the largest budget."""
        people = PersonalBudgets(np.repeat(self.epsilons, _EACH))
        budget = people.budget(self.delta)
        if self.way == "weights":
            sampler, noise = plan_weights(people, budget, steps=self.steps, sampling_rate=_RATE)
        else:
            plan = plan_rates(people, budget, steps=self.steps, sampling_rate=_RATE)
            sampler, noise = plan.sampler, plan.noise_multiplier
        return Query(sampler, _CANARY, _BOUND, Gaussian(noise)), budget

    def played(self, query: Query, level: int, present: bool, runs: int, stream: Stream) -> Array:
        """Return the log-likelihood ratios of all answers, "with" over "without", of each run."""
        sampler, noise = query.sampler, query.mechanism.noise_multiplier  # type: ignore[attr-defined]
        canaries = Leveled(Rows(np.ones((runs, 1))), np.full(runs, level), self.epsilons)
        one = Leveled(Rows(np.ones((1, 1))), np.array([level]), self.epsilons)
        moved = float(query.total(one, np.array([0]), None)[0])
        batch = GameBatch(sampler.sampling_rates[level], noise / sampler.weights[level])  # type: ignore[attr-defined]
        losses = np.zeros(runs)
        for turn in range(self.steps):
            totals = np.zeros(runs)
            if present:
                totals[query.draw(canaries, stream, turn)] = moved
            answers = np.asarray(query.mechanism.release(totals, _BOUND, stream))
            losses += batch.losses(answers / sampler.weights[level])  # type: ignore[attr-defined]
        return losses
