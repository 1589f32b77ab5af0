"""Provide the commands about ledgers: ``farthing ledger``, ``report`` and ``card`` (a model card)."""

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farthing import validate
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


File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger file.", show_default=False)]


def create(
    file: File,
    epsilon: Annotated[float, option(number, "The budget's epsilon.")],
    delta: Annotated[float, option(number, "The budget's delta.")],
    adjacency: Relation = Adjacency.ADD_REMOVE,
    filter: Annotated[
        Spending | None,
        typer.Option(help="The privacy filter that adds up charges; by default gdp, or basic if delta is 0."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Create a ledger from which several trainings can spend."""
    from farthing.accounting.filters import FILTERS
    from farthing.ledger.ledger import Ledger

    if Journal.exists(file):
        raise InvalidValue(f"FILE must be a new file, but {str(file)!r} exists")
    if not file.parent.is_dir():
        raise InvalidValue(f"FILE must be in an existing folder, got {str(file)!r}")
    validate.positive(**{"--epsilon": epsilon})
    validate.delta(**{"--delta": delta})
    if delta == 0 and filter not in (None, Spending.BASIC):
        raise InvalidValue(f"--delta must be above 0 with --filter {filter}, got 0; --filter basic allows 0")
    budget = Budget(epsilon, delta, adjacency)
    with Ledger(budget, journal=file, filter=FILTERS[filter] if filter else None) as begun:
        if as_json:
            emit_json(
                {"file": str(file), "budget": asdict(begun.budget), "filter": begun.journal.header["filter"]}
            )
            return 0
        return say(f"{file} holds {begun.budget}, spent by the {begun.filter.name} filter", 0)


def show(file: File, as_json: AsJson = False) -> int:
    """Show budget, charges and guarantee of a ledger."""
    fields = ledger(file)
    if as_json:
        emit_json(fields)
    else:
        emit(aligned(ledger_lines(fields)))
    return 0


def verify(file: File, as_json: AsJson = False) -> int:
    """Verify a ledger with independent code.

    It checks the hash chain, the head and the stored answers, and recomputes the spent budget.
    """
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
    """Print all rows of a ledger as JSON lines."""
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
                f"--out must be a new file in an existing directory, got {str(out)!r}: {error.strerror}"
            ) from None
        return say(f"{rows.last().seq + 1} rows written to {out}", 0)


def report(
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="The ledger file.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The title of the page; by default the name of the ledger."),
    ] = None,
    privacy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The privacy.json that train wrote: method, steps, records."),
    ] = None,
    simulated: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The output of simulate --json: the rounds that each client has left."
        ),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The output of audit --json: attacks on the method."),
    ] = None,
    tuning: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="A statement whether settings were tuned on the records, and at what cost."
        ),
    ] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Write the report of a ledger as one HTML page.

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
                f"--privacy {str(privacy)!r} describes another ledger than {str(ledger)!r}, which has no row "
                "with the hash in ledger_head"
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
    mlflow: Annotated[bool, typer.Option("--mlflow", help="Also log files and facts to MLflow.")] = False,
    force: Force = False,
) -> int:
    """Write a model card in Markdown, with Hugging Face's fields."""
    from farthing.data.model_file import check_writable, write
    from farthing.report import card as cards

    told = cards.read(folder)
    if out is not None:
        check_writable(out, force, kept=(folder, folder / "privacy.json", folder / "model.npz"))
    text = cards.card(told)
    if mlflow:
        say(f"logged to MLflow as run {cards.logged(folder, told)}")
    if out is None:
        emit(text)
    else:
        write(out, text.encode())
        say(f"the model card is written to {out}")
    return 0
