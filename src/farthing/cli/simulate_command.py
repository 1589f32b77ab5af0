"""Provide the command ``farthing simulate``."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farthing.budget import Adjacency, Unit
from farthing.cli.ledger_output import aligned, nested, simulated_lines
from farthing.cli.options import (
    FAILED,
    INTERRUPTED,
    AsJson,
    DeclaredBounds,
    SchemaFile,
    TableName,
    Target,
    TestTable,
    Values,
    declared,
    emit,
    emit_json,
    number,
    option,
    progress,
    say,
    whole,
)
from farthing.errors import InvalidValue
from farthing.federated.methods.table import METHODS, Option, every_option

if TYPE_CHECKING:
    from farthing.federated.jobs import Watch

_SUMS = ", ".join(method.name for method in METHODS.values() if len(method.trusts) > 1)


def _with_method_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of all federated methods, and pass those that were set as ``options``."""
    known = every_option()

    @functools.wraps(command)
    def called(**given: Any) -> int:
        options = {name: given.pop(name) for name in known}
        return command(**given, options={name: value for name, value in options.items() if value is not None})

    signature = inspect.signature(command)
    own = [one for one in signature.parameters.values() if one.name != "options"]
    more = [_parameter(one, methods) for one, methods in known.values()]
    vars(called)["__signature__"] = signature.replace(parameters=[*own[:-1], *more, own[-1]])
    called.__annotations__ = {one.name: one.annotation for one in [*own, *more]} | {"return": int}
    return called


def _parameter(one: Option, methods: list[str]) -> inspect.Parameter:
    """Return an option as typer takes it from a signature; the help names its methods."""
    text, default = f"{one.help} ({', '.join(methods)})", False if one.kind is bool else None
    if one.kind in (int, float):
        info = option(whole if one.kind is int else number, text)
    else:
        info = typer.Option(one.flag, metavar=None if one.kind is bool else "NAME", help=text)
    kind = bool if one.kind is bool else one.kind | None
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(one.name, either, default=default, annotation=Annotated[kind, info])


@_with_method_options
def simulate(
    table: TableName,
    clients: Annotated[
        int,
        option(whole, "The number of clients among whom the records are divided, in the order of the table."),
    ],
    epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGETS",
            help="Budgets of the clients: one number, several numbers separated by commas (in turn), or "
            "FILE:COLUMN with a row for each client.",
        ),
    ] = None,
    delta: Annotated[float | None, option(number, "The delta of every client's budget.")] = None,
    records: Annotated[
        int | None,
        typer.Option(
            "--records-per-client",
            parser=whole,
            metavar="INTEGER",
            help="The number of records of each client; by default all records are divided evenly.",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"The method: {', '.join(METHODS)}.")
    ] = "federated-descent",
    trust: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"The trust model: local; for {_SUMS} also distributed or trusted."
        ),
    ] = None,
    survivors: Annotated[
        int | None, option(whole, "The least number of honest clients in a round, for distributed noise.")
    ] = None,
    noise: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="sum simulates the noise of the sum, each the noise of every client."
        ),
    ] = "sum",
    adjacency: Annotated[
        Adjacency | None,
        typer.Option(help="The adjacency; by default add-remove."),
    ] = None,
    unit: Annotated[
        Unit, typer.Option(help="The protected unit: a record, or all records of a client.")
    ] = Unit.RECORD,
    target: Target = None,
    schema: SchemaFile = None,
    bounds: DeclaredBounds = None,
    values: Values = None,
    test: TestTable = None,
    as_json: AsJson = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Simulate training over clients that keep their records.

    Each client has its own budget. Ctrl-C ends the simulation and keeps the model of the last round.
    """
    from farthing.federated import jobs

    known = declared(table, schema, target, bounds or [], values or [])
    if known is None:
        raise InvalidValue("give --schema FILE; `farthing schema TABLE --target COLUMN` drafts one")
    job = jobs.Job(
        table=table,
        schema=known,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        records=records,
        method=method,
        trust=trust,
        survivors=survivors,
        noise=noise,
        adjacency=adjacency,
        test=test,
        unit=unit,
        options=options,
    )
    with shown(quiet=as_json) as watch:
        fields = nested(jobs.simulate(job, watch))
    if as_json:
        emit_json(fields)
    else:
        emit(aligned(simulated_lines(fields)))
    if fields["stopped"] == "interrupted":
        return say("interrupted: these are the results so far", INTERRUPTED)
    return 0 if fields["guarantee"]["epsilon"] is not None else say(f"{method} gives no guarantee", FAILED)


@contextmanager
def shown(quiet: bool) -> Iterator["Watch | None"]:
    """Yield a callback that shows a simulation's progress on standard error; None if that is no terminal."""
    with progress(quiet, "settling everybody's terms") as show:
        yield show and (lambda now: show(str(now), 1 - now.left))
