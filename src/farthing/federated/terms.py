"""Define the terms of federated training: the server's invitation, and each client's terms under it.

An `Invitation` states the draw, the clipping norm, the expected number of rounds, the accountants that choose
the noise and count the rounds, and the trust model. `Terms` are a client's sampler, bound and mechanism, and
the number of rounds that its budget affords; all of it follows from public numbers.

>>> from farthing.budget import Observer
>>> budget = Budget(0.5, 1e-8, observer=Observer.SERVER)
>>> paper = Invitation(3.0, Poisson(0.01), 10, calibration="advanced", accountant="sampling")
>>> terms = paper.terms(budget, records=100)
>>> round(terms.mechanism.noise_multiplier, 1), terms.rounds
(193.7, 38012)
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import gaussian
from farthing.accounting.accountants import Accountant
from farthing.accounting.correlated import banded_row_noise
from farthing.accounting.rounds import shift
from farthing.budget import Adjacency, Budget, Observer, Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.noise import ClientNoise, Share, Unhidden
from farthing.queries.bounds import ClipNorm, Kind
from farthing.queries.correlated import BandedGaussian, BandedShare, Cyclic, spread
from farthing.queries.events import Event
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Contribution, Query
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler, refuse_overlap

Array = NDArray[np.float64]

_ALL = Everyone()


class Trust(StrEnum):
    """A trust model: who adds the noise, and so whom a client need not trust.

    ``local``: each client adds all of it; the server may see every message. ``distributed``: each client adds
    a share; only sums over clients may be seen. ``trusted``: the aggregator adds it; only its releases may be
    seen.

    Examples
    --------
    >>> import farthing as ft
    >>> [str(trust.observer) for trust in ft.federated.Trust]
    ['server', 'aggregate', 'anyone']
    """

    LOCAL = "local"  # each client adds all of it: the server may see every message
    DISTRIBUTED = "distributed"  # each client adds a share: only sums over clients may be seen
    TRUSTED = "trusted"  # the aggregator adds it: only its releases may be seen

    @property
    def observer(self) -> Observer:
        """Return the observer against whom the guarantee holds."""
        match self:
            case Trust.LOCAL:
                return Observer.SERVER
            case Trust.DISTRIBUTED:
                return Observer.AGGREGATE
        return Observer.ANYONE


class Weights(StrEnum):
    """The server's weights for uploads of clients that differ in noise or in numbers of records.

    ``precision``: by the inverse variance of the noise. ``plain``: each client's mean counts the same, as in
    A-DDP. ``records``: each record counts the same, a plain sum.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.Weights("plain")
    <Weights.PLAIN: 'plain'>
    """

    PRECISION = "precision"  # by inverse variance of the noise
    PLAIN = "plain"  # each client's mean counts the same, as in the paper
    RECORDS = "records"  # each record counts the same: a plain sum


@dataclass(frozen=True, slots=True)
class Exactly:
    """A draw of exactly ``size`` of a client's records without replacement; one is A-DDP's draw.

    Parameters
    ----------
    size : int, default 1
        The number of records; a client with fewer takes all.

    Notes
    -----
    One record displaces another, so the sensitivity of a sum is two clipping norms under every adjacency.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.Exactly(3)
    Exactly(size=3)
    """

    size: int = 1

    def __post_init__(self) -> None:
        validate.count(size=self.size)


@dataclass(frozen=True, slots=True)
class InTurn:
    """A draw of one record per round, in turn: a pass over all records is priced as one round.

    Neighbours must have the same positions: zero-out or replace-one. It can only be simulated, because a
    ledger charges every round.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.InTurn()
    InTurn()
    """


Draw = Everyone | Poisson | Exactly | InTurn | Cyclic


@dataclass(frozen=True, slots=True)
class Terms:
    """A client's part of every query, and the rounds that it affords; all of it is public.

    Attributes
    ----------
    sampler : Sampler
        The draw among its records.
    bound : ClipNorm
        The clipping norm.
    mechanism : Gaussian
        The noise that it adds.
    expected : float
        The expected number of records in one upload.
    rounds : int
        The rounds that its budget affords.

    Examples
    --------
    >>> import farthing as ft
    >>> budget = ft.Budget(1.0, 1e-6, observer="server")
    >>> terms = ft.federated.Invitation(1.0, rounds=20).terms(budget, records=100)
    >>> terms.rounds, terms.expected
    (20, 100.0)
    """

    sampler: Sampler
    bound: ClipNorm
    mechanism: Gaussian
    expected: float
    rounds: int

    def query(self, contribution: Contribution) -> Query:
        """Return the query of the client to its own ledger."""
        return Query(self.sampler, contribution, self.bound, self.mechanism)

    def price(self, budget: Budget) -> Event:
        """Return the privacy event of one round."""
        return self.query(NOTHING).price(budget)

    @property
    def variance(self) -> float:
        """Return the variance of the noise on each coordinate of one upload."""
        own = self.mechanism.noise_multiplier * self.bound.clip * self.correlation
        return own**2 / self.survivors

    @property
    def survivors(self) -> int:
        """Return the number of clients whose noise adds up to that of the sum, 1 if its own suffices."""
        match self.mechanism:
            case Share(survivors=survivors) | ClientNoise(survivors=survivors):
                return survivors
            case BandedShare(survivors=survivors):
                return survivors
        return 1

    @property
    def correlation(self) -> float:
        """Return the noise of a late round over independent noise of the same price, 1 if independent."""
        if not isinstance(self.mechanism, BandedGaussian):
            return 1.0
        bands, exponent = self.mechanism.bands, self.mechanism.exponent
        return spread(bands, exponent) * banded_row_noise(bands, exponent, 8 * bands)


@dataclass(frozen=True, slots=True)
class Invitation:
    """A server's proposal: the draw, the clipping norm, the noise, and the trust model.

    Parameters
    ----------
    clip_norm : float
        The norm at which a record's contribution is clipped.
    draw : Everyone, Poisson, Exactly or InTurn, default Everyone()
        The records that a client draws in a round.
    rounds : int, default 100
        The number of rounds for which the noise is calibrated.
    noise_multiplier : float, optional
        The noise over the clipping norm; by default each client takes the least with which ``rounds`` fit its
        budget. Required unless noise is local, because it must be the same for all clients.
    calibration : Accountant, default "tight"
        The accountant that chooses the noise.
    accountant : Accountant, default "tight"
        The accountant that counts the rounds. A-DDP chooses the noise by advanced composition and then counts
        by its own theorem.
    trust : Trust, default "local"
        The trust model.
    survivors : int, default 1
        The least number of honest clients of a round under distributed trust.
    seen : bool, default False
        Whether the guarantee must hold even against an observer who knows which records were drawn.
    clipped : Unit, default "record"
        The unit whose contribution is clipped: a record, or all records of a user or party together (a
        gradient or an update over all of them), which then count as one. Budgets must protect that unit.
    bands : int, default 1
        The number of rounds over which a client's noise is correlated (`farthing.BandedGaussian`); 1 is
        independent noise. More than 1 needs draws by `farthing.Cyclic` with at least as many groups.
    exponent : float, default 0.5
        The exponent of `farthing.BandedGaussian`.

    Raises
    ------
    InvalidValue
        For values out of range, and if the noise is missing where all must share it.
    Unsupported
        For combinations that no theorem covers.

    Examples
    --------
    >>> import farthing as ft
    >>> invitation = ft.federated.Invitation(3.0, ft.Poisson(0.01), rounds=10, accountant="sampling")
    >>> invitation.terms(ft.Budget(0.5, 1e-8, observer="server"), records=100).expected
    1.0
    """

    clip_norm: float
    draw: Draw = _ALL
    rounds: int = 100
    noise_multiplier: float | None = None
    calibration: Accountant = Accountant.TIGHT
    accountant: Accountant = Accountant.TIGHT
    trust: Trust = Trust.LOCAL
    survivors: int = 1
    seen: bool = False
    clipped: Unit = Unit.RECORD
    bands: int = 1
    exponent: float = 0.5

    def __post_init__(self) -> None:
        validate.positive(clip_norm=self.clip_norm)
        validate.count(rounds=self.rounds)
        validate.count(survivors=self.survivors)
        for name in ("calibration", "accountant"):
            by = validate.choice(Accountant, **{name: getattr(self, name)})
            if by not in Accountant.of_rounds():
                raise InvalidValue(f"{name} must be one of {', '.join(Accountant.of_rounds())}, got {by}")
            object.__setattr__(self, name, by)
        object.__setattr__(self, "trust", validate.choice(Trust, trust=self.trust))
        object.__setattr__(self, "clipped", validate.choice(Unit, clipped=self.clipped))
        if not isinstance(self.draw, Draw):
            raise InvalidValue(
                "draw must be Everyone(), Poisson(rate), Exactly(size), Cyclic(rate, groups) or InTurn(), "
                f"got {self.draw!r}"
            )
        refuse_overlap(self._sampler, BandedGaussian(1.0, self.bands, self.exponent))
        if isinstance(self.draw, Cyclic) and {*self._by} != {Accountant.TIGHT}:
            raise Unsupported("cyclic draws need the tight accountant, which prices a plan as a whole")
        if self.noise_multiplier is not None:
            validate.positive(noise_multiplier=self.noise_multiplier)
        elif self.trust is not Trust.LOCAL:
            raise InvalidValue(
                f"noise_multiplier must be given under {self.trust} trust: it is the same for all clients"
            )
        if self.seen and (self.trust is not Trust.LOCAL or Accountant.AMPLIFIED in self._by):
            raise Unsupported("observed draws do not amplify, and need local noise")

    @property
    def _sampler(self) -> Sampler:
        return Everyone() if isinstance(self.draw, Exactly | InTurn) else self.draw

    @property
    def _by(self) -> tuple[Accountant, Accountant]:
        return self.calibration, self.accountant

    @property
    def observer(self) -> Observer:
        """Return the observer against whom the guarantee holds."""
        return Observer.COORDINATOR if self.seen else self.trust.observer

    def terms(self, budget: Budget, records: int, clip_norm: float | None = None) -> Terms:
        """Return the terms of a client with this budget and public number of records; its clip may be lower.

        A client whose budget does not allow a single round gets terms with 0 rounds.
        """
        return _terms(self, budget, records, self.clip_norm if clip_norm is None else clip_norm)


@lru_cache(maxsize=2**16)
def _terms(invitation: Invitation, budget: Budget, records: int, clip: float) -> Terms:
    _refuse(invitation, budget, records, clip)
    draw, trust = invitation.draw, invitation.trust
    sampler = sampler_of(draw, records)
    most, priced = _protected(invitation, budget, records)
    noise = invitation.noise_multiplier
    if noise is None:
        noise = least_noise(invitation, budget, records)
    elif trust is not Trust.LOCAL:
        noise *= invitation.clip_norm / clip  # the same absolute noise for all clipping norms
    rounds = invitation.accountant.rounds(noise / (most or 1), _chances(invitation), budget, priced)
    rounds *= records if isinstance(draw, InTurn) else 1
    rounds *= draw.groups if isinstance(draw, Cyclic) else 1
    shares = invitation.survivors if trust is Trust.DISTRIBUTED else 1
    mechanism = Share(noise, shares) if trust is Trust.DISTRIBUTED else Gaussian(noise)
    if invitation.bands > 1:
        banded = noise, invitation.bands, invitation.exponent
        mechanism = BandedShare(*banded, shares) if trust is Trust.DISTRIBUTED else BandedGaussian(*banded)
    if most:
        mechanism = ClientNoise(noise, most, shares)
        sampler = Unhidden(sampler.size, sampler.of) if isinstance(sampler, FixedSize) else sampler
    return Terms(sampler, ClipNorm(clip), mechanism, expected(draw, records), rounds)


def _refuse(invitation: Invitation, budget: Budget, records: int, clip: float) -> None:
    """Refuse combinations that no theorem covers."""
    if budget.observer is not invitation.observer:
        what = f"under {invitation.trust} trust" + " with draws seen" * invitation.seen
        raise InvalidValue(
            f"{what} the guarantee holds against {invitation.observer}, the budget is against "
            f"{budget.observer}"
        )
    if invitation.trust is Trust.DISTRIBUTED and clip != invitation.clip_norm:
        raise InvalidValue(
            f"shares of noise lie on one lattice, so all clients clip at {invitation.clip_norm:g} under "
            f"distributed trust, got {clip!r}"
        )
    validate.probability(delta=budget.delta)
    clipped = invitation.clipped
    if clipped not in (Unit.RECORD, budget.unit):
        raise Unsupported(f"clipping per {clipped} protects a {clipped}, the budget is for a {budget.unit}")
    if clipped is Unit.PARTY and records != 1:
        raise InvalidValue(f"a party that is clipped as a whole counts as one record, got {records}")
    if budget.adjacency is Adjacency.ADD_REMOVE and isinstance(invitation.draw, InTurn):
        raise Unsupported("adding or removing a record shifts all later turns: use zero-out or replace-one")
    if budget.adjacency is Adjacency.ADD_REMOVE and invitation.seen:
        raise Unsupported("an observer of draws learns the number of records: use zero-out or replace-one")


def refuse_uncovered(invitation: Invitation, budget: Budget, records: int) -> None:
    """Refuse an invitation that no theorem covers for such a client; nothing is priced."""
    _refuse(invitation, budget, records, invitation.clip_norm)
    _drawn(invitation, budget, records)


def _drawn(invitation: Invitation, budget: Budget, records: int) -> int:
    """Return the most records in an upload if all of a client's records are protected together; otherwise 0.

    The sensitivity of a sum to the whole client is that many clipping norms, for any records drawn, and one
    if the party is clipped as a whole. Users who are each clipped as a whole take the role of records.
    """
    if budget.unit is Unit.RECORD or invitation.clipped is Unit.USER:
        return 0
    match invitation.draw:
        case Everyone():
            return records
        case Exactly(size):
            return min(size, records)
        case Poisson() if invitation.clipped is Unit.PARTY:
            return 1
        case InTurn() | Cyclic():
            raise Unsupported(
                f"draws in turn protect a record, not a {budget.unit}: use Everyone() or Exactly(size)"
            )
    raise Unsupported(
        f"a Poisson draw may hold all records, so sampling amplifies nothing for a {budget.unit}: "
        "use Everyone() or Exactly(size)"
    )


def _protected(invitation: Invitation, budget: Budget, records: int) -> tuple[int, Sampler]:
    """Return the most records of a unit in an upload (0: one each), and the draw that amplifies its price.

    If all of a client's records are protected together, drawing among them amplifies nothing. A party that is
    clipped as a whole is one example: it draws itself whether it is in its own upload, and uploads noise
    alone if it is not. That is a Poisson sample of the protected unit, secret from all others.
    """
    most, sampler = _drawn(invitation, budget, records), sampler_of(invitation.draw, records)
    whole = invitation.clipped is Unit.PARTY and isinstance(invitation.draw, Poisson)
    if isinstance(sampler, Cyclic):
        sampler = Poisson(sampler.rate)  # in its own rounds: see `farthing.queries.correlated`
    return most, sampler if whole or not most else Everyone()


def _chances(invitation: Invitation) -> int:
    """Return the number of rounds in which a record may be drawn."""
    groups = invitation.draw.groups if isinstance(invitation.draw, Cyclic) else 1
    return -(-invitation.rounds // groups)


def least_noise(invitation: Invitation, budget: Budget, records: int) -> float:
    """Return the least noise multiplier with which the invitation's rounds fit a client's budget."""
    most, priced = _protected(invitation, budget, records)
    return invitation.calibration.noise(_chances(invitation), budget, priced) * (most or 1)


def noise_of_round(
    invitation: Invitation, budget: Budget, records: int, epsilon: float, delta: float
) -> float:
    """Return the least noise multiplier with which one round without its draw is (``epsilon``, ``delta``)-DP.

    This is the analytic Gaussian mechanism (Balle & Wang 2018, Thm. 8) for the sensitivity of an upload to
    one record, or to the whole client if that is protected.
    """
    most, priced = _protected(invitation, budget, records)
    return shift(priced, budget) * gaussian.noise(epsilon, delta) * (most or 1)


def refuse_unit(own: Unit, invitation: Invitation, units: int = 1) -> None:
    """Refuse records of another unit than the invitation clips.

    Adding or removing a unit that is clipped as a whole changes a sum by one clipping norm. A user's k
    records that are clipped one by one change it by k, and a record of a user who is clipped as a whole by up
    to two.
    """
    if (own is Unit.RECORD) != (invitation.clipped is Unit.RECORD):
        raise Unsupported(
            f"these records are clipped per {own}, but the invitation clips per {invitation.clipped}: use "
            "Examples(users=..., records_per_user=...) if and only if clipped is 'user' or 'party'"
        )
    if units > 1 and invitation.clipped is Unit.PARTY and isinstance(invitation.draw, Poisson):
        raise Unsupported(
            "a party that draws whether it takes part must be one example: give all its records the same user"
        )


def sampler_of(draw: Draw, records: int) -> Sampler:
    """Return the draw among a client's records, whose number is public."""
    if isinstance(draw, Exactly):
        return FixedSize(min(draw.size, records), records)
    return Everyone() if isinstance(draw, InTurn) else draw


def expected(draw: Draw, records: int) -> float:
    """Return the average number of records in an upload."""
    match draw:
        case Poisson(rate) | Cyclic(rate):
            return rate * records
        case Exactly(size):
            return float(min(size, records))
        case InTurn():
            return 1.0
    return float(records)


class _Nothing:
    honours, shape = (Kind.NORM,), None

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Array:
        raise Unsupported("terms are priced without a contribution and cannot be asked")


NOTHING = _Nothing()  # a placeholder for the contribution where only the price is needed


def weight_of(weights: Weights, expected: Any, variance: Any) -> Any:
    """Return the weights of uploads with these expected records and noise variances."""
    match weights:
        case Weights.PRECISION:
            return expected / variance
        case Weights.PLAIN:
            return 1.0 / expected
    return 1.0 + 0.0 * expected


def weights_under(trust: Trust, weights: Weights) -> Weights:
    """Return the weights under a trust model: where only sums are seen, all clients have equal weights."""
    return validate.choice(Weights, weights=weights) if trust is Trust.LOCAL else Weights.RECORDS
