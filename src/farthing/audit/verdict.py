"""What an audit found, in plain words: broken, or not refuted. An audit never proves a guarantee.

>>> from farthing.budget import Budget
>>> print(Verdict(7.49, Budget(0.689, 1e-5), 10_000, 0.99, "a canary"))
broken: ε is at least 7.49 with 99 % confidence, and 0.689 is claimed (a canary, 10,000 runs a world)
>>> print(Verdict(0.03, Budget(0.235, 1e-5), 10_000, 0.99, "a canary"))
not refuted: ε is at least 0.03 with 99 % confidence, and 0.235 is claimed (a canary, 10,000 runs a world)
"""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from farthing.budget import Budget

ATTACKED_AS = {"auto": ("descent", "least-squares"), "sgd-ma": ("dpsgd",)}  # of labels, and of numbers


def attacks(method: str) -> tuple[str, ...]:
    """The names under which an audit attacks what `farthing train` and the estimators call ``method``.

    >>> attacks("auto"), attacks("dpagd")
    (('descent', 'least-squares'), ('dpagd',))
    """
    return ATTACKED_AS.get(method, (method,))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A lower bound on ε at the claim's δ, which fails with probability 1 - confidence at most.

    ``trials`` are runs in each of the two worlds that were counted (not those on which a threshold was
    chosen), or canaries in one run. ``assumption`` says what was taken for granted, if anything.
    """

    eps_lower: float
    claim: Budget
    trials: int
    confidence: float
    attack: str
    assumption: str = ""
    trial: str = "runs a world"

    @property
    def broken(self) -> bool:
        """Whether the claim is refuted. False says nothing but that this attack did not."""
        return self.eps_lower > self.claim.epsilon

    @property
    def word(self) -> str:
        """Broken, or not refuted."""
        return "broken" if self.broken else "not refuted"

    def __str__(self) -> str:
        given = f", given that {self.assumption}" if self.assumption else ""
        return (
            f"{self.word}: ε is at least {_short(self.eps_lower)} with {100 * self.confidence:g} % confidence"
            f"{given}, and {self.claim.epsilon:g} is claimed ({self.attack}, {self.trials:,} {self.trial})"
        )

    def fields(self) -> dict[str, Any]:
        """As plain JSON values; an infinite bound is written as null beside ``broken``."""
        return {
            "verdict": self.word,
            "broken": self.broken,
            "eps_lower": self.eps_lower if math.isfinite(self.eps_lower) else None,
            "epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "adjacency": str(self.claim.adjacency),
            "unit": str(self.claim.unit),
            "observer": str(self.claim.observer),
            "attack": self.attack,
            "trials": self.trials,
            "confidence": self.confidence,
            "assumption": self.assumption,
        }


def _short(value: float) -> str:
    """Three digits, rounded down: a lower bound stays one."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(value / unit + 1e-9) * unit:.3g}"


def section(verdicts: Iterable[tuple[str, Verdict]], title: str = "Audit") -> str:
    """An HTML section for a report, one row a verdict: (what was attacked, verdict). All text is escaped.

    >>> verdict = Verdict(0.5, Budget(1.0, 1e-5), 100, 0.99, "a < b")
    >>> "a &lt; b" in section([("<mean>", verdict)]) and "<mean>" not in section([("<mean>", verdict)])
    True
    """
    heads = (
        "verdict",
        "method",
        "attack",
        "ε at least",
        "ε claimed",
        "δ",
        "neighbours",
        "confidence",
        "trials",
    )
    rows = []
    for name, verdict in verdicts:
        claim = verdict.claim
        attack = (
            f"{verdict.attack}; given that {verdict.assumption}" if verdict.assumption else verdict.attack
        )
        cells = [
            verdict.word,
            name,
            attack,
            _short(verdict.eps_lower),
            f"{claim.epsilon:.4g}",
            f"{claim.delta:g}",
            str(claim.adjacency),
            f"{100 * verdict.confidence:g} %",
            f"{verdict.trials:,}",
        ]
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="{"broken" if verdict.broken else "standing"}">{row}</tr>')
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    note = (
        "Each row is an attack on two neighbouring data sets, and a lower bound on ε that holds with the "
        "stated confidence. Broken: the bound is above the claim. Not refuted: this attack did not show "
        "that; it is no proof."
    )
    return (
        f'<section class="audit"><h2>{html.escape(title)}</h2><p>{note}</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )
