"""What a coordinator tells Flower's SuperLink: who may join, and to run the relay.

``python -m farthing.crowd.flower_control register FILE...`` registers the nodes with these keys, ``... run
FOLDER`` starts the app in a folder. Both are Flower's own commands, several in one process; each prints an
object of JSON, among words for people (`objects`).
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The objects in what was printed.

    >>> list(objects('Registered. {"node-id": 1} Done. {"success": false}'))
    [{'node-id': 1}, {'success': False}]
    """
    decoder, place = json.JSONDecoder(), 0
    while (start := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, start)
            yield found
        except ValueError:
            place = start + 1


def main(arguments: list[str]) -> None:
    from flwr.cli.app import app

    command, *rest = arguments
    before = ["run"] if command == "run" else ["supernode", "register"]
    for argument in rest:
        with contextlib.suppress(SystemExit):  # what went wrong is in the object that was printed
            app([*before, argument, "farthing", "--format", "json"], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1:])
