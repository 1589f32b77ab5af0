"""What ``farthing audit`` does: attacks methods one after the other, and prints what was found as a table."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from farthing import validate
from farthing.audit import methods
from farthing.audit.methods import Finding
from farthing.errors import InvalidValue
from farthing.noise import Stream

_SHOWN = 25  # runs between two looks at the progress
Watch = Callable[[str, int, int], None]  # method, runs of it, methods done


def audited(
    method: str | None,
    everything: bool,
    effort: float,
    confidence: float,
    watch: Watch | None = None,
    stream: Stream | None = None,
) -> list[Finding]:
    """The verdicts on one method or on all; ``confidence`` is that of all of them together."""
    if everything == (method is not None):
        known = ", ".join([*methods.names(), *methods.published()])
        raise InvalidValue(f"give either METHOD or --all; METHOD is one of {known}")
    validate.positive(**{"--effort": effort})
    validate.probability(**{"--confidence": confidence})
    names = methods.names() if method is None else [method]
    each = 1 - (1 - confidence) / len(names)
    found: list[Finding] = []
    for done, name in enumerate(names):
        found += methods.attack(
            name, scale=effort, confidence=each, stream=stream, tick=_ticks(name, done, watch)
        )
    return found


def _ticks(name: str, done: int, watch: Watch | None) -> Callable[[], None]:
    runs = 0

    def tick() -> None:
        nonlocal runs
        runs += 1
        if watch is not None and runs % _SHOWN == 0:
            watch(name, runs, done)

    if watch is not None:
        watch(name, 0, done)
    return tick


def fields(found: Sequence[Finding], confidence: float) -> dict[str, Any]:
    """As plain JSON values."""
    return {
        "broken": sum(verdict.broken for _, verdict in found),
        "confidence": confidence,
        "verdicts": [{"method": name, **verdict.fields()} for name, verdict in found],
    }


def table(found: Sequence[Finding]) -> str:
    """One line a verdict, in columns."""
    heads = "method", "verdict", "ε at least", "ε claimed", "trials", "attack"
    rows = [heads]
    for name, verdict in found:
        given = f" ({verdict.assumption})" if verdict.assumption else ""
        shown = f"{verdict.eps_lower:.3f}", f"{verdict.claim.epsilon:.3f}", f"{verdict.trials:,}"
        rows.append((name, verdict.word, *shown, verdict.attack + given))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:5], widths[2:], strict=True)]
        lines.append("  ".join([*left, *right, row[5]]))
    return "\n".join(lines)


@contextmanager
def shown(quiet: bool, everything: bool) -> Iterator[Watch | None]:
    """A line on standard error that follows an audit, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    parts = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*parts, console=Console(stderr=True), transient=True) as line:
        task = line.add_task("preparing", total=len(methods.names()) if everything else None)

        def watch(name: str, runs: int, done: int) -> None:
            line.update(task, completed=done, description=f"{name}: {runs:,} runs")

        yield watch
