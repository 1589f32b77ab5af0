"""Every method of the library as something to attack: its neighbours, its claim, and what to look at.

`METHODS` names them. `attack` runs all attacks on one. A run of a method goes through a real ledger, with the
strongest observer listening (`overheard`), so that it yields two things to look at: the log-likelihood ratio
of all answers, and the model that comes out.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import pld
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.algorithms.adassp import adassp
from farthing.algorithms.addp import addp
from farthing.algorithms.baselines import majority
from farthing.algorithms.descent import descent
from farthing.algorithms.dpagd import dpagd
from farthing.algorithms.dppca import dppca
from farthing.algorithms.dpsgd import dpsgd, sgd_adv
from farthing.algorithms.functional import functional
from farthing.algorithms.gradient import noisy_gradient
from farthing.algorithms.leastsquares import least_squares
from farthing.algorithms.perturbation import objective, output
from farthing.algorithms.privgene import privgene
from farthing.algorithms.problem import Problem
from farthing.algorithms.sgd1 import sgd1
from farthing.algorithms.sgd2 import sgd2
from farthing.algorithms.sufficient import sufficient
from farthing.algorithms.together import together
from farthing.audit import adaptive, as_published, tells
from farthing.audit.as_published import FarthestMove, WeightMoved
from farthing.audit.auditing import Mechanism, audit, judge
from farthing.audit.curves import Curve, GaussianCurve, Unknown
from farthing.audit.groups import canary_pair
from farthing.audit.overheard import Overheard
from farthing.audit.steps import CanaryStep, per_step
from farthing.audit.verdict import Verdict
from farthing.bounds import ClipNorm, ClipValue
from farthing.budget import Adjacency, Budget, Observer
from farthing.crowd.protocol import Accountant, ClientAgent, Parties
from farthing.errors import InvalidValue
from farthing.events import GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.ledger import Ledger
from farthing.losses import Gradient, logistic, squared
from farthing.mechanisms import Gaussian, Laplace, NoisyMax
from farthing.noise import Stream
from farthing.query import PerExample, Query, Rows, Step
from farthing.samplers import Everyone, FixedSize, Poisson
from farthing.tables import Features, Table

Array = NDArray[np.float64]
Tick = Callable[[], None]
Finding = tuple[str, Verdict]

RATIO = "likelihood ratio of every answer"
MODEL = "the model that comes out"
_DELTA = 1e-5
_AMPLE = 1e4
_GAUSSIAN = GaussianCurve()


def linear_pair(records: int = 8) -> tuple[Table, Table]:
    """Rows e₁ with label 0, and the canary e₂ with label 1."""
    x = np.zeros((records, 2))
    x[:, 0] = 1.0
    within = np.vstack([x, [[0.0, 1.0]]])
    return Table(x, np.zeros(records)), Table(within, np.append(np.zeros(records), 1.0))


def opposite_pair(records: int = 4) -> tuple[Table, Table]:
    """Rows e₁ with label 0, of which the last has label 1 in the second: their gradients point apart."""
    x = np.zeros((records, 2))
    x[:, 0] = 1.0
    y = np.zeros(records)
    return Table(x, y), Table(x, np.append(y[1:], 1.0))


def corner_pair(records: int = 8) -> tuple[Table, Table]:
    """Rows (1, 1) with target 1, of which the last is (0, 1) with target 0 in the second."""
    x, y = np.ones((records, 2)), np.ones(records)
    moved, other = x.copy(), y.copy()
    moved[-1, 0] = other[-1] = 0.0
    return Table(x, y), Table(moved, other)


def outvoted_pair(records: int = 200) -> tuple[Table, Table]:
    """Many rows e₁ with label 0, and one more with label 1: its residual is near 1 once they are fitted."""
    x, y = np.zeros((records + 1, 2)), np.zeros(records + 1)
    x[:, 0] = y[-1] = 1.0
    return Table(x[:records], y[:records]), Table(x, y)


def tied_pair() -> tuple[Table, Table]:
    """Four rows of each label, and one more of label 1."""
    x, y = np.ones((9, 1)), np.append(np.arange(8) % 2, 1).astype(np.float64)
    return Table(x[:8], y[:8]), Table(x, y)


@dataclass(frozen=True, slots=True)
class Trained:
    """A method that trains through a ledger; ``run(door)`` yields its steps."""

    run: Callable[[Overheard], Iterator[Step]]
    pair: tuple[Any, Any]
    claim: Budget
    rule: Callable[[Budget], Filter] = GdpFilter
    curve: Curve = _GAUSSIAN
    runs: int = 200
    model: bool = True

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        runs = max(10, round(self.runs * scale))
        rule = self.rule(self.claim)  # made once: choosing μ or ρ takes longer than a run
        heard, models = [], []
        for data in self.pair:
            losses, ends = [], []
            for _ in range(runs):
                door = Overheard.door(
                    Ledger(self.claim, filter=lambda _: rule, stream=stream), data, self.pair
                )
                end: Any = 0.0
                for step in self.run(door):
                    end = step.w
                losses.append(door.loss)
                ends.append(_flat(end))
                tick()
            heard.append(np.array(losses))
            models.append(np.array(ends))
        found = [_by_ratio(heard, self.claim, confidence, self.curve)]
        return [*found, _by_model(models, self.claim, confidence)] if self.model else found


@dataclass(frozen=True, slots=True)
class Together:
    """A method over a crowd of one party, whose every upload the observer sees."""

    run: Callable[[Parties], Iterator[Step]]
    pair: tuple[Table, Table]
    claim: Budget
    curve: Curve = _GAUSSIAN
    runs: int = 100
    size: int | None = None

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        rule = GdpFilter(self.claim)
        heard = []
        for data in self.pair:
            losses = []
            for _ in range(max(10, round(self.runs * scale))):
                door = Overheard.door(
                    Ledger(self.claim, filter=lambda _: rule, stream=stream), data, self.pair
                )
                for _ in self.run(Parties([ClientAgent(door, self.size or len(self.pair[0]))], stream)):
                    pass
                losses.append(door.loss)
                tick()
            heard.append(np.array(losses))
        return [_by_ratio(heard, self.claim, confidence, self.curve)]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question at a ledger's door, again and again, from a budget that is as good as endless."""

    query: Query
    pair: tuple[Any, Any]
    claim: Budget
    rule: Callable[[Budget], Filter] = BasicFilter
    curve: Curve = field(default_factory=Unknown)
    runs: int = 2000
    statistics: Sequence[Any] = ()

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        runs = max(50, round(self.runs * scale))
        heard, answers = [], []
        for data in self.pair:
            ample = Budget(_AMPLE, 0.5, self.claim.adjacency, observer=self.claim.observer)
            door = Overheard.door(Ledger(ample, filter=self.rule, stream=stream), data, self.pair)
            door.reserve(self.query, runs)  # in one commit
            losses, values = [], []
            for _ in range(runs):
                door.loss = 0.0
                values.append(_flat(door.ask(self.query).value))
                losses.append(door.loss)
                tick()
            heard.append(np.array(losses))
            answers.append(np.array(values))
        found = [_by_ratio(heard, self.claim, confidence, self.curve)]
        if self.statistics:
            named = [(part.__name__.replace("_", " "), part) for part in self.statistics]
            found.append(judge(answers[0], answers[1], self.claim, named, confidence))
        return found


