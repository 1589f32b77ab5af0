"""Provide the command ``farthing audit``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farthing.cli.options import FAILED, INTERRUPTED, AsJson, Force, emit, emit_json, number, option, say

if TYPE_CHECKING:
    from farthing.audit.methods import Finding


def audit(
    method: Annotated[
        str | None,
        typer.Argument(metavar="METHOD", help="The method to attack; a wrong name prints all names."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Attack every method of the library.")] = False,
    effort: Annotated[
        float, option(number, "The number of runs, relative to the default; 10 shows more and takes longer.")
    ] = 1.0,
    confidence: Annotated[float, option(number, "The confidence of all verdicts jointly.")] = 0.99,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the verdicts as an HTML page.")
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> int:
    """Attack a method and compare the result with its claim.

    The exit code is 1 if a claim is broken, 130 if it was interrupted. "Not refuted" is not a proof; the
    power of an attack is the smallest epsilon that it would have detected in nine of ten runs.
    """
    from farthing.cli import auditing
    from farthing.data.model_file import check_writable, write
    from farthing.report.document import audit_page

    if html is not None:
        check_writable(html, force, option="--html")
    found: list[Finding] = []
    told: dict[str, list[str]] = {}
    interrupted = False
    with auditing.shown(as_json, everything) as watch:
        try:
            auditing.audited(method, everything, effort, confidence, watch, found=found)
            told = auditing.lawful(method)
        except KeyboardInterrupt:
            if not found:
                raise
            interrupted = True
    if html is not None:
        write(html, audit_page(found, told).encode())
    if as_json:
        emit_json({"interrupted": interrupted, **auditing.fields(found, told, confidence)})
    else:
        parts = [auditing.table(found)] if found else []
        emit("\n\n".join([*parts, *([auditing.law_lines(told)] if told else [])]))
    code = say("interrupted: these are the results so far", INTERRUPTED) if interrupted else 0
    broken = [name for name, verdict in found if verdict.broken] + [law for law in told if told[law]]
    return say(f"broken: {', '.join(dict.fromkeys(broken))}", FAILED) if broken else code
