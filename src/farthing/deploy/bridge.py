"""Connect a coordinator with the process that carries its messages: bytes over a Unix socket.

The coordinator listens (`Bridge`, a `Transport`); a carrier, which can reach the nodes, connects and calls
`carry`. So keys, checkpoint and algorithm stay in the coordinator's own process, and a carrier may die: the
next one that connects gets the requests that are still open. Frames are a line of JSON and raw bytes; no
pickle.

An answer is identified by the SHA-256 of the request that it answers, not by the exchange in which the
request was sent: a late answer, which comes after its exchange has ended, is kept until the same request is
sent again. A carrier that is behind skips exchanges that are over.

`Party` and `Status` are the coordinator's record of each party: what it announced, and its state in the run.
All of it is public.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from farthing.budget import Budget
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import LARGEST_ANSWER, RoundId
from farthing.deploy.messages.signed import Fields, Reason, refuse
from farthing.federated.terms import Terms

Carry = Callable[[Mapping[int, bytes], float], Iterable[tuple[int, bytes]]]

_LARGEST_LINE = 2**20


class Bridge:
    """A transport that reaches each party's node, by number, over the carrier that connected last."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._nodes = dict(nodes)
        self._names = {node: name for name, node in nodes.items()}
        self._folder = tempfile.TemporaryDirectory(prefix="farthing-")  # readable by its owner only
        self.path = Path(self._folder.name) / "bridge"  # short, because paths of sockets are limited
        self._listener = Listener(str(self.path), "AF_UNIX")
        self._changed = threading.Condition()
        self._carrier: Connection | None = None
        self._number, self._closed = 0, False
        self._open: dict[int, str] = {}  # the digest of each node's unanswered request
        self._late: dict[int, bytes] = {}  # answers that came after their exchange had ended
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def parties(self) -> Sequence[str]:
        return list(self._nodes)

    @property
    def connected(self) -> bool:
        """Return whether a carrier is connected, as far as is known."""
        with self._changed:
            return self._carrier is not None

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        until = time.monotonic() + seconds
        left = {self._nodes[name]: request for name, request in requests.items()}
        for node, request in list(left.items()):
            if self._open.get(node) != (asked := _digest(request)):
                self._open[node] = asked
                self._late.pop(node, None)
            elif node in self._late:
                del left[node], self._open[node]
                yield self._names[node], self._late.pop(node)
        while left and (carrier := self._there(until)) is not None:
            try:
                yield from self._carried(carrier, left, until)
                return
            except (OSError, EOFError, ValueError):
                self._lost(carrier)

    def _carried(
        self, carrier: Connection, left: dict[int, bytes], until: float
    ) -> Iterator[tuple[str, bytes]]:
        """Run one exchange with one carrier; remove answered requests from ``left``."""
        self._number += 1
        header = {"number": self._number, "seconds": max(0.0, until - time.monotonic())}
        sizes = [[node, len(request)] for node, request in left.items()]
        carrier.send_bytes(_packed(header | {"sizes": sizes}, *left.values()))
        while left and carrier.poll(max(0.0, until - time.monotonic())):
            said, body = _unpacked(carrier.recv_bytes(LARGEST_ANSWER))
            node = said.get("node")
            if node is None:
                if said.get("number") == self._number:
                    return  # the carrier has sent all answers
            elif node not in self._open or said.get("request") != self._open[node]:
                continue  # it answers a request that is no longer open
            elif node in left:
                del left[node], self._open[node]
                yield self._names[node], body
            else:
                self._late[node] = body

    def close(self) -> None:
        """Stop listening; a connected carrier notices."""
        self._closed = True
        with contextlib.suppress(OSError):  # unblocks accept
            Client(str(self.path), "AF_UNIX").close()
        self._thread.join()
        self._listener.close()
        with self._changed:
            if self._carrier is not None:
                self._carrier.close()
                self._carrier = None
        self._folder.cleanup()

    def _accept(self) -> None:
        while not self._closed:
            try:
                arrived = self._listener.accept()
            except OSError:
                return
            with self._changed:
                before, self._carrier = self._carrier, arrived
                if before is not None:
                    before.close()
                self._changed.notify_all()

    def _there(self, until: float) -> Connection | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._carrier is not None, timeout=max(0.0, until - time.monotonic())
            )
            return self._carrier if time.monotonic() < until else None

    def _lost(self, carrier: Connection) -> None:
        with self._changed:
            if self._carrier is carrier:
                self._carrier = None
            carrier.close()


