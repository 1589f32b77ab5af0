"""List every method of the library as a target: its neighbours, its claim, and its test statistics."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import pld
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.accounting.menu import Menu
from farthing.audit import as_published, released, statistics, transcripts
from farthing.audit.as_published import FarthestMove, WeightMoved
from farthing.audit.auditing import ATTACKED_AS, NOT_ATTACKED, Verdict
from farthing.audit.games import MenuGame, TuningGame
from farthing.audit.neighbours import (
    binned_pair,
    corner_pair,
    linear_pair,
    opposite_pair,
    outvoted_pair,
    pulled_pair,
    trailing_pair,
)
from farthing.audit.plans import (
    BalancedTarget,
    BandedTarget,
    BufferedTarget,
    PersonalBandedTarget,
    PersonalTarget,
    TruncatedBandedTarget,
    TruncatedTarget,
)
from farthing.audit.released import ReleasedTarget
from farthing.audit.statistics import GaussianCurve, Unknown
from farthing.audit.steps import canary_pair
from farthing.audit.targets import (
    DELTA,
    AskedTarget,
    FederatedTarget,
    ObservedDrawsTarget,
    PublishedTarget,
    SoundFormTarget,
    SteppedTarget,
    Target,
    Tick,
    TrainedTarget,
)
from farthing.budget import Adjacency, Budget, Observer
from farthing.data.tables import Features
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.methods.addp import addp, sgd_maj
from farthing.federated.methods.addp import sgd_adv as sgd_adv_clients
from farthing.federated.methods.federated_descent import federated_descent
from farthing.federated.methods.networks import fedavg, fedsgd
from farthing.federated.methods.sgd1 import sgd1
from farthing.federated.methods.sgd2 import sgd2
from farthing.federated.protocol import Accountant
from farthing.federated.terms import Exactly, Invitation, least_noise
from farthing.linear.additive.method import additive
from farthing.linear.losses import (
    Huber,
    LinearGradient,
    LogLinear,
    Loss,
    Pinball,
    huber_hinge,
    logistic,
    multinomial,
    squared,
)
from farthing.linear.methods.baselines import majority
from farthing.linear.methods.descent import descent, generalised
from farthing.linear.methods.dpagd import dpagd
from farthing.linear.methods.dppca import dppca
from farthing.linear.methods.dpsgd import dpsgd, sgd_adv
from farthing.linear.methods.functional import functional
from farthing.linear.methods.leastsquares import least_squares
from farthing.linear.methods.perturbation import objective, output
from farthing.linear.methods.privgene import privgene
from farthing.linear.methods.pure import pure as solve_pure
from farthing.linear.methods.regression import noisy_gradient
from farthing.linear.methods.sufficient import adassp, sufficient
from farthing.linear.problem import Problem
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax
from farthing.queries.query import PerExample, Query, Rows, Step
from farthing.queries.samplers import Everyone, FixedSize, Poisson

Finding = tuple[str, Verdict]

MODELS = (
    *("torch-dpsgd", "torch-adadp", "torch-adadp-box", "torch-adal", "torch-adan"),
    *("torch-dpopt", "torch-dpagd"),
)


def _weights(steps: Iterator[Step]) -> Iterator[Step]:
    """Yield the steps of an additive model with its linear weights only, whose number is fixed."""
    for step in steps:
        yield replace(step, w=(step.w.weights, step.w.constant))


class _Flat:
    """A linear model at flat weights, which clients treat like a network."""

    gradient = LinearGradient(logistic, Features(2, intercept=0.0))

    def start(self) -> NDArray[np.float64]:
        return np.zeros(2)


def _short(t: int) -> float:
    """Return a learning rate that leaves every gradient longer than its clipping norm."""
    return 0.001


def _classifier(width: int = 2, intercept: bool = True) -> Problem:
    return Problem(logistic, 8, width, intercept=intercept)


def _numbers(loss: Loss, claim: Budget) -> TrainedTarget:
    """Return the solver of losses of numbers as a target."""
    problem = Problem(loss, 8, 2)
    return TrainedTarget(lambda ledger: generalised(ledger, problem), linear_pair(), claim, runs=480)


Attacked = Target | MenuGame | TuningGame | PersonalTarget | BandedTarget | TruncatedTarget | ReleasedTarget


@functools.cache
def targets() -> dict[str, Attacked]:
    """Return everything that can be attacked, by name."""
    return {**_tables(), **_clients(), **_mechanisms(), **released.targets(), **_plans()}


def _tables() -> dict[str, Attacked]:
    """Return the methods for tables."""
    claim, pure = Budget(8.0, DELTA), Budget(2.0, 0.0)
    fit, line = _classifier(), Problem(squared, 8, 2)
    alone = _classifier(intercept=False)
    slope = Problem(Pinball(width=1e-6), 8, 1, intercept=False)
    through = Problem(squared, 8, 1, intercept=False, unit=False)
    boosted, numbers = Problem(logistic, 8, 2, unit=False), Problem(squared, 8, 2, unit=False)
    pair, pulled = linear_pair(), Problem(logistic, 1000, 2, intercept=False)
    one = Features(2, intercept=0.0)
    return {
        "descent": TrainedTarget(lambda ledger: descent(ledger, fit), outvoted_pair(), claim, runs=400),
        "svm": TrainedTarget(
            lambda ledger: descent(ledger, Problem(huber_hinge, 8, 2)), outvoted_pair(), claim, runs=500
        ),
        "additive": TrainedTarget(
            lambda ledger: _weights(additive(ledger, boosted, trees=4)), binned_pair(), claim, runs=450
        ),
        "additive-regression": TrainedTarget(
            lambda ledger: _weights(additive(ledger, numbers, trees=4)), binned_pair(), claim, runs=450
        ),
        "dpagd": TrainedTarget(
            lambda ledger: dpagd(ledger, fit, splits=8), pulled_pair(0.0), claim, ZcdpFilter, runs=1000
        ),
        "dpsgd": TrainedTarget(
            # without an intercept, which all records move, and in steps that leave every gradient clipped
            lambda ledger: dpsgd(
                ledger, alone, sampling_rate=0.8, noise_multiplier=2.0, clip_norm=0.25, step=0.01
            ),
            pair,
            claim,
            runs=600,
            stepwise=True,
        ),
        "dpsgd-step": SteppedTarget(1.386, 0.1, 100),
        "sgd-adv": TrainedTarget(
            # few steps: its noise is meant for ε = 8, and that of any number of them is 1.1 exactly
            lambda ledger: sgd_adv(ledger, alone, sampling_rate=0.9, steps=4, clip_norm=0.25, step=0.01),
            pair,
            claim,
            runs=6000,
            stepwise=True,
            model=False,
        ),
        "adadp": SoundFormTarget(transcripts.SoundAdaDP()),
        "adal": SoundFormTarget(transcripts.SoundAdaDP(noise_adapts=False)),
        "objective": TrainedTarget(
            lambda ledger: objective(ledger, Problem(logistic, 200, 2, intercept=False)),
            outvoted_pair(),
            claim,
            BasicFilter,
            runs=800,
        ),
        "pure": TrainedTarget(
            # of one feature: noise is paid for in L1, and a row along one of two is shorter than its bound
            lambda ledger: solve_pure(ledger, Problem(logistic, 200, 1, intercept=False)),
            outvoted_pair(width=1),
            pure,
            BasicFilter,
            Unknown(),
            4000,
        ),
        "pure-classes": TrainedTarget(
            # two classes share the others, so that the record curves the objective where it is surprising
            lambda ledger: solve_pure(ledger, Problem(multinomial, 200, 1, 3, intercept=False)),
            pulled_pair(0.0, 2.0, width=1),
            pure,
            BasicFilter,
            Unknown(),
            3500,
            threshold=1.3,
        ),
        "output": TrainedTarget(lambda ledger: output(ledger, pulled), pulled_pair(0.0), claim, runs=1000),
        "privgene": TrainedTarget(
            # of two candidates the record prefers one by all that a record may, in every round
            lambda ledger: privgene(ledger, slope, candidates=2, parents=1, rounds=32, spread=0.25),
            corner_pair(),
            claim,
            ZcdpFilter,
            runs=400,
            model=False,
        ),
        "majority": TrainedTarget(
            lambda ledger: majority(ledger, _classifier(1)),
            trailing_pair(),
            pure,
            BasicFilter,
            Unknown(),
            5000,
            model=False,
            threshold=0.0,  # there are two outcomes: nothing to choose
        ),
        "least-squares": TrainedTarget(lambda ledger: least_squares(ledger, line), pair, claim, runs=500),
        "quantile": _numbers(Pinball(), claim),
        "huber": _numbers(Huber(), claim),
        "poisson": _numbers(LogLinear(), claim),
        "adassp": TrainedTarget(lambda ledger: adassp(ledger, line), pair, claim, runs=2000),
        "sufficient": TrainedTarget(lambda ledger: sufficient(ledger, line), pair, claim, runs=500),
        "gradient": TrainedTarget(
            lambda ledger: noisy_gradient(ledger, line), pulled_pair(-1.0), claim, runs=900
        ),
        "functional": TrainedTarget(
            lambda ledger: functional(ledger, through),
            corner_pair(),
            pure,  # by one record more: a replaced one moves the coefficients by about half of what is priced
            BasicFilter,
            Unknown(),
            4000,
            model=False,
        ),
        "pca": TrainedTarget(lambda ledger: dppca(ledger, one), pair, claim, runs=600),
    }


def _clients() -> dict[str, Attacked]:
    """Return the methods for clients."""
    fit, alone, pair = _classifier(), _classifier(intercept=False), linear_pair()
    server = Budget(8.0, DELTA, observer=Observer.SERVER)
    swapped = replace(server, adjacency=Adjacency.REPLACE_ONE)
    drawn_noise = least_noise(Invitation(0.25, Exactly(1), rounds=4), replace(swapped, delta=1e-3), 2)
    tight = Accountant.TIGHT
    tight_addp = functools.partial(
        addp, clip_norm=0.25, lr=0.001, rounds=8, calibration=tight, accountant=tight
    )
    return {
        "addp": FederatedTarget(
            lambda clients: tight_addp(clients, alone, draw=Exactly(3)),
            opposite_pair(),
            swapped,
            runs=800,
            stepwise=True,
        ),
        "addp-poisson": FederatedTarget(
            lambda clients: tight_addp(clients, alone, draw=Poisson(0.8)),
            pair,
            server,
            runs=600,
            stepwise=True,
        ),
        "sgd-maj": FederatedTarget(
            lambda clients: sgd_maj(clients, alone, clip_norm=0.25, draw=Everyone(), rounds=2, lr=0.001),
            pair,
            server,
            runs=400,
            stepwise=True,
        ),
        "sgd-adv-clients": FederatedTarget(
            lambda clients: sgd_adv_clients(
                clients, alone, clip_norm=0.25, draw=Everyone(), rounds=2, lr=0.001
            ),
            pair,
            server,
            runs=6000,
        ),
        "fedsgd": FederatedTarget(
            lambda clients: fedsgd(clients, _Flat(), rounds=8, clip_norm=0.25, sampling_rate=0.8, lr=0.1),
            pair,
            server,
            runs=400,
            stepwise=True,
        ),
        "fedavg": FederatedTarget(
            lambda clients: fedavg(
                clients, _Flat(), rounds=2, clip_norm=0.25, sampling_rate=0.8, local_lr=0.1
            ),
            pair,
            server,
            runs=400,
            stepwise=True,
        ),
        "addp-seen": ObservedDrawsTarget(2.0, 4, 8),
        "sgd1": FederatedTarget(
            lambda clients: sgd1(
                clients, Problem(logistic, 1, 2, intercept=False), lipschitz=0.25, lr=_short, exact=True
            ),
            opposite_pair(1),
            replace(swapped, delta=1e-3),
            runs=500,
        ),
        "sgd1-drawn": FederatedTarget(
            # one of two records in each of four rounds; the noise is looked for once, not in every run
            lambda clients: sgd1(
                clients,
                Problem(logistic, 2, 2, intercept=False),
                lipschitz=0.25,
                lr=_short,
                noise_multiplier=drawn_noise,
            ),
            opposite_pair(2),
            replace(swapped, delta=1e-3),
            runs=1600,
            stepwise=True,
        ),
        "sgd1-seen": ObservedDrawsTarget(3.0, 3, 9),
        "sgd2": FederatedTarget(
            lambda clients: sgd2(clients, alone, rounds=10, lipschitz=0.25, lr=_short),
            pair,
            server,
            runs=400,
            stepwise=True,
        ),
        "federated-descent": FederatedTarget(
            lambda clients: federated_descent(clients, fit), outvoted_pair(), server, runs=350, size=8
        ),
    }


def _mechanisms() -> dict[str, Attacked]:
    """Return single mechanisms."""
    pure, rows = Budget(2.0, 0.0), PerExample(lambda part, w: part[0])
    ties = Rows(np.zeros((3, 21))), Rows(np.vstack([np.zeros((3, 21)), np.append(0.0, -np.ones(20))]))
    ones = Rows(np.zeros((3, 2))), Rows(np.vstack([np.zeros((3, 2)), [[3.0, 4.0]]]))
    signs = Rows(-np.ones((2, 1))), Rows(np.array([[-1.0], [1.0]]))
    return {
        "gaussian": AskedTarget(
            Query(Everyone(), rows, ClipNorm(1.0), Gaussian(1.0)),
            ones,
            Budget(pld.epsilon(GaussianEvent(1.0), DELTA), DELTA),
            rule=GdpFilter,
            curve=GaussianCurve(),
            statistics=(statistics.largest, statistics.spread, statistics.frozen, statistics.lowest_bit),
        ),
        "laplace": AskedTarget(
            Query(Everyone(), rows, ClipNorm(1.0, order=1), Laplace(1.0)),
            ones,
            Budget(1.0, 0.0),
            runs=6000,
            statistics=(statistics.largest, statistics.lowest_bit),
            threshold=0.95,
        ),
        "noisy-max": AskedTarget(
            Query(Everyone(), rows, ClipValue(-1.0, 0.0), NoisyMax(0.5)),
            ties,
            pure,
            runs=8000,
            threshold=0.0,  # one candidate is chosen more often with the record, all others less
        ),
        "noisy-max-laplace": AskedTarget(
            Query(Everyone(), rows, ClipValue(-1.0, 0.0), NoisyMax(0.5, "laplace")),
            ties,
            pure,
            runs=8000,
            threshold=0.0,
        ),
        "fixed-size": AskedTarget(
            Query(FixedSize(1, 2), rows, ClipNorm(1.0), Gaussian(1.0)),
            signs,
            Budget(  # at a large δ: at a small one, what tells is too rare for thousands of runs
                pld.epsilon(FixedSize(1, 2).amplify(GaussianEvent(1.0)), 0.05, Adjacency.REPLACE_ONE),
                0.05,
                Adjacency.REPLACE_ONE,
            ),
            RdpFilter,
            runs=12_000,
        ),
    }


def _plans() -> dict[str, Attacked]:
    """Return plans of many answers, menus and tuning."""
    return {
        "personal-rates": PersonalTarget((0.5, 3.0), 0.01, 8),
        "personal-weights": PersonalTarget((0.5, 3.0), 0.01, 8, "weights"),
        "menu": MenuGame(
            Menu((Poisson(0.5).amplify(GaussianEvent(noise)) for noise in (3.0, 9.0)), units=24),
            Budget(1.0, 0.01),
        ),
        "tuning": TuningGame(Budget(2.0, 0.01)),
        "correlated": BandedTarget(groups=4, bands=4, steps=12),
        "buffered": BufferedTarget(groups=4, steps=12),
        "balanced": BalancedTarget(),
        "personal-correlated": PersonalBandedTarget(groups=4, bands=4, steps=12),
        "truncated": TruncatedTarget(),
        "truncated-correlated": TruncatedBandedTarget(),
    }


@functools.cache
def published() -> dict[str, Target]:
    """Return the methods that are unsound as published, by name: an audit of them ends in "broken"."""
    claim = Budget(0.689, DELTA)
    moves = WeightMoved(2), FarthestMove(2)
    ties = np.zeros(21), np.append(0.0, np.ones(20))
    return {
        "adadp-as-published": PublishedTarget(as_published.PublishedAdaDP(), canary_pair(), claim, moves),
        "adan-as-published": PublishedTarget(
            as_published.PublishedAdaDP(learning=False, step=0.1), canary_pair(), claim, moves
        ),
        "dpopt-as-published": PublishedTarget(as_published.PublishedDpOpt(), canary_pair(), claim, moves),
        "noisy-min-as-published": PublishedTarget(
            as_published.ExponentialNoisyMin(0.5),
            ties,
            Budget(0.5, 0.0),
            (statistics.Outcomes(),),
            40_000,
        ),
        "realised-batch": PublishedTarget(
            as_published.RealisedBatch(),
            (3, 4),
            Budget(0.1, DELTA),
            (statistics.spread, statistics.level),
        ),
        "float-noise": PublishedTarget(
            as_published.PublishedFloatGaussian(4.0), (0.0, 1.0), Budget(1.0, DELTA), (statistics.lowest_bit,)
        ),
    }


def names() -> list[str]:
    """Return the names of the library's methods; those for models only where PyTorch is installed."""
    return [*targets(), *(MODELS if find_spec("torch") else ())]


