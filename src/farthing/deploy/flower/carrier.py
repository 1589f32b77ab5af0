"""Carry requests to nodes over Flower's grid, and answers back: when to send, to ask, and to send again.

It needs the messages of Flower and nothing else of it, which takes long to import.
"""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict

GUARD = "guard"  # the entry of a node's configuration with the socket of its guard
GUARD_SECONDS = 120.0

# seconds after which an unanswered request is sent again: ten times what the last answer took, within these,
# and twice as long every time
_SOONEST, _AGAIN = 3.0, 20.0
_SOON_AGAIN = 1.0  # seconds after which a failed request is
_LASTING = 200.0  # seconds after which Flower drops a message: long enough for a busy machine
_MOMENT = 0.01  # seconds between two polls that are held: answers that come together are fetched together
_HELD = 0.2  # seconds: a poll that took longer was held, or the SuperLink is busy


class Grid(Protocol):
    """The part of Flower's grid that carries messages."""

    def push_messages(self, messages: Any) -> Any:
        """Send messages; return their numbers."""

    def pull_messages(self, message_ids: Any) -> Any:
        """Return the replies to some messages that have come."""


def shorten_backoff() -> None:
    """Shorten Flower's first wait for the parts of a message from 1 s to 0.1 s.

    A message is announced before its parts arrive, so a frequent poll sees it before it is complete.
    """
    from flwr.supercore.inflatable import inflatable_utils

    defaults = getattr(getattr(inflatable_utils, "pull_objects", None), "__kwdefaults__", None)
    if defaults and "initial_backoff" in defaults:
        defaults["initial_backoff"] = 0.1


class PollSchedule:
    """A schedule of pauses between polls: every poll costs the SuperLink as much as a message does.

    The first pause is half of the last waiting time, then an eighth of it, then ever longer. Two sides that
    poll each other in this way still converge to the time that the work itself takes.
    """

    def __init__(self) -> None:
        self._last, self._began, self._pauses = 0.2, 0.0, iter([0.0])
        self._took = _AGAIN  # nobody has answered yet

    def begin(self) -> None:
        self._began, self._pauses = time.monotonic(), self._planned(min(2.0, self._last))

    def pause(self, waited: float = 0.0) -> float:
        """Return the next pause in seconds, after a poll that took so long.

        A SuperLink of ours holds a poll until there is an answer: there is no need to wait then.
        """
        return 0.0 if waited >= _HELD else next(self._pauses)

    def _planned(self, last: float) -> Iterator[float]:
        yield max(0.05, last / 2)
        pause = max(0.05, last / 8)
        while True:
            yield pause
            pause = min(1.0, 1.15 * pause)

    def again(self, times: int) -> float:
        """Return the seconds after which a request that was sent so many times is sent again.

        It may be lost, with a SuperLink or a node that was killed. What is large in it is not sent twice, and
        a guard that is asked again returns the answer that it kept.
        """
        return min(_AGAIN, max(_SOONEST, 10 * self._took) * 2.0 ** max(0, times - 1))

    def end(self) -> None:
        self._took = self._last = time.monotonic() - self._began


class Carrier:
    """A carrier that sends requests to nodes over Flower's grid and returns their answers.

    A request that was sent in an earlier exchange is not sent again at once: its answer may be under way.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._schedule = grid, PollSchedule()
        self._sent: dict[tuple[int, bytes], tuple[float, set[str]]] = {}  # time last sent, message ids

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> Iterator[tuple[int, bytes] | float]:
        """Yield (node, answer) as they come, and pauses; send unanswered and failed requests again."""
        until, left, waited = time.monotonic() + seconds, dict(requests), 0.0
        self._sent = {key: self._sent[key] for key in left.items() if key in self._sent}
        while left and time.monotonic() < until:
            if self._send(left, seconds):
                self._schedule.begin()
            held = getattr(self._grid, "holds", False)
            yield _MOMENT if held else self._schedule.pause(waited)
            numbers = {number: key for key in left.items() for number in self._sent[key][1]}
            began = time.monotonic()
            found = list(self._grid.pull_messages(list(numbers)))
            waited = time.monotonic() - began
            for message in found:
                key = numbers.pop(message.metadata.reply_to_message_id, None)
                if key is None or key[0] not in left:
                    continue
                if message.has_content() and (answer := opened(message)):
                    del left[key[0]], self._sent[key]
                    self._schedule.end()
                    yield key[0], answer
                else:  # the node or its guard is not running, or sends what is no answer
                    when, others = self._sent[key]
                    others.discard(message.metadata.reply_to_message_id)
                    soon = time.monotonic() - self._schedule.again(len(others)) + _SOON_AGAIN
                    self._sent[key] = (min(when, soon), others)

    def _send(self, left: Mapping[int, bytes], seconds: float) -> bool:
        now, due = time.monotonic(), []
        for key in left.items():
            when, numbers = self._sent.get(key, (-math.inf, set()))
            if now - when >= self._schedule.again(len(numbers)):
                due.append(key)
        if not due:
            return False
        lasting = max(_LASTING, seconds)
        messages = [Message(wrapped(request), node, "query", ttl=lasting) for node, request in due]
        for key, number in zip(due, self._grid.push_messages(messages), strict=True):
            known = self._sent[key][1] if key in self._sent else set()
            self._sent[key] = (now, known | ({number} if number else set()))
        return True


def wrapped(content: bytes) -> RecordDict:
    return RecordDict({"farthing": ConfigRecord({"bytes": content})})


def opened(message: Message) -> bytes:
    """Return the bytes that a message carries; none where it is not one of ours."""
    content = message.content.get("farthing")
    value = content.get("bytes") if isinstance(content, ConfigRecord) else b""
    return value if isinstance(value, bytes) else b""
