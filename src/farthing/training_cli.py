"""The commands about tables: ``farthing train``, ``predict`` and ``simulate``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from farthing import validate
from farthing.budget import Adjacency, Unit
from farthing.errors import InvalidValue
from farthing.journal import Journal
from farthing.options import (
    FAILED,
    WRONG,
    AsJson,
    Force,
    emit,
    number,
    option,
    say,
    whole,
)
from farthing.reporting import aligned, open_journal, simulated_lines, trained_lines


def train(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A CSV file with a header, or the word adult.", show_default=False
        ),
    ],
    epsilon: Annotated[float, option(number, "The most that may be spent: its epsilon.")],
    delta: Annotated[float, option(number, "The most that may be spent: its delta.")],
    target: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What to predict: the schema's target.")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Public bounds and vocabularies as JSON, or the word adult; left out, a skeleton.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="logistic or svm for labels, linear for numbers.")
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="The solver; a wrong name lists those there are.")
    ] = "auto",
    book: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="Spend from this ledger; a new one holds this budget."),
    ] = None,
    adjacency: Annotated[
        Adjacency | None,
        typer.Option(help="When two tables are neighbours; by default the ledger's, or add-remove."),
    ] = None,
    records: Annotated[
        int | None,
        option(whole, "The public number of records; by default the table's own, taken as public."),
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="A folder for model.npz and privacy.json, or NAME.npz.")
    ] = Path(),
    test: Annotated[
        str | None,
        typer.Option(metavar="TABLE2", help="Measure the model on another table, without privacy."),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Trains a linear model on a table within a budget.

    Exactly what the budget allows is spent. Bounds and vocabularies are declared in a schema, never learnt.
    """
    validate.positive(**{"--epsilon": epsilon})
    validate.delta(**{"--delta": delta})
    from farthing import training

    if schema is None and table != training.EMBEDDED:
        if target is None:
            raise InvalidValue("give --schema FILE; for a skeleton of one, give --target COLUMN instead")
        emit(training.skeleton_of(table, target))
        return say(
            "bounds and vocabularies are declared, never learnt from the records: fill in low and high, or "
            "values, of every column above from public knowledge, and give the file as --schema",
            WRONG,
        )
    known = training.schema_of(schema or training.EMBEDDED, target)
    if book is not None and Journal.exists(book):
        open_journal(book).close()
    fields = training.train(
        training.Job(table, known, epsilon, delta, adjacency, model, method, records, book, out, force, test)
    )
    if as_json:
        emit(json.dumps(fields, allow_nan=False))
    else:
        print(aligned(trained_lines(fields)), file=sys.stderr)
    return 0


def predict(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="What train wrote: the .npz or its folder.", show_default=False),
    ],
    table: Annotated[
        str,
        typer.Argument(metavar="TABLE", help="A CSV file with the schema's columns.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A new file; standard output if left out.")
    ] = None,
    force: Force = False,
) -> int:
    """One label or number a row of a table, in its order."""
    from farthing import training

    trained = training.Model.load(model)
    if out is not None:
        training.check_writable(out, force)
    text = "".join(f"{line}\n" for line in training.predictions(trained, table))
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        training.write(out, text.encode())
    return 0


def simulate(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A CSV file with a header, or the word adult.", show_default=False
        ),
    ],
    users: Annotated[int, option(whole, "How many users share the records, in the order of the table.")],
    epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGETS",
            help="A number for all, numbers with commas in turn, or FILE:COLUMN, a row each.",
        ),
    ] = None,
    delta: Annotated[float | None, option(number, "Of every user's budget.")] = None,
    records: Annotated[
        int | None,
        typer.Option(
            "--records-per-user",
            parser=whole,
            metavar="INTEGER",
            help="Of each user, from the first rows; by default all rows, evenly.",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="Together, addp, sgd2, sgd-adv, ...; a wrong name lists them.")
    ] = "together",
    accountant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of addp: sampling (its own), advanced or tight.")
    ] = None,
    trust: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Who adds noise: local; with together, addp, sgd2 distributed or trusted."
        ),
    ] = None,
    survivors: Annotated[
        int | None, option(whole, "The least number of honest users of a round, for distributed noise.")
    ] = None,
    noise: Annotated[
        str, typer.Option(metavar="NAME", help="Simulate the sum of all noise, or that of each user.")
    ] = "sum",
    clip: Annotated[float | None, option(number, "Where a record's gradient is clipped; 3 in A-DDP.")] = None,
    draw: Annotated[
        str | None, typer.Option(metavar="DRAW", help="Of a round: one, a number, all, or poisson:P.")
    ] = None,
    rounds: Annotated[int | None, option(whole, "The rounds that noise is chosen for.")] = None,
    adjacency: Annotated[
        Adjacency | None, typer.Option(help="When two users' records are neighbours; by default add-remove.")
    ] = None,
    unit: Annotated[
        Unit, typer.Option(help="What is hidden of a user: a record, or all of them.")
    ] = Unit.RECORD,
    schema: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Public bounds and vocabularies as JSON, or the word adult."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(metavar="TABLE2", help="Measure the model on another table, without privacy."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Lets users who keep their records train together, each on a budget of its own.

    Ctrl-C ends it with what was reached.
    """
    from farthing import simulating, training

    if schema is None and table != training.EMBEDDED:
        raise InvalidValue(
            "give --schema FILE; `farthing train TABLE --target COLUMN` prints a skeleton of one"
        )
    job = simulating.Job(
        table,
        training.schema_of(schema or training.EMBEDDED, None),
        users,
        epsilon,
        delta,
        records,
        method,
        accountant,
        trust,
        survivors,
        noise,
        clip,
        draw,
        rounds,
        adjacency,
        test,
        unit,
    )
    with simulating.shown(quiet=as_json) as watch:
        fields = simulating.simulate(job, watch)
    emit(json.dumps(fields, allow_nan=False) if as_json else aligned(simulated_lines(fields)))
    return 0 if fields["epsilon"] is not None else say(f"{method} gives no guarantee", FAILED)
