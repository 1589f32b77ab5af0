"""The ledger: the only way to private records. It prices, charges durably, computes, adds noise, returns.

>>> import numpy as np
>>> from farthing.queries.bounds import ClipNorm
>>> from farthing.queries.mechanisms import Gaussian
>>> from farthing.queries.query import (PerExample, Query, Rows)
>>> from farthing.queries.samplers import Poisson
>>> ledger = Ledger(Budget(1.0, 1e-5))
>>> mean = Query(Poisson(0.1), PerExample(lambda rows, w: rows[0] - w), ClipNorm(1.0), Gaussian(4.0))
>>> countdown = ledger.promise(mean)                 # one unchanging price: counted by tight accounting
>>> private = ledger.over(Rows(np.ones((1000, 2))))  # from here on, records are only asked
>>> answer = private.ask(mean, np.zeros(2))
>>> countdown.left == countdown.times - 1
True

**Two ways to spend.** `promise` fixes a plan of constant prices in advance and counts its answers down by
tight accounting (`accounting.pld`); stopping early is free. Without a promise every answer is charged to a
*filter* (`accounting.filters`), so that the next price may depend on the last answer. A ledger does one or
the other: tight accounting is never used for prices that are chosen adaptively.
"""

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import numpy as np

from farthing import validate
from farthing.accounting.filters import BasicFilter, Filter
from farthing.accounting.tolerance import DEPTH
from farthing.budget import Budget, Drawn, Guarantee
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger import answers, levels
from farthing.ledger.answers import (
    alike,
    form,
    immutable,
    pack,
    refuse_nonfinite,
    to_bytes,
    unpack,
    whole_event,
    with_clip,
)
from farthing.ledger.books import FLOATS, SEEDED, SOUND, Books, Countdown, header_of, rule_of
from farthing.ledger.journal import Journal
from farthing.noise.lattice import Stream
from farthing.queries.events import ApproximateEvent, Event, TurnEvent, encode
from farthing.queries.query import Answer, Query, Receipt, Records

Listener = Callable[[Query, Any, Answer], None]  # called after each answer with the query, w and the answer

_BLOCK = 32  # promised answers reserved in one durable commit


class _Ready(NamedTuple):
    """A query prepared before it is charged: its price, and the shapes of ``w`` and of its sum."""

    query: Query
    event: Event
    form: Any
    shape: tuple[int, ...]


