"""Define the protocol between a server and its clients, independently of any transport.

The server sends an `Invitation` once: the draw, the clipping norm, the expected number of rounds, the
accountants that choose the noise and count the rounds, and the trust model. Each client answers with its own
`Terms`: sampler, bound and mechanism, chosen from its `Budget` and its public number of records, and the
number of rounds that its budget affords. Then the server sends an `Ask` (a contribution and w) each round,
and every client that can afford it sends a `Reply`: a noisy bounded sum, charged to its ledger first. A
client whose next round does not fit raises `BudgetSpent` before it computes anything, and is not asked again.

An algorithm is a generator of Steps over `Clients`, which are either `Parties` (agents that answer one by
one: local objects, or stubs of remote ones) or `farthing.federated.simulated.Simulated` (all clients at once,
as arrays):

    clients.invite(Invitation(clip_norm=3.0, rounds=100))
    for t in itertools.count(1):
        got = clients.ask(gradient, w)          # BudgetSpent when none can afford a round
        w = w - lr * got.mean
        yield Step(t, w, got.receipts)

All quantities that decide who takes part are public: budgets, numbers of records, the invitation. The
sensitivity follows from the draw: for a draw of exactly k records it is 2C under every adjacency (one record
displaces another, or a blank one); for all records or a Poisson sample it is C, or 2C under replace-one. If a
client or party is protected as a whole (`Budget.unit`), its noise is multiplied by the number of records in
its upload.

`SequentialClients` can also query one party at a time: the coordinator draws it in proportion to its number
of records, and the party draws among its records, which is equivalent to drawing a record uniformly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting.accountants import Accountant
from farthing.budget import Budget, Unit
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated.noise import ClientNoise, Share
from farthing.federated.rounds import (
    Answers,
    Ask,
    Forecast,
    LocalSteps,
    Reply,
    combined,
    forecast_of,
    refuse_shares,
    rounded,
)
from farthing.federated.terms import (
    NOTHING,
    Draw,
    Exactly,
    InTurn,
    Invitation,
    Terms,
    Trust,
    Weights,
    least_noise,
    noise_of_round,
    refuse_unit,
    weights_under,
)
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import Stream
from farthing.queries.correlated import BandedShare
from farthing.queries.query import Contribution, Receipt

__all__ = [
    "Accountant",
    "Answers",
    "Ask",
    "ClientAgent",
    "ClientNoise",
    "Clients",
    "Draw",
    "Exactly",
    "Forecast",
    "InTurn",
    "Invitation",
    "Parties",
    "Reply",
    "SequentialClients",
    "Share",
    "Terms",
    "Trust",
    "Weights",
    "iteration_noise",
    "least_noise",
    "under",
    "weights_under",
]

Array = NDArray[np.float64]


class ClientAgent:
    """A client with its own ledger, which answers an invitation and then rounds.

    It needs no transport. It promises its ledger the rounds that the invitation's accountant allows, which
    tight accounting checks again.

    Parameters
    ----------
    ledger : Ledger
        Its ledger over its records (`Ledger.over`).
    records : int
        Its public number of records.
    clip_norm : float, optional
        Its own clipping norm, in place of the invitation's.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> from farthing.data.tables import Table
    >>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6, observer="server"))
    >>> agent = ft.federated.ClientAgent(ledger.over(Table(np.ones((20, 1)), np.ones(20))), records=20)
    >>> agent.join(ft.federated.Invitation(1.0, rounds=5)).rounds, agent.left
    (5, 5)
    """

    def __init__(self, ledger: Ledger, records: int, clip_norm: float | None = None) -> None:
        self._ledger, self._records = ledger, validate.count(records=records)
        self._clip = None if clip_norm is None else validate.positive(clip_norm=clip_norm)
        self._terms: Terms | None = None

    def terms(self, invitation: Invitation) -> Terms:
        """Return the terms that this client would agree to."""
        if invitation.trust is Trust.TRUSTED:
            raise Unsupported("an agent releases nothing without noise: under trusted noise use a Ledger")
        if isinstance(invitation.draw, InTurn):
            raise Unsupported("draws in turn can only be simulated, as a ledger charges every round")
        records = getattr(self._ledger, "_records", None)
        refuse_unit(unit_of(self._ledger), invitation, 0 if records is None else len(records))
        return invitation.terms(self._ledger.budget, self._records, self._clip)

    def join(self, invitation: Invitation) -> Terms:
        """Return this client's terms for an invitation, and promise its ledger that many rounds."""
        terms = self.terms(invitation)
        if terms.rounds:
            self._left = self._ledger.promise(terms.query(NOTHING), terms.rounds)
        self._terms = terms
        return terms

    @property
    def budget(self) -> Budget:
        """Return the budget of its ledger."""
        return self._ledger.budget

    @property
    def records(self) -> int:
        """Return its public number of records."""
        return self._records

    @property
    def left(self) -> int:
        """Return the rounds that it can still afford."""
        return self._left.left if self._terms is not None and self._terms.rounds else 0

    def handle(self, ask: Ask) -> Reply:
        """Charge a round, then draw, clip, add noise and answer; raise `BudgetSpent` if it does not fit."""
        if self._terms is None:
            raise InvalidValue("this agent has not joined a run yet: send an Invitation first")
        if not self._terms.rounds:
            raise BudgetSpent(f"not even one round fits {self._ledger.budget}")
        turn = self._terms.rounds - self.left
        if isinstance(self._terms.mechanism, BandedShare) and ask.round != turn + 1:
            raise InvalidValue(f"shares of correlated noise need one turn: round {ask.round}, turn {turn}")
        if isinstance(ask.contribution, LocalSteps):
            return self._stepped(self._terms, ask.contribution, rounded(ask.w))
        answer = self._ledger.ask(self._terms.query(ask.contribution), ask.w)
        return Reply(answer.value, self._terms.expected, self._terms.variance, answer.receipt)

    def _stepped(self, terms: Terms, local: LocalSteps, w: Array) -> Reply:
        """Return the upload of several steps, each charged and answered by the ledger."""
        refuse_shares([terms])
        query, receipts = terms.query(local.gradient), list[Receipt]()

        def mean(at: Array) -> Array:
            answer = self._ledger.ask(query, at)
            receipts.append(answer.receipt)
            found: Array = answer.value / terms.expected
            return found

        value, variance = local.upload(terms, *local.run(mean, w, self.left))
        return Reply(value, terms.expected, variance, receipts[-1], tuple(receipts[:-1]))


