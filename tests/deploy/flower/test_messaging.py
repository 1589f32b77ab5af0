"""Flower's protocol through memory: messages go both ways, and nobody gets or sends what is not theirs."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import fleet_pb2, message_pb2, runtime_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from farthing.deploy.flower import link, mailbox, messaging
from farthing.deploy.flower.carrier import opened
from farthing.deploy.flower.link import Relay
from farthing.deploy.flower.messaging import FLEET, RUNTIME, BulkGrid, DirectMessaging, unpack
from farthing.deploy.messages.transport import Bridge


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Flower:
    """Flower's app: it knows two nodes and a task, and answers 599 to whatever reaches it."""

    def __init__(self):
        self.keys = {7: ec.generate_private_key(ec.SECP384R1()), 8: ec.generate_private_key(ec.SECP384R1())}
        known = {public_key_to_bytes(key.public_key()): node for node, key in self.keys.items()}
        state = SimpleNamespace(
            get_node_id_by_public_key=known.get, get_task_by_token={"token": "task"}.get, object_store=None
        )
        self.state = SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state))
        self.reached = []

    async def __call__(self, scope, receive, send):
        self.reached.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 599, "headers": []})


class Wire:
    """Requests of a relay and of nodes."""

    def __init__(self):
        self.flower = Flower()
        self.app = DirectMessaging(self.flower)

    def headers(self, node):
        if node is None:
            return [(TASK_TOKEN_HEADER.lower().encode(), b"token")]
        request = SimpleNamespace(headers={})
        signer = NodeAuthHttpInterceptor(self.flower.keys[node], self.flower.keys[node].public_key())
        signer.intercept(SimpleNamespace(request=request), lambda context: None)
        return [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]

    async def post(self, path, message, node=None, headers=None, gone=None):
        """What was answered: a status, and the bytes."""
        said, body = [], [{"type": "http.request", "body": message.SerializeToString()}]

        async def receive():
            if body:
                return body.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(part):
            said.append(part)

        given = self.headers(node) if headers is None else headers
        scope = {"type": "http", "method": "POST", "path": path, "headers": given, "query_string": b""}
        await self.app(scope, receive, send)
        if not said:
            return None, b""
        return said[0]["status"], said[1]["body"] if len(said) > 1 else b""

    async def push(self, message, node=None, skip=0):
        """Announces a message and sends its parts, but for some."""
        message.metadata.__dict__["_message_id"] = message.object_id
        head = messaging_head(message)
        prefix = RUNTIME if node is None else FLEET
        if node is None:
            asked = runtime_pb2.PushAppMessagesRequest(
                messages_list=[head], message_object_trees=[get_object_tree(message)]
            )
        else:
            asked = fleet_pb2.PushMessagesRequest(
                node=Node(node_id=node), messages_list=[head], message_object_trees=[get_object_tree(message)]
            )
        status, body = await self.post(f"{prefix}push-messages", asked, node)
        if status != 200:
            return status
        kind = runtime_pb2.PushAppMessagesResponse if node is None else fleet_pb2.PushMessagesResponse
        answer = kind.FromString(body)
        parts = get_all_nested_objects(message)
        assert set(answer.objects_to_push) == set(parts)
        for name in list(parts)[skip:]:
            await self.put(name, parts[name].deflate(), answer.session_id, node)
        return status

    async def put(self, name, content, session="", node=None):
        asked = message_pb2.PushObjectRequest(
            node=Node(node_id=node or 0), object_id=name, object_content=content, session_id=session
        )
        return (await self.post(f"{RUNTIME if node is None else FLEET}push-object", asked, node))[0]

    async def pull(self, node=None, ids=(), **options):
        if node is None:
            asked, kind = (
                runtime_pb2.PullAppMessagesRequest(message_ids=list(ids)),
                runtime_pb2.PullAppMessagesResponse,
            )
        else:
            asked, kind = (
                fleet_pb2.PullMessagesRequest(node=Node(node_id=node)),
                fleet_pb2.PullMessagesResponse,
            )
        prefix = RUNTIME if node is None else FLEET
        status, body = await self.post(f"{prefix}pull-messages", asked, node, **options)
        return list(kind.FromString(body).messages_list) if status == 200 else status

    async def part(self, name, node=None):
        asked = message_pb2.PullObjectRequest(node=Node(node_id=node or 0), object_id=name)
        status, body = await self.post(f"{RUNTIME if node is None else FLEET}pull-object", asked, node)
        return message_pb2.PullObjectResponse.FromString(body).object_content if status == 200 else status

    async def confirm(self, number, node=None):
        asked = message_pb2.ConfirmMessageReceivedRequest(
            node=Node(node_id=node or 0), message_object_id=number
        )
        prefix = RUNTIME if node is None else FLEET
        return (await self.post(f"{prefix}confirm-message-received", asked, node))[0]


