"""What a crowd is to do: a method with its own symbols, for ``farthing simulate`` and ``farthing serve``.

`METHODS` says which options a method takes, `checked` refuses the others before anything is read, `steps`
runs it, and `holds` says what noise taken from a publication is worth.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from farthing import validate
from farthing.budget import Adjacency, Guarantee, Unit
from farthing.data.schema import Schema
from farthing.errors import InvalidValue
from farthing.federated.methods.addp import addp
from farthing.federated.methods.addp_baselines import sgd_adv, sgd_maj, sgd_pass
from farthing.federated.methods.federated_descent import together
from farthing.federated.methods.sgd1 import sgd1, sgd1_guarantees
from farthing.federated.methods.sgd2 import sgd2, sgd2_epsilon, sgd2_published_noise
from farthing.federated.protocol import Accountant, Crowd, Draw, Exactly, Passing, Trust, Weights
from farthing.linear.problem import Problem
from farthing.queries.query import Step
from farthing.queries.samplers import Everyone, Poisson

_PAPER, _MORE = 10, 1000  # rounds to expect: A-DDP's own T, and where tight accounting makes them cheap
_SGD2_ROUNDS = 100
_FIXED_T = ("clip", "rounds", "lr")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a method leaves open. The first accountant and trust model are its own."""

    accountants: tuple[str, ...]
    draw: str | None = None  # the only one there is
    trusts: tuple[Trust, ...] = (Trust.LOCAL,)
    options: tuple[str, ...] = ()  # of those in `_OPTIONS`
    private: bool = True