class Clients(Protocol):
    """The interface of clients for algorithms; everything that clients send to the server is public.

    `Simulated`, `Parties` and the deployed coordinator implement it.

    Examples
    --------
    >>> import farthing as ft
    >>> clients: ft.federated.Clients = ft.federated.Simulated.split(
    ...     [[0.5]] * 20, [1.0] * 20, clients=2, budgets=ft.Budget(1.0, 1e-6)
    ... )
    >>> clients.invite(ft.federated.Invitation(1.0, rounds=3))
    >>> len(clients), clients.alive, clients.left.tolist()
    (2, 2, [3, 3])
    """

    def __len__(self) -> int:
        """Return the number of clients."""

    @property
    def budgets(self) -> Sequence[Budget]:
        """Return each client's budget, in order; clients with equal budgets may share one object."""

    @property
    def records(self) -> NDArray[np.int64]:
        """Return the public number of records of each client."""

    @property
    def alive(self) -> int:
        """Return the number of clients that can afford another round."""

    @property
    def left(self) -> NDArray[np.int64]:
        """Return the number of rounds that each client can still afford."""

    def terms(self, client: int) -> Terms:
        """Return the terms of a client."""

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        """Return the outlook of an invitation, at no cost and without commitment."""

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        """Agree on all clients' terms, once, before the first round."""

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        """Query all clients that can afford a round; raise `BudgetSpent` if none can."""


class SequentialClients(Clients, Protocol):
    """Clients that can also be queried one at a time, as SGD1 does.

    Examples
    --------
    >>> import farthing as ft
    >>> clients: ft.federated.SequentialClients = ft.federated.Simulated.split(
    ...     [[0.5]] * 20, [1.0] * 20, clients=2, budgets=ft.Budget(1.0, 1e-6)
    ... )
    >>> clients.pick() in (0, 1)
    True
    """

    def pick(self) -> int:
        """Draw a party in proportion to its number of records. The result must not be published."""

    def ask_one(self, party: int, contribution: Contribution, w: Any) -> Answers:
        """Run a round with this party alone; raise `BudgetSpent` if it cannot afford it.

        If the party is not available its turn passes: the answer is noise alone, with a ``count`` of 0, and
        nothing is charged.
        """


