"""The commands ``farthing report``, the page of a ledger, and ``farthing card``, a model card."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farthing.cli.options import FAILED, AsJson, Force, emit_json, say
from farthing.errors import InvalidValue, LedgerLocked

if TYPE_CHECKING:
    from farthing.report.subject import Subject
from farthing.cli.options import NewFile, emit


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