def messaging_head(message):
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute
    from flwr.supernode.fleet_http_connection import remove_content_from_message

    with no_object_id_recompute():
        return message_to_proto(remove_content_from_message(message))


def request(node, content=b"question"):
    return Message(RecordDict({"farthing": ConfigRecord({"bytes": content})}), node, "query", ttl=100.0)


def reply(to, content=b"answer"):
    return Message(RecordDict({"farthing": ConfigRecord({"bytes": content})}), reply_to=to)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(messaging, "HOLD", dict.fromkeys(messaging.HOLD, 0.0))


def test_a_message_goes_to_its_node_and_the_reply_comes_back(short):
    async def run():
        wire, asked = Wire(), request(7)
        assert await wire.push(asked) == 200
        assert await wire.pull(8) == []
        (head,) = await wire.pull(7)
        number = head.metadata.message_id
        assert number == asked.object_id
        for name, part in get_all_nested_objects(asked).items():
            assert await wire.part(name, 7) == part.deflate()
        assert await wire.confirm(number, 7) == 200
        assert await wire.pull(7) == []  # once only
        said = reply(asked)
        assert await wire.push(said, 7) == 200
        assert await wire.pull(ids=["another"]) == []
        (back,) = await wire.pull(ids=[number, "another"])
        assert back.metadata.reply_to_message_id == number
        for name, part in get_all_nested_objects(said).items():
            assert await wire.part(name) == part.deflate()
        assert await wire.confirm(back.metadata.message_id) == 200
        box = wire.app._box
        assert (box._mail, box._taken, box._parts, box._size) == ({}, {}, {}, 0)
        assert wire.flower.reached == []

    asyncio.run(run())


def test_all_parts_of_many_messages_in_one_request(short):
    """The relay's grid in bulk, over this app: what it sends and fetches are whole messages."""
    loop = asyncio.new_event_loop()
    wire = Wire()

    class Client:
        _base_url = ""
        _client = SimpleNamespace(
            build_request=lambda method, url, content: SimpleNamespace(url=url, content=content)
        )

        def _send(self, context):
            asked = SimpleNamespace(SerializeToString=lambda: context.request.content)
            status, content = loop.run_until_complete(
                wire.post(context.request.url, asked, headers=self.given)
            )
            assert status == 200
            return SimpleNamespace(content=content, raise_for_status=lambda: None)

        def PushMessages(self, asked):
            _, content = loop.run_until_complete(wire.post(f"{RUNTIME}push-messages", asked))
            return runtime_pb2.PushAppMessagesResponse.FromString(content)

        def PullMessages(self, asked):
            _, content = loop.run_until_complete(wire.post(f"{RUNTIME}pull-messages", asked))
            return runtime_pb2.PullAppMessagesResponse.FromString(content)

    client = Client()
    client.given = wire.headers(None)
    invoker = SimpleNamespace(invoke=lambda call: call())
    grid = BulkGrid(SimpleNamespace(_runtime_client=client, _retry_invoker=invoker))
    first, second = request(7, b"one"), request(8, b"two")
    numbers = grid.push_messages([first, second])
    assert list(numbers) == [first.object_id, second.object_id]
    for node, asked in ((7, first), (8, second)):
        (head,) = loop.run_until_complete(wire.pull(node))
        assert head.metadata.message_id == asked.object_id
        assert loop.run_until_complete(wire.push(reply(asked, b"from %d" % node), node)) == 200
    came = {message.metadata.reply_to_message_id: opened(message) for message in grid.pull_messages(numbers)}
    assert came == {first.object_id: b"from 7", second.object_id: b"from 8"}
    assert list(grid.pull_messages(numbers)) == []
    for node, asked in ((7, first), (8, second)):
        loop.run_until_complete(wire.confirm(asked.object_id, node))
    assert (wire.app._box._parts, wire.app._box._taken) == ({}, {})
    client.given = []  # without the task's token
    with pytest.raises(AssertionError):
        grid._exchange({"ab" * 32: b""})
    loop.close()