@functools.cache
def models() -> dict[str, TrainedTarget]:
    """Return the methods for models, by name; imports PyTorch."""
    from farthing.audit import deep

    return deep.targets()


def attack(
    name: str,
    *,
    scale: float = 1.0,
    confidence: float = 0.99,
    stream: Stream | None = None,
    tick: Tick = lambda: None,
) -> list[Finding]:
    """Run all attacks on one method, with ``scale`` times as many runs as usual.

    ``confidence`` is that of all its verdicts jointly: the failure probability is split evenly.
    """
    target = targets().get(name) or published().get(name)
    if target is None and name in names():
        target = models()[name]
    if name in NOT_ATTACKED:
        raise Unsupported(f"{name} cannot be attacked: {NOT_ATTACKED[name]}")
    if target is None:
        known = [*dict.fromkeys([*ATTACKED_AS, *names(), *published()])]
        hint = validate.did_you_mean(name, known)
        listed = "" if hint else f": METHOD must be one of {', '.join(known)}"
        raise InvalidValue(f"there is no method {name!r}{hint}{listed}")
    validate.positive(effort=scale), validate.probability(confidence=confidence)
    each = 1 - (1 - confidence) / 2
    found = target.verdicts(scale, each, Stream() if stream is None else stream, tick)
    return [(name, verdict) for verdict in found]
