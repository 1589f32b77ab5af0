"""The command ``farthing simulate``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from farthing.budget import Adjacency, Unit
from farthing.cli.ledger_output import aligned, simulated_lines
from farthing.cli.options import (
    FAILED,
    INTERRUPTED,
    AsJson,
    Bounds,
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
    say,
    whole,
)
from farthing.cli.progress import progress
from farthing.errors import InvalidValue

if TYPE_CHECKING:
    from farthing.federated.simulation import Watch


def simulate(
    table: TableName,
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
    rounds: Annotated[int | None, option(whole, "The rounds T that noise is chosen for.")] = None,
    lr: Annotated[float | None, option(number, "The learning rate; by default from public numbers.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of uploads, addp and sgd2: plain, precision or records."),
    ] = None,
    epsilon_iter: Annotated[
        float | None, option(number, "Of addp: noise with which one round has this epsilon, ...")
    ] = None,
    delta_iter: Annotated[float | None, option(number, "... and this delta, before its draw.")] = None,
    noise_multiplier: Annotated[
        float | None, option(number, "Noise over the clip, in place of what a budget asks for.")
    ] = None,
    radius: Annotated[float | None, option(number, "Of sgd1, sgd2: the ball that steps stay in.")] = None,
    convexity: Annotated[
        float | None, option(number, "Of sgd1, sgd2: make every loss so strongly convex.")
    ] = None,
    published_noise: Annotated[
        bool, typer.Option("--published-noise", help="Of sgd1, sgd2: their text's; says what it gives.")
    ] = False,
    adjacency: Annotated[
        Adjacency | None, typer.Option(help="When two users' records are neighbours; by default add-remove.")
    ] = None,
    unit: Annotated[
        Unit, typer.Option(help="What is hidden of a user: a record, or all of them.")
    ] = Unit.RECORD,
    target: Target = None,
    schema: SchemaFile = None,
    bounds: Bounds = None,
    values: Values = None,
    test: TestTable = None,
    as_json: AsJson = False,
) -> int:
    """Lets users who keep their records train together.

    Each has a budget of its own. Ctrl-C ends it with what was reached.
    """
    from farthing.federated import simulation

    known = declared(table, schema, target, bounds or [], values or [])
    if known is None:
        raise InvalidValue("give --schema FILE; `farthing schema TABLE --target COLUMN` drafts one")
    job = simulation.Job(
        table=table,
        schema=known,
        users=users,
        epsilon=epsilon,
        delta=delta,
        records=records,
        method=method,
        accountant=accountant,
        trust=trust,
        survivors=survivors,
        noise=noise,
        clip=clip,
        draw=draw,
        rounds=rounds,
        adjacency=adjacency,
        test=test,
        unit=unit,
        lr=lr,
        weights=weights,
        epsilon_iter=epsilon_iter,
        delta_iter=delta_iter,
        noise_multiplier=noise_multiplier,
        radius=radius,
        convexity=convexity,
        published_noise=published_noise,
    )
    with shown(quiet=as_json) as watch:
        fields = simulation.simulate(job, watch)
    if as_json:
        emit_json(fields)
    else:
        emit(aligned(simulated_lines(fields)))
    if fields["stopped"] == "interrupted":
        return say("interrupted: this is what was reached", INTERRUPTED)
    return 0 if fields["epsilon"] is not None else say(f"{method} gives no guarantee", FAILED)


@contextmanager
def shown(quiet: bool) -> Iterator["Watch | None"]:
    """A line on standard error that follows a simulation, where that is a terminal."""
    with progress(quiet, "settling everybody's terms") as show:
        yield show and (lambda now: show(str(now), 1 - now.left))
