"""What passes between a server and the parties of a crowd, free of any transport.

The server sends an `Invitation` once: how to draw from one's own records, where to clip, how many rounds to
expect, how noise is chosen and rounds are counted, whom to trust. Each user answers it for itself: `Terms`
are its own sampler, bound and mechanism, chosen from its own `Budget` and its public number of records, and
the number of rounds that its budget affords. After that the server sends an `Ask` (a contribution and w) each
round, and every user who can afford it sends a `Reply`: a noisy bounded sum, charged to its own ledger first.
A user whose next round does not fit raises `BudgetSpent` before it computes anything, and is left in peace.

An algorithm is a generator of Steps over a `Crowd`, which is either `Parties` (agents asked one by one: local
objects, or stubs of remote ones) or `farthing.crowd.simulated.Simulated` (all users at once, as arrays):

    crowd.invite(Invitation(clip=3.0, rounds=100))
    for t in itertools.count(1):
        got = crowd.ask(gradient, w)          # BudgetSpent when nobody can afford a round
        w = w - rate * got.mean
        yield Step(t, w, got.receipts)

Everything that decides who takes part is public: budgets, numbers of records, the invitation. Sensitivity
follows from the draw: exactly k records move a sum by 2C under every adjacency (one record pushes another, or
a blank one, out), everybody or a Poisson sample by C, or 2C where a record is replaced. Where a user or party
is protected as a whole (`Budget.unit`) all of its records take part, and its noise is as many times as large.

>>> from farthing.budget import Observer
>>> budget = Budget(0.5, 1e-8, observer=Observer.SERVER)
>>> paper = Invitation(3.0, Poisson(0.01), 10, calibration="advanced", accountant="sampling")
>>> terms = paper.terms(budget, records=100)
>>> round(terms.mechanism.noise, 1), terms.rounds
(193.7, 38012)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.accounting import calibrate, composition, gaussian, sampling
from farthing.bounds import Bound, ClipNorm
from farthing.budget import Adjacency, Budget, Observer, Unit
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.events import Event, RepeatedEvent
from farthing.ledger import Ledger
from farthing.mechanisms import Gaussian
from farthing.noise import Stream
from farthing.query import Contribution, Query, Receipt
from farthing.samplers import Everyone, FixedSize, Poisson, Sampler

Array = NDArray[np.float64]

_ALL = Everyone()
_ROUNDED = 1 + 1e-12  # so that the rounds that noise was chosen for are those that are counted


class Trust(StrEnum):
    """Who adds the noise, and so whom a user need not trust."""

    LOCAL = "local"  # each user, all of it: the server may see every message
    DISTRIBUTED = "distributed"  # each user a share: only sums over users may be seen
    TRUSTED = "trusted"  # the aggregator: only what it releases may be seen

    @property
    def observer(self) -> Observer:
        """Against whom the guarantee holds."""
        match self:
            case Trust.LOCAL:
                return Observer.SERVER
            case Trust.DISTRIBUTED:
                return Observer.AGGREGATE
        return Observer.ANYONE


class Accountant(StrEnum):
    """How noise is chosen for a number of rounds, and rounds are counted for a noise.

    The first three fix T beforehand: a user leaves after T rounds.
    """

    BASIC = "basic"  # (ε/T, δ/T) a round
    ADVANCED = "advanced"  # Dwork & Roth 2014, Thm. 3.20, with half of δ as slack; no amplification
    AMPLIFIED = "amplified"  # the same over rounds amplified by sampling (Balle et al. 2018, Thm. 8 and 9)
    SAMPLING = "sampling"  # A-DDP's Gaussian Sampling Composition Theorem
    TIGHT = "tight"  # the privacy loss distribution of the draw and the noise


class Weights(StrEnum):
    """How the server combines uploads of users who differ in noise or in numbers of records."""

    PRECISION = "precision"  # by inverse variance of the noise
    PLAIN = "plain"  # each user's mean counts the same, as in the paper
    RECORDS = "records"  # each record counts the same: a plain sum


@dataclass(frozen=True, slots=True)
class Exactly:
    """``size`` of a user's records without replacement, or all where it has fewer; one is A-DDP's draw."""

    size: int = 1

    def __post_init__(self) -> None:
        validate.count(size=self.size)


@dataclass(frozen=True, slots=True)
class InTurn:
    """One record a round, in turn: each is seen once in a pass, so that a pass is priced as one round.

    Neighbours must have the same places: zero-out or replace-one. Only simulated: a ledger charges by round.
    """


Draw = Everyone | Poisson | Exactly | InTurn


@dataclass(frozen=True, slots=True)
class Share(Gaussian):
    """A user's share of Gaussian noise on a sum over users, of which at least ``survivors`` add theirs.

    The price is that of the whole ``noise`` in the sum. On a common lattice the sum of integer shares is, but
    for a total variation below 1e-300, round(G + V) with G Gaussian of the summed variance and V independent
    of the records: post-processing of the Gaussian mechanism (sampling a convolution at the integers errs by
    its Fourier transform beyond 2π, e^(-2π²σ²/2) with σ >= 2²⁰ cells).
    """

    survivors: int = 1

    def release(self, total: ArrayLike, bound: Bound, stream: Stream) -> Array:
        return Gaussian(self.noise / math.sqrt(self.survivors)).release(total, bound, stream)


@dataclass(frozen=True, slots=True)
class Together(Gaussian):
    """Noise that hides all of a user's ``records`` at once: ``noise`` is over the sum of as many clips.

    Where it holds more than it said, the sum is shrunk to what so many could make.
    """

    records: int = 1

    def release(self, total: ArrayLike, bound: Bound, stream: Stream) -> Array:
        most, sums = self.records * bound.norm(), np.asarray(total, dtype=np.float64)
        size = float(np.linalg.norm(sums))
        within = sums if size <= most else sums * (most / size)
        return Gaussian(self.noise * self.records).release(within, bound, stream)


@dataclass(frozen=True, slots=True)
class Terms:
    """A user's own part of every query, and how many rounds it affords. All of it is public."""

    sampler: Sampler
    bound: ClipNorm
    mechanism: Gaussian
    expected: float  # records in one upload, on average
    rounds: int

    def query(self, contribution: Contribution) -> Query:
        """What the user asks of its own ledger."""
        return Query(self.sampler, contribution, self.bound, self.mechanism)

    def price(self, budget: Budget) -> Event:
        """The event of one round."""
        return self.query(_NOTHING).price(budget)

    @property
    def variance(self) -> float:
        """Of the noise on each coordinate of one upload."""
        own = (self.mechanism.noise * self.bound.clip) ** 2
        match self.mechanism:
            case Share(survivors=survivors):
                return own / survivors
            case Together(records=records):
                return own * records**2
        return own


