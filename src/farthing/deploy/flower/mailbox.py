"""Keep the messages of a SuperLink in memory, each for its reader, until it is fetched or expires.

A message is announced with the numbers of its parts (the SHA-256 of their bytes), then its parts come. A
reader gets the parts of messages that it fetched and no others, until it confirms them. Nodes run on machines
of other people, so a node may reply only once to each message that it fetched, its replies may use a limited
amount of memory, and only the last few messages that it does not confirm are kept.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RELAY = 0  # the reader of replies; nodes have numbers of their own
MOST = 2**31  # bytes of messages in memory; more are refused
MOST_OF_NODE = 2**30 + 2**20  # bytes of one node's replies: the longest answer of a guard
_UNCONFIRMED = 4  # messages of a node that it may fetch before it confirms the first
_SWEEP = 1.0  # seconds between two looks for messages that have expired


@dataclass(slots=True, eq=False)
class _Mail:
    """A message and the tree of its parts; ``missing`` are those that did not come yet."""

    head: Any
    tree: Any
    parts: set[str]
    missing: set[str]
    sender: int
    reader: int
    until: float


class Mailbox:
    """Messages for readers, and their parts, until they are fetched or expire."""

    def __init__(self) -> None:
        self._mail: dict[str, _Mail] = {}  # by the message's number, in the order of arrival
        # readers, and parts of messages that were fetched and not confirmed yet
        self._taken: dict[str, tuple[int, set[str]]] = {}
        self._asked: dict[str, tuple[int, float]] = {}  # the node that may reply to a message, and until when
        self._parts: dict[str, bytes] = {}
        self._size, self._looked = 0, -math.inf

    def add(self, head: Any, tree: Any, sender: int, reader: int, now: float) -> set[str] | None:
        """Announce a message; return the parts that are missing, None where it is not the sender's to send.

        A second reply of a node to the same message replaces the first, which nobody has fetched.
        """
        self._expire(now)
        number, told = head.metadata.message_id, float(head.metadata.ttl)
        before = self._mail.get(number)
        if number != tree.object_id or (before is not None and before.sender != sender) or told != told:
            return None
        answers = head.metadata.reply_to_message_id
        for old in [other for other, mail in self._mail.items() if _replaced(mail, sender, answers)]:
            self._drop(self._mail.pop(old).parts)
        parts = set(_numbers(tree))
        missing = {name for name in parts if name not in self._parts}
        self._mail[number] = _Mail(head, tree, parts, missing, sender, reader, now + min(told, 3600.0))
        return set(missing)

    def put(self, name: str, content: bytes, sender: int) -> set[int] | None:
        """Store a part; return the readers whose messages it completes, None where nobody asked for it."""
        waiting = [mail for mail in self._mail.values() if name in mail.missing]
        size = len(content)
        if not any(mail.sender == sender for mail in waiting) or self._size + size > MOST:
            return None
        if sender != RELAY and self._held(sender) + size > MOST_OF_NODE:
            return None
        if hashlib.sha256(content).hexdigest() != name:
            return None
        self._parts[name], self._size = content, self._size + size
        for mail in waiting:
            mail.missing.discard(name)
        return {mail.reader for mail in waiting if not mail.missing}

    def _held(self, sender: int) -> int:
        """Return the bytes of messages that a node sent."""
        parts = {name for mail in self._mail.values() if mail.sender == sender for name in mail.parts}
        return sum(len(self._parts.get(name, b"")) for name in parts)

    def part(self, name: str, reader: int) -> bytes | None:
        """Return a part of a message that a reader has fetched."""
        ours = any(to == reader and name in parts for to, parts in self._taken.values())
        return self._parts.get(name) if ours else None

    def fetch(self, reader: int, replies: set[str] | None, now: float, most: int) -> list[_Mail]:
        """Return and remove the complete messages for a reader; of replies, those to some messages."""
        self._expire(now)
        found = [
            (number, mail)
            for number, mail in self._mail.items()
            if mail.reader == reader
            and not mail.missing
            and (replies is None or mail.head.metadata.reply_to_message_id in replies)
        ][:most]
        for number, mail in found:
            del self._mail[number]
            self._taken[number], self._asked[number] = (reader, mail.parts), (reader, mail.until)
        held = [number for number, (to, _) in self._taken.items() if to == reader != RELAY]
        for number in held[:-_UNCONFIRMED]:
            self._drop(self._taken.pop(number)[1])
        return [mail for _, mail in found]

    def may_reply(self, node: int, number: str) -> bool:
        """Return whether a node fetched this message, which it replies to."""
        return self._asked.get(number, (None, 0.0))[0] == node

    def confirm(self, number: str, reader: int) -> bool:
        """Forget a message that its reader has fetched; return whether there was one."""
        if self._taken.get(number, (None,))[0] != reader:
            return False
        self._drop(self._taken.pop(number)[1])
        return True

    def _expire(self, now: float) -> None:
        if now - self._looked < _SWEEP:
            return
        self._looked = now
        for number in [number for number, mail in self._mail.items() if mail.until < now]:
            self._drop(self._mail.pop(number).parts)
        self._asked = {number: one for number, one in self._asked.items() if one[1] >= now}
        while len(self._taken) > 4096:  # fetched and never confirmed
            self._drop(self._taken.pop(next(iter(self._taken)))[1])

    def _drop(self, parts: set[str]) -> None:
        """Forget parts that belong to no other message."""
        held = [mail.parts for mail in self._mail.values()] + [own for _, own in self._taken.values()]
        for name in parts:
            if name in self._parts and not any(name in others for others in held):
                self._size -= len(self._parts.pop(name))


def _replaced(mail: _Mail, sender: int, answers: str) -> bool:
    """Return whether a message is a reply of the same sender to the same message."""
    return bool(answers) and mail.sender == sender and mail.head.metadata.reply_to_message_id == answers


def _numbers(tree: Any) -> Iterator[str]:
    """Yield the numbers of all parts of a tree."""
    yield tree.object_id
    for child in tree.children:
        yield from _numbers(child)
