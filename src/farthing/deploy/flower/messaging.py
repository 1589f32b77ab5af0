"""Carry Flower's messages through memory: its protocol and authentication, not its framework and database.

A round takes about sixteen requests a party (a message is announced, its parts are sent one by one, both are
fetched and confirmed), and nodes and relay poll for more. Flower passes each request through nine layers of
middleware and keeps messages in a database, which took most of a round. `DirectMessaging` sits before its app
and answers these requests itself, after Flower's own authentication (a node's signature, a task's token).
All other requests, and all that it cannot answer, go on to Flower.

Messages are kept in memory until they are fetched or expire. A SuperLink that ends forgets them: the relay
sends again what was not answered, and a guard that is asked again returns the answer that it kept. A request
for messages waits until there is one (`HOLD` seconds at most), so that nobody has to ask often. Where the
inner parts of Flower are not those known (1.41), everything is left to Flower.

A node may belong to anybody: it gets the parts of messages that it fetched and no others, replies once to
each of them, confirms only them, and can use a limited amount of memory. A client that has not proved to be a
node or the relay can send a few kilobytes only.

Flower's grid sends and fetches the parts of a message one after the other, and confirms each message: seven
requests per party and round, each of which waits for the SuperLink. `BulkGrid` announces and requests
messages as Flower's grid does, but exchanges all parts at once (`PARTS`, answered by `DirectMessaging`). If a
SuperLink does not know that path, `BulkGrid` behaves like Flower's grid. `NearGrid` does this in the
SuperLink's own process, without requests.
"""

import asyncio
import base64
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from farthing.deploy.flower.mailbox import MOST, RELAY, Mailbox

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
# seconds that a request for messages waits at most: a node's, and the relay's, which has other work as well
HOLD = {f"{FLEET}pull-messages": 10.0, f"{RUNTIME}pull-messages": 0.25}
LARGEST_HEAD = 2**22  # bytes of a request that carries no part
LARGEST_UNKNOWN = 2**16  # bytes of a request before its sender is known
_KNOWN = 5.0  # seconds for which Flower's word on a node or a task is taken
_LOOK = 2.0  # seconds after which a reader that waits looks again, whether or not it was woken


class _Gone(Exception):
    """The client has disconnected."""


class _TooLarge(Exception):
    """The body of a request is longer than its sender may send."""


class _Unknown(Exception):
    """Flower must answer this request."""


class _Known:
    """Flower's state, asked about the same node or task only every few seconds."""

    def __init__(self, factory: Any) -> None:
        self._factory, self._found = factory, dict[Any, tuple[float, Any]]()

    def state(self) -> "_Known":
        return self

    def _asked(self, name: str, key: Any) -> Any:
        now = time.monotonic()
        when, value = self._found.get((name, key), (0.0, None))
        if value is None or now - when > _KNOWN:
            value = getattr(self._factory.state(), name)(key)
            self._found = {known: one for known, one in self._found.items() if now - one[0] <= _KNOWN}
            if value is not None:  # strangers are not remembered: there may be any number of them
                self._found[name, key] = now, value
        return value

    def get_node_id_by_public_key(self, key: bytes) -> Any:
        return self._asked("get_node_id_by_public_key", key)

    def get_task_by_token(self, token: str) -> Any:
        return self._asked("get_task_by_token", token)