@dataclass(frozen=True, slots=True)
class Invitation:
    """How the server proposes to train. ``noise`` is over the clip; None: enough for ``rounds`` rounds.

    ``calibration`` chooses that noise, ``accountant`` counts how many rounds it affords in the end: A-DDP
    takes the noise of advanced composition for T rounds and then counts by its own theorem. Distributed
    noise must be one and the same for all users, so it must be given, with the least number of honest
    ``survivors`` of a round; how many rounds of it each can afford remains its own affair.
    """

    clip: float
    draw: Draw = _ALL
    rounds: int = 100
    noise: float | None = None
    calibration: Accountant = Accountant.TIGHT
    accountant: Accountant = Accountant.TIGHT
    trust: Trust = Trust.LOCAL
    survivors: int = 1

    def __post_init__(self) -> None:
        validate.positive(clip=self.clip)
        validate.count(rounds=self.rounds)
        validate.count(survivors=self.survivors)
        for name in ("calibration", "accountant"):
            object.__setattr__(self, name, validate.choice(Accountant, **{name: getattr(self, name)}))
        object.__setattr__(self, "trust", validate.choice(Trust, trust=self.trust))
        if not isinstance(self.draw, Draw):
            raise InvalidValue(
                f"draw must be Everyone(), Poisson(rate), Exactly(size) or InTurn(), got {self.draw!r}"
            )
        if self.noise is not None:
            validate.positive(noise=self.noise)
        elif self.trust is not Trust.LOCAL:
            raise InvalidValue(
                f"noise must be given under {self.trust} trust: one and the same for all users"
            )

    def terms(self, budget: Budget, records: int, clip: float | None = None) -> Terms:
        """What a user with this budget and public number of records agrees to; its own ``clip`` may be lower.

        A user whose budget does not allow a single round gets terms with 0 rounds.
        """
        return _terms(self, budget, records, self.clip if clip is None else clip)


