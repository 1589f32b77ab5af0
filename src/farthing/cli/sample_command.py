"""The command ``farthing sample``: a small table and its schema, to try things on."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from farthing.cli.options import Force, emit

NAMES = "people.csv", "people.json"


def sample(
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to copy them into.")] = Path(),
    force: Force = False,
) -> int:
    """Writes people.csv, 3,000 people who do not exist, and its schema people.json."""
    from farthing.data.model_file import check_writable, write

    folder = files("farthing.data") / "datasets"
    for name in NAMES:
        check_writable(out / name, force)
    for name in NAMES:
        write(out / name, (folder / name).read_bytes())
        emit(str(out / name))
    return 0
