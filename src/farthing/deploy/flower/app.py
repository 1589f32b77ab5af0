"""Flower's two apps, both of which only carry bytes: no key, no record and no decision is in them.

`client` hands a request to the guard's Unix socket and returns what the guard says. `server` connects to the
coordinator's `Bridge`, sends what it is given to nodes over Flower's grid, and hands the answers back. What
is signed, checked, charged and counted is so at both ends, out of reach of this file.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from farthing.deploy.bridge import carry
from farthing.deploy.flower.superlink import BRIDGE
from farthing.deploy.messages.forms import call

GUARD = "guard"  # the entry of a node's configuration with the socket of its guard

_AGAIN, _SOON_AGAIN = 20.0, 1.0  # seconds after which a request is sent once more: unanswered, or failed
_LASTING = 200.0  # seconds after which Flower forgets a message: long enough for a busy machine
_GUARD_SECONDS = 120.0

client = ClientApp()
server = ServerApp()


@client.query()
def relay(message: Message, context: Context) -> Message:
    """Asks the guard. Where it does not answer this raises, and the party is missing from the round."""
    path = str(context.node_config[GUARD])
    answer = call(path, opened(message), seconds=_GUARD_SECONDS)
    return Message(wrapped(answer), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Carries for the coordinator until it goes away."""
    hurry()
    carry(os.environ[BRIDGE], Carrier(grid).exchange)


def hurry() -> None:
    """Looks for the parts of a message that are still on their way after .1 s, not Flower's whole second.

    A message is announced before its parts arrive, so that whoever looks often sees it too early.
    """
    from flwr.supercore.inflatable import inflatable_utils

    defaults = getattr(getattr(inflatable_utils, "pull_objects", None), "__kwdefaults__", None)
    if defaults and "initial_backoff" in defaults:
        defaults["initial_backoff"] = 0.1


class Looks:
    """When to look again: every look costs the SuperLink as much as a message does.

    First after half of what it took the last time, then after an eighth of it, then ever more rarely. Two
    who wait for each other in this way still come down to what the work itself takes.
    """

    def __init__(self) -> None:
        self._last, self._began, self._pauses = 0.2, 0.0, iter([0.0])

    def begin(self) -> None:
        self._began, self._pauses = time.monotonic(), self._planned(min(2.0, self._last))

    def wait(self) -> None:
        time.sleep(next(self._pauses))

    def _planned(self, last: float) -> Iterator[float]:
        yield max(0.05, last / 2)
        pause = max(0.05, last / 8)
        while True:
            yield pause
            pause = min(1.0, 1.15 * pause)

    def end(self) -> None:
        self._last = time.monotonic() - self._began


class Carrier:
    """Requests to nodes over Flower's grid, and their answers back.

    A request that was sent in an earlier exchange is not sent anew: its answer may be under way.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._looks = grid, Looks()
        self._sent: dict[tuple[int, bytes], tuple[float, set[str]]] = {}  # when last, and as which messages

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> Iterator[tuple[int, bytes]]:
        """(node, answer) as they come. What is not answered, or answered by an error, is sent again."""
        until, left = time.monotonic() + seconds, dict(requests)
        self._sent = {key: self._sent[key] for key in left.items() if key in self._sent}
        while left and time.monotonic() < until:
            if self._send(left, seconds):
                self._looks.begin()
            self._looks.wait()
            numbers = {number: key for key in left.items() for number in self._sent[key][1]}
            for message in self._grid.pull_messages(list(numbers)):
                key = numbers.pop(message.metadata.reply_to_message_id, None)
                if key is None or key[0] not in left:
                    continue
                if message.has_content():
                    del left[key[0]], self._sent[key]
                    self._looks.end()
                    yield key[0], opened(message)
                else:  # the node is not there, or its guard
                    when, others = self._sent[key]
                    others.discard(message.metadata.reply_to_message_id)
                    self._sent[key] = (min(when, time.monotonic() - _AGAIN + _SOON_AGAIN), others)

    def _send(self, left: Mapping[int, bytes], seconds: float) -> bool:
        now = time.monotonic()
        due = [key for key in left.items() if now - self._sent.get(key, (-math.inf, set()))[0] >= _AGAIN]
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
    content = message.content["farthing"]
    value = content["bytes"] if isinstance(content, ConfigRecord) else b""
    return value if isinstance(value, bytes) else b""
