"""Simulate clients in one process as rows of arrays, without a loop over clients.

Rows of all clients lie in one table (`farthing.data.tables.Table`, or `Indicators` for zeros and ones),
sorted by client. Terms are settled once for each distinct budget, number of records and clipping norm. A
round is one draw, one bounded sum over the drawn rows and its noise:

``noise="each"``  every client's upload is put on its own lattice with its own noise, as deployed;
``noise="sum"``   one draw with the distribution of the weighted sum of all clients' noise: the same for
                  everything the server sees in aggregate, and a hundred times as fast.

Draws and noise come from a cryptographic stream; a seeded one is for tests and voids every guarantee.

**The rule of a ledger.** A `ClientAgent` promises its ledger the rounds of its terms, and each answer uses
one of them: `Ledger.ask` refuses if none is left, otherwise it charges, and only then draws. Here `left`
holds the same numbers, one per client, and both use `farthing.ledger.books.taken`, which charges an answer to
one promise or to an array of them, or refuses. Both begin with ``Invitation.terms(...).rounds``, which
follows from public numbers and which a ledger accepts: the theorem of every accountant is an upper bound on
tight accounting, by which a promise is checked again. Rounds continue while any is left (`enough_came`).
There are no refunds here, because nothing is reserved in advance.

>>> from farthing.linear.losses import (LinearGradient, logistic)
>>> from farthing.data.tables import Features
>>> X = np.random.default_rng(0).uniform(size=(1000, 3))
>>> clients = Simulated.split(X, (X[:, 0] > 0.5) * 1.0, records=100, budgets=Budget(1.0, 1e-6))
>>> clients.invite(Invitation(clip_norm=1.0, rounds=20))
>>> got = clients.ask(LinearGradient(logistic, Features(3)), np.zeros(4))
>>> got.mean.shape, got.count, int(clients.left[0])
((4,), 10, 19)
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.accounting import pld
from farthing.accounting.tuning import TIGHT
from farthing.budget import Budget, Guarantee, Observer, Unit
from farthing.data.tables import Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated.budgets import Budgets, dealt, per_client, personal, public_sizes
from farthing.federated.draws import (
    ClientRows,
    Round,
    distinct,
    exactly,
    noisy_uploads,
    owned,
    present,
    ranges,
    refuse_many,
    sum_noise,
    weighted_sum,
)
from farthing.federated.protocol import (
    NOT_INVITED,
    Answers,
    Exactly,
    InTurn,
    Invitation,
    Terms,
    Trust,
    Weights,
    alone,
    enough_came,
    picked,
)
from farthing.federated.rounds import (
    Forecast,
    LocalSteps,
    Reply,
    combined,
    forecast_of,
    refuse_shares,
    rounded,
    variance_of_trusted,
)
from farthing.federated.terms import refuse_unit, weight_of, weights_under
from farthing.ledger import answers
from farthing.ledger.books import SEEDED, taken
from farthing.noise.lattice import Stream
from farthing.queries import arrays
from farthing.queries.bounds import ClipNorm
from farthing.queries.correlated import Cyclic
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.query import Contribution, refuse_bound
from farthing.queries.samplers import Poisson

BANDED = "; banded noise: Choquette-Choo et al. 2023, Thm. 4"

__all__ = ["Simulated", "personal"]

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


class Simulated:
    """Simulated clients, each with records, a budget and optionally its own clipping norm.

    Client i owns rows ``offsets[i]`` to ``offsets[i+1]`` of the table. Use `split` or `gather` to make one
    from arrays.

    Parameters
    ----------
    table : Table, Indicators or farthing.torch.Examples
        The rows of all clients, sorted by client.
    offsets : array_like of int
        The first row of each client, followed by the number of rows.
    budgets : Budget or sequence of Budget
        One for all, or one per client. The observer follows from the invitation's trust model.
    clip_norm : array_like, optional
        The clients' own clipping norms, in place of the invitation's.
    sizes : array_like of int, optional
        Public numbers of records. By default those of the table, taken as public; a client without records
        gets the most common number, so that its uploads, which are noise alone, look like any other.
    noise : {"sum", "each"}, default "sum"
        One draw with the distribution of all noise in the sum, or one per upload, as deployed.
    stream : Stream, optional
        The source of random bits; a seeded stream is for tests and voids every guarantee.

    Attributes
    ----------
    left : ndarray of int
        The number of rounds that each client can still afford.

    Notes
    -----
    Each client has its own guarantee (`guarantee`): its (ε, δ) under its adjacency and unit, against the
    observer of the invitation. Charges follow the rule of a ledger, see the module's docstring.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> X, y = np.ones((300, 2)), np.ones(300)
    >>> clients = ft.federated.Simulated.split(X, y, clients=3, budgets=ft.Budget(1.0, 1e-6))
    >>> clients.invite(ft.federated.Invitation(1.0, rounds=10))
    >>> len(clients), clients.left.tolist(), clients.guarantee(0).epsilon
    (3, [10, 10, 10], 1.0)
    """

    def __init__(
        self,
        table: Any,
        offsets: ArrayLike,
        budgets: Budget | Sequence[Budget],
        *,
        clip_norm: ArrayLike | None = None,
        sizes: ArrayLike | None = None,
        noise: Literal["sum", "each"] = "sum",
        stream: Stream | None = None,
    ) -> None:
        self._table, self._offsets = table, np.asarray(offsets, dtype=np.int64)
        counts = np.diff(self._offsets)
        if len(counts) == 0 or self._offsets[0] != 0 or self._offsets[-1] != len(table) or (counts < 0).any():
            raise InvalidValue(f"offsets must rise from 0 to the number of rows, {len(table)}")
        if noise not in ("sum", "each"):
            raise InvalidValue(f"noise must be 'sum' or 'each', got {noise!r}")
        self._counts, self._noise = counts, noise
        self._stream = stream if stream is not None else Stream()
        self._budgets = Budgets.of(budgets, len(self))
        self._sizes = public_sizes(sizes, counts)
        self._clips = None if clip_norm is None else per_client("clip_norm", clip_norm, len(self))
        self._terms: list[Terms] = []
        self._round: Round | None = None
        self._turns: dict[int, Round] = {}
        self._tried: tuple[Contribution, tuple[int, ...]] | None = None
        self.left = np.zeros(len(self), np.int64)
        self._turn = -1  # of the last round

    @classmethod
    def split(
        cls,
        X: Any,
        y: Any = None,
        *,
        budgets: Budget | Sequence[Budget],
        clients: int | None = None,
        records: ArrayLike | None = None,
        unit: bool = False,
        clip_norm: ArrayLike | None = None,
        noise: Literal["sum", "each"] = "sum",
        stream: Stream | None = None,
    ) -> "Simulated":
        """Return clients with rows divided in order: ``records`` each, or evenly among ``clients``.

        Parameters
        ----------
        X : array_like, sparse array, Table, Indicators or farthing.torch.Examples
            The rows of all clients.
        y : array_like, optional
            The targets, if X is not a table.
        budgets : Budget or sequence of Budget
            One for all, or one per client.
        clients : int, optional
            The number of clients.
        records : int or array_like of int, optional
            The number of records of each (the last may have fewer), or one number per client.
        unit : bool, default False
            Whether rows are scaled to norm 1.
        clip_norm, noise, stream
            As for `Simulated`.
        """
        if hasattr(X, "shape") or not hasattr(X, "take"):
            X = Table(X, y, unit=unit)
        offsets = dealt(len(X), clients, records)
        return cls(X, offsets, budgets, clip_norm=clip_norm, noise=noise, stream=stream)

    @classmethod
    def gather(
        cls,
        parts: Sequence[tuple[Any, Any]],
        budgets: Budget | Sequence[Budget],
        *,
        unit: bool = False,
        clip_norm: ArrayLike | None = None,
        noise: Literal["sum", "each"] = "sum",
        stream: Stream | None = None,
    ) -> "Simulated":
        """Return clients from one (X, y) each; an empty X is a client without records.

        Parameters
        ----------
        parts : sequence of (X, y)
            The rows and targets of every client.
        budgets : Budget or sequence of Budget
            One for all, or one per client.
        unit : bool, default False
            Whether rows are scaled to norm 1.
        clip_norm, noise, stream
            As for `Simulated`.
        """
        if not parts:
            raise InvalidValue("there must be at least one client")
        tables = [arrays.rows(X) for X, _ in parts]
        widths = [X.shape[1] if X.ndim == 2 else -1 for X in tables]
        for client, ((_, y), X) in enumerate(zip(parts, tables, strict=True)):
            if X.ndim != 2 or X.shape[1] != widths[0]:
                raise InvalidValue(f"client {client} must have rows of width {widths[0]}")
            if arrays.length(y) != len(X):
                raise InvalidValue(f"client {client} must have one target per row")
        offsets = np.concatenate([[0], np.cumsum([len(X) for X in tables])])
        said = "all clients must have rows and targets of one kind"
        X, y = (
            arrays.attempt(np.concatenate, parts, said=said)
            for parts in (tables, [arrays.rows(y) for _, y in parts])
        )
        return cls(Table(X, y, unit=unit), offsets, budgets, clip_norm=clip_norm, noise=noise, stream=stream)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def budgets(self) -> Sequence[Budget]:
        return self._budgets

    @property
    def records(self) -> Integers:
        return self._sizes

    @property
    def alive(self) -> int:
        return int(np.count_nonzero(self.left))

    @property
    def done(self) -> Integers:
        """Return the rounds that each client took part in."""
        return self._settled - self.left

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        terms, which, _ = self._agreed(invitation)
        return forecast_of(invitation, weights, terms, which)

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        if self._terms:
            raise InvalidValue("these clients were already invited: terms are agreed once")
        refuse_unit(getattr(self._table, "unit", Unit.RECORD), invitation)
        if invitation.bands > 1 and self._noise == "each" and invitation.trust is not Trust.TRUSTED:
            raise Unsupported("correlated noise is drawn for the sum of all uploads: leave out noise='each'")
        terms, self._which, self._budgets = self._agreed(invitation)
        self._cycle = invitation.draw.begin() if isinstance(invitation.draw, Cyclic) else None
        self._invitation, self._weights = invitation, weights_under(invitation.trust, weights)
        self._survivors = invitation.survivors if invitation.trust is Trust.DISTRIBUTED else 1
        self._terms = terms
        self._settled = np.array([term.rounds for term in terms], dtype=np.int64)[self._which]
        self.left = self._settled.copy()

    def _agreed(self, invitation: Invitation) -> tuple[list[Terms], Integers, "Budgets"]:
        """Return the distinct terms (by budget, records and clip), each client's index, and budgets."""
        clips = np.full(len(self), invitation.clip_norm) if self._clips is None else self._clips
        kinds = np.stack([self._budgets.which.astype(np.float64), self._sizes.astype(np.float64), clips])
        other = np.flatnonzero(clips != invitation.clip_norm)
        if len(other) and invitation.trust is Trust.DISTRIBUTED:
            raise InvalidValue(
                f"client {other[0]} clips at {clips[other[0]]:g}; under distributed trust all clip at "
                f"{invitation.clip_norm:g}, because shares of noise lie on one lattice"
            )
        kinds, which = distinct(kinds)
        if not invitation.seen and any(b.observer is Observer.COORDINATOR for b in self._budgets.distinct):
            raise InvalidValue("a coordinator sees the draws: invite with seen=True")
        known = [replace(budget, observer=invitation.observer) for budget in self._budgets.distinct]
        more = np.flatnonzero(self._counts > self._sizes)
        # their sums would have no bound
        if len(more) and any(budget.unit is not Unit.RECORD for budget in known):
            raise InvalidValue(
                "clients to be protected as a whole must not have more records than their public number"
            )
        terms = [invitation.terms(known[int(b)], int(size), float(clip)) for b, size, clip in kinds.T]
        return terms, which, Budgets(known, self._budgets.which)

    def terms(self, client: int) -> Terms:
        """Return a client's terms."""
        return self._terms[int(self._which[client])]

    def event(self, client: int) -> Event | None:
        """Return a client's charges so far as one event; None if there are none."""
        done = int(self.done[client])
        if isinstance(self._invitation.draw, InTurn):
            done = -(-done // int(self._sizes[client]))
        if isinstance(self._invitation.draw, Cyclic):
            done = -(-done // self._invitation.draw.groups)
        term = self.terms(client)
        return RepeatedEvent(term.price(self._budgets[client]), done) if done else None

    def guarantee(self, client: int) -> Guarantee:
        """Return the guarantee of a client for any number of rounds."""
        budget = self._budgets[client]
        by = self._invitation.accountant
        return self._statement(budget, budget.epsilon, str(by), by.theorem)

    def spent(self, client: int) -> Guarantee:
        """Return the cost of a client's rounds so far, by tight accounting."""
        budget, event = self._budgets[client], self.event(client)
        epsilon = 0.0 if event is None else pld.epsilon(event, budget.delta, budget.adjacency)
        within = min(epsilon, budget.epsilon)  # the cost of the rounds so far
        return self._statement(budget, within, "pld", TIGHT)

    def _statement(self, budget: Budget, epsilon: float, accountant: str, theorem: str) -> Guarantee:
        sound = self._stream.sound
        return Guarantee(
            epsilon if sound else math.inf,
            budget.delta,
            budget.adjacency,
            budget.unit,
            budget.observer,
            accountant,
            theorem + (BANDED if self._invitation.bands > 1 else ""),
            note="" if sound else SEEDED,
        )

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        if isinstance(contribution, LocalSteps):
            return self._stepped(contribution, rounded(w))
        w = self._ready(contribution, w)
        if self._round is None or not self._round.same:
            self._round = self._settle(np.flatnonzero(self.left))
        now = self._round
        enough_came(len(now.came), self._survivors, len(self))
        self.left[now.came] = taken(self.left[now.came])  # charged before anything is drawn
        now.lasts, self._turn = now.lasts - 1, self._turn + 1
        alive = len(now.came) if now.same else self.alive
        return self._answered(contribution, w, now, alive)

    def pick(self) -> int:
        return picked(np.cumsum(self._sizes), self._stream)

    def ask_one(self, party: int, contribution: Contribution, w: Any) -> Answers:
        w = self._ready(contribution, w)
        alone(party, len(self), self._invitation.trust)
        if self._cycle is not None:
            raise Unsupported("cyclic draws need all clients: one client alone has no turn")
        if not self.left[party]:
            raise BudgetSpent(f"party {party} can afford no further answer")
        if party not in self._turns:
            self._turns[party] = self._settle(np.array([party]))
        self.left[party] = taken(int(self.left[party]))  # charged before anything is drawn
        self._round = None  # the clients of the next round may have changed
        return self._answered(contribution, w, self._turns[party], self.alive)

    def _stepped(self, local: LocalSteps, w: Array) -> Answers:
        """Return the answers of a round in which every client takes several local steps."""
        self._ready(local.gradient, w)
        refuse_shares(self._terms)
        replies, came = list[Reply](), np.flatnonzero(self.left).tolist()
        enough_came(len(came), 1, len(self))
        for client in came:
            ask = partial(self._mean_of, client, local.gradient)
            upload = local.upload(self.terms(client), *local.run(ask, w, int(self.left[client])))
            replies.append(Reply(upload[0], self.terms(client).expected, upload[1]))
        return combined(replies, self._weights, self.alive)

    def _mean_of(self, client: int, gradient: Contribution, w: Array) -> Array:
        return self.ask_one(client, gradient, w).mean

    def _ready(self, contribution: Contribution, w: Any) -> Array:
        if not self._terms:
            raise InvalidValue(NOT_INVITED)
        given: Array = np.asarray(w, dtype=np.float64)
        if not np.isfinite(given).all():
            raise InvalidValue("w must be finite, got NaN or infinity; nothing was charged")
        known = self._tried
        if known is None or known[0] is not contribution or known[1] != given.shape:
            # the sum over no records raises errors of the caller before anything is charged
            refuse_bound(contribution, self._terms[0].bound)
            drawn = float(np.array([term.expected for term in self._terms])[self._which].sum())
            refuse_many(contribution, drawn, isinstance(self._invitation.draw, Poisson | Cyclic))
            answers.zero_sum(contribution, self._table, given, self._terms[0].bound)
            self._tried = contribution, given.shape
        return given

    def _answered(self, contribution: Contribution, w: Array, now: "Round", alive: int) -> Answers:
        """Return the noisy sum over the clients of a round; call it only after the charge."""
        rows, who = self._draw(now)
        table = now.table if now.table is not None else self._table.take(rows)

        def sums(places: Any) -> Any:
            return weighted_sum(contribution, table.take(places), who[places], w, now)

        def noisy(total: Any) -> Array:
            if now.noise is None:
                now.noise = sum_noise(now, self._invitation), ClipNorm(now.reach)
            mechanism, limit = now.noise
            return mechanism.release(total, limit, self._stream, self._turn)

        each = self._noise == "each" and self._invitation.trust is not Trust.TRUSTED
        asked = contribution, table, who, w, now, self._stream
        try:
            total = noisy_uploads(*asked) if each else noisy(sums(slice(None)))
        except Exception as error:
            if not self._stream.sound or answers.refusal(error) is not None:
                raise
            if each:
                total = noisy_uploads(*asked, failing=True)
            else:
                zero = sums(np.empty(0, np.int64))
                total = noisy(answers.without_failing(sums, np.arange(len(table)), zero))
        return Answers(total, now.divisor, len(now.came), alive, (now.deviation / now.divisor) ** 2)

    def _settle(self, came: Integers) -> "Round":
        """Return the values that stay constant until the next client leaves."""
        which = self._which[came]

        def column(values: list[float]) -> Array:
            return np.array(values, dtype=np.float64)[which]

        clips = column([term.bound.clip for term in self._terms])
        expected = column([term.expected for term in self._terms])
        variance = column([term.variance for term in self._terms])
        weights = np.broadcast_to(weight_of(self._weights, expected, variance), clips.shape)
        weights = weights / weights.max(initial=1e-300)
        alike = len(came) > 0 and bool(np.ptp(clips) == 0 and np.ptp(weights) == 0)
        deviation = math.sqrt(float(np.square(weights) @ variance))
        if self._invitation.trust is Trust.TRUSTED:
            deviation = math.sqrt(variance_of_trusted(self._invitation, self._terms[0]))
        now = Round(
            came=came,
            lasts=int(self.left[came].min(initial=2**62)),
            clips=clips,
            weights=weights,
            divisor=float(weights @ expected),
            deviation=deviation,
            reach=float((clips * weights).max(initial=0.0)),
            bound=ClipNorm(float(clips[0])) if alike else None,
            owned=ClientRows(self._sizes[came], self._counts[came], self._offsets[:-1][came]),
            kinds=self._terms,
            which=which,
        )
        whole = not isinstance(self._invitation.draw, Poisson | Exactly | InTurn | Cyclic)
        if whole and len(came):
            rows = ranges(now.owned.starts, now.owned.counts)
            now.table = self._table if len(came) == len(self) else self._table.take(rows)
            now.who = np.repeat(np.arange(len(came)), now.owned.counts)
        return now

    def _draw(self, now: "Round") -> tuple[Integers, Integers]:
        """Return the rows of this round, sorted by client, and the index of each row's client."""
        match self._invitation.draw:
            case Exactly(size):
                return exactly(size, now.owned, self._stream)
            case Poisson(rate) if len(now.came) == 1:
                rows = now.owned.starts[0] + self._stream.poisson_indices(rate, int(now.owned.counts[0]))
                return rows, np.zeros(len(rows), np.int64)
            case Poisson(rate):
                rows = self._stream.poisson_indices(rate, len(self._table))
                return owned(rows, self._offsets, now.came)
            case Cyclic() if self._cycle is not None:
                rows = np.asarray(self._cycle.draw(len(self._table), self._stream, self._turn))
                return owned(rows, self._offsets, now.came)
            case InTurn():
                turn = self.done[now.came] - 1
                return present(now.owned, turn % now.owned.sizes)
        assert now.who is not None
        return np.empty(0, np.int64), now.who