@dataclass(frozen=True, slots=True)
class Seen:
    """One record of ``records`` a round, replaced by its opposite, before who sees which one was drawn."""

    noise: float
    records: int
    rounds: int
    runs: int = 1000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        step, draw, bound = Gaussian(self.noise), FixedSize(1, self.records), ClipNorm(1.0)
        event = RepeatedEvent(draw.amplify(step, Observer.COORDINATOR), self.rounds)
        swap = Adjacency.REPLACE_ONE
        claim = Budget(pld.epsilon(event, _DELTA, swap), _DELTA, swap, observer=Observer.COORDINATOR)
        heard = []
        for canary in (-1.0, 1.0):
            losses = np.zeros(max(50, round(self.runs * scale)))
            for run in range(len(losses)):
                for _ in range(self.rounds):
                    mine = self.records - 1 in np.arange(self.records)[draw.draw(self.records, stream)]
                    answer = step.release(np.array([canary if mine else -1.0]), bound, stream)
                    losses[run] += 2 * float(answer[0]) / self.noise**2 if mine else 0.0
                tick()
            heard.append(losses)
        named = [("likelihood ratio of every answer, draws seen", tells.value)]
        return [judge(heard[0], heard[1], claim, named, confidence)]


@dataclass(frozen=True, slots=True)
class Stepped:
    """DP-SGD step by step, a canary in an unused coordinate, a million steps a world."""

    noise: float
    rate: float
    steps: int
    trials: int = 1_000_000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        event = RepeatedEvent(PoissonEvent(self.rate, GaussianEvent(self.noise)), self.steps)
        claim = Budget(pld.epsilon(event, _DELTA), _DELTA)
        x = np.zeros((1, 20))
        x[0, -1] = 1.0
        gradient = Gradient(logistic, Features(20, intercept=0.0))
        query = Query(Poisson(self.rate), gradient, ClipNorm(0.5), Gaussian(self.noise))
        step = CanaryStep(query, Table(x, np.ones(1)), np.zeros(20))
        trials = max(1000, round(self.trials * scale))
        return [per_step(step, claim, self.steps, trials, confidence, stream=stream)]


