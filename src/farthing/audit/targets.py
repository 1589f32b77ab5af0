"""Define the kinds of targets, each with its neighbours, its claim and its test statistics.

A method runs through a real ledger under the strongest observer (`transcripts`), so that a run yields two
outputs to test: the log-likelihood ratio of all answers, and the trained model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.accounting import pld
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter
from farthing.audit import statistics as test_statistics
from farthing.audit import transcripts
from farthing.audit.as_published import FarthestMove, WeightMoved
from farthing.audit.auditing import Mechanism, Verdict, audit_mechanism, judge
from farthing.audit.statistics import Curve, GaussianCurve, SampledCurve, Unknown
from farthing.audit.steps import CanaryStep, canary_pair, corner_pair, per_step
from farthing.audit.transcripts import Transcript
from farthing.budget import Adjacency, Budget, Observer
from farthing.data.tables import Features, Table
from farthing.errors import Unsupported
from farthing.federated.protocol import ClientAgent, Parties
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm
from farthing.queries.events import ComposedEvent, Event, GaussianEvent, PoissonEvent, RepeatedEvent, decode
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query, Step
from farthing.queries.samplers import FixedSize, Poisson

Array = NDArray[np.float64]
Tick = Callable[[], None]

RATIO = "likelihood ratio of every answer"
PER_STEP = "likelihood ratio of every answer, per step"
MODEL = "the model that comes out"
DELTA = 1e-5
_AMPLE = 1e5
_GAUSSIAN = GaussianCurve()


@dataclass(frozen=True, slots=True)
class TrainedTarget:
    """A method that trains through a ledger; ``run(ledger)`` yields its steps.

    With ``stepwise`` its answers are equal Gaussian steps, each of which is a trial.
    """

    run: Callable[[Ledger], Iterator[Step]]
    pair: tuple[Any, Any]
    claim: Budget
    rule: Callable[[Budget], Filter] = GdpFilter
    curve: Curve = _GAUSSIAN
    runs: int = 200
    model: bool = True
    threshold: float | None = None
    stepwise: bool = False

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        heard, models, ledger = _heard(self, max(10, round(self.runs * scale)), stream, tick)
        found = [_by_runs(heard, self, confidence)]
        if self.model:
            found.append(_by_model(models, self.claim, confidence))
        exact = _exact(ledger)
        return [replace(verdict, exact=exact) for verdict in found]


@dataclass(frozen=True, slots=True)
class FederatedTarget:
    """A federated method with one party, whose every upload the observer sees; ``stepwise`` as above."""

    method: Callable[[Parties], Iterator[Step]]
    pair: tuple[Table, Table]
    claim: Budget
    curve: Curve = _GAUSSIAN
    runs: int = 100
    size: int | None = None
    stepwise: bool = False
    rule: Callable[[Budget], Filter] = GdpFilter
    threshold: float | None = None

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        heard, _, ledger = _heard(self, max(10, round(self.runs * scale)), stream, tick)
        return [replace(_by_runs(heard, self, confidence), exact=_exact(ledger))]

    def run(self, ledger: Ledger) -> Iterator[Step]:
        """Train with the ledger of the party."""
        party = ClientAgent(ledger, self.size or len(self.pair[0]))
        return self.method(Parties([party], ledger._stream))


@dataclass(frozen=True, slots=True)
class AskedTarget:
    """One query that is asked of a ledger repeatedly, from an ample budget."""

    query: Query
    pair: tuple[Any, Any]
    claim: Budget
    rule: Callable[[Budget], Filter] = BasicFilter
    curve: Curve = field(default_factory=Unknown)
    runs: int = 2000
    statistics: Sequence[Any] = ()
    threshold: float | None = None  # of the ratio; without one, half of the runs choose it

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        runs = max(50, round(self.runs * scale))
        heard, answers = [], []
        for data in self.pair:
            ample = Budget(_AMPLE, 0.5, self.claim.adjacency, observer=self.claim.observer)
            said = Transcript(self.pair)
            attached = Ledger(ample, filter=self.rule, stream=stream).over(data).with_listener(said)
            attached.reserve(self.query, runs)  # in one commit
            values = []
            for _ in range(runs):
                values.append(_flat(attached.ask(self.query).value))
                tick()
            heard.append(np.array(said.losses))
            answers.append(np.array(values))
        found = [_by_ratio(heard, self.claim, confidence, self.curve, self.threshold)]
        if self.statistics:
            named = [(part.__name__.replace("_", " "), part) for part in self.statistics]
            found.append(judge(answers[0], answers[1], self.claim, named, confidence))
        return found


@dataclass(frozen=True, slots=True)
class ObservedDrawsTarget:
    """One record of ``records`` a round, replaced by its opposite, against an observer of the draws."""

    noise: float
    records: int
    rounds: int
    delta: float = 0.02  # at a small one, what tells is too rare for thousands of runs
    runs: int = 16_000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        step, draw, bound = Gaussian(self.noise), FixedSize(1, self.records), ClipNorm(1.0)
        event = RepeatedEvent(draw.amplify(step, Observer.COORDINATOR), self.rounds)
        swap = Adjacency.REPLACE_ONE
        epsilon = pld.epsilon(event, self.delta, swap)
        claim = Budget(epsilon, self.delta, swap, observer=Observer.COORDINATOR)
        runs, heard = max(50, round(self.runs * scale)), []
        for canary in (-1.0, 1.0):
            draws = (draw.draw(self.records, stream) for _ in range(runs * self.rounds))
            mine = np.array([self.records - 1 in np.asarray(drawn) for drawn in draws])
            answers = step.release(np.where(mine, canary, -1.0), bound, stream)  # all runs in one release
            losses = np.where(mine, 2 * np.asarray(answers) / self.noise**2, 0.0)
            heard.append(losses.reshape(runs, self.rounds).sum(axis=1))
            tick()
        named = [("likelihood ratio of every answer, draws seen", test_statistics.value)]
        return [judge(heard[0], heard[1], claim, named, confidence, threshold=0.85 * epsilon)]


@dataclass(frozen=True, slots=True)
class SteppedTarget:
    """DP-SGD step by step, with a canary in an unused coordinate, a million steps a world."""

    noise: float
    rate: float
    steps: int
    trials: int = 1_000_000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        event = RepeatedEvent(PoissonEvent(self.rate, GaussianEvent(self.noise)), self.steps)
        claim = Budget(pld.epsilon(event, DELTA), DELTA)
        x = np.zeros((1, 20))
        x[0, -1] = 1.0
        gradient = LinearGradient(logistic, Features(20, intercept=0.0))
        query = Query(Poisson(self.rate), gradient, ClipNorm(0.5), Gaussian(self.noise))
        step = CanaryStep(query, Table(x, np.ones(1)), np.zeros(20))
        trials = max(1000, round(self.trials * scale))
        return [per_step(step, claim, self.steps, trials, confidence, stream=stream)]


@dataclass(frozen=True, slots=True)
class SoundFormTarget:
    """The sound forms of AdaDP and AdaL: a record at the corner of the clip, and what breaks published ones.

    The canary's gradient is longer than the clip in every coordinate, and no other record moves the sum, so
    that a released sum in units of its scale is N(0, σ²), and N(1, σ²) where the canary was drawn.
    """

    mechanism: transcripts.SoundAdaDP
    runs: int = 10_000
    rate: float = 0.5  # of the first attack, whose steps show more the more often the canary is drawn
    noise: float = 2.0

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        runs = max(200, round(self.runs * scale))
        return [self._by_steps(runs // 2, confidence, stream), self._by_scale(runs, confidence, stream)]

    def _by_steps(self, runs: int, confidence: float, stream: Stream) -> Verdict:
        plan = replace(self.mechanism, rate=self.rate, noise=self.noise)
        sums = [plan(data, runs, stream)[:, :, 1:] for data in corner_pair(5 * plan.clip)]
        seen = [-(part[:, :, 0] / part[:, :, 1]).mean(axis=2).ravel() for part in sums]
        named = [("canary at the corner of the clip, per step", test_statistics.value)]
        curve = SampledCurve(plan.rate, plan.steps)
        return judge(seen[0], seen[1], _claimed(plan), named, confidence, threshold=0.5, curve=curve)

    def _by_scale(self, runs: int, confidence: float, stream: Stream) -> Verdict:
        plan = self.mechanism
        outputs = [plan(data, runs, stream) for data in canary_pair()]
        named: list[tuple[str, Any]] = [
            ("weight 3 moved", lambda part: WeightMoved(2)(part[:, :, 0])),
            ("longest move of weight 3", lambda part: FarthestMove(2)(part[:, :, 0])),
            ("mean of the canary's coordinate", lambda part: part[:, :, 1, 2].mean(axis=1)),
            ("largest entry of it", lambda part: test_statistics.largest(part[:, :, 1, 2])),
            ("level of its noise", lambda part: test_statistics.level(part[:, :, 1, 2])),
        ]
        return judge(outputs[0], outputs[1], _claimed(plan), named, confidence, attack="scale of the noise")


def _claimed(plan: transcripts.SoundAdaDP) -> Budget:
    event = RepeatedEvent(PoissonEvent(plan.rate, GaussianEvent(plan.noise)), plan.steps)
    return Budget(pld.epsilon(event, DELTA), DELTA)


@dataclass(frozen=True, slots=True)
class PublishedTarget:
    """A method that is unsound as published, with its authors' claim."""

    mechanism: Mechanism
    pair: tuple[Any, Any]
    claim: Budget
    statistics: Sequence[Any]
    runs: int = 10_000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        runs = max(200, round(self.runs * scale))
        chosen = list(self.statistics)
        return [
            audit_mechanism(self.mechanism, self.pair, self.claim, chosen, runs, confidence, stream=stream)
        ]


