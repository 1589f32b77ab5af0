"""The command line: ``farthing train``, ``predict``, ``simulate``, ``audit``, ``account``, ``ledger``, ...

Data goes to standard output, prose and errors to standard error. Exit codes: 0, in order; 1, a check failed
or what is printed is no guarantee; 2, wrong usage or an invalid value; 3, it does not fit the budget.

Everything heavy is imported inside the commands, so that ``farthing --help`` answers at once.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import farthing
from farthing import validate
from farthing.budget import Adjacency, Budget, Unit
from farthing.deploying_cli import join, keys, serve
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.journal import Journal
from farthing.plans import Accountant, Curve, Plan, curve
from farthing.reporting import (
    aligned,
    ledger,
    ledger_lines,
    open_journal,
    rounded_up,
    simulated_lines,
    trained_lines,
    verification,
    verification_lines,
)

FAILED, WRONG, SPENT = 1, 2, 3

# typer brings click along, as a dependency or as a copy of its own: both have this class above BadParameter.
_WrongUsage: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Differentially private training with adaptive budgets: trains, accounts, reads ledgers.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
books = typer.Typer(help="Begins a ledger, or reads one; never changes it.", rich_markup_mode=None)
app.add_typer(books, name="ledger")


class _Command(typer.core.TyperCommand):
    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")  # typer before 0.21 escapes brackets for rich


class Sampler(StrEnum):
    """How the records of a step are drawn."""

    POISSON = "poisson"
    FIXED = "fixed"


class Spending(StrEnum):
    """How the costs of a ledger's answers add up."""

    BASIC = "basic"
    ZCDP = "zcdp"
    GDP = "gdp"
    RDP = "rdp"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, got {text!r}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def _option(parser: Callable[[str], float], text: str) -> Any:
    return typer.Option(parser=parser, metavar="INTEGER" if parser is _whole else "NUMBER", help=text)


_SIGMA = "Noise: standard deviation over the bound C of one contribution."
_RATE = "Probability of a record to be in a step's sample; 1 for everybody."
_RECORDS = "Records in all, for fixed samples: rate times records are drawn."

Rate = Annotated[float, _option(_number, _RATE)]
Records = Annotated[int | None, _option(_whole, _RECORDS)]
Relation = Annotated[Adjacency, typer.Option(help="When two data sets are neighbours.")]
Draw = Annotated[
    Sampler, typer.Option(help="How a sample is drawn: each record by itself, or a fixed number.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger's journal.", show_default=False)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; every expected error ends here as one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="farthing", standalone_mode=False)
    except _WrongUsage as error:
        return _say(error.format_message(), WRONG)  # type: ignore[attr-defined]
    except (InvalidValue, Unsupported) as error:
        return _say(str(error), WRONG)
    except BudgetSpent as error:
        return _say(str(error), SPENT)
    except FarthingError as error:
        return _say(str(error), FAILED)
    except ArithmeticError as error:
        return _say(f"these values are too extreme to compute with ({error})", WRONG)
    return code or 0


def _say(sentence: str, code: int) -> int:
    print(f"farthing: {sentence}", file=sys.stderr)
    return code


def _emit(text: str) -> None:
    print(text, flush=True)  # a reader that went away is noticed here, where typer ends quietly


