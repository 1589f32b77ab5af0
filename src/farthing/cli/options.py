"""The base of all commands: exit codes, options, output, and the progress line of a long one.

Data goes to standard output, prose and errors to standard error.
"""

import inspect
import json
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from farthing.budget import FORMAT, Adjacency
from farthing.errors import InvalidValue
from farthing.validate import did_you_mean

if TYPE_CHECKING:  # it opens numpy
    from farthing.data.csv_files import Csv
    from farthing.data.schema import Schema

FAILED, WRONG, SPENT, INTERRUPTED = 1, 2, 3, 130


class Command(typer.core.TyperCommand):
    """A command that says when it is interrupted, and whose help shows brackets as they are."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            return say("interrupted", INTERRUPTED)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")  # typer before 0.21 escapes brackets for rich


def say(sentence: str, code: int = 0) -> int:
    """Print one sentence on standard error, and return the exit code."""
    print(f"farthing: {sentence}", file=sys.stderr, flush=True)
    return code


def emit(text: str) -> None:
    """Print data on standard output."""
    print(text, flush=True)  # a reader that went away is noticed here, where typer ends quietly


def emit_json(fields: dict[str, Any]) -> None:
    """Print one JSON object on one line, with its format."""
    emit(json.dumps({"format": FORMAT, **fields}, allow_nan=False))


def number(text: Any) -> float:
    """Return the number that an option or a --config file gives; there it may have any type."""
    try:
        if isinstance(text, bool):
            raise ValueError
        return float(text)
    except (ValueError, TypeError, OverflowError):
        mark = " with a decimal point" if isinstance(text, str) and "," in text else ""
        raise typer.BadParameter(f"must be a number{mark}, got {text!r}") from None


def whole(text: Any) -> int:
    """Return the whole number that an option or a --config file gives; a fraction is refused, not cut."""
    try:
        if isinstance(text, bool | float):
            raise ValueError
        return int(text)
    except (ValueError, TypeError):
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def option(parser: Callable[[str], float], text: str, *names: str) -> Any:
    """Return an option that takes a number, and whose errors quote the text that was typed."""
    metavar = "INTEGER" if parser is whole else "NUMBER"
    return typer.Option(*names, parser=parser, metavar=metavar, help=text)


Relation = Annotated[Adjacency, typer.Option(help="The adjacency: which data sets are neighbours.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def present(path: str | None) -> str | None:
    """Return an existing or embedded table's name; refuse others before anything heavy is imported."""
    if path is not None and path != "adult" and not os.path.exists(path):
        raise InvalidValue(f"there is no file {path!r}{near(path)}")
    return path


def near(path: str) -> str:
    """Return a hint at a file of the same folder with a similar name, or nothing."""
    folder = os.path.dirname(path) or "."
    with suppress(OSError):
        name = os.path.basename(path)
        return did_you_mean(name, (other for other in os.listdir(folder) if other != name))
    return ""


