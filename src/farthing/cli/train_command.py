"""Provide the commands about tables: ``farthing train``, ``schema``, ``predict`` and ``sample``."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farthing import validate
from farthing.budget import FORMAT, Adjacency
from farthing.cli.ledger_output import aligned, open_journal, rehearsed_lines, trained_lines
from farthing.cli.options import (
    INTERRUPTED,
    WRONG,
    AsJson,
    Bounds,
    Config,
    Decimal,
    Delimiter,
    Drop,
    Encoding,
    Force,
    HeaderLine,
    Missing,
    NewFile,
    SchemaFile,
    TableName,
    Target,
    TestTable,
    Values,
    csv_format,
    declared,
    emit,
    emit_json,
    number,
    option,
    progress,
    say,
    stoppable,
    whole,
)
from farthing.errors import InvalidValue
from farthing.ledger.journal import Journal

if TYPE_CHECKING:  # what opens numpy is opened by the commands
    from farthing.cli.step_recorder import Watch
    from farthing.data.csv_files import Csv
    from farthing.ledger.ledger import Ledger
    from farthing.queries.query import Step


from importlib.resources import files

_MANY = 10  # columns of one remark that are all named
_SHOWN = 0.1  # seconds between two looks at the progress


def train(
    table: TableName,
    delta: Annotated[float, option(number, "Delta of the budget; well below 0.1 / records.")],
    epsilon: Annotated[float | None, option(number, "Epsilon of the budget.")] = None,
    budget_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of --epsilon: the public column that holds each record's own epsilon.",
        ),
    ] = None,
    target: Target = None,
    schema: SchemaFile = None,
    bounds: Bounds = None,
    values: Values = None,
    drop: Drop = None,
    missing: Missing = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: HeaderLine = 1,
    user: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column that identifies a person; all records of a person are then protected together.",
        ),
    ] = None,
    rows: Annotated[
        int, option(whole, "With --user: the number of records used of each person.", "--rows")
    ] = 1,
    holdout: Annotated[
        float,
        option(number, "Hold out this share of the records and measure the model on it, within the budget."),
    ] = 0.0,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model. auto (the default) trains a boosted model, or a linear one if the budget is "
            "small or another option needs it. For labels: logistic, svm, additive, boosted. For numbers: "
            "linear, huber, quantile, poisson, additive, boosted.",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="The training method; a wrong name prints all names.")
    ] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the method; a wrong name prints all names. Repeatable.",
        ),
    ] = None,
    book: Annotated[
        Path | None,
        typer.Option(
            "--ledger",
            metavar="FILE",
            help="Spend from this ledger; a new file gets this budget. By default a new ledger in --out.",
        ),
    ] = None,
    checked_by: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Name and date of the person who checked that the schema is public; printed in the report.",
        ),
    ] = None,
    adjacency: Annotated[
        Adjacency | None,
        typer.Option(help="The adjacency; by default that of the ledger, or add-remove."),
    ] = None,
    records: Annotated[
        int | None,
        option(
            whole, "The public number of records; by default the table's number, which then counts as public."
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse a table with values outside the schema instead of clipping them; this reveals "
            "something.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the price and the noise, and train nothing.")
    ] = False,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The folder for model, ledger and report, or a file NAME.npz.")
    ] = Path(),
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="NAME", help="Also write the model as skops or onnx. Repeatable."),
    ] = None,
    test: TestTable = None,
    config: Config = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print each stage with the time.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Train a private model of a table.

    Training spends the whole budget. You declare bounds and vocabularies in a schema, or have bounds computed
    privately from the budget. Ctrl-C ends training after the current step and writes the model of that step.
    """
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if (epsilon is None) == (budget_column is None):
        raise InvalidValue(
            "give either --epsilon or --budget-column (the column with each record's epsilon), got "
            + ("neither" if epsilon is None else "both")
        )
    if epsilon is not None:
        validate.positive(**{"--epsilon": epsilon})
    elif records is not None:
        raise InvalidValue(
            "leave out --records with --budget-column: the number of records with each budget is public "
            "anyway"
        )
    validate.delta(**{"--delta": delta})
    csv = csv_format(delimiter, decimal, encoding, header)
    known = declared(table, schema, target, bounds or [], values or [], drop, missing)
    if known is None:
        return _skeleton(table, target, csv)
    if checked_by is not None:
        known = replace(known, checked_by=checked_by)
    if user is None and rows != 1:
        raise InvalidValue(f"--rows {rows} limits the records of each person, so it needs --user COLUMN")
    if not 0 <= holdout < 1:
        raise InvalidValue(f"--holdout must be at least 0 and below 1, such as 0.2, got {holdout:g}")
    from farthing.cli import training
    from farthing.cli.job import TrainingJob
    from farthing.data import table_files

    if book is not None and Journal.exists(book):
        open_journal(book).close()
    job = TrainingJob(
        table,
        known,
        schema_file=schema,
        epsilon=epsilon,
        delta=delta,
        budget_column=budget_column,
        adjacency=adjacency,
        model=model,
        method=method,
        records=records,
        ledger=book,
        out=out,
        force=force,
        test=test,
        strict=strict,
        formats=tuple(formats or ()),
        settings=tuple(settings or ()),
        csv=csv,
        user=user,
        rows=validate.count(**{"--rows": rows}),
        holdout=holdout,
    )
    if dry_run:
        count = table_files.count(table, known, csv)  # which reads the header too
        fields = training.rehearse(job, records or table_files.filled(table, count))
    else:
        fields = training.train(job, partial(_followed, quiet=as_json), partial(_read, quiet=as_json))
    if as_json:
        emit_json(fields)
    elif dry_run:
        emit(aligned(rehearsed_lines(fields)))
    else:
        print(aligned(trained_lines(fields)), file=sys.stderr)
    if not as_json:
        for said in _reservations(fields):
            say(said)
    if "unmeasured" in fields and not as_json:
        say(fields["unmeasured"])
    if "verdict" in fields.get("test", {}) and not as_json:
        say(fields["test"]["verdict"])
    if fields.get("partial"):
        return say("interrupted: the model of the last step is written", INTERRUPTED)
    return 0


def _reservations(fields: dict[str, Any]) -> Iterator[str]:
    """Yield warnings about a training: a large ε or δ, an unchecked schema, earlier ledgers."""
    from farthing.cli.outputs import UNCHECKED
    from farthing.report.reading import earlier
    from farthing.report.statement import weaknesses

    said = fields["guarantee"]
    if said["epsilon"] is not None:
        yield from weaknesses(said["epsilon"], said["delta"], fields["records"])
        yield from _too_little(said["epsilon"], said["delta"], fields["records"], fields["features"])
    if fields.get("dry_run"):
        return
    if not fields["public"]["schema"]["checked_by"]:
        yield UNCHECKED
    if fields["earlier_ledgers"]:
        yield earlier(fields["earlier_ledgers"])


def _too_little(epsilon: float, delta: float, records: int, features: int) -> Iterator[str]:
    """Yield a sentence where one answer for the whole budget has more noise than all records can add.

    Its noise has a norm of about √features / μ, and a sum of vectors in the unit ball one of at most records.
    """
    from farthing.accounting import gaussian

    if delta and gaussian.mu(epsilon, delta) * records < features**0.5:
        table = f"{validate.counted(records, 'record')} with {validate.counted(features, 'feature')}"
        yield (
            f"the noise is larger than {table} can add, so the model is mostly noise: use a larger epsilon, "
            "more records or fewer columns"
        )


def _skeleton(table: str, target: str | None, csv: "Csv") -> int:
    """Print a schema to fill in, and why it is needed."""
    from farthing.data import table_files

    if target is None:
        table_files.header(table, None, csv)  # which says what is wrong with the table, if it cannot be read
        raise InvalidValue(
            "give --schema FILE, the public bounds and vocabularies of the columns; with --target COLUMN "
            "instead, an empty schema is printed for you to fill in"
        )
    emit(table_files.skeleton_of(table, target, csv))
    return say(
        "there is no schema. Save the one above to a file, fill in low and high, or values, of every column "
        "from public knowledge (not from the records), and pass the file by --schema. farthing schema drafts "
        "one from the records, which you must then check",
        WRONG,
    )


@contextmanager
def _read(csv: "Csv", *, quiet: bool) -> "Iterator[Csv]":
    """Show the progress of reading a table."""
    with progress(quiet, "reading") as show:
        yield csv if show is None else replace(csv, seen=lambda share: show("reading", share))


