"""Run the coordinator's side of one round of secure aggregation, over any transport.

There are five exchanges: keys, sealed shares, masked vectors, consents, revealed shares. A party that is late
in one is left out of the following ones; the sum can be computed as long as at least the threshold's number
of parties stay until the end.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Question, RoundId
from farthing.deploy.messages.signed import (
    SIGNATURE,
    MessageKind,
    Opened,
    Reason,
    Refused,
    digest,
    pack_table,
    refuse,
    table_size,
    unpack_table,
)
from farthing.deploy.messages.transport import Check, Request
from farthing.deploy.secagg.masked_noise import own_cell
from farthing.deploy.secagg.protocol import (
    ADVERT,
    SEALED,
    SHARE,
    Aggregator,
    least_threshold,
    session_of,
    signed_words,
    unpack_words,
    word_bytes,
)
from farthing.federated.terms import Terms

Array = NDArray[np.float64]
Row = tuple[int, str] | None
Exchange = Callable[
    [Mapping[str, Request], MessageKind, float, Check, int], tuple[dict[str, Opened], set[str]]
]

_TAIL = 40.0  # standard deviations of noise; exceeded with probability below 1e-300


class Session:
    """A round in which the coordinator sees only the sum."""

    def __init__(
        self,
        question: Question,
        weights: bytes,
        terms: Mapping[str, Terms],
        records: int,
        enrolled: Mapping[str, bytes],
        colluding: int,
        seconds: float,
    ) -> None:
        self._question, self._weights, self._terms = question, weights, terms
        self._records, self._enrolled = records, enrolled
        self._colluding, self._seconds = colluding, seconds
        self._size = math.prod(question.answered)
        self.charged: dict[str, tuple[int, Row, Row]] = {}  # party -> rounds left, charged row, newest row
        self.arrived: list[str] = []

    def run(self, exchange: Exchange, seen: Mapping[str, list[Any]]) -> Array | None:
        """Return the sum of all uploads, or None where too few parties stayed."""
        turn, most = self._question.turn.header(), len(self._terms)
        header = self._question.header() | {"weights": digest(self._weights)}

        def step(
            kind: MessageKind,
            back: MessageKind,
            requests: Mapping[str, tuple[dict[str, Any], bytes]],
            length: int,
        ) -> dict[str, Opened]:
            sent = {name: (kind, *request) for name, request in requests.items()}
            return exchange(sent, back, self._seconds, self._check, length)[0]

        openings = {name: (header | {"seen": seen[name]}, b"") for name in self._terms}
        keys = step(MessageKind.OPENING, MessageKind.ADVERT, openings, ADVERT)
        adverts = {name: opened.body for name, opened in keys.items()}
        aggregator = Aggregator(session_of(header), self._enrolled, adverts)
        members = len(aggregator.adverts)
        threshold = least_threshold(members, self._colluding, self._question.invitation.survivors)
        if members < max(threshold, 2):
            return None
        roster = pack_table(aggregator.settle(threshold).adverts)
        requests = {name: (turn | {"threshold": threshold}, roster) for name in aggregator.adverts}
        came = step(MessageKind.ROSTER, MessageKind.SHARES, requests, table_size(most, SEALED))
        routed = aggregator.route(_tables(came, most, SEALED))
        if len(routed) < threshold:
            return None
        each = word_bytes(self._reach())
        requests = {
            name: (turn | {"table": len(table), "each": each}, table + self._weights)
            for name, table in ((name, pack_table(boxes)) for name, boxes in routed.items())
        }
        masked = step(MessageKind.MASKED_QUESTION, MessageKind.MASKED_ANSWER, requests, 8 * self._size)
        for name, opened in masked.items():
            if len(opened.body) == each * self._size:
                aggregator.add(name, unpack_words(opened.body, self._size, each))
        if len(aggregator.arrived) < threshold:
            return None
        arrived = pack_table(dict.fromkeys(aggregator.arrived, b""))
        requests = dict.fromkeys(aggregator.arrived, (turn, arrived))
        signed = step(MessageKind.SURVIVORS, MessageKind.CONSENT, requests, SIGNATURE)
        consents = aggregator.consents({name: opened.body for name, opened in signed.items()})
        requests = {name: (turn, pack_table(consents)) for name in consents}
        told = step(MessageKind.REVEAL, MessageKind.REVEALED, requests, table_size(most, 1 + SHARE))
        try:
            words = aggregator.result(_tables(told, most, 1 + SHARE))
        except Refused:
            return None
        self.arrived = aggregator.arrived
        cell = own_cell(next(iter(self._terms.values())), self._size)
        return (signed_words(words, each).astype(np.float64) * cell).reshape(self._question.answered)

    def _check(self, name: str, opened: Opened) -> None:
        said = opened.fields()
        if RoundId.of(said) != self._question.turn:
            refuse(Reason.STALE, "the answer is for another run or round")
        if opened.kind is MessageKind.MASKED_ANSWER:
            if said.hexadecimal("weights", 32) != digest(self._weights):
                refuse(Reason.CONFLICT, "the answer is about other weights")
            if said.hexadecimal("update", 32) != digest(opened.body):
                refuse(Reason.FORGED, "the update does not match its digest")
            left = said.whole("left")
            self.charged[name] = left, forms.row_of(said.take("row")), forms.row_of(said.take("head"))

    def _reach(self) -> float:
        """Return the largest sum in cells: all drawn records clipped (twice as many as announced), and noise.

        A sum that is larger wraps around and is wrong; no party loses anything by it.
        """
        terms = next(iter(self._terms.values()))  # clipping norm and noise are equal for all
        noise = _TAIL * math.sqrt(terms.variance) * len(self._terms)
        drawn = sum(term.expected for term in self._terms.values())
        most = min(self._records, drawn + _TAIL * math.sqrt(drawn))
        return (2 * most * terms.bound.clip + noise) / own_cell(terms, self._size)


def _tables(came: Mapping[str, Opened], most: int, length: int) -> dict[str, dict[str, bytes]]:
    """Return each party's table; leave out malformed ones."""
    found = {}
    for name, opened in came.items():
        try:
            found[name] = unpack_table(opened.body, most, (length,))
        except Refused:
            continue
    return found
