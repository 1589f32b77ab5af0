"""What a coordinator tells Flower's SuperLink: who may join, and to run the relay.

``python -m farthing.deploy.flower.control register FILE...`` registers the nodes with these keys, ``... run
FOLDER`` starts the app in a folder. Both are Flower's own commands, several in one process; each prints an
object of JSON, among words for people (`objects`). Requests carry the coordinator's key, without which the
doorman (`farthing.deploy.flower.link`) lets nobody at these commands.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEY_FILE = "FARTHING_CONTROL_KEY"  # in the environment: where the key lies that opens the control interface
KEY_HEADER = "x-farthing-control-key"  # how a request carries it


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


def _carry_key() -> None:
    """Adds the coordinator's key to every request of Flower's client."""
    from flwr.supercore.protobuf.client import ProtobufClient

    key, begin = Path(os.environ[KEY_FILE]).read_text(encoding="ascii").strip(), ProtobufClient.__init__

    def keyed(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._client.headers[KEY_HEADER] = key

    ProtobufClient.__init__ = keyed  # type: ignore[method-assign]


def main(arguments: list[str]) -> None:
    from flwr.cli.app import app

    _carry_key()
    command, *rest = arguments
    before = ["run"] if command == "run" else ["supernode", "register"]
    for argument in rest:
        with contextlib.suppress(SystemExit):  # what went wrong is in the object that was printed
            app([*before, argument, "farthing", "--format", "json"], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1:])