def test_a_superlink_of_others_gets_parts_one_by_one():
    plain = SimpleNamespace(
        push_messages=lambda messages: ["number"],
        pull_messages=lambda numbers: ["message"],
        _retry_invoker=None,
    )
    grid = BulkGrid(plain)
    assert list(grid.push_messages([])) == ["number"]
    assert list(grid.pull_messages([])) == ["message"]


@pytest.mark.parametrize("bad", [b"", b"x\n", b'{"parts": [["a", 9]], "confirmed": []}\nfew', b"{}\n"])
def test_parts_that_are_none(bad):
    with pytest.raises((ValueError, LookupError)):
        unpack(bad)


def test_a_reader_waits_until_a_message_is_complete():
    async def run():
        wire, asked = Wire(), request(7)
        waiting = asyncio.ensure_future(wire.pull(7))
        assert await wire.push(asked, skip=1) == 200
        await asyncio.sleep(0.01)
        assert not waiting.done()
        name, part = next(iter(get_all_nested_objects(asked).items()))
        assert await wire.put(name, part.deflate()) == 200
        (head,) = await asyncio.wait_for(waiting, 60)
        assert head.metadata.message_id == asked.object_id

    asyncio.run(run())


def test_a_superlink_that_ends_holds_no_request(monkeypatch):
    monkeypatch.setattr(messaging, "HOLD", dict.fromkeys(messaging.HOLD, 3600.0))

    async def run():
        wire = Wire()
        waiting = [asyncio.ensure_future(wire.pull(node)) for node in (7, 8, None)]
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in waiting)
        wire.app.end()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [[], [], []]
        assert await asyncio.wait_for(wire.pull(7), 60) == []

    asyncio.run(run())


def test_a_signal_ends_what_is_held_before_it_ends_the_server(monkeypatch):
    import uvicorn

    said = []
    monkeypatch.setattr(uvicorn.Server, "handle_exit", lambda server, *signal: said.append(signal))
    link._end_soon(SimpleNamespace(end=lambda: said.append("held")))
    uvicorn.Server.handle_exit(None, 15, None)
    assert said == ["held", (15, None)]


def test_a_message_is_not_lost_to_a_node_that_has_disconnected():
    async def run():
        wire, gone = Wire(), asyncio.Event()
        waiting = asyncio.ensure_future(wire.pull(7, gone=gone))
        await asyncio.sleep(0)
        gone.set()
        assert await asyncio.wait_for(waiting, 60) is None
        await wire.push(request(7))
        assert len(await wire.pull(7)) == 1

    asyncio.run(run())