Target = (
    TrainedTarget
    | FederatedTarget
    | AskedTarget
    | ObservedDrawsTarget
    | SteppedTarget
    | SoundFormTarget
    | PublishedTarget
)


def _exact(ledger: Ledger) -> float | None:
    """Return the ε of a run's answers, composed exactly; None where that is not tight, or not known."""
    budget, counted = ledger.budget, Counter[Event]()
    events = dict[int, Event]()
    for row in ledger.journal.rows():
        if row.kind == "charge":
            events[row.seq] = decode(row.body["event"])
            counted[events[row.seq]] += int(row.body["count"])
        elif row.kind == "refund":
            counted[events[int(row.body["of"])]] -= int(row.body["count"])
    asked = ComposedEvent(tuple(RepeatedEvent(event, count) for event, count in counted.items() if count))
    try:
        exact = pld.epsilon(asked, budget.delta, budget.adjacency) if budget.delta else math.inf
    except Unsupported:
        return None
    return exact if exact <= budget.epsilon * (1 + 1e-6) else None  # above: not by this accountant


def _heard(
    target: TrainedTarget | FederatedTarget, runs: int, stream: Stream, tick: Tick
) -> tuple[list[list[Transcript]], list[Array], Ledger]:
    """Return what is heard of ``runs`` runs in each world, the models that come out, and the last ledger."""
    rule = target.rule(target.claim)  # made once: choosing μ or ρ takes longer than a run
    heard, models = [], []
    for data in target.pair:
        said, ends = [], []
        for _ in range(runs):
            said.append(Transcript(target.pair))
            ledger = Ledger(target.claim, filter=lambda _: rule, stream=stream)
            end: Any = 0.0
            for step in target.run(ledger.over(data).with_listener(said[-1])):
                end = step.w
            ends.append(_flat(end))
            tick()
        heard.append(said)
        models.append(np.array(ends))
    return heard, models, ledger