@lru_cache(maxsize=2**16)
def _terms(invitation: Invitation, budget: Budget, records: int, clip: float) -> Terms:
    whole = budget.unit is not Unit.RECORD
    if whole and not (isinstance(invitation.draw, Everyone) and invitation.trust is Trust.LOCAL):
        raise Unsupported(
            f"a {budget.unit} is protected as a whole by local noise on all of its records only"
        )
    if budget.observer is not invitation.trust.observer:
        raise InvalidValue(
            f"under {invitation.trust} trust the guarantee holds against {invitation.trust.observer}, "
            f"the budget is against {budget.observer}"
        )
    validate.probability(delta=budget.delta)
    passes = isinstance(invitation.draw, InTurn)
    if passes and budget.adjacency is Adjacency.ADD_REMOVE:
        raise Unsupported("records that come and go move all turns after them: use zero-out or replace-one")
    bound, sampler = ClipNorm(clip), sampler_of(invitation.draw, records)
    noise = invitation.noise
    if noise is None:
        noise = noise_for(invitation.calibration, invitation.rounds, budget, sampler)
    elif invitation.trust is not Trust.LOCAL:
        noise *= invitation.clip / clip  # the same noise for all, whatever they clip at
    elif whole:
        noise /= records
    rounds = rounds_for(invitation.accountant, noise, invitation.rounds, budget, sampler)
    rounds *= records if passes else 1
    shared = invitation.trust is Trust.DISTRIBUTED
    mechanism = Share(noise, invitation.survivors) if shared else Gaussian(noise)
    if whole:
        mechanism = Together(noise, records)
    return Terms(sampler, bound, mechanism, expected(invitation.draw, records), rounds)


def sampler_of(draw: Draw, records: int) -> Sampler:
    """The draw among a user's records, whose number is public."""
    if isinstance(draw, Exactly):
        return FixedSize(min(draw.size, records), records)
    return Everyone() if isinstance(draw, InTurn) else draw


def expected(draw: Draw, records: int) -> float:
    """How many records an upload holds on average."""
    match draw:
        case Poisson(rate):
            return rate * records
        case Exactly(size):
            return float(min(size, records))
        case InTurn():
            return 1.0
    return float(records)


def _price(noise: float, budget: Budget, sampler: Sampler) -> Event:
    return Query(sampler, _NOTHING, ClipNorm(1.0), Gaussian(noise)).price(budget)


def _rate(sampler: Sampler) -> float:
    match sampler:
        case Poisson(rate):
            return rate
        case FixedSize(size, of):
            return size / of
    return 1.0


def _shift(sampler: Sampler, budget: Budget) -> float:
    """How far one record moves an upload, over the clip."""
    return 2.0 if isinstance(sampler, FixedSize) or budget.adjacency is Adjacency.REPLACE_ONE else 1.0


def noise_for(by: Accountant, rounds: int, budget: Budget, sampler: Sampler) -> float:
    """The least noise, over the clip, with which so many rounds fit the budget."""
    epsilon, delta, shift, rate = budget.epsilon, budget.delta, _shift(sampler, budget), _rate(sampler)
    match by:
        case Accountant.BASIC:
            return shift * gaussian.noise(epsilon / rounds, delta / rounds)
        case Accountant.ADVANCED:
            return shift * sampling.addp_noise(epsilon, delta, rounds, delta / 2)
        case Accountant.AMPLIFIED:
            each, missed = composition.advanced_epsilon_iter(epsilon, delta, rounds, delta / 2)
            inner = math.log1p(math.expm1(each) / rate) * (1 - 1e-14)
            return shift * gaussian.noise(inner, missed / rate * (1 - 1e-15))
        case Accountant.SAMPLING:
            safe = gaussian.noise(epsilon, delta) * math.sqrt(rounds) * (1 + 1e-12)

            def excess(noise: float) -> float:
                return math.log(sampling.delta(noise, rate, rounds, epsilon) / delta)

            unsafe = safe
            while unsafe > 1e-3 and excess(unsafe) <= 0:
                safe, unsafe = unsafe, unsafe / 2
            return shift * (safe if safe == unsafe else gaussian.safe_root(excess, safe, unsafe))
    if isinstance(sampler, Everyone):
        return shift * math.sqrt(rounds) * gaussian.noise(epsilon, delta) * _ROUNDED
    least = calibrate.noise(lambda noise: RepeatedEvent(_price(noise, budget, sampler), rounds), budget)
    noise, more = least, 1e-9
    while (
        calibrate.steps(_price(noise, budget, sampler), budget) < rounds
    ):  # its bounds are others, by a hair
        noise, more = least * (1 + more), 4 * more
    return noise