def test_who_is_not_known_is_left_to_flower(short):
    async def run():
        wire, asked = Wire(), fleet_pb2.PullMessagesRequest(node=Node(node_id=7))
        path = f"{FLEET}pull-messages"
        stale = [
            (n, b"2020-01-01T00:00:00+00:00" if n == TIMESTAMP_HEADER.lower().encode() else v)
            for n, v in wire.headers(7)
        ]
        for headers in ([], wire.headers(8), wire.headers(None), stale):
            assert (await wire.post(path, asked, headers=headers))[0] == 599
        assert (await wire.post(f"{RUNTIME}pull-messages", asked, headers=[]))[0] == 599
        wrong = [(TASK_TOKEN_HEADER.lower().encode(), b"guess")]
        assert (await wire.post(f"{RUNTIME}pull-messages", asked, headers=wrong))[0] == 599
        assert (await wire.post("/v1/fleet/send-node-heartbeat", asked, 7))[0] == 599
        assert wire.flower.reached[0] == (path, asked.SerializeToString())  # whole, as it came
        assert len(wire.flower.reached) == 7

    asyncio.run(run())


def test_a_node_replies_only_to_what_it_was_sent(short):
    async def run():
        wire, asked = Wire(), request(7)
        await wire.push(asked)
        await wire.pull(7)
        assert await wire.push(reply(asked), 8) == 599
        assert await wire.pull(ids=[asked.object_id]) == []
        assert await wire.push(reply(asked), 7) == 200

    asyncio.run(run())


def test_a_node_gets_and_confirms_nothing_of_other_nodes(short):
    """It may know a message's number, and the numbers of its parts: the same question went to all."""

    async def run():
        wire, asked = Wire(), request(7)
        await wire.push(asked)
        parts = get_all_nested_objects(asked)
        assert [await wire.part(name, 8) for name in parts] == [599] * len(parts)
        assert [await wire.part(name, 7) for name in parts] == [599] * len(parts)  # it must fetch it first
        await wire.pull(7)
        assert [await wire.part(name, 8) for name in parts] == [599] * len(parts)
        assert await wire.confirm(asked.object_id, 8) == 599
        assert [await wire.part(name, 7) for name in parts] == [part.deflate() for part in parts.values()]

    asyncio.run(run())


def test_a_node_cannot_replace_the_message_of_another(short):
    async def run():
        wire, mine, other = Wire(), request(8, b"mine"), request(7, b"theirs")
        for message in (mine, other):
            await wire.push(message)
        await wire.pull(8)
        head, tree = messaging_head(reply(mine)), get_object_tree(reply(mine))
        head.metadata.message_id = other.object_id
        for claimed in (tree, get_object_tree(other)):
            asked = fleet_pb2.PushMessagesRequest(
                node=Node(node_id=8), messages_list=[head], message_object_trees=[claimed]
            )
            assert (await wire.post(f"{FLEET}push-messages", asked, 8))[0] == 599
        (head,) = await wire.pull(7)
        assert head.metadata.message_id == other.object_id

    asyncio.run(run())


def test_replies_of_a_node_take_up_so_much_memory_at_most(short, monkeypatch):
    """One to each question, a second replaces the first; of so many bytes; none lasts for ever."""
    monkeypatch.setattr(mailbox, "MOST_OF_NODE", 2000)

    async def run():
        wire, asked = Wire(), request(7)
        await wire.push(asked)
        await wire.pull(7)
        await wire.confirm(asked.object_id, 7)
        for number in range(5):
            assert await wire.push(reply(asked, b"answer %d" % number), 7) == 200
            assert len(wire.app._box._mail) == 1
        assert wire.app._box._size < 1000
        large = reply(asked, bytes(3000))
        assert await wire.push(large, 7, skip=99) == 200
        parts = get_all_nested_objects(large)
        kept = [await wire.put(name, part.deflate(), node=7) for name, part in parts.items()]
        assert sorted(kept) == [200] * (len(parts) - 1) + [599]
        small = reply(asked, b"small")
        small.metadata.__dict__["_message_id"] = small.object_id
        head = messaging_head(small)
        head.metadata.ttl = float("nan")
        assert wire.app._box.add(head, get_object_tree(small), 7, 0, 0.0) is None

    asyncio.run(run())


