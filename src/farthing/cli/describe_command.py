"""Provide the command ``farthing describe``: statistics of a table within a budget."""

from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from farthing import validate
from farthing.budget import Budget
from farthing.cli.ledger_output import aligned, statement_words
from farthing.cli.options import (
    AsJson,
    Decimal,
    Delimiter,
    Drop,
    Encoding,
    HeaderLine,
    SchemaFile,
    csv_format,
    emit,
    emit_json,
    number,
    option,
    say,
)
from farthing.errors import InvalidValue


def describe(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A CSV or Parquet file.", show_default=False)],
    epsilon: Annotated[float, option(number, "Epsilon of the budget.")],
    delta: Annotated[float, option(number, "Delta of the budget; 0 uses Laplace noise.")] = 0.0,
    schema: SchemaFile = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Describe this numeric column; NAME=private computes its bounds privately. Repeatable.",
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B", help="Describe this column of declared values. Repeatable."),
    ] = None,
    book: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="Spend from this ledger; a new file gets this budget."),
    ] = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: HeaderLine = 1,
    as_json: AsJson = False,
) -> int:
    """Release statistics of every column of a table.

    It prints counts, means, quantiles and counts of declared values, each with its error. Bounds that are not
    declared are computed privately, from the same budget.
    """
    validate.positive(**{"--epsilon": epsilon})
    validate.delta(**{"--delta": delta})
    from farthing.cli import describing
    from farthing.cli.ledger_output import open_journal
    from farthing.data import model_file, table_files
    from farthing.ledger.journal import Journal

    if schema is not None and (bounds or values):
        raise InvalidValue("give either --schema or --bounds and --values, got both")
    columns: Any = None
    if schema is not None:
        found = table_files.schema_of(schema, None).without(drop or [])
        columns = [*found.columns, found.target]
    elif bounds or values:
        columns = table_files.declared_columns(bounds or [], values or [])
    if book is not None:
        if Journal.exists(book):
            open_journal(book).close()
        else:
            model_file.check_writable(book, force=True, option="--ledger")
    fields = describing.describe_table(
        table,
        columns,
        Budget(epsilon, delta),
        ledger=book,
        drop=drop or [],
        csv=csv_format(delimiter, decimal, encoding, header),
    )
    if as_json:
        emit_json(fields)
    else:
        emit(aligned(_lines(fields)))
        for name, kind in fields["left_out"].items():
            say(f"column {name!r} is left out: it holds {kind}")
    return 0


def _lines(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a description as text, a few lines per column."""
    lines: dict[str, Any] = {}
    for column in fields["columns"]:
        if column["kind"] == "values":
            error = f" ± {_short(column['error'])} each"
            counts = zip(column["values"], column["counts"], strict=True)
            lines[column["name"]] = [
                ", ".join(f"{value or 'empty'} {max(0, round(n)):,}" for value, n in counts) + error
            ]
            continue
        size = f"{round(column['count']):,} ± {_short(column['count_error'])} numbers"
        if column["mean"] is None:
            lines[column["name"]] = f"{size}: too few for a mean and quantiles"
            continue
        show, unit = (_day, " days") if column["kind"] == "dates" else (_short, "")
        pairs = zip(column["quantiles"], column["quantile_errors"], strict=True)
        spread = ", ".join(f"{show(value)} ± {_short(error)}{unit}" for value, error in pairs)
        ends = f"{show(column['low'])} to {show(column['high'])}"
        lines[column["name"]] = [
            f"{size}, mean {show(column['mean'])} ± {_short(column['mean_error'])}{unit}",
            f"quantiles (5, 25, 50, 75, 95 %) {spread}",
            f"clipped to {ends}, " + ("by private bounds" if column["bought"] else "as declared"),
        ]
    return {**lines, "guarantee": statement_words(fields["guarantee"]), "ledger": fields["ledger"]}


def _short(number: float) -> str:
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e15 else f"{number:.4g}"


def _day(days: float) -> str:
    return (date(1970, 1, 1) + timedelta(days=round(days))).isoformat()