@dataclass(frozen=True, slots=True)
class Enacted:
    """The sound forms of AdaDP and AdaL under the attack that breaks the published ones."""

    mechanism: adaptive.SoundAdaDP
    runs: int = 10_000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        plan = self.mechanism
        event = RepeatedEvent(PoissonEvent(plan.rate, GaussianEvent(plan.noise)), plan.steps)
        claim = Budget(pld.epsilon(event, _DELTA), _DELTA)
        runs = max(200, round(self.runs * scale))
        outputs = [plan(data, runs, stream) for data in canary_pair()]
        moved: list[tuple[str, Any]] = [
            ("weight 3 moved", lambda part: WeightMoved(2)(part[:, :, 0])),
            ("longest move of weight 3", lambda part: FarthestMove(2)(part[:, :, 0])),
        ]
        sums: list[tuple[str, Any]] = [
            ("mean of the canary's coordinate", lambda part: part[:, :, 1, 2].mean(axis=1)),
            ("largest entry of it", lambda part: tells.largest(part[:, :, 1, 2])),
            ("level of its noise", lambda part: tells.level(part[:, :, 1, 2])),
        ]
        return [
            judge(outputs[0], outputs[1], claim, moved, confidence, attack="frozen coordinate"),
            judge(outputs[0], outputs[1], claim, sums, confidence, attack="scale of the noise"),
        ]


@dataclass(frozen=True, slots=True)
class Published:
    """Something unsound, with what its authors claim of it."""

    mechanism: Mechanism
    pair: tuple[Any, Any]
    claim: Budget
    statistics: Sequence[Any]
    runs: int = 10_000

    def verdicts(self, scale: float, confidence: float, stream: Stream, tick: Tick) -> list[Verdict]:
        runs = max(200, round(self.runs * scale))
        chosen = list(self.statistics)
        return [audit(self.mechanism, self.pair, self.claim, chosen, runs, confidence, stream=stream)]


Target = Trained | Together | Asked | Seen | Stepped | Enacted | Published


def _by_ratio(heard: Sequence[Array], claim: Budget, confidence: float, curve: Curve) -> Verdict:
    named = [(RATIO, tells.value)]
    if isinstance(curve, Unknown):
        return judge(heard[0], heard[1], claim, named, confidence)
    return judge(heard[0], heard[1], claim, named, confidence, threshold=0.0, curve=curve)


