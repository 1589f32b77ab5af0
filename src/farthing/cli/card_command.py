"""The command ``farthing card``: the model card of a training."""

from pathlib import Path
from typing import Annotated

import typer

from farthing.cli.options import Force, NewFile, emit, say


def card(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder that train wrote, or its privacy.json."),
    ],
    out: NewFile = None,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log files and facts to MLflow's tracking server as well.")
    ] = False,
    force: Force = False,
) -> int:
    """Writes the model card of a training, in Markdown with Hugging Face's fields."""
    from farthing.data.model_file import check_writable, write
    from farthing.report import card as cards

    told = cards.read(folder)
    if out is not None:
        check_writable(out, force, kept=(folder,))
    text = cards.card(told)
    if mlflow:
        say(f"logged to MLflow as run {cards.logged(folder, told)}")
    if out is None:
        emit(text)
    else:
        write(out, text.encode())
    return 0
