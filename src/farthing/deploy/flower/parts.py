"""Send and fetch the parts of many messages in one request each, where the SuperLink is ours.

Flower's grid sends and fetches every part of a message by itself, one after the other, and confirms each
message: seven requests a party and round, each of which waits for the SuperLink. `BulkGrid` announces and
asks for messages as Flower's grid does, and exchanges all parts at once (`PARTS`, answered by
`farthing.deploy.flower.messaging`). A SuperLink of others does not know that path: then it is Flower's grid.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PARTS = "/v1/runtime/farthing-parts"

log = logging.getLogger("farthing.federated")


def pack(names: Sequence[str], parts: Sequence[bytes], confirmed: Sequence[str] = ()) -> bytes:
    """Return parts under their names, after a line of JSON; a name without a part asks for it.

    >>> unpack(pack(["a", "b"], [b"one", b""], ["m"]))
    ({'a': b'one', 'b': b''}, ['m'])
    """
    sizes = [[name, len(part)] for name, part in zip(names, parts, strict=True)]
    line = json.dumps({"parts": sizes, "confirmed": list(confirmed)})
    return b"".join([line.encode("ascii"), b"\n", *parts])


def unpack(content: bytes) -> tuple[dict[str, bytes], list[str]]:
    """Return what `pack` wrote; `ValueError` for anything else."""
    line, _, rest = content.partition(b"\n")
    said, found, place = json.loads(line), {}, 0
    for name, size in said["parts"]:
        if not isinstance(name, str) or type(size) is not int or not 0 <= size <= len(rest) - place:
            raise ValueError("a part has no name, or a wrong size")
        found[name], place = rest[place : place + size], place + size
    return found, [str(number) for number in said["confirmed"]]


class BulkGrid:
    """Flower's grid, with all parts of messages in one request."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._bulk: bool | None = None  # not known yet

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """Send messages; return their numbers."""
        messages = list(messages)
        if not self._known():
            found: Iterable[str] = self._grid.push_messages(messages)
            return found
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from flwr.supercore.inflatable import inflatable_object as inflatable

        heads, trees, parts = [], [], dict[str, Any]()
        with inflatable.no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id
                parts |= inflatable.get_all_nested_objects(message)
                trees.append(inflatable.get_object_tree(message))
                heads.append(message_to_proto(remove_content_from_message(message)))
            asked = PushAppMessagesRequest(messages_list=heads, message_object_trees=trees)
            said = self._grid._runtime_client.PushMessages(asked)
            self._exchange({name: parts[name].deflate() for name in said.objects_to_push})
        return list(said.message_ids)

    def pull_messages(self, numbers: Iterable[str]) -> Iterable[Any]:
        """Return the replies to some messages that have come."""
        if not self._known():
            found: Iterable[Any] = self._grid.pull_messages(numbers)
            return found
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        said = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=list(numbers)))
        names = [part.object_id for tree in said.message_object_trees for part in iterate_object_tree(tree)]
        came = [head.metadata.message_id for head in said.messages_list]
        if not came:
            return []
        parts, messages = self._exchange(dict.fromkeys(names, b""), came), []
        for number, tree in zip(came, said.message_object_trees, strict=True):
            if all(part.object_id in parts for part in iterate_object_tree(tree)):  # else it is sent again
                message: Any = inflate_object_from_contents(number, dict(parts))
                message.metadata.__dict__["_message_id"] = number
                messages.append(message)
        return messages

    @property
    def holds(self) -> bool:
        """Return whether the SuperLink is ours, which holds a request for messages until there is one."""
        return self._bulk is True

    def _known(self) -> bool:
        """Return whether the SuperLink exchanges parts in bulk; asked once."""
        if self._bulk is None:
            try:
                self._exchange({})
                self._bulk = True
            except Exception as error:  # another SuperLink, or another Flower
                log.info("parts are sent one by one: %s", type(error).__name__)
                self._bulk = False
        return self._bulk

    def _exchange(self, parts: Mapping[str, bytes], confirmed: Sequence[str] = ()) -> dict[str, bytes]:
        from flwr.supercore.protobuf.client import ProtobufRequestContext

        client, content = self._grid._runtime_client, pack(list(parts), list(parts.values()), confirmed)

        def send() -> dict[str, bytes]:
            request = client._client.build_request("POST", f"{client._base_url}{PARTS}", content=content)
            message: Any = None
            response = client._send(ProtobufRequestContext("farthing.Parts", message, request))
            response.raise_for_status()
            return unpack(response.content)[0]

        found: dict[str, bytes] = self._grid._retry_invoker.invoke(send)
        return found