def _by_model(models: Sequence[Array], claim: Budget, confidence: float) -> Verdict:
    named: list[tuple[str, Any]] = [
        ("projection on the worst direction", tells.Projection()),
        ("its largest entry", tells.largest),
        ("its lowest bit", tells.lowest_bit),
    ]
    return judge(models[0], models[1], claim, named, confidence, attack=MODEL)


def _flat(value: Any) -> Array:
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, dtype=np.float64)) for part in parts])


def _classifier(width: int = 2, **problem: Any) -> Problem:
    return Problem(logistic, 8, width, **problem)


@functools.cache
def targets() -> dict[str, Target]:
    """All that can be attacked, by name."""
    claim, pure = Budget(8.0, _DELTA), Budget(2.0, 0.0)
    fit, line = _classifier(), Problem(squared, 8, 2)
    pair = linear_pair()
    server = Budget(8.0, _DELTA, observer=Observer.SERVER)
    swapped = replace(server, adjacency=Adjacency.REPLACE_ONE)
    rows = PerExample(lambda part, w: part[0])
    ties = Rows(np.zeros((3, 21))), Rows(np.vstack([np.zeros((3, 21)), np.append(0.0, -np.ones(20))]))
    ones = Rows(np.zeros((3, 2))), Rows(np.vstack([np.zeros((3, 2)), [[3.0, 4.0]]]))
    signs = Rows(-np.ones((5, 1))), Rows(np.append(-np.ones(4), 1.0)[:, None])
    one = Features(2, intercept=0.0)
    return {
        "descent": Trained(lambda door: descent(door, fit), pair, claim, runs=100),
        "dpagd": Trained(lambda door: dpagd(door, fit), pair, claim, ZcdpFilter, runs=60),
        "dpsgd": Trained(lambda door: dpsgd(door, fit, rate=0.5, noise=2.0), pair, claim),
        "dpsgd-step": Stepped(1.386, 0.1, 100),
        "sgd-adv": Trained(lambda door: sgd_adv(door, fit, rate=0.5, steps=20), pair, claim, runs=15),
        "adadp": Enacted(adaptive.SoundAdaDP()),
        "adal": Enacted(adaptive.SoundAdaDP(noise_adapts=False)),
        "objective": Trained(
            lambda door: objective(door, Problem(logistic, 200, 2, intercept=False)),
            outvoted_pair(),
            claim,
            BasicFilter,
            runs=100,
        ),
        "output": Trained(lambda door: output(door, fit), pair, claim),
        "privgene": Trained(
            lambda door: privgene(door, fit, candidates=20), pair, claim, ZcdpFilter, runs=100
        ),
        "majority": Trained(
            lambda door: majority(door, _classifier(1)),
            tied_pair(),
            pure,
            BasicFilter,
            Unknown(),
            400,
            False,
        ),
        "least-squares": Trained(lambda door: least_squares(door, line), pair, claim),
        "adassp": Trained(lambda door: adassp(door, line), pair, claim),
        "sufficient": Trained(lambda door: sufficient(door, line), pair, claim),
        "gradient": Trained(lambda door: noisy_gradient(door, line), pair, claim, runs=100),
        "functional": Trained(
            lambda door: functional(door, line),
            corner_pair(),
            replace(pure, adjacency=Adjacency.REPLACE_ONE),
            BasicFilter,
            Unknown(),
            2000,
        ),
        "pca": Trained(lambda door: dppca(door, one), pair, claim),
        "addp": Together(
            lambda crowd: addp(
                crowd, fit, clip=0.5, rounds=8, calibration=Accountant.TIGHT, accountant=Accountant.TIGHT
            ),
            opposite_pair(),
            swapped,
        ),
        "addp-poisson": Together(
            lambda crowd: addp(
                crowd,
                _classifier(intercept=False),
                clip=0.3,
                draw=Poisson(0.25),
                rounds=8,
                calibration=Accountant.TIGHT,
                accountant=Accountant.TIGHT,
            ),
            pair,
            server,
        ),
        "addp-seen": Seen(2.0, 4, 8),
        "sgd1": Together(
            lambda crowd: sgd1(crowd, Problem(logistic, 4, 2), exact=True),
            opposite_pair(),
            replace(swapped, delta=1e-3),
        ),
        "sgd2": Together(lambda crowd: sgd2(crowd, fit, rounds=10), pair, server),
        "together": Together(lambda crowd: together(crowd, fit), pair, server, runs=60),
        "gaussian": Asked(
            Query(Everyone(), rows, ClipNorm(1.0), Gaussian(1.0)),
            ones,
            Budget(pld.epsilon(GaussianEvent(1.0), _DELTA), _DELTA),
            rule=GdpFilter,
            curve=_GAUSSIAN,
            statistics=(tells.largest, tells.spread, tells.frozen, tells.lowest_bit),
        ),
        "laplace": Asked(
            Query(Everyone(), rows, ClipNorm(1.0, order=1), Laplace(1.0)),
            ones,
            Budget(1.0, 0.0),
            runs=6000,
            statistics=(tells.largest, tells.lowest_bit),
        ),
        "noisy-max": Asked(
            Query(Everyone(), rows, ClipValue(-1.0, 0.0), NoisyMax(1.0)), ties, Budget(1.0, 0.0), runs=6000
        ),
        "noisy-max-laplace": Asked(
            Query(Everyone(), rows, ClipValue(-1.0, 0.0), NoisyMax(1.0, "laplace")),
            ties,
            Budget(1.0, 0.0),
            runs=6000,
        ),
        "fixed-size": Asked(
            Query(FixedSize(1, 5), rows, ClipNorm(1.0), Gaussian(0.7)),
            signs,
            Budget(
                pld.epsilon(FixedSize(1, 5).amplify(GaussianEvent(0.7)), _DELTA, Adjacency.REPLACE_ONE),
                _DELTA,
                Adjacency.REPLACE_ONE,
            ),
            RdpFilter,
        ),
    }