class DirectMessaging:
    """An ASGI app around Flower's that answers messaging requests itself."""

    def __init__(self, app: Any) -> None:
        self._app, self._box = app, Mailbox()
        self.loop: asyncio.AbstractEventLoop | None = None  # set when it runs
        self._waiting: dict[int, asyncio.Event] = {}  # readers that wait for a message
        self._ending = False
        try:
            from flwr.proto import fleet_pb2, message_pb2, runtime_pb2
            from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TASK_TOKEN_HEADER
            from flwr.supercore.dependencies.task import authenticate_task
            from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
            from flwr.superlink.routers.fleet.node_auth import authenticate_node

            known: Any = _Known(app.state.linkstate_factory)
            self._stub = SimpleNamespace(state=SimpleNamespace(linkstate_factory=known))
            self._fleet, self._objects, self._runtime = fleet_pb2, message_pb2, runtime_pb2
            self._of_node, self._key_header = authenticate_node, FLEET_HTTP_PUBLIC_KEY_HEADER
            self._known = known
            self._of_task: Callable[[Any], Any] = lambda request: authenticate_task(
                request, request.headers.get(TASK_TOKEN_HEADER), known
            )
            paths = [prefix + name for prefix in (FLEET, RUNTIME) for name in _NAMES]
            self._kinds = {path: PROTOBUF_REQUEST_TYPES["POST", path] for path in paths}
        except (ImportError, AttributeError, KeyError):
            self._kinds = {}

    @property
    def known(self) -> bool:
        """Return whether it answers messaging requests itself, and does not leave them to Flower."""
        return bool(self._kinds)

    def end(self) -> None:
        """Hold no request any longer, since the SuperLink ends; called by any thread or signal handler."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._ending = True
        self._wake(set(self._waiting))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        known = scope["type"] == "http" and scope.get("method") == "POST" and self.known
        if not known or (scope["path"] not in self._kinds and scope["path"] != PARTS):
            await self._app(scope, receive, send)
            return
        body = b""
        try:
            body = await _body(receive, lambda: self._largest(scope))
            answer = await self._answered(scope, body, receive)
        except _Gone:
            return
        except _TooLarge:
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        except Exception:  # Flower answers, or says what is wrong
            await self._app(scope, _replayed(body, receive), send)
            return
        headers = [(b"content-type", b"application/protobuf"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _largest(self, scope: dict[str, Any]) -> int:
        """Return the most bytes that a request may have: few, unless its headers prove who sent it."""
        from starlette.requests import Request

        request = Request({**scope, "app": self._stub, "state": {}})
        try:
            if scope["path"].startswith(FLEET):
                key = base64.b64decode(request.headers[self._key_header], validate=True)
                node = self._known.get_node_id_by_public_key(key)
                if node is None:
                    return LARGEST_UNKNOWN
                request.state.protobuf_request = SimpleNamespace(node_id=node)
                self._of_node(request)
            else:
                self._of_task(request)
        except Exception:  # Flower says what is wrong
            return LARGEST_UNKNOWN
        return MOST if scope["path"] == PARTS or scope["path"].endswith("/push-object") else LARGEST_HEAD

    async def _answered(self, scope: dict[str, Any], body: bytes, receive: Any) -> bytes:
        from starlette.requests import Request

        path = scope["path"]
        request = Request({**scope, "app": self._stub, "state": {}})
        if path == PARTS:
            self._of_task(request)
            found = self._exchanged(*unpack(body))
            return pack(list(found), list(found.values()))
        request.state.protobuf_request = asked = self._kinds[path].FromString(body)
        of_node = path.startswith(FLEET)
        (self._of_node if of_node else self._of_task)(request)
        if path in HOLD:
            response = await self._pulled(asked, of_node, HOLD[path], receive)
        elif path.endswith("/push-messages"):
            response = self._announced(asked, of_node)
        elif path.endswith("/push-object"):
            response = self._stored(asked, asked.node.node_id if of_node else RELAY)
        elif path.endswith("/pull-object"):
            response = self._part(asked, asked.node.node_id if of_node else RELAY)
        else:
            if not self._box.confirm(asked.message_object_id, asked.node.node_id if of_node else RELAY):
                raise _Unknown
            response = self._objects.ConfirmMessageReceivedResponse()
        content: bytes = response.SerializeToString()
        return content

    async def announced(self, asked: Any) -> Any:
        """Announce messages of a relay in this process."""
        return self._announced(asked, of_node=False)

    async def pulled(self, asked: Any) -> Any:
        """Return replies to a relay in this process, which does not disconnect while it waits."""
        return await self._pulled(asked, False, HOLD[f"{RUNTIME}pull-messages"], asyncio.Event().wait)

    async def exchanged(self, parts: Mapping[str, bytes], confirmed: Sequence[str]) -> dict[str, bytes]:
        """Exchange parts with a relay in this process."""
        return self._exchanged(parts, confirmed)

    def _announced(self, asked: Any, of_node: bool) -> Any:
        wanted, numbers, now = dict[str, None](), [], time.monotonic()
        for head, tree in zip(asked.messages_list, asked.message_object_trees, strict=True):
            node = asked.node.node_id if of_node else None
            if node is not None and not self._box.may_reply(node, head.metadata.reply_to_message_id):
                raise _Unknown
            reader = RELAY if of_node else head.metadata.dst_node_id
            missing = self._box.add(head, tree, RELAY if node is None else node, reader, now)
            if missing is None:
                raise _Unknown
            wanted |= dict.fromkeys(sorted(missing))
            numbers.append(head.metadata.message_id)
            self._wake(set() if missing else {reader})
        if not numbers:
            raise _Unknown
        session = secrets.token_hex(16)
        if of_node:
            results = dict.fromkeys(numbers, 0)
            return self._fleet.PushMessagesResponse(
                results=results, objects_to_push=list(wanted), session_id=session
            )
        return self._runtime.PushAppMessagesResponse(
            message_ids=numbers, objects_to_push=list(wanted), session_id=session
        )

    def _exchanged(self, parts: Mapping[str, bytes], confirmed: Sequence[str]) -> dict[str, bytes]:
        """Store the parts that came, return those that are asked for, forget messages that were fetched."""
        for name, content in parts.items():
            if content:
                self._wake(self._box.put(name, content, RELAY) or set())
        wanted = {name: self._box.part(name, RELAY) for name, content in parts.items() if not content}
        found = {name: content for name, content in wanted.items() if content is not None}
        for number in confirmed:
            self._box.confirm(number, RELAY)
        return found

    def _stored(self, asked: Any, sender: int) -> Any:
        readers = self._box.put(asked.object_id, asked.object_content, sender)
        if readers is None:
            raise _Unknown
        self._wake(readers)
        return self._objects.PushObjectResponse(stored=True)

    def _part(self, asked: Any, reader: int) -> Any:
        content = self._box.part(asked.object_id, reader)
        if content is None:
            raise _Unknown
        return self._objects.PullObjectResponse(
            object_found=True, object_available=True, object_content=content
        )

    async def _pulled(self, asked: Any, of_node: bool, seconds: float, receive: Any) -> Any:
        """Return messages as soon as there are any, or none when the time is up."""
        reader = asked.node.node_id if of_node else RELAY
        replies, most = (None, 1) if of_node else (set(asked.message_ids), 2**20)
        until, gone = time.monotonic() + seconds, asyncio.ensure_future(receive())
        try:
            while True:
                found = self._box.fetch(reader, replies, time.monotonic(), most)
                if found or self._ending or time.monotonic() >= until:
                    break
                await self._wait(reader, gone, until - time.monotonic())
        finally:
            gone.cancel()
        heads, trees = [mail.head for mail in found], [mail.tree for mail in found]
        kind = self._fleet.PullMessagesResponse if of_node else self._runtime.PullAppMessagesResponse
        return kind(messages_list=heads, message_object_trees=trees)

    async def _wait(self, reader: int, gone: Any, seconds: float) -> None:
        """Wait for a message; none is fetched for a client that has disconnected."""
        event = self._waiting.setdefault(reader, asyncio.Event())
        waiting = asyncio.ensure_future(event.wait())
        done = asyncio.FIRST_COMPLETED
        await asyncio.wait({waiting, gone}, timeout=min(seconds, _LOOK), return_when=done)
        waiting.cancel()
        if gone.done():
            raise _Gone

    def _wake(self, readers: set[int]) -> None:
        for reader in readers:
            if (event := self._waiting.pop(reader, None)) is not None:
                event.set()


_NAMES = ("pull-messages", "push-messages", "pull-object", "push-object", "confirm-message-received")


async def _body(receive: Any, largest: Callable[[], int]) -> bytes:
    """Return the body of a request; ``largest`` is asked where it is not a short one."""
    parts, more, size, most = [], True, 0, LARGEST_UNKNOWN
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise _Gone
        parts.append(message.get("body", b""))
        more, size = message.get("more_body", False), size + len(parts[-1])
        if size > most and size > (most := largest()):
            raise _TooLarge
    return b"".join(parts)


def _replayed(body: bytes, receive: Any) -> Any:
    """Return a ``receive`` that begins with a body that was read already."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


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
            said = self._pushed(asked)
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

        said = self._pulled(PullAppMessagesRequest(message_ids=list(numbers)))
        names = [part.object_id for tree in said.message_object_trees for part in iterate_object_tree(tree)]
        came = [head.metadata.message_id for head in said.messages_list]
        if not came:
            return []
        parts, messages = self._exchange(dict.fromkeys(names, b""), came), []
        for head in said.messages_list:
            number, answers = head.metadata.message_id, head.metadata.reply_to_message_id
            try:
                message: Any = inflate_object_from_contents(number, dict(parts))
                # what the SuperLink checked, whatever the node wrote into the message itself
                message.metadata.__dict__ |= {"_message_id": number, "_reply_to_message_id": answers}
            except Exception as error:  # a part is missing, or a node sent what is no message
                log.warning("a reply cannot be read (%s): it is asked for again", type(error).__name__)
                continue
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

    def _pushed(self, asked: Any) -> Any:
        return self._grid._runtime_client.PushMessages(asked)

    def _pulled(self, asked: Any) -> Any:
        return self._grid._runtime_client.PullMessages(asked)

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


class NearGrid(BulkGrid):
    """The same inside the SuperLink's process, in another thread than its event loop."""

    def __init__(self, messaging: DirectMessaging, loop: asyncio.AbstractEventLoop) -> None:
        self._messaging, self._loop, self._bulk = messaging, loop, True

    def _pushed(self, asked: Any) -> Any:
        return self._done(self._messaging.announced(asked))

    def _pulled(self, asked: Any) -> Any:
        return self._done(self._messaging.pulled(asked))

    def _exchange(self, parts: Mapping[str, bytes], confirmed: Sequence[str] = ()) -> dict[str, bytes]:
        found: dict[str, bytes] = self._done(self._messaging.exchanged(parts, confirmed))
        return found

    def _done(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