METHODS = {
    "together": Kind(("tight",), "all", tuple(Trust)),
    "addp": Kind(
        ("sampling", "advanced", "tight"),
        trusts=tuple(Trust),
        options=(*_FIXED_T, "weights", "epsilon_iter", "delta_iter", "noise_multiplier"),
    ),
    "sgd2": Kind(
        ("tight",),
        "all",
        tuple(Trust),
        (*_FIXED_T, "weights", "radius", "convexity", "noise_multiplier", "published_noise"),
    ),
    "sgd1": Kind(
        ("tight",),
        "one",
        options=("clip", "lr", "radius", "convexity", "noise_multiplier", "published_noise"),
    ),
    "sgd-adv": Kind(("advanced",), options=_FIXED_T),
    "sgd-pass": Kind(("advanced",), "turn", options=_FIXED_T),
    "sgd-maj": Kind(("basic",), options=_FIXED_T),
    "nonprivate": Kind(("none",), "all", options=("rounds", "lr"), private=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Who trains on what, and how; what is left None is the method's own."""

    table: str
    schema: Schema
    users: int
    epsilon: str | None = None  # a number, numbers with commas (dealt out in turn), or FILE:COLUMN
    delta: float | None = None
    records: int | None = None  # of each user; all rows, dealt out evenly
    method: str = "together"
    accountant: str | None = None
    trust: str | None = None
    survivors: int | None = None
    noise: str = "sum"
    clip: float | None = None  # C, or L
    draw: str | None = None
    rounds: int | None = None  # T
    adjacency: Adjacency | None = None
    test: str | None = None
    unit: Unit = Unit.RECORD
    lr: float | None = None  # α, or η as a constant
    weights: str | None = None  # plain is A-DDP's mean, records SGD2's sum
    epsilon_iter: float | None = None
    delta_iter: float | None = None
    noise_multiplier: float | None = None  # σ/C; σ/L of SGD2, σ/(nL) of SGD1
    radius: float | None = None  # of the ball that steps are projected onto
    convexity: float | None = None  # Δ
    published_noise: bool = False  # SGD1's (3), or that of the proof of SGD2's Theorem 3


# How each option is looked at; those of a table, of budgets and of whom to trust are looked at apart.
_OPTIONS: dict[str, Any] = {
    "clip": validate.positive,
    "rounds": validate.count,
    "lr": validate.positive,
    "weights": lambda **value: validate.choice(Weights, **value),
    "epsilon_iter": validate.positive,
    "delta_iter": validate.probability,
    "noise_multiplier": validate.positive,
    "radius": validate.positive,
    "convexity": validate.positive,
    "published_noise": lambda **value: value,
}


def checked(job: Job) -> Kind:
    """What a job's method leaves open; refuses what contradicts it. Nothing is read yet."""
    kind = METHODS.get(job.method)
    if kind is None:
        raise InvalidValue(f"--method must be one of {list(METHODS)}, got {job.method!r}")
    validate.count(**{"--users": job.users})
    if job.noise not in ("sum", "each"):
        raise InvalidValue(f"--noise must be one of ['sum', 'each'], got {job.noise!r}")
    for option, value, allowed in (
        ("accountant", job.accountant, kind.accountants),
        ("trust", job.trust, tuple(map(str, kind.trusts))),
        ("draw", job.draw, (job.draw,) if kind.draw is None else (kind.draw,)),
    ):
        if value is not None and value not in allowed:
            raise InvalidValue(
                f"--{option} must be one of {list(allowed)} with --method {job.method}, got {value!r}"
            )
    _check_options(job, kind)
    for option, budget in (("epsilon", job.epsilon), ("delta", job.delta)):
        if budget is not None and not kind.private:
            raise InvalidValue(
                f"--{option} must be left out with --method {job.method}, which promises nothing, got "
                f"{budget!r}"
            )
    if job.records is not None:
        validate.count(**{"--records-per-user": job.records})
    if job.survivors is not None:
        if job.trust != Trust.DISTRIBUTED:
            raise InvalidValue("--survivors is for --trust distributed only")
        if validate.count(**{"--survivors": job.survivors}) > job.users:
            raise InvalidValue(
                f"--survivors must be at most the number of users, {job.users}, got {job.survivors}"
            )
    if kind.draw is None and job.draw is not None:
        draw_of(job.draw)
    return kind


def _check_options(job: Job, kind: Kind) -> None:
    """Refuses options that the method does not have, values that none has, and several ways to set noise."""
    for name, check in _OPTIONS.items():
        flag, value = f"--{name.replace('_', '-')}", getattr(job, name)
        if value is None or value is False:
            continue
        if name not in kind.options:
            raise InvalidValue(
                f"{flag} must be left out with --method {job.method}, which has none to set, got {value!r}"
            )
        check(**{flag: value})
    if (job.epsilon_iter is None) != (job.delta_iter is None):
        raise InvalidValue("--epsilon-iter and --delta-iter go together: give both or neither")
    ways = [job.epsilon_iter is not None, job.noise_multiplier is not None, job.published_noise]
    if sum(ways) > 1:
        raise InvalidValue(
            "give one of --epsilon-iter, --noise-multiplier and --published-noise: each sets the noise"
        )
    if job.weights is not None and job.trust not in (None, Trust.LOCAL):
        raise InvalidValue(
            f"--weights must be left out with --trust {job.trust}: only plain sums are seen there"
        )
    if job.method == "sgd2" and job.lr is not None and job.weights not in (None, Weights.RECORDS):
        raise InvalidValue(
            f"--weights must be 'records' with --lr, which multiplies a plain sum, got {job.weights!r}"
        )


def draw_of(text: str) -> Draw:
    """``one``, a whole number, ``all``, or ``poisson:P``."""
    if text in ("one", "all"):
        return Exactly(1) if text == "one" else Everyone()
    name, _, rate = text.partition(":")
    try:
        if name == "poisson":
            return Poisson(validate.rate(**{"the rate of --draw": float(rate)}))
        return Exactly(validate.count(**{"--draw": int(text)}))
    except InvalidValue:
        raise
    except ValueError:
        raise InvalidValue(f"--draw must be one, a whole number, all, or poisson:P, got {text!r}") from None


def steps(job: Job, crowd: Passing, problem: Problem) -> Iterator[Step]:
    """The method's steps; what was left open is filled in."""
    draw = Exactly(1) if job.draw is None else draw_of(job.draw) if job.draw != "turn" else Everyone()
    clip, rounds = 3.0 if job.clip is None else job.clip, job.rounds or _PAPER
    match job.method:
        case "together":
            trust = Trust(job.trust or Trust.LOCAL)
            return together(crowd, problem, trust=trust, survivors=job.survivors)
        case "addp":
            return _addp(job, crowd, problem, clip, draw)
        case "sgd2":
            return _sgd2(job, crowd, problem)
        case "sgd1":
            return _sgd1(job, crowd, problem)
        case "sgd-adv":
            return sgd_adv(crowd, problem, clip=clip, draw=draw, rounds=rounds, rate=job.lr)
        case "sgd-maj":
            return sgd_maj(crowd, problem, clip=clip, draw=draw, rounds=rounds, rate=job.lr)
    return sgd_pass(crowd, problem, clip=clip, rounds=rounds, rate=job.lr)


def _addp(job: Job, crowd: Crowd, problem: Problem, clip: float, draw: Draw) -> Iterator[Step]:
    tight = job.accountant == Accountant.TIGHT
    return addp(
        crowd,
        problem,
        clip=clip,
        draw=draw,
        rounds=job.rounds or (_MORE if tight else _PAPER),
        noise=job.noise_multiplier,
        epsilon_iter=job.epsilon_iter,
        delta_iter=job.delta_iter,
        calibration=Accountant.TIGHT if tight else Accountant.ADVANCED,
        accountant=Accountant(job.accountant or Accountant.SAMPLING),
        weights=Weights(job.weights or Weights.PRECISION),
        rate=job.lr,
        trust=Trust(job.trust or Trust.LOCAL),
        survivors=job.survivors,
    )


def _sgd1(job: Job, crowd: Passing, problem: Problem) -> Iterator[Step]:
    return sgd1(
        crowd,
        problem,
        lipschitz=job.clip,
        radius=1.0 if job.radius is None else job.radius,
        convexity=job.convexity or 0.0,
        exact=not job.published_noise,
        noise=job.noise_multiplier,
        rate=_constant(job.lr),
    )


def _sgd2(job: Job, crowd: Crowd, problem: Problem) -> Iterator[Step]:
    """With published noise T rounds, as published; otherwise for as long as budgets last."""
    rounds, noise = job.rounds or _SGD2_ROUNDS, job.noise_multiplier
    if job.published_noise:
        pairs = set(zip(crowd.budgets, crowd.records.tolist(), strict=True))
        noise = max(sgd2_published_noise(budget, rounds, records=size) for budget, size in pairs)
    found = sgd2(
        crowd,
        problem,
        rounds=rounds,
        noise=noise,
        lipschitz=job.clip,
        radius=10.0 if job.radius is None else job.radius,
        convexity=job.convexity or 0.0,
        rate=_constant(job.lr),
        weights=Weights(job.weights or Weights.RECORDS),
        trust=Trust(job.trust or Trust.LOCAL),
        survivors=job.survivors,
    )
    return itertools.islice(found, rounds) if job.published_noise else found


def _constant(rate: float | None) -> Any:
    return None if rate is None else lambda t: rate


def holds(job: Job, crowd: Crowd, noise: float, user: int, rounds: int) -> list[Guarantee]:
    """What published noise, σ/L or σ/(nL), really gives a user's record, by who looks; without it nothing."""
    if not job.published_noise:
        return []
    budget, sizes = crowd.budgets[user], crowd.records.tolist()
    if job.method == "sgd1":
        return list(sgd1_guarantees(sizes, noise, budget.delta, of=user))
    epsilon = sgd2_epsilon(budget, noise, rounds, sizes[user])
    theorem = "Dong, Roth & Su 2022, Cor. 3.3, and Balle & Wang 2018, Thm. 8"
    note = f"{rounds} rounds with noise {noise:.6g} x L"
    return [
        Guarantee(
            epsilon, budget.delta, budget.adjacency, budget.unit, budget.observer, "gaussian", theorem, note
        )
    ]
