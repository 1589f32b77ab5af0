"""Show a run in public figures: a `View`, as its live page, its ``status.json`` and its metrics have it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyView:
    """A party, as the live page shows it."""

    name: str
    state: str
    left: int | None = None  # rounds it can still afford, as it announced
    most: int | None = None  # rounds it could afford at the beginning
    records: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    reason: str = ""
    stale: int = 0  # rounds by which its last answer was late


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run, as the live page shows it."""

    run: str
    method: str
    phase: str  # begins with "over" at the end
    round: int = 0
    parties: tuple[PartyView, ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()  # (round, accuracy on public test data)
    noise: float | None = None  # noise multiplier, the least over the parties
    clip: float | None = None
    seconds: float | None = None  # of one round, on average
    end: float | None = None  # estimated seconds until the end