def _by_runs(
    heard: Sequence[Sequence[Transcript]], target: TrainedTarget | FederatedTarget, confidence: float
) -> Verdict:
    """Judge by the log-likelihood ratios of whole runs, or of their steps."""
    if target.stepwise:
        losses = [np.array([run.losses for run in part]).ravel() for part in heard]
        verdict = _by_ratio(losses, target.claim, confidence, heard[0][0].curve(), attack=PER_STEP)
        return replace(verdict, trial="steps a world")
    losses = [np.array([run.loss for run in part]) for part in heard]
    return _by_ratio(losses, target.claim, confidence, target.curve, target.threshold)


def _by_ratio(
    losses: Sequence[Array],
    claim: Budget,
    confidence: float,
    curve: Curve,
    threshold: float | None = None,
    attack: str = RATIO,
) -> Verdict:
    if not isinstance(curve, Unknown):
        threshold = 0.0
    named = [(attack, test_statistics.value)]
    return judge(losses[0], losses[1], claim, named, confidence, threshold, curve)


def _by_model(models: Sequence[Array], claim: Budget, confidence: float) -> Verdict:
    named: list[tuple[str, Any]] = [
        ("projection on the worst direction", test_statistics.Projection()),
        ("its largest entry", test_statistics.largest),
        ("its lowest bit", test_statistics.lowest_bit),
    ]
    return judge(models[0], models[1], claim, named, confidence, attack=MODEL)


def _flat(value: Any) -> Array:
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, dtype=np.float64)) for part in parts])