@functools.cache
def published() -> dict[str, Target]:
    """What is unsound as published, by name: to see an audit that ends in "broken"."""
    claim = Budget(0.689, _DELTA)
    moves = WeightMoved(2), FarthestMove(2)
    ties = np.zeros(21), np.append(0.0, np.ones(20))
    return {
        "adadp-as-published": Published(as_published.AdaDP(), canary_pair(), claim, moves),
        "adan-as-published": Published(
            as_published.AdaDP(learning=False, step=0.1), canary_pair(), claim, moves
        ),
        "dpopt-as-published": Published(as_published.DpOpt(), canary_pair(), claim, moves),
        "noisy-min-as-published": Published(
            as_published.ExponentialNoisyMin(0.5), ties, Budget(0.5, 0.0), (tells.Outcomes(),), 40_000
        ),
        "realised-lot": Published(
            as_published.RealisedLot(), (3, 4), Budget(0.1, _DELTA), (tells.spread, tells.level)
        ),
        "float-noise": Published(
            as_published.FloatGaussian(4.0), (0.0, 1.0), Budget(1.0, _DELTA), (tells.lowest_bit,)
        ),
    }


def names() -> list[str]:
    """The methods of the library that can be attacked."""
    return list(targets())


def attack(
    name: str,
    *,
    scale: float = 1.0,
    confidence: float = 0.99,
    stream: Stream | None = None,
    tick: Tick = lambda: None,
) -> list[Finding]:
    """All attacks on one method, ``scale`` times as many runs as it is usually given.

    ``confidence`` is that of all its verdicts together: each is held to an even part of what may fail.
    """
    target = targets().get(name) or published().get(name)
    if target is None:
        raise InvalidValue(f"METHOD must be one of {[*names(), *published()]}, got {name!r}")
    validate.positive(effort=scale), validate.probability(confidence=confidence)
    each = 1 - (1 - confidence) / 2
    found = target.verdicts(scale, each, Stream() if stream is None else stream, tick)
    return [(name, verdict) for verdict in found]