@contextmanager
def _followed(*, quiet: bool) -> "Iterator[Watch]":
    """Show the progress of a training, and end it after Ctrl-C."""
    shown = 0.0
    with progress(quiet, "until the first step") as show, stoppable() as stopped:

        def watch(step: "Step", ledger: "Ledger") -> bool:
            nonlocal shown
            if show is not None and time.monotonic() - shown >= _SHOWN:
                shown, share = time.monotonic(), ledger.share
                show(f"step {step.t:,}: {share:.0%} of the budget spent, {1 - share:.0%} left", share)
            return stopped()

        yield watch


def schema(
    table: TableName,
    target: Target = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: HeaderLine = 1,
    out: NewFile = None,
    force: Force = False,
) -> int:
    """Draft a schema from a table, for a person to check.

    A draft is read from private records, and no guarantee covers it. train refuses the draft until a person
    has checked it and replaced its first line by "checked_by".
    """
    from farthing.data import model_file, schema_draft
    from farthing.data import schema as data

    if out is not None:
        model_file.check_writable(out, force, kept=[table])
    text, said = schema_draft.draft(
        table, target, csv_format(delimiter, decimal, encoding, header), drop or []
    )
    if out is None:
        emit(text)
    else:
        model_file.write(out, f"{text}\n".encode())
    for what in dict.fromkeys(said.values()):
        first, *more = (name for name, remark in said.items() if remark == what)
        also = f" (and {len(more):,} others, such as {more[0]!r})" if len(more) > _MANY else ""
        for name in [first] if also else [first, *more]:
            say(f"column {name!r}{also} {what}")
    if target is None:
        say("no target is named: give --target COLUMN, or fill in the last line")
    if data.DRAFTED not in text:
        return 0
    where = "this draft" if out is None else f"the draft {out}"
    return say(
        f"{where} was read from private records, and no guarantee covers it. Check every line against public "
        f"knowledge, then replace {data.DRAFTED!r} by {data.CHECKED!r} with your name and the date"
    )


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="The folder that train wrote, or its .npz file.", show_default=False
        ),
    ],
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A CSV or Parquet file with the schema's columns.", show_default=False
        ),
    ],
    proba: Annotated[
        bool, typer.Option("--proba", help="Also print the probability of every label, as CSV.")
    ] = False,
    threshold: Annotated[
        float | None,
        option(
            number, "Predict the second of two labels if its probability is at least this, instead of 0.5."
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--id", metavar="COLUMN", help="Also print this column of the table, as CSV."),
    ] = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: HeaderLine = 1,
    out: NewFile = None,
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Predict a label or a number for every row of a table."""
    from farthing.cli import outputs
    from farthing.data import model_file

    trained = outputs.loaded(model)
    if out is not None:
        model_file.check_writable(out, force, kept=[table, model, model / "model.npz"])
    if proba or threshold is not None:
        trained.refuse(threshold)
    found = list(
        trained.rows(
            table,
            csv=csv_format(delimiter, decimal, encoding, header),
            threshold=threshold,
            proba=proba,
            also=identity,
        )
    )
    if identity is not None:
        found = [(_as_typed(cell), *others) for cell, *others in found]
    names = trained.columns(proba, identity)
    if as_json:
        text = json.dumps(_as_fields(trained.schema.target.name, names, found), default=str) + "\n"
    elif len(names) == 1:
        text = "".join(f"{row[0]}\n" for row in found)
    else:
        text = _as_csv(names, found)
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        model_file.write(out, text.encode())
        say(f"{len(found):,} predictions are written to {out}")
    return 0


def _as_typed(cell: Any) -> Any:
    """Return a whole number without a decimal point, as identifiers are written; other cells unchanged."""
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell


def _as_fields(target: str, names: list[str], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return predictions, and the facts beside them, as one object."""
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]
    beside = {name: column for name, column in zip(names, columns, strict=True) if name != target}
    told = {"format": FORMAT, "target": target, "predictions": columns[names.index(target)]}
    return told | ({"columns": beside} if beside else {})


def _as_csv(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """Return rows below a header, as CSV."""
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    return text.getvalue()


NAMES = "people.csv", "people.json"


def sample(
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to.")] = Path(),
    force: Force = False,
) -> int:
    """Write a made-up table to try things on, and its schema.

    people.csv has 3,000 people who do not exist; people.json is its schema.
    """
    from farthing.data.model_file import check_writable, write

    folder = files("farthing.data") / "datasets"
    for name in NAMES:
        check_writable(out / name, force)
    for name in NAMES:
        write(out / name, (folder / name).read_bytes())
        emit(str(out / name))
    return 0
