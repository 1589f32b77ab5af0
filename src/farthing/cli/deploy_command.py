"""The commands for parties on machines of their own: ``farthing guard``, ``keys``, ``serve``, ``join``."""

import functools
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from farthing.cli.options import AsJson, emit, emit_json, say
from farthing.errors import InvalidValue


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _logged() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def guard(
    policy: Annotated[
        Path,
        typer.Argument(metavar="POLICY", help="The policy of the party, a TOML file.", show_default=False),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Check policy, records, key and ledger, and exit.")
    ] = False,
    hashes: Annotated[
        bool,
        typer.Option("--hashes", help="Print the hashes of the models' source for the policy, and exit."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run a guard: hold a party's records and enforce its budget.

    It adds the noise and keeps the ledger. It listens on a Unix socket.
    """
    if as_json and not (check or hashes):
        raise InvalidValue("--json needs --check or --hashes: a running guard prints no result")
    if hashes:
        return _hashes(policy, as_json)
    from farthing.deploy.guard.server import guard as keep

    key = keep(policy, check=check)
    if as_json:
        emit_json({"policy": str(policy), "ok": True, "public": key})
    elif check:
        say(f"{policy} is in order: policy, records, key and ledger can be read and are consistent")
    return 0


def _hashes(policy: Path, as_json: bool) -> int:
    """Print the lines of a policy that name the source of its models, as it is installed now."""
    from farthing.deploy.guard.models import hashes
    from farthing.deploy.guard.policy import Policy

    found = hashes(Policy.load(policy))
    if as_json:
        emit_json({"hashes": found})
    else:
        emit("\n".join(f'{where}\nhash = "{hash_}"' for where, hash_ in found.items()))
    return 0


def keys(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="The folder to write to; it gets one folder for each party.",
            show_default=False,
        ),
    ],
    parties: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Make keys for these parties, separated by commas.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Make keys for a coordinator with these host names, separated by commas."
        ),
    ] = None,
    renew: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Replace the keys of these parties or the coordinator, separated by commas.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Make keys and certificates for parties and a coordinator.

    A private key should never leave the machine that made it: each party makes its own with --parties NAME,
    and the coordinator with --host. Use both at once only to try it on one machine. --renew keeps the old
    keys beside the new ones; the new public keys must then be exchanged again.
    """
    from farthing.deploy import keys as keyring

    names, hosts, old = ([] if text is None else _split(text) for text in (parties, host, renew))
    if renew is not None and (parties is not None or host is not None):
        raise InvalidValue("--renew replaces existing keys: leave out --parties and --host")
    made = (
        keyring.renew(folder, old)
        if old
        else keyring.make(folder, names, hosts, coordinator=host is not None)
    )
    places = [str(place) for place in made]
    if as_json:
        emit_json({"made": places})
    else:
        emit("\n".join(places))
    return 0


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run, a TOML file.", show_default=False)],
    page: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Serve a live page on this port; 0 chooses a free port."),
    ] = None,
    page_host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="The address of the live page; by default this machine only."),
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> int:
    """Run a coordinator: train one model over parties.

    It runs until no party can afford another round. Start an interrupted run again to resume it.
    """
    if page is not None and not 0 <= page < 2**16:
        raise InvalidValue(f"--page must be a port from 0 to 65535, got {page}")
    from farthing.cli import ledger_output
    from farthing.deploy import serve as serving
    from farthing.deploy.run_file import RunFile
    from farthing.report.live_page import Page

    _logged()
    shown = None if page is None else functools.partial(Page, port=page, host=page_host)
    report = serving.serve(RunFile.load(run), page=shown, say=_say)
    if as_json:
        emit_json(report)
    else:
        emit(ledger_output.aligned(serving.lines(report)))
    return 0


def join(
    party: Annotated[
        Path, typer.Argument(metavar="PARTY", help="The party, a TOML file.", show_default=False)
    ],
) -> int:
    """Join a run: start a party's guard and its node.

    A guard that is already running is used. Ctrl-C or SIGTERM ends the processes that this command started.
    """
    from farthing.deploy import join as joining

    _logged()
    joining.join(joining.PartyFile.load(party), _say)
    return 0