class Ledger(Drawn):
    """A budget with a record of its charges and, after `over`, the only access to private records.

    Parameters
    ----------
    budget : Budget
        The budget.
    journal : path, optional
        The journal file, new or created with the same budget and filter; None for a ledger in memory.
    filter : callable, optional
        The filter for answers that were not promised: `GdpFilter`, or `BasicFilter` if delta is 0.
    stream : Stream, optional
        The source of random bits; a `SeededStream` is for tests and voids every guarantee.
    block : int, default 32
        The number of promised answers, or of answers of one block of a menu, that are reserved in one durable
        commit. `close` gives unused ones back; a crash forfeits them.
    float_noise : bool, default False
        Whether mechanisms with noise that is not on a lattice are allowed; the guarantee then says so.

    Notes
    -----
    A ledger spends in one of two ways. `promise` fixes a plan in advance, which is priced tightly as a whole;
    its answers have turns (0, 1, 2, ...), which are passed to mechanisms and samplers. Without a promise each
    answer is charged to the filter, so that the next price may depend on the last answer; its turn is 0. A
    copy shares the balance: ``copy`` and ``deepcopy`` return the same ledger, and a pickle holds the path of
    its journal.

    Examples
    --------
    >>> import numpy as np, farthing as ft
    >>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    >>> total = ft.PerExample(lambda rows, w: rows[0])
    >>> query = ft.Query(ft.Everyone(), total, ft.ClipNorm(1.0), ft.Gaussian(10.0))
    >>> answer = ledger.over(ft.Rows(np.ones((100, 1)))).ask(query)
    >>> answer.value.shape, round(ledger.share, 3)
    ((1,), 0.139)
    """

    def __init__(
        self,
        budget: Budget,
        *,
        journal: str | os.PathLike[str] | None = None,
        filter: Callable[[Budget], Filter] | None = None,
        stream: Stream | None = None,
        block: int | None = None,
        float_noise: bool = False,
    ) -> None:
        rule = levels.rule_for(budget, filter)
        self._stream = Stream() if stream is None else validate.offers("integers", "choose", stream=stream)
        noise = SEEDED if not self._stream.sound else FLOATS if float_noise else SOUND
        size = validate.count(block=block) if block is not None else _BLOCK
        self._books = Books(rule, Journal(journal, header_of(rule, noise)), noise, size)
        self._records: Records | None = None
        self._ready: _Ready | None = None
        self._listener: Listener | None = None
        self._depth = 0  # how often the budget was divided into parts

    @classmethod
    def open(cls, journal: str | os.PathLike[str], *, block: int | None = None) -> "Ledger":
        """Return the ledger of an existing journal, with the budget and filter that it was created with.

        Parameters
        ----------
        journal : path
            The journal file.
        block : int, optional
            As for `Ledger`.

        Returns
        -------
        Ledger

        Raises
        ------
        InvalidValue
            If there is no journal at this path.
        LedgerLocked
            If its rows do not match their hashes.
        """
        if not Journal.exists(journal):
            raise InvalidValue(f"there is no ledger at {os.fspath(journal)!r}")
        with Journal(journal) as found:
            header = found.header
        if header.get("noise") == SEEDED:
            raise Unsupported(f"the ledger at {os.fspath(journal)!r} was used with {SEEDED}")
        rule, floats = rule_of(header), header.get("noise") == FLOATS
        return cls(rule.budget, journal=journal, filter=lambda _: rule, block=block, float_noise=floats)

    @property
    def filter(self) -> Filter:
        """The privacy filter for answers that were not promised."""
        return self._books.rule

    @property
    def budget(self) -> Budget:
        """The budget that may be spent in all."""
        return self._books.rule.budget

    def over(self, records: Records) -> "Ledger":
        """Return this ledger, with the same balance, bound to these records.

        Parameters
        ----------
        records : Records
            Private records: `Rows`, or anything with a length and ``take(indices)``.

        Returns
        -------
        Ledger
        """
        return self._beside(self._books, levels.bound(self._books, records), self._listener)

    def with_listener(self, listener: "Listener") -> "Ledger":
        """Return this ledger, with the same balance and a ``listener(query, w, answer)`` after each answer.

        The arguments are public. Answers of parts of the budget (`allot`) are not passed to it.
        """
        return self._beside(self._books, self._records, listener)

    def rehearsal(self) -> "Ledger":
        """Return a ledger in memory with this one's budget, filter, promises and balance, without records.

        A method can be tried on made-up records with it: it raises the same refusals, and nothing is charged
        here.
        """
        ledger = self._beside(self._books.rehearsal(), None, None)
        ledger._stream = Stream()
        return ledger

    def _beside(self, books: Books, records: Records | None, listener: "Listener | None") -> "Ledger":
        ledger = object.__new__(Ledger)
        ledger._stream, ledger._depth = self._stream, self._depth
        ledger._books, ledger._records, ledger._listener, ledger._ready = books, records, listener, None
        return ledger

    def ask(self, query: Query, w: Any = None, *, key: str | None = None) -> Answer:
        """Charge a query durably; then compute, add noise and release.

        Parameters
        ----------
        query : Query
            The query.
        w : optional
            Its parameters: public, finite numbers.
        key : str, optional
            A name under which the answer is stored: the same key, query and ``w`` return it again without a
            charge.

        Returns
        -------
        Answer
            The noisy value, and the receipt of its charge.

        Raises
        ------
        BudgetSpent
            If the query does not fit the budget; nothing is charged then.
        PromiseBroken
            If the ledger has a plan that does not include this query.
        NotReleased
            If the key was charged but its answer was never stored, because of a crash in between.
        """
        answer = self._answered(query, w, key)
        if self._listener is not None:
            self._listener(query, w, answer)
        return answer

    def _answered(self, query: Query, w: Any, key: str | None) -> Answer:
        answers.refuse_unready(query, self._records)
        if self._books.noise == SOUND and not getattr(query.mechanism, "on_lattice", True):
            raise Unsupported(
                f"{query.mechanism!r} adds float noise: use lattice noise, or Ledger(budget, "
                "float_noise=True), whose guarantee states it"
            )
        refuse_nonfinite(w)
        ready = self._readied(query, w)
        event = ready.event
        ready = ready._replace(query=self._books.memories.begin(query, event, self._records))
        if key is None:
            receipt = with_clip(self._books.take(event), query)
            return Answer(self._compute(ready, w, receipt.turn), receipt)
        # the field's original name, so that answers stored by earlier versions are found
        mechanism = repr(query.mechanism).replace("noise_multiplier=", "noise=")
        asked = [encode(event), mechanism, type(query.bound).__name__, query.bound.scale, w]
        request = hashlib.sha256(to_bytes(asked)).hexdigest()
        stored = self.journal.find_answer(key, request)
        if stored is not None:
            seq, digest, value = unpack(stored)
            receipt = Receipt(seq, digest, event, turn=self._books.turn(seq))
            return Answer(value, with_clip(receipt, query))
        receipt = with_clip(self._books.take(event, key, request), query)
        answer = Answer(self._compute(ready, w, receipt.turn), receipt)
        self.journal.store_answer(key, pack(answer))
        return answer

    def _readied(self, query: Query, w: Any) -> "_Ready":
        """Return the price and the shape of an answer, computed once per query and shape of ``w``.

        The shape is that of the sum over no records: errors of the caller are raised here, before any charge.
        """
        assert self._records is not None
        query.check(self._records)  # each time: records may grow beyond what the price holds for
        ready, shaped = self._ready, form(w)  # read once: another thread may replace it
        if ready is not None and ready.query is query and ready.form == shaped and immutable(query):
            if query.remembers and not isinstance(ready.event, TurnEvent):  # promised since then
                return ready._replace(event=self._event(query))
            return ready
        if ready is not None and alike(ready.query, query) and ready.form == shaped:
            shape = ready.shape
        else:
            shape = answers.shape_of(answers.zero_sum(query.contribution, self._records, w, query.bound))
        query.mechanism.check(query.bound, shape)
        if (grid := getattr(query.mechanism, "grid", None)) is not None:
            grid(query.bound, math.prod(shape))  # raises if the noise needs too fine a grid
        self._ready = ready = _Ready(query, self._event(query), shaped, shape)
        return ready

    def _compute(self, ready: "_Ready", w: Any, turn: int) -> Any:
        """Draw, sum and release after the charge is written. If anything fails, noise alone is released.

        With a seeded stream, which guarantees nothing and is meant for made-up records, errors are raised.
        """
        query, records, drawn = ready.query, self._records, None
        assert records is not None
        sound = self._stream.sound
        with np.errstate(all="ignore") if sound else nullcontext():  # a warning would reveal a record
            try:
                drawn = query.draw(records, self._stream, turn)
                total = query.total(records, drawn, w)
                if answers.shape_of(total) != ready.shape:
                    raise InvalidValue("the bounded sum over records differs in shape from that over none")
                return query.mechanism.release(total, query.bound, self._stream, turn)
            except Exception as error:
                if not sound:
                    raise
                refusal = answers.refusal(error)
            if refusal is not None:  # raised outside the handler, without the private error
                raise refusal
            return answers.released(query, records, drawn, w, self._stream, turn)

    def promise(self, query: Query | Event, times: int | None = None) -> Countdown:
        """Fix the number of answers at one price, before the first answer.

        Parameters
        ----------
        query : Query or Event
            The query or its price. The bound may change later as long as the price does not.
        times : int, optional
            The number of answers; as many as fit by default.

        Returns
        -------
        Countdown
            The number of answers that were promised, and that are left.

        Raises
        ------
        BudgetSpent
            If the plan does not fit.
        PromiseBroken
            If the ledger has already answered a query.

        Notes
        -----
        Several promises form a plan and are priced together. Promising a query again returns its promise. A
        query whose noise or draws depend on the turn is promised as one event of all turns (`Query.plan`).
        """
        times = None if times is None else validate.count(times=times)
        if isinstance(query, Query) and query.remembers:
            return self._books.promise_turns(query, times)
        return self._books.promise(query.price(self.budget) if isinstance(query, Query) else query, times)

    def _event(self, query: Query | Event) -> Event:
        """Return the event that is charged for one answer: its own price, or a turn of its promise."""
        if not isinstance(query, Query):
            return query
        return self._books.promised_as(query) if query.remembers else query.price(self.budget)

    def reserve(self, query: Query, count: int) -> None:
        """Charge ``count`` answers in advance in one durable commit; `close` gives unused ones back.

        Parameters
        ----------
        query : Query
            The query.
        count : int
            The number of answers.
        """
        self._books.reserve(self._event(query), validate.count(count=count))

    def affords(self, query: Query | Event, times: int = 1) -> bool:
        """Return whether ``times`` more answers fit the budget. The result depends on no record.

        Parameters
        ----------
        query : Query or Event
            The query or its price.
        times : int, default 1
            The number of answers.

        Returns
        -------
        bool
        """
        return self._books.affords(self._event(query), validate.count(times=times))

    def allot(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        filter: Callable[[Budget], Filter] | None = None,
    ) -> "Ledger":
        """Charge a part of the budget at once and in full, and return a ledger that may spend it.

        Parameters
        ----------
        epsilon, delta : float, optional
            The part; by default all that is left (`rest`).
        filter : callable, optional
            The privacy filter of the part: any under basic composition, otherwise one of the same kind, which
            is charged for the total that it allows (μ-GDP or ρ-zCDP).

        Returns
        -------
        Ledger
            A ledger in memory over the same records; its cost is already in this ledger's journal.

        Raises
        ------
        BudgetSpent
            If the part does not fit.
        """
        levels.refuse_parts(self._books.rule)
        if self._depth == DEPTH:
            raise Unsupported(f"a part cannot be divided more than {DEPTH} times")
        if epsilon is None and delta is None:
            budget = self.rest
        elif epsilon is None or delta is None:
            raise InvalidValue(f"pass both epsilon and delta of the part, or neither: {epsilon!r}, {delta!r}")
        else:
            budget = self.budget.with_(epsilon, delta)
        basic = isinstance(self._books.rule, BasicFilter)
        if filter is None and not basic:
            filter = type(self._books.rule)
        part = Ledger(budget, filter=filter, stream=self._stream, float_noise=self._books.noise == FLOATS)
        whole = ApproximateEvent(budget.epsilon, budget.delta) if basic else whole_event(part._books.rule)
        try:
            self._books.take(whole)
        except BudgetSpent:
            wanted = f"epsilon {budget.epsilon:g}, delta {budget.delta:g}, but {1 - self.share:.3%}"
            raise BudgetSpent(f"budget exhausted: requested {wanted} is left of {self.budget}") from None
        part._books.plans, part._books.parent = isinstance(whole, ApproximateEvent), self._books
        part._records, part._depth = self._records, self._depth + 1
        return part

    @property
    def rest(self) -> Budget:
        """The largest budget that a part may have, which is this one minus the charges.

        The GDP filter keeps δ and reduces μ²; zCDP does the same with ρ; basic composition reduces ε and δ.
        A
        plan and an RDP filter with charges raise `Unsupported`: their remainder is not a budget.
        """
        return self._books.rest()

    def note(self, text: str) -> None:
        """Record an assumption, such as that a count is public; `guarantee` states it.

        Parameters
        ----------
        text : str
            The assumption. A note on a part of a budget (`allot`) is also recorded in the ledger that paid
            for it.
        """
        self._books.note(text)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything that was or will be released, at any stopping time."""
        return self._books.guarantee()

    @property
    def guarantees(self) -> dict[float, Guarantee]:
        """The guarantee of each level of personal budget by its ε; one entry if all have the same budget."""
        return levels.guarantees(self._books)

    @property
    def spent(self) -> Guarantee:
        """The guarantee of the charges so far, by itself (see its note)."""
        return self._books.spent()

    @property
    def share(self) -> float:
        """The share of the budget that is charged, from 0 to 1."""
        return self._books.share()

    @property
    def journal(self) -> Journal:
        """The journal, whose rows can be read, verified and exported."""
        return self._books.journal

    def refund(self) -> None:
        """Give back the reserved answers that were not used."""
        self._books.refund()

    def close(self) -> None:
        """Give back the reserved answers that were not used, and close the journal."""
        self._books.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        path = self._books.journal.path
        if path is None:
            raise Unsupported("a ledger in memory cannot be sent to another process: use a journal file")
        if not self._stream.sound:
            raise Unsupported("a ledger with seeded noise cannot be pickled")
        return Ledger.open, (path,)

    def __repr__(self) -> str:
        return f"<Ledger {self.budget}, {self.share:.1%} charged>"