def test_a_node_that_confirms_nothing_does_not_fill_the_memory(short):
    """It would end the messages of all; the last ones that it fetched stay there for it."""

    async def run():
        wire = Wire()
        for number in range(30):
            asked = request(7, bytes([number]) * 1000)
            assert await wire.push(asked) == 200
            (head,) = await wire.pull(7)
        box = wire.app._box
        assert box._size < 10_000
        for name, part in get_all_nested_objects(asked).items():
            assert await wire.part(name, 7) == part.deflate()
        assert await wire.confirm(head.metadata.message_id, 7) == 200
        assert await wire.push(reply(asked), 7) == 200

    asyncio.run(run())


def test_who_has_not_proved_to_be_a_node_sends_a_few_kilobytes(short):
    """They are not kept, and neither are strangers' keys."""

    async def run():
        wire = Wire()
        for path in (f"{FLEET}push-object", f"{RUNTIME}push-object", messaging.PARTS):
            asked = message_pb2.PushObjectRequest(node=Node(node_id=7), object_content=bytes(2**17))
            assert (await wire.post(path, asked, headers=[]))[0] == 413
        assert (await wire.post(f"{FLEET}push-object", asked, 7))[0] == 599  # nobody waits for that part
        assert (await wire.post(f"{RUNTIME}push-object", asked))[0] == 599
        for _ in range(3):
            wire.flower.keys[9] = ec.generate_private_key(ec.SECP384R1())  # not registered
            assert await wire.pull(9) == 599
        assert len(wire.app._known._found) == 2  # node 7 and the task

    asyncio.run(run())


def test_a_reply_that_is_none_does_not_end_the_relay(short):
    """A node replies with what is no message, or names another message in it than the SuperLink saw."""
    from flwr.proto.message_pb2 import ObjectTree

    class Client:
        def __init__(self, heads, trees):
            self.said = runtime_pb2.PullAppMessagesResponse(messages_list=heads, message_object_trees=trees)

        def PullMessages(self, asked):
            return self.said

    good, liar = reply(request(7), b"good"), reply(request(8), b"liar")
    for message in (good, liar):
        message.metadata.__dict__["_message_id"] = message.object_id
    heads = [messaging_head(good), messaging_head(liar), messaging_head(good)]
    heads[1].metadata.reply_to_message_id = "what the SuperLink checked"
    heads[2].metadata.message_id = "ab" * 32
    parts = get_all_nested_objects(good) | get_all_nested_objects(liar)
    contents = {name: part.deflate() for name, part in parts.items()} | {"ab" * 32: b"no message"}
    trees = [get_object_tree(good), get_object_tree(liar), ObjectTree(object_id="ab" * 32)]
    grid = BulkGrid(SimpleNamespace(_runtime_client=Client(heads, trees)))
    grid._bulk, grid._exchange = True, lambda names, confirmed=(): dict(contents)
    came = {message.metadata.reply_to_message_id: opened(message) for message in grid.pull_messages([])}
    assert came == {good.metadata.reply_to_message_id: b"good", "what the SuperLink checked": b"liar"}
    for content in (
        RecordDict(),
        RecordDict({"farthing": ConfigRecord()}),
        RecordDict({"farthing": ConfigRecord({"bytes": 1})}),
    ):
        assert opened(Message(content, reply_to=request(7))) == b""


def test_parts_that_nobody_asked_for_are_left_to_flower(short):
    async def run():
        wire, asked = Wire(), request(7)
        await wire.push(asked, skip=1)
        name = next(iter(get_all_nested_objects(asked)))
        assert await wire.put(name, b"something else") == 599  # its number is its hash
        assert await wire.put("ab" * 32, b"unknown") == 599
        assert await wire.part("ab" * 32, 7) == 599
        assert await wire.confirm("ab" * 32, 7) == 599
        assert await wire.pull(7) == []

    asyncio.run(run())


