"""Simulate clients whose coordinator may change noise, draw and clipping norm at any time.

`Simulated` clients settle terms once, and count rounds of one price. Here every client has its own privacy
filter (`farthing.accounting.filters`, or a menu of prices), which prices each invitation: the rounds under
the old terms stay charged, and ``left`` is the number of new ones that still fit. A client that cannot afford
a round skips it, and returns if terms become cheaper.

Each client has its own guarantee: its (ε, δ) by the theorem of its filter, which allows prices that depend on
all releases, against the observer of the invitation; adjacency and unit are the budget's. A filter is charged
before anything is drawn, one round at a time.

>>> import numpy as np
>>> from farthing.linear.losses import logistic
>>> from farthing.queries.samplers import Poisson
>>> X = np.random.default_rng(0).uniform(size=(1000, 2))
>>> clients = Renegotiated.split(X, (X[:, 0] > X[:, 1]) * 1.0, records=100, budgets=Budget(2.0, 1e-6))
>>> def rough_then_exact(t, w):
...     return Invitation(1.0, Poisson(0.1), noise_multiplier=20.0 if t <= 30 else 5.0)
>>> problem = Problem(logistic, 1000, 2, unit=False)
>>> steps = list(descend_changing(clients, problem, rough_then_exact, lr=0.5))
>>> len(steps) > 60, clients.alive, 1.7 < clients.spent(0).epsilon <= 2.0
(True, 0, True)
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from farthing import validate
from farthing.accounting.filters import Filter, RdpFilter, Totals
from farthing.budget import Budget, Guarantee
from farthing.data.tables import Features
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.protocol import Answers, Clients, InTurn, Invitation, Trust, Weights
from farthing.federated.simulated import Simulated
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent
from farthing.queries.query import Contribution, Step, until_spent

_MOST = 2**40  # the largest number of rounds that is counted

Following = Callable[[int, Any], Invitation | None]


class Renegotiated(Simulated):
    """Simulated clients that may be invited repeatedly, each with its own privacy filter.

    Use ``split`` or ``gather`` to make one, as for `Simulated`.

    Notes
    -----
    ``rule`` is the filter of every client: the Rényi filter by default. Set it before the first invitation,
    for instance to ``Menu(events)``, whose prices are nearly those of a fixed plan. Trust is local, because
    shares of noise are settled among all clients at once.
    """

    rule: Callable[[Budget], Filter] = RdpFilter

    _rules: Sequence[Filter] = ()  # one per kind of client: by budget, size and clipping norm

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        """Agree on new terms; the rounds under earlier ones stay charged."""
        if invitation.trust is not Trust.LOCAL or isinstance(invitation.draw, InTurn):
            raise Unsupported("changing terms need local trust, and draws that are not in turn")
        if invitation.noise_multiplier is None:
            raise InvalidValue("changing terms need a noise_multiplier: there is no plan to choose it for")
        if self._rules and invitation.observer is not self._rules[0].budget.observer:
            raise InvalidValue("seen must stay the same: budgets are against one observer")
        self._terms, self._round, self._tried = [], None, None
        super().invite(invitation, weights)
        if not self._rules:
            self._rules = [self.rule(self._budget_of(kind)) for kind in range(len(self._terms))]
            self._totals: list[Totals] = [rule.start() for rule in self._rules]
            self._history: list[list[tuple[Event, int]]] = [[] for _ in self._rules]
        self._prices = [term.price(rule.budget) for term, rule in zip(self._terms, self._rules, strict=True)]
        self._count()

    def _budget_of(self, kind: int) -> Budget:
        return self._budgets[int(np.flatnonzero(self._which == kind)[0])]

    def _count(self) -> None:
        """Set ``left`` to the rounds at the current price that each client's filter still allows."""
        books = zip(self._rules, self._totals, self._prices, strict=True)
        rounds = np.array([most_rounds(*book) for book in books], dtype=np.int64)
        self.left = rounds[self._which]
        self._settled = self.left.copy()

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        """Charge every client that can afford the round, then query them."""
        self._ready(contribution, w)
        taking = self.left > 0
        for kind in np.unique(self._which[taking]).tolist():
            rule, price = self._rules[kind], self._prices[kind]
            self._totals[kind] = rule.add(self._totals[kind], price)
            self._history[kind] = _noted(self._history[kind], price)
        return super().ask(contribution, w)

    def ask_one(self, party: int, contribution: Contribution, w: Any) -> Answers:
        """Refuse: clients of one kind share a filter, so all of them are queried together."""
        raise Unsupported("clients with changing terms can only be queried all at once")

    def event(self, client: int) -> Event | None:
        """Return a client's charges so far, under all terms, as one event; None if there are none."""
        history = self._history[int(self._which[client])]
        return ComposedEvent(tuple(RepeatedEvent(*one) for one in history)) if history else None

    def guarantee(self, client: int) -> Guarantee:
        """Return the guarantee of a client for any later terms."""
        rule = self._rules[int(self._which[client])]
        return self._statement(rule.budget, rule.budget.epsilon, rule.name, rule.theorem)

    def spent(self, client: int) -> Guarantee:
        """Return the cost of a client's rounds so far, by its filter."""
        kind = int(self._which[client])
        rule, total = self._rules[kind], self._totals[kind]
        return self._statement(
            rule.budget, min(rule.epsilon(total), rule.budget.epsilon), rule.name, rule.theorem
        )


def most_rounds(rule: Filter, total: Totals, price: Event) -> int:
    """Return how many more rounds at a price a filter allows."""
    low, high = 0, 1
    while high <= _MOST and rule.fits(rule.add(total, price, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rule.fits(rule.add(total, price, middle)) else (low, middle)
    return low


def _noted(history: list[tuple[Event, int]], price: Event) -> list[tuple[Event, int]]:
    """Return the history with one more round at a price."""
    counts = dict(history)
    return list({**counts, price: counts.get(price, 0) + 1}.items())


@until_spent
def descend_changing(
    clients: Clients,
    problem: Problem,
    following: Following,
    *,
    weights: Weights = Weights.PRECISION,
    lr: float = 0.1,
) -> Iterator[Step]:
    """Train as A-DDP does, under terms that may depend on the round and on all releases.

    Parameters
    ----------
    clients : Renegotiated or farthing.deploy.coordinator.Remote
        The clients, simulated or deployed; they are invited here, again whenever terms change.
    problem : Problem
        The loss and the public numbers of the table.
    following : callable
        A function of t = 1, 2, … and the weights so far that returns the invitation of round t, None to end.
    weights : Weights, default "precision"
        How uploads are weighted.
    lr : float, default 0.1
        The learning rate.

    Returns
    -------
    Iterator of Step
        One step per round, until no client can afford one.
    """
    features = Features(problem.width, intercept=float(problem.intercept))
    gradient, w = LinearGradient(problem.loss, features), problem.zeros(features.size)
    lr, last = validate.positive(lr=lr), None
    for t in itertools.count(1):
        invitation = following(t, w)
        if invitation is None:
            return
        if invitation != last:
            clients.invite(invitation, weights)
            last = invitation
        got = clients.ask(gradient, w)
        w = w - lr * got.mean
        yield Step(t, features.unfold(w), got.receipts)