def rounds_for(by: Accountant, noise: float, planned: int, budget: Budget, sampler: Sampler) -> int:
    """How many rounds with this noise fit the budget; by a theorem with fixed T, at most ``planned``."""
    if by is Accountant.TIGHT:
        return calibrate.steps(_price(noise, budget, sampler), budget)
    if by is Accountant.SAMPLING:
        return sampling.rounds(noise / _shift(sampler, budget), _rate(sampler), budget.epsilon, budget.delta)

    def fits(rounds: int) -> bool:
        return noise_for(by, rounds, budget, sampler) <= noise * (1 + 1e-12)

    if fits(planned):
        return planned
    low, high = 0, planned
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Nothing:
    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Array:
        raise Unsupported("terms are priced without a contribution and cannot be asked")


_NOTHING = _Nothing()


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """The server's question of one round."""

    round: int
    contribution: Contribution
    w: Any


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A user's upload: a noisy bounded sum, how many records to expect in it, the variance of its noise."""

    value: Array
    expected: float
    variance: float
    receipt: Receipt


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What the server makes of one round: Σ weight · upload, and what to divide it by. All public."""

    total: Array
    divisor: float  # Σ weight · expected records
    count: int  # users who came
    alive: int  # users who can afford another round
    variance: float  # of the noise on each coordinate of the mean
    receipts: tuple[Receipt, ...] = ()

    @property
    def mean(self) -> Array:
        """The mean contribution of a record."""
        return self.total / self.divisor


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would come of an invitation: noise on the first round's mean, rounds until nobody is left."""

    deviation: float
    rounds: int


def forecast_of(invitation: Invitation, weights: Weights, terms: Sequence[Terms], which: Any) -> Forecast:
    """The outlook for users whose terms are ``terms[which]``."""
    afford = np.array([term.rounds > 0 for term in terms])[which]
    expected, variance = (
        np.array([getattr(term, name) for term in terms], dtype=np.float64)[which][afford]
        for name in ("expected", "variance")
    )
    if not afford.any():
        raise BudgetSpent(f"not even one round fits the budget of any of {len(afford)} users")
    weight = weight_of(weights_under(invitation.trust, weights), expected, variance)
    noise = float(np.square(weight) @ variance)
    if invitation.trust is Trust.TRUSTED:
        noise = variance_of_trusted(invitation)
    return Forecast(math.sqrt(noise) / float(weight @ expected), max(term.rounds for term in terms))


def variance_of_trusted(invitation: Invitation) -> float:
    """Of the noise that a trusted aggregator adds to the sum."""
    assert invitation.noise is not None
    return (invitation.noise * invitation.clip) ** 2


def weight_of(weights: Weights, expected: Any, variance: Any) -> Any:
    """What uploads are multiplied by, for users with so many expected records and such noise."""
    match weights:
        case Weights.PRECISION:
            return expected / variance
        case Weights.PLAIN:
            return 1.0 / expected
    return 1.0 + 0.0 * expected


class ClientAgent:
    """A user: its door (`Ledger.over(records)`), its public number of records, and what it agreed to.

    Free of any transport: `join` answers an invitation, `handle` a round. The promise to its own ledger is
    what the accountant allowed, checked once more by tight accounting.
    """

    def __init__(self, ledger: Ledger, records: int, clip: float | None = None) -> None:
        self._ledger, self._records = ledger, validate.count(records=records)
        self._clip = None if clip is None else validate.positive(clip=clip)
        self._terms: Terms | None = None

    def terms(self, invitation: Invitation) -> Terms:
        """What this user would agree to."""
        if invitation.trust is Trust.TRUSTED:
            raise Unsupported("an agent hands nothing out without noise: a trusted aggregator asks a Ledger")
        if isinstance(invitation.draw, InTurn):
            raise Unsupported("a ledger charges every round, so turns can only be simulated")
        return invitation.terms(self._ledger.budget, self._records, self._clip)

    def join(self, invitation: Invitation) -> Terms:
        """Answers an invitation with this user's own terms, and promises its ledger that many rounds."""
        terms = self.terms(invitation)
        if terms.rounds:
            self._left = self._ledger.promise(terms.query(_NOTHING), terms.rounds)
        self._terms = terms
        return terms

    @property
    def budget(self) -> Budget:
        """What this user may spend in all."""
        return self._ledger.budget

    @property
    def records(self) -> int:
        """How many records it says it has."""
        return self._records

    @property
    def left(self) -> int:
        """How many more rounds this user can afford."""
        return self._left.left if self._terms is not None and self._terms.rounds else 0

    def handle(self, ask: Ask) -> Reply:
        """Charges, draws, clips, adds noise, answers. Raises `BudgetSpent` where the round does not fit."""
        if self._terms is None:
            raise InvalidValue("this agent joined nothing yet: send an Invitation first")
        if not self._terms.rounds:
            raise BudgetSpent(f"not even one round fits {self._ledger.budget}")
        answer = self._ledger.ask(self._terms.query(ask.contribution), ask.w)
        return Reply(answer.value, self._terms.expected, self._terms.variance, answer.receipt)


