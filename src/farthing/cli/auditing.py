"""Attack methods one after the other for ``farthing audit``, and list the verdicts in a table.

Beside attacks there are laws (`audit.laws`, `audit.prices`, `audit.charges`): statements about noise,
clipping, draws, prices and charges that must hold for every query. ``farthing audit laws`` checks the laws
only, ``--all`` runs attacks and laws.
"""

import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from farthing import validate
from farthing.audit import (
    charges,
    entrances,
    games,
    laws,
    methods,
    prices,
    steps,
)
from farthing.audit.auditing import ATTACKED_AS, attacks
from farthing.audit.methods import Finding
from farthing.cli.options import progress
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream

LAWS = "laws"
_SHOWN = 25  # runs between two looks at the progress
Watch = Callable[[str, int, int], None]  # method, runs of it, methods done


def audited(
    method: str | None,
    everything: bool,
    effort: float,
    confidence: float,
    watch: Watch | None = None,
    stream: Stream | None = None,
    found: list[Finding] | None = None,
) -> list[Finding]:
    """Return the verdicts on one method or on all; ``confidence`` holds for all of them together.

    They are appended to ``found``, so that whoever is interrupted keeps those that were reached.

    A bound on n runs that fails with probability f is off by about √(ln(1/f)/n). Among many methods each has
    a smaller share of the failure probability, and as many more runs as it needs to show as much as alone.
    """
    if everything == (method is not None):
        known = ", ".join(dict.fromkeys([*ATTACKED_AS, *methods.names(), LAWS, *methods.published()]))
        given = f"both --all and {method!r}" if everything else "neither"
        raise InvalidValue(f"give either METHOD or --all, got {given}; METHOD is one of {known}")
    validate.positive(**{"--effort": effort})
    validate.probability(**{"--confidence": confidence})
    names = methods.names() if method is None else [*attacks(method)] if method != LAWS else []
    each = 1 - (1 - confidence) / max(1, len(names))
    effort *= math.log((1 - each) / 2) / math.log((1 - confidence) / 2)
    found = [] if found is None else found
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


def lawful(method: str | None, stream: Stream | None = None) -> dict[str, list[str]]:
    """Return the complaints of each law; none is checked where a method was named."""
    if method not in (None, LAWS):
        return {}
    words = Stream() if stream is None else stream
    told = {
        "noise": laws.samplers_of_noise(words),
        "releases": laws.releases(words),
        "choices": laws.elections(words) + prices.choices() + prices.election_grids(),
        "streams": laws.streams(words),
        "clips": laws.clipping(words) + laws.sensitivities(words),
        "draws": laws.draws(words),
        "prices": prices.divergences() + prices.gaussians(),
        "filters": prices.filters() + prices.countdowns(),
        "menus": games.games() + games.dominations(),
        "tuning": games.selections() + games.gaussian_selections() + games.runs(words),
        "charges": charges.answers(words) + charges.promises(words) + charges.order(words),
        "failures": charges.failures(),
        "copies": charges.copies(words),
        "contributions": laws.contributions(words) + laws.pairs(),
        "sums": steps.sums(words),
        "entrances": entrances.refusals(),
        "perturbation": laws.objectives(words) + laws.minimisers(words),
        "models": _models(),
        "clients": charges.uploads_allowed(words) + charges.shares(words) + charges.uploads(words),
    }
    with tempfile.TemporaryDirectory() as folder, _silent(logging.getLogger("farthing.deploy.guard")):
        told["refunds"] = charges.refunds(words, folder) + games.blocks(folder)
        told["guards"] = entrances.replies(folder) + _network_guards(folder)
    return told


@contextmanager
def _silent(log: logging.Logger) -> Iterator[None]:
    """Silence a log: guards under attack would write a line for every message that they refuse."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _models() -> list[str]:
    """Return the complaints about models and datasets, where torch is installed."""
    if find_spec("torch") is None:
        return []
    from farthing.audit import network_laws

    return network_laws.brought()


def _network_guards(folder: str) -> list[str]:
    """Return the complaints about guards over networks, where torch is installed."""
    if find_spec("torch") is None:
        return []
    from farthing.audit import network_laws

    return network_laws.replies(folder)


def law_lines(told: dict[str, list[str]]) -> str:
    """Return one line per law: that it holds, or its complaints."""
    width = max(map(len, told)) + 2
    return "\n".join(f"{name:{width}}{'; '.join(said) or 'holds'}" for name, said in told.items())


def fields(found: Sequence[Finding], told: dict[str, list[str]], confidence: float) -> dict[str, Any]:
    """Return plain JSON values."""
    return {
        "broken": sum(verdict.broken for _, verdict in found) + sum(bool(said) for said in told.values()),
        "confidence": confidence,
        "laws": told,
        "verdicts": [{"method": name, **verdict.fields()} for name, verdict in found],
    }


def table(found: Sequence[Finding]) -> str:
    """Return one line per verdict, in columns."""
    heads = "method", "verdict", "ε at least", "ε exact", "ε claimed", "catches ε from", "trials", "attack"
    rows = [heads]
    for name, verdict in found:
        given = f" ({verdict.assumption})" if verdict.assumption else ""
        bound, claimed = f"{verdict.eps_lower:.3f}", f"{verdict.claim.epsilon:.3f}"
        exact = "-" if verdict.exact is None else f"{verdict.exact:.3f}"
        shown = bound, exact, claimed, verdict.power, f"{verdict.trials:,}"
        rows.append((name, verdict.word, *shown, verdict.attack + given))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:7], widths[2:], strict=True)]
        lines.append("  ".join([*left, *right, row[7]]))
    return "\n".join(lines)


@contextmanager
def shown(quiet: bool, everything: bool) -> Iterator[Watch | None]:
    """Yield a callback that shows the progress of an audit on standard error; None if that is no terminal."""
    with progress(quiet, "preparing", len(methods.names()) if everything else None) as show:
        yield show and (lambda name, runs, done: show(f"{name}: {runs:,} runs", done))
