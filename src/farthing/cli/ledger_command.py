"""The commands about ledgers: ``farthing ledger create``, ``show``, ``verify`` and ``export``."""

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from farthing.budget import Adjacency, Budget
from farthing.cli.ledger_output import (
    aligned,
    ledger,
    ledger_lines,
    open_journal,
    verification,
    verification_lines,
)
from farthing.cli.options import FAILED, AsJson, NewFile, Relation, emit, emit_json, number, option, say
from farthing.errors import InvalidValue
from farthing.ledger.journal import Journal


class Spending(StrEnum):
    """The privacy filters by which a ledger's answers add up."""

    BASIC = "basic"
    ZCDP = "zcdp"
    GDP = "gdp"
    RDP = "rdp"


File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger's journal.", show_default=False)]


def create(
    file: File,
    epsilon: Annotated[float, option(number, "The budget's epsilon.")],
    delta: Annotated[float, option(number, "The budget's delta.")],
    adjacency: Relation = Adjacency.ADD_REMOVE,
    filter: Annotated[
        Spending | None, typer.Option(help="How charges add up; by default gdp, or basic if delta is 0.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Begins a ledger that several trainings can spend from."""
    from farthing.accounting.filters import FILTERS
    from farthing.ledger.ledger import Ledger

    if Journal.exists(file):
        raise InvalidValue(f"FILE must be new, but there is a ledger at {str(file)!r}")
    if not file.parent.is_dir():
        raise InvalidValue(f"FILE must lie in an existing directory, got {str(file)!r}")
    budget = Budget(epsilon, delta, adjacency)
    with Ledger(budget, journal=file, filter=FILTERS[filter] if filter else None) as begun:
        if as_json:
            emit_json(
                {"file": str(file), "budget": asdict(begun.budget), "filter": begun.journal.header["filter"]}
            )
            return 0
        return say(f"{file} holds {begun.budget}, spent by the {begun.filter.name} filter", 0)


def show(file: File, as_json: AsJson = False) -> int:
    """Shows budget, filter or plan, spend and guarantee of a ledger."""
    fields = ledger(file)
    if as_json:
        emit_json(fields)
    else:
        emit(aligned(ledger_lines(fields)))
    return 0


def verify(file: File, as_json: AsJson = False) -> int:
    """Checks chain, head and answers, and recomputes the spend."""
    fields = verification(file)
    if as_json:
        emit_json(fields)
    else:
        emit(aligned(verification_lines(fields)))
    return 0 if fields["ok"] else say(f"{file}: {fields['verdict']}", FAILED)


def export(
    file: File,
    out: NewFile = None,
) -> int:
    """Prints all rows, each as one line of JSON."""
    with open_journal(file) as rows:
        if out is None:
            rows.export(sys.stdout)
            sys.stdout.flush()
            return 0
        try:
            with out.open("x", encoding="ascii") as target:  # an existing file could be a ledger
                rows.export(target)
        except OSError as error:
            raise InvalidValue(
                f"--out must be a new file in an existing directory, got {str(out)!r}: {error}"
            ) from None
        return say(f"{rows.last().seq + 1} rows written to {out}", 0)
