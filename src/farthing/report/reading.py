"""What other commands print with ``--json``, as parts of a report's subject.

Only what a page shows is taken, and all of it is checked: these files may come from anywhere.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from farthing.budget import Adjacency, Budget, Guarantee, Observer, Unit
from farthing.errors import InvalidValue, LedgerLocked
from farthing.ledger.books import FLOATS, SEEDED
from farthing.report.subject import Crowd, Score, Users

if TYPE_CHECKING:
    from farthing.audit.verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Told:
    """What a ``privacy.json`` adds to what the ledger says."""

    method: str = ""
    steps: int | None = None
    records: int | None = None
    features: int | None = None
    partial: bool = False
    scores: tuple[Score, ...] = ()
    released: tuple[str, ...] = ()


def read(option: str, file: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """The JSON object in ``file``, taken apart; a file that is something else is refused by name."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return take(found)
    except OSError as error:
        raise InvalidValue(f"{option} must be a readable file, {str(file)!r}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise InvalidValue(
            f"{option} must be the JSON object that farthing printed, {str(file)!r} is not one ({reason})"
        ) from None


def told(said: dict[str, Any]) -> Told:
    """What ``farthing train`` wrote as privacy.json, or printed with ``--json``."""
    method, test = str(said["method"]), said.get("test")
    settings = said.get("settings", {}).items()
    return Told(
        ", ".join((method, *(f"{name}={value}" for name, value in settings))),
        _count(said["steps"]),
        _count(said["records"]),
        _count(said["features"]) if "features" in said else None,
        said.get("partial", False) is True,
        tuple(scored(said, method)[1]),
        () if not test else (f"Figures on the test table {test['table']}: {test['note']}.",),
    )


def verified(said: dict[str, Any]) -> str:
    """What the independent verifier found, in a sentence; LedgerLocked where the ledger is not in order."""
    verdict = str(said["verdict"])
    unsure = any(word in verdict for word in ("not recomputed", SEEDED, FLOATS))  # nothing is wrong with it
    if not said["ok"] and not unsure:
        raise LedgerLocked(f"{said['file']}: {verdict}")
    if not said["ok"]:
        return f"The independent verifier did not recompute the spend: {verdict}"
    low, high = said.get("plan") or said.get("spent") or (None, None)
    if low is None or high is None:
        return "Chain, head and answers are in order."
    return (
        f"Chain, head and answers are in order, and an independent verifier recomputed the cost: ε from "
        f"{low:.5g} to {high:.5g}."
    )


def crowd(said: dict[str, Any]) -> tuple[Crowd, list[Score]]:
    """What ``farthing simulate --json`` printed."""
    if said["epsilon"] is None:
        raise InvalidValue("a simulation without privacy has no budgets to show")
    groups = tuple(
        Users(
            epsilon=_positive(group["epsilon"]),
            users=_count(group["users"]),
            rounds=_count(group["rounds"]),
            done=_count(group["done"]),
        )
        for group in said["people"]
    )
    method, users = str(said["method"]), sum(group.users for group in groups)
    value, scores = scored(said, f"{method}, {users:,} users")
    return (
        Crowd(
            method=method,
            guarantee=guarantee(said),
            trust=str(said["trust"]),
            rounds=_count(said["rounds"]),
            groups=groups,
            value=value,
        ),
        scores,
    )


def guarantee(said: dict[str, Any]) -> Guarantee:
    """A guarantee as it was written; no ε is an infinite one."""
    return Guarantee(
        math.inf if said["epsilon"] is None else _positive(said["epsilon"]),
        float(said["delta"]),
        Adjacency(said["adjacency"]),
        Unit(said["unit"]),
        Observer(said["observer"]),
        str(said["accountant"]),
        str(said["theorem"]),
        str(said["note"]),
    )


def scored(said: dict[str, Any], label: str) -> tuple[float | None, list[Score]]:
    """How well a model did on test records, beside guessing, where that was measured."""
    test = said.get("test")
    if not test or "accuracy" not in test or said["epsilon"] is None:
        return None, []
    value, epsilon = float(test["accuracy"]), _positive(said["epsilon"])
    return value, [
        Score(label=label, epsilon=epsilon, value=value),
        Score(label="guessing", epsilon=None, value=float(test["guessing"])),
    ]


def verdicts(said: dict[str, Any]) -> "list[tuple[str, Verdict]]":
    """What ``farthing audit --json`` printed."""
    from farthing.audit.verdict import Verdict

    return [
        (
            str(one["method"]),
            Verdict(
                math.inf if one["eps_lower"] is None else float(one["eps_lower"]),
                Budget(one["epsilon"], one["delta"], one["adjacency"], one["unit"], one["observer"]),
                _count(one["trials"]),
                float(one["confidence"]),
                str(one["attack"]),
                str(one["assumption"]),
            ),
        )
        for one in said["verdicts"]
    ]


def _positive(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{value!r} is no epsilon")
    return float(value)


def _count(value: Any) -> int:
    if int(value) != value or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return int(value)
