"""Show ledgers, guarantees, runs and verdicts in notebooks: a small table of facts, or a picture.

Pictures are SVG files inside an image, with their style inside, so that neither can touch the rest of a page;
they follow the reader's preference, light or dark.
"""

import base64
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from farthing.audit.auditing import Verdict
from farthing.budget import Guarantee, Shown
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.query import Run
from farthing.report import pictures
from farthing.report.drawing import CHART, PALETTE
from farthing.report.statement import band, upwards
from farthing.report.subject import Charge, Subject
from farthing.report.words import number, percent, plain


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture that a notebook shows; `save` writes it as an SVG file."""

    title: str
    caption: str
    svg: str

    def save(self, path: str | Path) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_html_(self) -> str:
        image = base64.b64encode(self.svg.encode()).decode()
        said = escape(self.caption, quote=True)
        return (
            f"<figure style='max-width:34rem;margin:0'><figcaption><strong>{escape(self.title)}</strong> "
            f"{said}</figcaption><img alt='{said}' src='data:image/svg+xml;base64,{image}'/></figure>"
        )


def plot(one: Any) -> Plot:
    """Return the picture of a ledger, ε after each answer, or of a run, the noise of each answer."""
    match one:
        case Ledger():
            found = pictures.burned(Subject.of(one, title="ledger", method=""))
        case Run():
            found = _of_run(one)
        case Shown() if (paid := getattr(one, "ledger", None)) is not None:  # a training of a network
            return plot(paid)
        case _:
            raise Unsupported(f"there is no picture of {type(one).__name__}")
    if found is None:
        raise InvalidValue("there is nothing to draw: nothing was charged yet, or nothing is promised")
    # with a ground of its own: a page may be light where the reader prefers dark
    ground = "svg{background:var(--card);border-radius:6px}text{font-family:system-ui,sans-serif}"
    style = f"<style>{PALETTE}{CHART}{ground}</style>"
    svg = found.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="460" ', 1)
    place = svg.index(">") + 1
    return Plot(found.title, found.caption, svg[:place] + style + svg[place:])


def _of_run(run: Run) -> pictures.Picture | None:
    from farthing.budget import Budget

    empty = Subject.of(Ledger(Budget(1.0, 1e-5)), title="run", method="")
    return pictures.noised(replace(empty, charges=tuple(Charge(one.event) for one in run.receipts)))


def html(one: Any) -> str:
    """Return the facts of a ledger, a guarantee, a run or a verdict, as a small table."""
    match one:
        case Ledger():
            where = (
                str(one.journal.path) if one.journal.path is not None else "in memory: gone with its process"
            )
            facts = {
                "budget": str(one.budget),
                "charged": percent(one.share),
                "guarantee": str(one.guarantee),
                "kept": where,
            }
        case Guarantee():
            facts = _guaranteed(one)
        case Run():
            facts = {
                "steps": f"{one.steps:,}",
                "answers": f"{len(one.receipts):,}",
                "ended because": one.stop_reason,
            }
        case Verdict():
            facts = _judged(one)
        case Shown() if hasattr(one, "plan"):
            facts = _trained(one)
        case _:
            raise Unsupported(f"there is no table of {type(one).__name__}")
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(plain(value, 600))}</td></tr>"
        for name, value in facts.items()
        if value
    )
    return f"<table><caption>{type(one).__name__}</caption>{rows}</table>"


def _guaranteed(said: Guarantee) -> dict[str, str]:
    finite = said.epsilon < float("inf")
    return {
        "ε": upwards(said.epsilon) if finite else "infinite: no guarantee",
        "δ": number(said.delta) if said.delta else "0",
        "neighbours": f"{said.adjacency}, per {said.unit}",
        "holds against": str(said.observer),
        "accounting": f"{said.accountant}: {said.theorem}",
        "assumptions": said.note,
        "size": band(said.epsilon)[1] if finite else "",
    }


def _trained(training: Any) -> dict[str, str]:
    """Return the facts of a training of a network, whose class is in a module that imports PyTorch."""
    plan, ledger = training.plan, training.ledger
    facts = {
        "model": type(training.model).__name__,
        "optimizer": type(training.optimizer).__name__,
        "updates": f"{training.t:,} made",
        "batches": f"{training.steps:,} planned, of {plan.expected_batch_size:,.0f} records expected",
        "noise multiplier": number(plan.noise_multiplier(0)),
    }
    if ledger is None:
        return facts
    return facts | {"charged": percent(ledger.share), "guarantee": str(ledger.guarantee)}


def _judged(verdict: Verdict) -> dict[str, str]:
    return {
        "verdict": verdict.word,
        "ε at least": number(verdict.eps_lower, 3),
        "ε claimed": number(verdict.claim.epsilon),
        "catches ε from": verdict.power,
        "confidence": percent(verdict.confidence),
        "trials": f"{verdict.trials:,} {verdict.trial}",
        "attack": verdict.attack,
        "assumption": verdict.assumption,
    }