class Crowd(Protocol):
    """Users who can be invited and asked. Everything it tells the server is public."""

    @property
    def users(self) -> int:
        """How many there are."""

    @property
    def budgets(self) -> Sequence[Budget]:
        """What each may spend, in order; users with equal budgets may share one object."""

    @property
    def records(self) -> NDArray[np.int64]:
        """The public number of records of each."""

    @property
    def alive(self) -> int:
        """How many can afford another round of what they were invited to."""

    @property
    def left(self) -> NDArray[np.int64]:
        """How many more rounds each user can afford."""

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        """What would come of an invitation; costs nothing and settles nothing."""

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        """Settles everybody's terms; once, before the first question."""

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        """One round among those who can afford it. Raises `BudgetSpent` where nobody can."""


class Parties:
    """A crowd of agents asked one after the other: the server's side of a round, whatever carries it."""

    def __init__(self, agents: Iterable[ClientAgent]) -> None:
        self._agents = list(agents)
        self._terms: list[Terms] = []
        self._round = 0

    @property
    def users(self) -> int:
        return len(self._agents)

    @property
    def budgets(self) -> Sequence[Budget]:
        return [agent.budget for agent in self._agents]

    @property
    def records(self) -> NDArray[np.int64]:
        return np.array([agent.records for agent in self._agents], dtype=np.int64)

    @property
    def left(self) -> NDArray[np.int64]:
        return np.array([agent.left for agent in self._agents], dtype=np.int64)

    @property
    def alive(self) -> int:
        return int(np.count_nonzero(self.left))

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        terms = [agent.terms(invitation) for agent in self._agents]
        return forecast_of(invitation, weights, terms, np.arange(len(terms)))

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        if self._terms:
            raise InvalidValue("this crowd was invited before: terms are settled once")
        self._survivors = invitation.survivors if invitation.trust is Trust.DISTRIBUTED else 1
        self._weights = weights_under(invitation.trust, weights)
        self._terms = [agent.join(invitation) for agent in self._agents]

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        if not self._terms:
            raise InvalidValue("nobody was invited yet: call crowd.invite(Invitation(...)) first")
        came = [agent for agent in self._agents if agent.left]
        enough_came(len(came), self._survivors, len(self._agents))
        self._round += 1
        replies = [agent.handle(Ask(self._round, contribution, w)) for agent in came]
        expected, variance = (
            np.array([getattr(r, name) for r in replies]) for name in ("expected", "variance")
        )
        weight = weight_of(self._weights, expected, variance)
        total = np.tensordot(weight, np.array([reply.value for reply in replies]), axes=1)
        divisor = float(weight @ expected)
        noise = float(np.square(weight) @ variance) / divisor**2
        receipts = tuple(reply.receipt for reply in replies)
        return Answers(total, divisor, len(came), self.alive, noise, receipts)


def weights_under(trust: Trust, weights: Weights) -> Weights:
    """Sums over users are all that is seen unless noise is local, so nobody can be weighted there."""
    return validate.choice(Weights, weights=weights) if trust is Trust.LOCAL else Weights.RECORDS


def enough_came(came: int, least: int, users: int) -> None:
    """Refuses a round with nobody in it, or with too few to make up the noise."""
    if not came:
        raise BudgetSpent(f"none of {users} users can afford another round")
    if came < least:
        raise BudgetSpent(
            f"{came} of {users} users can afford another round, {least} are needed for the noise"
        )