def carry(path: str | os.PathLike[str], exchange: Carry) -> None:
    """Serve the coordinator's exchanges as its carrier until the coordinator disconnects."""
    with Client(os.fspath(path), "AF_UNIX") as coordinator, contextlib.suppress(EOFError, OSError):
        while True:
            asked, bodies = _unpacked(coordinator.recv_bytes())
            while coordinator.poll():  # earlier exchanges are over: skip them
                asked, bodies = _unpacked(coordinator.recv_bytes())
            requests, place = {}, 0
            for node, size in asked["sizes"]:
                requests[node] = bodies[place : place + size]
                place += size
            number = asked["number"]
            for node, answer in exchange(requests, asked["seconds"]):
                about = {"number": number, "node": node, "request": _digest(requests.get(node, b""))}
                coordinator.send_bytes(_packed(about, answer))
            coordinator.send_bytes(_packed({"number": number}))


def _digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()


def _packed(header: dict[str, Any], *bodies: bytes) -> bytes:
    return b"".join([json.dumps(header).encode("ascii"), b"\n", *bodies])


def _unpacked(frame: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, body = frame.partition(b"\n")
    if len(line) > _LARGEST_LINE:
        raise ValueError("a line is too long")
    header = json.loads(line)
    if not isinstance(header, dict):
        raise ValueError("a frame must begin with a JSON object")
    return header, body


# standard deviations: an honest update is longer with probability 1e-12
_TAIL = math.sqrt(2 * math.log(1e12))


class State(StrEnum):
    """A party's state in a run."""

    HERE = "here"
    MISSING = "missing"  # did not answer the last round
    SPENT = "spent"  # cannot afford another round
    REFUSED = "refused"  # refused the terms, or its answer was refused
    GONE = "gone"  # missed too many rounds


@dataclass(frozen=True, slots=True)
class PartyStatus:
    """A party's state and figures, for the live page."""

    name: str
    state: State
    left: int
    missed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """A run's progress."""

    run: str
    round: int
    alive: int
    parties: tuple[PartyStatus, ...]


@dataclass(slots=True, eq=False)
class Party:
    """A party as the coordinator sees it."""

    name: str
    budget: Budget
    records: int
    colluding: int
    seen: tuple[int, str]  # the newest row of its ledger that the coordinator knows of
    left: int = 0
    state: State = State.HERE
    missed: int = 0
    reason: str = ""

    @classmethod
    def announced(cls, name: str, said: Fields, turn: RoundId) -> "Party":
        """Return a party from its announcement; refuse a malformed one."""
        if RoundId.of(said) != turn:
            refuse(Reason.STALE, "the announcement is for another run")
        said.take("about")
        budget = forms.budget_of(said.inner("budget"))
        records, colluding = said.whole("records", 1), said.whole("colluding")
        row = forms.row_of(said.take("row"))
        said.done()
        return cls(name, budget, records, colluding, row or (0, "0" * 64))

    @property
    def asked(self) -> bool:
        """Return whether the next round asks it."""
        return self.left > 0 and self.state in (State.HERE, State.MISSING)

    @property
    def status(self) -> PartyStatus:
        return PartyStatus(self.name, self.state, self.left, self.missed, self.reason)

    def told(self, left: int, seen: tuple[int, str] | None) -> None:
        """Note the rounds left that it announces, and the newest row of its ledger."""
        self.left, self.seen = left, seen or self.seen

    def answered(self) -> None:
        """Note that it answered a round."""
        self.missed, self.reason = 0, ""
        self.state = State.HERE if self.left else State.SPENT

    def absent(self, patience: int) -> None:
        """Note that it missed a round."""
        if self.state in (State.HERE, State.MISSING):
            self.missed += 1
            self.state = State.GONE if self.missed >= patience else State.MISSING

    def refused(self, reason: Reason) -> None:
        """Note that it refused, for good or for this round."""
        match reason:
            case Reason.SPENT | Reason.ROUNDS:
                self.left, self.state = 0, State.SPENT
            case Reason.LOST | Reason.LOCKED | Reason.INTERNAL | Reason.MEMBERS | Reason.STALE:
                pass  # it may answer the next round
            case _:
                self.excluded(reason)
        self.reason = str(reason)

    def excluded(self, reason: Reason) -> None:
        """Exclude it: it refuses the terms, or signed an answer that breaks the rules."""
        self.left, self.state, self.reason = 0, State.REFUSED, str(reason)

    def snapshot(self) -> list[Any]:
        """Return all mutable state, as JSON values."""
        return [self.left, str(self.state), self.missed, self.reason, *self.seen]

    def restore(self, said: list[Any]) -> None:
        """Restore the state that `snapshot` returned."""
        self.left, state, self.missed, self.reason, seq, text = said
        self.state, self.seen = State(state), (seq, text)


def longest(terms: Terms, records: int, size: int) -> float:
    """Return the bound on an honest upload's norm: all records clipped, and noise up to a probability of
    1e-12.

    |N(0, I)| exceeds √d + t with a chance below e^(-t²/2) (Gaussian concentration; the norm is 1-Lipschitz).
    """
    noise = math.sqrt(terms.variance) * (math.sqrt(size) + _TAIL)
    return (terms.bound.clip * (records + 1) + noise) * (1 + 1e-6)