def from_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Read options from a TOML file, by their long names; those on the command line take precedence."""
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(f"--config {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"--config {str(path)!r} is not a TOML file: it is not UTF-8 text") from None
    except ValueError as error:
        raise InvalidValue(f"--config {str(path)!r} is not a TOML file: {error}") from None
    options = {_long(one): one for one in ctx.command.params if one.name not in ("config", "help")}
    for name in found:
        if name not in options:
            raise InvalidValue(f"--config {path}: there is no option {name!r}{did_you_mean(name, options)}")
        if isinstance(found[name], dict):
            raise InvalidValue(f"--config {path}: {name!r} must be a value or a list, not a table")
        if getattr(options[name], "multiple", False) and not isinstance(found[name], list):
            found[name] = [found[name]]
        each = found[name] if isinstance(found[name], list) else [found[name]]
        if _takes_texts(ctx.command, options[name].name) and not all(isinstance(one, str) for one in each):
            raise InvalidValue(f"--config {path}: {name!r} must be a text, got {found[name]!r}")
        if getattr(options[name], "is_flag", False) and not isinstance(found[name], bool):
            raise InvalidValue(f"--config {path}: {name!r} must be true or false, got {found[name]!r}")
    ctx.default_map = {str(options[name].name): value for name, value in found.items()}
    return path


def _takes_texts(command: Any, name: str) -> bool:
    """Whether an option is declared as text, a path or a choice, and not as a number or a switch."""
    declared = get_type_hints(inspect.unwrap(command.callback))[name]
    return not {declared, *get_args(declared)} & {bool, int, float}


def _long(parameter: Any) -> str:
    """Return the name of a parameter in a file: its longest flag without leading dashes."""
    return str(max(parameter.opts, key=len)).lstrip("-")


TableName = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="A CSV or Parquet file, or adult for the embedded table.",
        show_default=False,
        callback=present,
    ),
]
TestTable = Annotated[
    str | None,
    typer.Option(
        metavar="TABLE2",
        help="Measure the model on another table, without noise and outside the guarantee.",
        callback=present,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read options from a TOML file; keys are long option names.",
        is_eager=True,
        callback=from_config,
    ),
]
NewFile = Annotated[
    Path | None, typer.Option("-o", "--out", help="Write to this new file instead of standard output.")
]
Target = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="The column to predict; by default the schema's target.")
]
SchemaFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The schema: public bounds and vocabularies, as JSON."),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=LOW:HIGH",
        help="Instead of --schema: bounds of a column. NAME=private computes them privately, from the "
        "budget. Repeatable.",
    ),
]
DeclaredBounds = Annotated[
    list[str] | None,
    typer.Option(
        "--bounds",
        metavar="NAME=LOW:HIGH",
        help="Instead of --schema: declared bounds of a column. Repeatable.",
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=A,B", help="Instead of --schema: the vocabulary of a column. Repeatable."),
]


Delimiter = Annotated[
    str | None,
    typer.Option(
        metavar="CHAR", help="The delimiter of a CSV file, or tab; by default read from its header."
    ),
]
Decimal = Annotated[
    str | None,
    typer.Option(
        metavar="CHAR",
        help="The decimal mark; by default a comma if the delimiter is a semicolon, otherwise a point.",
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The encoding of a CSV file, such as cp1252; by default UTF-8."),
]
HeaderLine = Annotated[
    int, option(whole, "The number of the line that names the columns of a CSV file.", "--header")
]
Drop = Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave this column out. Repeatable.")]
Missing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A public value for missing cells of a column; the word middle takes the middle of the bounds "
        "of every other column. Repeatable.",
    ),
]


def csv_format(delimiter: str | None, decimal: str | None, encoding: str | None, header: int) -> "Csv":
    """Return the format of CSV files that these options describe."""
    from farthing.data.csv_files import Csv

    return Csv("\t" if delimiter in ("tab", "\\t") else delimiter, decimal, encoding, header)


def declared(
    table: str,
    schema: str | None,
    target: str | None,
    bounds: list[str],
    values: list[str],
    drop: list[str] | None = None,
    missing: list[str] | None = None,
) -> "Schema | None":
    """Return the schema that these options name or declare; None if there is none."""
    from farthing.data import table_files

    if schema is not None and (bounds or values):
        raise InvalidValue("give either --schema or --bounds and --values, got both")
    if bounds or values:
        found = table_files.declared(bounds, values, target)
    elif schema is None and table != table_files.EMBEDDED:
        return None
    else:
        found = table_files.schema_of(table_files.EMBEDDED if schema is None else schema, target)
    return found.without(drop or []).with_missing(*table_files.missing(missing or []))


Show = Callable[[str, float | None], None]  # what is going on, and how much of the total is done


@contextmanager
def progress(quiet: bool, beginning: str, total: float | None = 1.0) -> Iterator[Show | None]:
    """Yield a function that updates a progress line on standard error; None if that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    parts = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*parts, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(beginning, total=total)

        def show(words: str, done: float | None) -> None:
            line.update(task, completed=done, description=words)

        yield show


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether to end: after one Ctrl-C or SIGTERM. A second ends at once."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # only that one has signals
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
