"""The state of a deployed run in public figures: what its live page and its ``status.json`` show."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyView:
    """A party, as the live page shows it."""

    name: str
    state: str
    left: int | None = None  # rounds it can still afford, as it announced
    most: int | None = None  # at the beginning
    records: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run, as the live page shows it."""

    run: str
    method: str
    phase: str  # in words; begins with "over" at the end
    round: int = 0
    parties: tuple[PartyView, ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()  # of some rounds, on public test data
    noise: float | None = None  # over the clip, the least that a party adds
    clip: float | None = None
    seconds: float | None = None  # a round
    end: float | None = None  # seconds until then, as it looks now
