"""The command line: ``farthing train``, ``schema``, ``predict``, ``audit``, ``ledger``, ...

Data goes to standard output, prose and errors to standard error. Exit codes: 0, success; 1, a check failed
or what is printed is no guarantee; 2, wrong usage or an invalid value; 3, the budget is exhausted; 130,
interrupted.

Everything heavy is imported inside the commands, so that ``farthing --help`` answers at once.
"""

import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

import farthing

try:
    from farthing.cli import (
        account_command,
        audit_command,
        deploy_command,
        describe_command,
        doctor_command,
        ledger_command,
        simulate_command,
        train_command,
    )
except ImportError as error:  # a ledger refuses systems where it cannot lock files
    if os.name == "posix":
        raise
    sys.exit(f"farthing: {error}")
from farthing.cli.options import FAILED, SPENT, WRONG, Command, say
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported

# typer brings click along, as a dependency or as a copy of its own: both have this class above BadParameter.
_WrongUsage: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Differentially private training with adaptive budgets.",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
books = typer.Typer(help="Create ledgers, and show, verify or export them.", rich_markup_mode=None)
app.add_typer(books, name="ledger")

for _command in (
    train_command.train,
    train_command.schema,
    train_command.predict,
    train_command.sample,
    describe_command.describe,
    simulate_command.simulate,
    deploy_command.guard,
    deploy_command.keys,
    deploy_command.serve,
    deploy_command.join,
    audit_command.audit,
    ledger_command.report,
    ledger_command.card,
    account_command.account,
    account_command.calibrate,
    doctor_command.doctor,
):
    app.command(cls=Command)(_command)
for _book in (ledger_command.create, ledger_command.show, ledger_command.verify, ledger_command.export):
    books.command(cls=Command)(_book)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; every expected error is printed as one sentence."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Greek letters shows "?"
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = cast(Any, _warned)
            code = typer.main.get_command(app).main(arguments, prog_name="farthing", standalone_mode=False)
    except _WrongUsage as error:
        said = error.format_message()  # type: ignore[attr-defined]
        said = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", said)  # typer and click both hint
        return say(_wrong_usage(said, error), WRONG)
    except (InvalidValue, Unsupported) as error:
        return say(str(error), WRONG)
    except BudgetSpent as error:
        return say(str(error), SPENT)
    except FarthingError as error:
        return say(str(error), FAILED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return _failed(error)
        return say(f"the result could not be written: {error.strerror}", FAILED)
    except ArithmeticError:
        return say("these values are too large or too small to compute with", WRONG)
    except Exception as error:  # a mistake of ours or of another library: its text may quote a record
        return _failed(error)
    return code or 0


def _failed(error: Exception) -> int:
    """Say where an unexpected error happened; with FARTHING_DEBUG, raise it."""
    if os.environ.get("FARTHING_DEBUG"):
        raise error
    return say(_unexpected(error), FAILED)


def _wrong_usage(said: str, error: Exception) -> str:
    """Return the sentence for wrong usage, with a hint at the one option that a shortened name begins."""
    context = getattr(error, "ctx", None)
    if context is None:
        return said
    typed, known = getattr(error, "option_name", None), list[str]()
    if typed and "Did you mean" not in said:
        known = [name for one in context.command.params for name in one.opts if name.startswith(f"{typed}-")]
    hint = f" Did you mean {known[0]!r}?" if len(known) == 1 else ""
    return f"{said}{'' if said[-1] in '.?' else '.'}{hint} See '{context.command_path} --help'."


def _warned(message: Warning | str, *_: Any) -> None:
    say(str(message))


def _unexpected(error: Exception) -> str:
    """Return where an error happened, and nothing of its text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
    place = "" if frame is None or trace is None else f", {frame.f_globals.get('__name__')}:{trace.tb_lineno}"
    return (
        f"an unexpected {type(error).__name__}{place}. Its text is not shown, because it may quote a "
        "record. To see it, set FARTHING_DEBUG=1 and keep the output private"
    )


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


if __name__ == "__main__":
    sys.exit(main())