def test_messages_expire_and_shared_parts_stay_as_long_as_one_needs_them(short):
    async def run():
        wire = Wire()
        first, second = request(7), request(8)
        await wire.push(first)
        second.metadata.__dict__["_message_id"] = second.object_id
        shared = get_all_nested_objects(first).keys() & get_all_nested_objects(second).keys()
        assert shared  # the same bytes to both
        box = wire.app._box
        assert box.add(messaging_head(second), get_object_tree(second), 0, 8, 0.0) == {second.object_id}
        box._mail[second.object_id].until = -1.0
        box._looked = -1e9
        box.fetch(9, None, 0.0, 1)
        assert second.object_id not in box._mail
        assert shared <= box._parts.keys()
        box._mail[first.object_id].until = -1.0
        box._looked = -1e9
        box.fetch(9, None, 0.0, 1)
        assert (box._parts, box._size) == ({}, 0)

    asyncio.run(run())


def test_an_unknown_flower_is_left_alone():
    async def run():
        wire = Wire()
        wire.app = DirectMessaging(wire.flower.__call__)  # which has no state
        assert await wire.push(request(7)) == 599

    asyncio.run(run())


# --- the relay in the SuperLink's own process


async def answering(wire, node, answer):
    """A node that fetches one message and replies to it."""
    while not (heads := await wire.pull(node)):
        await asyncio.sleep(0)
    (head,) = heads
    number = head.metadata.message_id
    parts = {part: await wire.part(part, node) for part in wire.app._box._taken[number][1]}
    message = inflate_object_from_contents(number, parts)
    message.metadata.__dict__["_message_id"] = number
    assert await wire.push(reply(message, answer(opened(message))), node) == 200


class Tasks:
    """Flower's state, as far as a task goes: a run is under way while its task is alive."""

    def __init__(self):
        self.said, self.over = [], threading.Event()

    def get_tasks(self, run_ids):
        return [SimpleNamespace(task_id=11 * number) for number in run_ids]

    def claim_task(self, number):
        self.said.append(f"claimed {number}")
        return "token"

    def activate_task(self, number):
        self.said.append(f"active {number}")
        return True

    def acknowledge_task_heartbeat(self, number):
        self.said.append(f"beat {number}")
        return True

    def finish_task(self, number, status, details):
        self.said.append(f"{status} {number}")
        self.over.set()


def test_a_relay_inside_the_superlink_carries_requests_and_answers(short, monkeypatch):
    """The coordinator's bridge, the relay as a thread, and nodes that speak Flower's protocol."""
    from flwr.supercore.task_identity import TaskIdentity

    wire, came, tasks = Wire(), {}, Tasks()
    bridge = Bridge({"north": 7, "east": 8})
    monkeypatch.setattr(link, "_BEAT", 0.01)

    async def run():
        assert not Relay(wire.app, str(bridge.path)).start(3, tasks)  # no event loop yet: an app must do it
        await wire.pull(7)
        assert not Relay(wire.app, None).start(3, tasks)
        assert not Relay(wire.app, str(bridge.path)).start(3, object())  # another Flower
        assert tasks.said == []
        assert Relay(wire.app, str(bridge.path)).start(3, tasks)
        assert (TaskIdentity.run_id, TaskIdentity.task_id) == (3, 33)
        asking = asyncio.to_thread(lambda: came.update(bridge.exchange({"north": b"n", "east": b"e"}, 20.0)))
        await asyncio.gather(asking, *(answering(wire, node, lambda said: said * 2) for node in (7, 8)))

    asyncio.run(run())
    assert came == {"north": b"nn", "east": b"ee"}
    assert wire.flower.reached == []
    bridge.close()
    assert tasks.over.wait(60)
    assert tasks.said[:2] == ["claimed 33", "active 33"]
    assert tasks.said[-1] == "completed 33"
    assert set(tasks.said[2:-1]) <= {"beat 33"}


def test_a_superlink_that_leaves_messages_to_flower_has_no_relay_inside():
    app = DirectMessaging(SimpleNamespace())  # without the state that is known
    assert not app.known
    app.loop = asyncio.new_event_loop()
    assert not Relay(app, "bridge").start(1, Tasks())
    app.loop.close()
