"""The commands about ledgers: ``farthing ledger``, ``report`` (its page) and ``card`` (a model card)."""

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from farthing.cli.options import (
    FAILED,
    AsJson,
    Force,
    NewFile,
    Relation,
    emit,
    emit_json,
    number,
    option,
    say,
)
from farthing.errors import InvalidValue, LedgerLocked
from farthing.ledger.journal import Journal

if TYPE_CHECKING:
    from farthing.report.subject import Subject


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
        raise InvalidValue(f"FILE must be new, but {str(file)!r} exists already")
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


def report(
    ledger: Annotated[
        Path, typer.Argument(metavar="LEDGER", help="The ledger's journal.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page, a new file.")] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The title; by default the ledger's name.")
    ] = None,
    privacy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The privacy.json of train: method, steps, records."),
    ] = None,
    simulated: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The output of simulate --json: the budget that each client has left."
        ),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The output of audit --json: attacks beside the claim."),
    ] = None,
    tuning: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Whether settings were tuned on the records, and what paid for it."
        ),
    ] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Writes the report of a ledger: a privacy statement, pictures and every row, as one HTML page.

    The ledger is read, never changed. A damaged ledger gets a page that says so, and exit code 1.
    """
    from farthing.data.model_file import check_writable, write
    from farthing.report.document import broken, page

    kept = (ledger, f"{ledger}.head", privacy, simulated, audit)
    check_writable(out, force, kept=kept)
    name = title or ledger.name
    try:
        subject = _subject(ledger, name, privacy, simulated, audit, tuning)
    except LedgerLocked as error:
        write(out, broken(name, str(error)).encode())
        if as_json:
            emit_json({"report": str(out), "ok": False, "guaranteed": False, "reason": str(error)})
        return say(f"{error} ({out} says so)", FAILED)
    write(out, page(subject).encode())
    if as_json:
        emit_json({"report": str(out), "ok": True, "guaranteed": subject.guaranteed})
    if not subject.guaranteed:
        return say(f"{out} is written, and says that there is no guarantee", FAILED)
    return 0 if as_json else say(f"{out} is written: {subject.guarantee}")


def _subject(
    ledger: Path, name: str, privacy: Path | None, simulated: Path | None, audit: Path | None, tuning: str
) -> "Subject":
    """Return the report's subject from all files. The guarantee is the ledger's own, whatever they say."""
    from farthing.cli.ledger_output import open_journal, verification
    from farthing.report import reading
    from farthing.report.subject import Subject

    told = reading.Told() if privacy is None else reading.read("--privacy", privacy, reading.told)
    federated, scores = (
        (None, []) if simulated is None else reading.read("--simulated", simulated, reading.federated_run)
    )
    verdicts = [] if audit is None else reading.read("--audit", audit, reading.verdicts)
    verified = reading.verified(verification(ledger))
    with open_journal(ledger) as journal:
        if told.head is not None and all(row.hash != told.head for row in journal.rows()):
            raise InvalidValue(
                f"--privacy {str(privacy)!r} tells of another ledger than {str(ledger)!r}: no row of it has "
                "the hash that stands under ledger_head"
            )
        return Subject.of(
            journal,
            title=name,
            method=told.method,
            steps=told.steps,
            records=told.records,
            features=told.features,
            partial=told.partial,
            scores=[*told.scores, *scores],
            released=told.released,
            tuning=tuning,
            federated=federated,
            audit=verdicts,
            verified=verified,
            declared=told.declared,
        )


def card(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder that train wrote, or its privacy.json."),
    ],
    out: NewFile = None,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log files and facts to MLflow's tracking server as well.")
    ] = False,
    force: Force = False,
) -> int:
    """Writes the model card of a training, in Markdown with Hugging Face's fields."""
    from farthing.data.model_file import check_writable, write
    from farthing.report import card as cards

    told = cards.read(folder)
    if out is not None:
        check_writable(out, force, kept=(folder,))
    text = cards.card(told)
    if mlflow:
        say(f"logged to MLflow as run {cards.logged(folder, told)}")
    if out is None:
        emit(text)
    else:
        write(out, text.encode())
    return 0