def _version(wanted: bool) -> None:
    if wanted:
        print(f"farthing {farthing.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(cls=_Command)
def train(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A CSV file with a header, or the word adult.", show_default=False
        ),
    ],
    epsilon: Annotated[float, _option(_number, "The most that may be spent: its epsilon.")],
    delta: Annotated[float, _option(_number, "The most that may be spent: its delta.")],
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
        _option(_whole, "The public number of records; by default the table's own, taken as public."),
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
        _emit(training.skeleton_of(table, target))
        return _say(
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
        _emit(json.dumps(fields, allow_nan=False))
    else:
        print(aligned(trained_lines(fields)), file=sys.stderr)
    return 0


@app.command(cls=_Command)
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


@app.command(cls=_Command)
def simulate(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A CSV file with a header, or the word adult.", show_default=False
        ),
    ],
    users: Annotated[int, _option(_whole, "How many users share the records, in the order of the table.")],
    epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGETS",
            help="A number for all, numbers with commas in turn, or FILE:COLUMN, a row each.",
        ),
    ] = None,
    delta: Annotated[float | None, _option(_number, "Of every user's budget.")] = None,
    records: Annotated[
        int | None,
        typer.Option(
            "--records-per-user",
            parser=_whole,
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
        int | None, _option(_whole, "The least number of honest users of a round, for distributed noise.")
    ] = None,
    noise: Annotated[
        str, typer.Option(metavar="NAME", help="Simulate the sum of all noise, or that of each user.")
    ] = "sum",
    clip: Annotated[
        float | None, _option(_number, "Where a record's gradient is clipped; 3 in A-DDP.")
    ] = None,
    draw: Annotated[
        str | None, typer.Option(metavar="DRAW", help="Of a round: one, a number, all, or poisson:P.")
    ] = None,
    rounds: Annotated[int | None, _option(_whole, "The rounds that noise is chosen for.")] = None,
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
    _emit(json.dumps(fields, allow_nan=False) if as_json else aligned(simulated_lines(fields)))
    return 0 if fields["epsilon"] is not None else _say(f"{method} gives no guarantee", FAILED)


@app.command(cls=_Command)
def guard(
    policy: Annotated[
        Path, typer.Argument(metavar="POLICY", help="What the party allows, as TOML.", show_default=False)
    ],
    check: Annotated[bool, typer.Option("--check", help="See that everything is in order, and end.")] = False,
) -> int:
    """Keeps a party's records, noise and ledger, and answers on a Unix socket what its policy allows."""
    from farthing.guard.command import guard as keep

    keep(policy, check=check)
    return 0


for _deployed in (keys, serve, join):
    app.command(cls=_Command)(_deployed)


@app.command(cls=_Command)
def audit(
    method: Annotated[
        str | None, typer.Argument(metavar="METHOD", help="What to attack; a wrong name lists them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Attack every method of the library.")] = False,
    effort: Annotated[
        float, _option(_number, "Runs, relative to the usual number; 10 shows more and takes longer.")
    ] = 1.0,
    confidence: Annotated[float, _option(_number, "Of all verdicts together.")] = 0.99,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table as a section of HTML as well.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Attacks a method on neighbouring data and compares what the attacks show with what is claimed.

    Ends with 1 where a claim is broken. "Not refuted" is no proof.
    """
    from farthing import auditing_cli
    from farthing.audit.verdict import section

    if html is not None and (html.exists() or not html.parent.is_dir()):
        raise InvalidValue(f"--html must be a new file in an existing directory, got {str(html)!r}")
    with auditing_cli.shown(as_json, everything) as watch:
        found = auditing_cli.audited(method, everything, effort, confidence, watch)
        told = auditing_cli.lawful(method)
    if html is not None:
        html.write_text(section(found), encoding="utf-8")
    if as_json:
        _emit(json.dumps(auditing_cli.fields(found, told, confidence), allow_nan=False))
    else:
        parts = [auditing_cli.table(found)] if found else []
        _emit("\n\n".join([*parts, *([auditing_cli.law_lines(told)] if told else [])]))
    broken = [name for name, verdict in found if verdict.broken] + [law for law in told if told[law]]
    return _say(f"broken: {', '.join(dict.fromkeys(broken))}", FAILED) if broken else 0


@app.command(cls=_Command)
def account(
    sigma: Annotated[float, _option(_number, _SIGMA)],
    rate: Rate,
    steps: Annotated[int, _option(_whole, "How many steps.")],
    delta: Annotated[float | None, _option(_number, "Print epsilon at this delta.")] = None,
    epsilon: Annotated[
        float | None,
        _option(_number, "Print delta at this epsilon; with --delta, say whether epsilon stays within it."),
    ] = None,
    accountant: Annotated[Accountant, typer.Option(help="How steps are added up.")] = Accountant.PLD,
    adjacency: Relation = Adjacency.ADD_REMOVE,
    sampler: Draw = Sampler.POISSON,
    records: Records = None,
    as_json: AsJson = False,
) -> int:
    """What a plan of equal steps costs: epsilon at a delta, or delta at an epsilon."""
    if delta is None and epsilon is None:
        raise InvalidValue("give --delta for epsilon, --epsilon for delta, or both for a check; got neither")
    plan = _plan(sigma, rate, steps, adjacency, sampler, records)
    if delta is not None:
        validate.probability(**{"--delta": delta})
    if epsilon is not None:
        validate.non_negative(**{"--epsilon": epsilon})
    found = curve(plan, accountant)
    if delta is None:
        assert epsilon is not None
        delta = found.delta(epsilon)
        return _report(plan, accountant, found, epsilon, delta, computed="delta", as_json=as_json)
    at_delta = found.epsilon(delta)
    if epsilon is not None and epsilon < at_delta and found.delta(epsilon) <= delta:
        at_delta = epsilon  # the two searches end within rounding of each other
    return _report(plan, accountant, found, at_delta, delta, limit=epsilon, as_json=as_json)


@app.command(cls=_Command)
def calibrate(
    epsilon: Annotated[float, _option(_number, "The budget's epsilon.")],
    delta: Annotated[float, _option(_number, "The budget's delta.")],
    rate: Rate,
    steps: Annotated[int | None, _option(_whole, "Find the least noise for so many steps.")] = None,
    sigma: Annotated[float | None, _option(_number, "Find the most steps for this noise.")] = None,
    adjacency: Relation = Adjacency.ADD_REMOVE,
    sampler: Draw = Sampler.POISSON,
    records: Records = None,
    as_json: AsJson = False,
) -> int:
    """The least noise for some steps, or the most steps for some noise, within a budget."""
    from farthing.accounting import calibrate as search

    if (steps is None) == (sigma is None):
        given = "neither" if steps is None else f"--steps {steps} and --sigma {sigma:g}"
        raise InvalidValue(f"give either --steps (for noise) or --sigma (for steps), got {given}")
    validate.positive(**{"--epsilon": epsilon})
    validate.probability(**{"--delta": delta})
    budget = Budget(epsilon, delta, adjacency)
    plan = _plan(
        1.0 if sigma is None else sigma, rate, 1 if steps is None else steps, adjacency, sampler, records
    )
    if sigma is None:
        try:
            least = search.noise(lambda noise: replace(plan, sigma=noise).event, budget)
        except InvalidValue as error:  # the values themselves were checked above
            raise BudgetSpent(str(error)) from None
        plan = replace(plan, sigma=least)
    else:
        most = search.steps(plan.step, budget)
        if most == 0:
            raise BudgetSpent(f"not even {plan} fits {budget}: add noise or draw fewer")
        plan = replace(plan, steps=most)
    found = curve(plan, Accountant.PLD)
    achieved = min(found.epsilon(delta), epsilon)  # the search has certified the budget itself
    return _report(plan, Accountant.PLD, found, achieved, delta, limit=epsilon, as_json=as_json)


def _plan(
    sigma: float, rate: float, steps: int, adjacency: Adjacency, sampler: Sampler, records: int | None
) -> Plan:
    validate.positive(**{"--sigma": sigma})
    validate.rate(**{"--rate": rate})
    validate.count(**{"--steps": steps})
    if sampler is Sampler.FIXED and records is None:
        raise InvalidValue("--sampler fixed needs --records, the number of records drawn from")
    if sampler is Sampler.POISSON and records is not None:
        raise InvalidValue(f"--records is for --sampler fixed only, got {records} with --sampler poisson")
    if records is not None:
        validate.count(**{"--records": records})
    return Plan(sigma, rate, steps, adjacency, records)


def _report(
    plan: Plan,
    accountant: Accountant,
    found: Curve,
    epsilon: float,
    delta: float,
    *,
    computed: str = "epsilon",
    limit: float | None = None,
    as_json: bool,
) -> int:
    """Prints what holds of a plan and returns the exit code."""
    said = math.isfinite(epsilon) and delta < 1
    proven = said and found.proven(delta)
    notes = [found.note] if found.note else []
    if not said:
        notes.append("nothing is promised: epsilon is infinite or delta is 1")
    fields: dict[str, Any] = {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
        "sigma": plan.sigma,
        "rate": plan.drawn,
        "steps": plan.steps,
        "sampler": str(Sampler.POISSON if plan.records is None else Sampler.FIXED),
        **({} if plan.records is None else {"size": plan.size, "records": plan.records}),
        "accountant": str(accountant),
        "adjacency": str(plan.adjacency),
        "unit": str(Unit.RECORD),
        "observer": str(found.observer),
        "theorem": found.theorem,
        "valid": proven,
        **({} if limit is None else {"limit": limit, "within": proven and epsilon <= limit}),
        "note": "; ".join(notes),
    }
    if as_json:
        _emit(json.dumps(fields, allow_nan=False))
    else:
        fields["valid"] = "yes" if proven else "no: this is not a guarantee"
        if limit is not None:
            fields["within"] = "yes" if fields["within"] else "no"
        fields[computed] = "none" if fields[computed] is None else rounded_up(fields[computed])
        _emit(aligned(fields))
    if not proven:
        return _say(f"{accountant} gives no guarantee here ({fields['note']})", FAILED)
    if limit is not None and epsilon > limit:
        return _say(f"epsilon {rounded_up(epsilon)} of {plan} is above {limit:g}", SPENT)
    return 0


@books.command(cls=_Command)
def create(
    file: File,
    epsilon: Annotated[float, _option(_number, "The budget's epsilon.")],
    delta: Annotated[float, _option(_number, "The budget's delta.")],
    adjacency: Relation = Adjacency.ADD_REMOVE,
    filter: Annotated[
        Spending | None, typer.Option(help="How what is asked adds up; gdp, or basic if delta is 0.")
    ] = None,
) -> int:
    """Begins a ledger that several trainings can spend from."""
    from farthing.accounting.filters import FILTERS
    from farthing.ledger import Ledger

    if Journal.exists(file):
        raise InvalidValue(f"FILE must be new, but there is a ledger at {str(file)!r}")
    if not file.parent.is_dir():
        raise InvalidValue(f"FILE must lie in an existing directory, got {str(file)!r}")
    budget = Budget(epsilon, delta, adjacency)
    with Ledger(budget, journal=file, filter=FILTERS[filter] if filter else None) as begun:
        return _say(f"{file} holds {begun.budget}, spent by the {begun.filter.name} filter", 0)


@books.command(cls=_Command)
def show(file: File, as_json: AsJson = False) -> int:
    """Budget, filter or plan, spend and guarantee of a ledger."""
    fields = ledger(file)
    _emit(json.dumps(fields, allow_nan=False) if as_json else aligned(ledger_lines(fields)))
    return 0


@books.command(cls=_Command)
def verify(file: File, as_json: AsJson = False) -> int:
    """Checks chain, head and answers, and recomputes the spend."""
    fields = verification(file)
    _emit(json.dumps(fields, allow_nan=False) if as_json else aligned(verification_lines(fields)))
    return 0 if fields["ok"] else _say(f"{file}: {fields['verdict']}", FAILED)


@books.command(cls=_Command)
def export(
    file: File,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A new file; standard output if left out.")
    ] = None,
) -> int:
    """All rows, each as one line of JSON."""
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
        return _say(f"{rows.last().seq + 1} rows written to {out}", 0)


if __name__ == "__main__":
    sys.exit(main())
