"""The coordinator's post: seals requests, and sorts what comes back before anything of it is believed."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from farthing.deploy.messages.signed import (
    LARGEST_HEADER,
    Kind,
    Opened,
    Reason,
    Refused,
    Signer,
    message_digest,
    refuse,
    seal,
    unseal,
)
from farthing.deploy.messages.transport import Transport

log = logging.getLogger("farthing.federated")

Request = tuple[Kind, dict[str, Any], bytes]
Check = Callable[[str, Opened], None]


@dataclass(frozen=True, slots=True, eq=False)
class Mail:
    """What came of an exchange, by party; who is in none of the three was not heard of."""

    came: dict[str, Opened] = field(default_factory=dict)
    refused: dict[str, Reason] = field(default_factory=dict)  # by the guard
    broken: dict[str, Reason] = field(default_factory=dict)  # by us: signed, and against the rules

    @property
    def heard(self) -> set[str]:
        return {*self.came, *self.refused, *self.broken}


class Post:
    """Exchanges messages with enrolled parties."""

    def __init__(self, transport: Transport, signer: Signer, enrolled: Mapping[str, bytes]) -> None:
        self._transport, self._signer, self._enrolled = transport, signer, enrolled

    def exchange(
        self, requests: Mapping[str, Request], kind: Kind, seconds: float, check: Check, largest: int = 0
    ) -> Mail:
        """Answers of a kind, with bodies up to ``largest`` bytes; ``check`` raises `Refused` for bad ones.

        What is not signed by the party for this very request says nothing about it: anybody could have made
        or kept it. It counts as if nothing had come, and the same party may still be heard of.
        """
        sealed = {name: seal(*request, self._signer) for name, request in requests.items()}
        about = {name: message_digest(data) for name, data in sealed.items()}
        mail = Mail()
        for name, data in self._transport.exchange(sealed, seconds):
            if name not in sealed or name in mail.heard:
                continue  # nobody asked it, or it answered before: duplicates count once
            try:
                opened = unseal(data, {self._enrolled[name]}, LARGEST_HEADER + 256 + largest)
                said = opened.fields()
                if said.take("about") != about[name]:
                    refuse(Reason.STALE, "it is not about this request")
            except Refused as refusal:
                log.warning("from %s: %s", name, refusal)
                continue
            self._sort(mail, name, opened, said.plain().get("reason"), kind, check)
            if len(mail.heard) == len(sealed):
                break
        return mail

    def _sort(self, mail: Mail, name: str, opened: Opened, text: Any, kind: Kind, check: Check) -> None:
        if opened.kind is Kind.REFUSAL:
            mail.refused[name] = Reason(text) if text in list(Reason) else Reason.MALFORMED
            log.warning("%s refused: %s", name, mail.refused[name])
            return
        try:
            if opened.kind is not kind:
                refuse(Reason.MALFORMED, "it is another kind of message")
            check(name, opened)
            mail.came[name] = opened
        except Refused as refusal:
            log.warning("from %s: %s", name, refusal)
            mail.broken[name] = refusal.reason