class Parties:
    """Agents that are queried in turn: the server's side of a round, over any transport.

    Parameters
    ----------
    agents : iterable of ClientAgent
        The parties, or stubs of remote ones.
    stream : Stream, optional
        The source of randomness for choosing a party in `pick`.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> from farthing.data.tables import Table
    >>> budget = ft.Budget(1.0, 1e-6, observer="server")
    >>> ledgers = [ft.Ledger(budget).over(Table(np.ones((20, 1)), np.ones(20))) for _ in range(2)]
    >>> parties = ft.federated.Parties(ft.federated.ClientAgent(ledger, 20) for ledger in ledgers)
    >>> parties.invite(ft.federated.Invitation(1.0, rounds=4))
    >>> len(parties), parties.left.tolist()
    (2, [4, 4])
    """

    def __init__(self, agents: Iterable[ClientAgent], stream: Stream | None = None) -> None:
        self._agents = list(agents)
        self._terms: list[Terms] = []
        self._round = 0
        self._stream = stream if stream is not None else Stream()

    def __len__(self) -> int:
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

    def terms(self, client: int) -> Terms:
        if not self._terms:
            raise InvalidValue(NOT_INVITED)
        return self._terms[client]

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        terms = [agent.terms(invitation) for agent in self._agents]
        return forecast_of(invitation, weights, terms, np.arange(len(terms)))

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        if self._terms:
            raise InvalidValue("these clients were already invited: terms are agreed once")
        self._survivors = invitation.survivors if invitation.trust is Trust.DISTRIBUTED else 1
        self._weights = weights_under(invitation.trust, weights)
        self._trust = invitation.trust
        self._terms = [agent.join(invitation) for agent in self._agents]
        self._ends = np.cumsum(self.records)
        self._standing = np.array([term.rounds > 0 for term in self._terms])

    def pick(self) -> int:
        if not self._terms:
            raise InvalidValue(NOT_INVITED)
        return picked(self._ends, self._stream)

    def ask_one(self, party: int, contribution: Contribution, w: Any) -> Answers:
        if not self._terms:
            raise InvalidValue(NOT_INVITED)
        alone(party, len(self._agents), self._trust)
        agent = self._agents[party]
        self._round += 1
        reply = agent.handle(Ask(self._round, contribution, w))
        self._standing[party] = agent.left > 0
        variance, alive = reply.variance / reply.expected**2, int(np.count_nonzero(self._standing))
        return Answers(reply.value, reply.expected, 1, alive, variance, reply.receipts)

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        if not self._terms:
            raise InvalidValue(NOT_INVITED)
        came = [agent for agent in self._agents if agent.left]
        enough_came(len(came), self._survivors, len(self._agents))
        self._round += 1
        replies = [agent.handle(Ask(self._round, contribution, w)) for agent in came]
        return combined(replies, self._weights, self.alive)


def unit_of(ledger: Ledger) -> Unit:
    """Return the unit that one of a ledger's records represents, without reading any of them."""
    unit: Unit = getattr(getattr(ledger, "_records", None), "unit", Unit.RECORD)
    return unit


NOT_INVITED = "no client was invited yet: call clients.invite(Invitation(...)) first"


def picked(ends: NDArray[np.int64], stream: Stream) -> int:
    """Return the owner of a uniformly drawn record; ``ends`` are the cumulative numbers of records."""
    place = stream.uniform_below(int(ends[-1]), 1)[0]
    return int(np.searchsorted(ends, place, side="right"))


def alone(party: int, clients: int, trust: Trust) -> None:
    """Refuse a round with an unknown party, or with one whose upload may not be seen alone."""
    if trust is not Trust.LOCAL:
        raise Unsupported(f"under {trust} trust a party's upload cannot be used alone: use local trust")
    if not 0 <= party < clients:
        raise InvalidValue(f"party must lie between 0 and {clients - 1}, got {party}")


def under(clients: Clients, invitation: Invitation, trust: Trust, survivors: int | None = None) -> Invitation:
    """Return an invitation under a trust model, with one noise for all: the least that every budget affords.

    Distributed noise is chosen for ``survivors`` honest clients, by default all of them.
    """
    trust = validate.choice(Trust, trust=trust)
    if trust is not Trust.DISTRIBUTED and survivors is not None:
        raise InvalidValue(f"survivors need distributed trust, got {str(trust)!r}")
    if trust is Trust.LOCAL:
        return invitation
    noise = invitation.noise_multiplier
    if noise is None:
        known = {(replace(budget, observer=trust.observer), size) for budget, size in _kinds(clients)}
        noise = max(least_noise(invitation, budget, size) for budget, size in known)
    least = len(clients) if survivors is None else validate.count(survivors=survivors)
    return replace(
        invitation, noise_multiplier=noise, trust=trust, survivors=least if trust is Trust.DISTRIBUTED else 1
    )


def iteration_noise(clients: Clients, invitation: Invitation, epsilon: float, delta: float) -> float:
    """Return the noise multiplier with which one round is (``epsilon``, ``delta``)-DP for every client.

    These are A-DDP's eps_iter and δ_iter: they set the noise of one round; the accountant counts the rounds
    that fit a budget.
    """
    epsilon, delta = validate.positive(epsilon_iter=epsilon), validate.probability(delta_iter=delta)
    return max(noise_of_round(invitation, budget, size, epsilon, delta) for budget, size in _kinds(clients))


def _kinds(clients: Clients) -> set[tuple[Budget, int]]:
    """Return the distinct pairs of budget and number of records."""
    pairs = zip(clients.budgets, clients.records.tolist(), strict=True)
    return {(budget, size) for budget, size in {(id(own), size): (own, size) for own, size in pairs}.values()}


def enough_came(came: int, least: int, clients: int) -> None:
    """Refuse a round without clients, or with too few for the noise of the sum."""
    if not came:
        raise BudgetSpent(f"none of {clients} clients can afford another round")
    if came < least:
        raise BudgetSpent(
            f"{came} of {clients} clients can afford another round, {least} are needed for the noise"
        )
