"""Flower's apps and our access control, without processes."""

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import threading
import urllib.error
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab

from farthing.deploy.flower import app as flower
from farthing.deploy.flower import carrier as flower_carrier
from farthing.deploy.flower import link as flower_link
from farthing.deploy.flower import node as flower_node
from farthing.deploy.flower import superlink
from farthing.deploy.flower.carrier import Carrier, PollSchedule, opened, wrapped
from farthing.deploy.flower.superlink import APP, BRIDGE, ORDER, Address, environment
from farthing.deploy.messages.signed import MessageKind, Signer, seal
from farthing.errors import FarthingError, InvalidValue


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Messages name the run that they belong to, which Flower's processes know."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(flower_carrier, "time", found)
    return found


class Grid:
    """Nodes that answer as ``plan`` says of (node, how often it was asked): seconds, or None for never."""

    def __init__(self, clock, plan, error=()):
        self.clock, self.plan, self.error = clock, plan, error
        self.numbers = itertools.count()
        self.waiting, self.pushed, self.pulls = {}, [], 0

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            node = message.metadata.dst_node_id
            times = sum(n == node for n, _ in self.pushed)
            self.pushed.append((node, self.clock.now))
            number, delay = f"m{next(self.numbers)}", self.plan(node, times)
            message.metadata.__dict__["_message_id"] = number
            if delay is not None:
                self.waiting[number] = (self.clock.now + delay, message, (node, times) in self.error)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers):
        self.pulls += 1
        for number in numbers:
            when, message, failed = self.waiting.get(number, (float("inf"), None, False))
            if when <= self.clock.now:
                del self.waiting[number]
                said = opened(message) + b"!"
                content = {"error": Error(1, "no guard")} if failed else {"content": wrapped(said)}
                yield Message(*content.values(), reply_to=message)


def came(clock, exchange):
    """The answers of an exchange whose pauses are waited for."""
    found = []
    for one in exchange:
        if isinstance(one, tuple):
            found.append(one)
        else:
            clock.sleep(one)
    return found


def test_answers_come_as_they_arrive(clock):
    grid = Grid(clock, lambda node, times: node / 10)
    assert came(clock, Carrier(grid).exchange({3: b"c", 1: b"a"}, 60.0)) == [(1, b"a!"), (3, b"c!")]


def test_what_nobody_answers_is_sent_again_and_given_up(clock):
    grid = Grid(clock, lambda node, times: None if times == 0 or node == 2 else 0.1)
    assert came(clock, Carrier(grid).exchange({1: b"a", 2: b"b"}, 50.0)) == [(1, b"a!")]
    assert [node for node, _ in grid.pushed] == [1, 2, 1, 2, 2, 2]
    assert 1050.0 <= clock.now < 1052.0


def test_after_an_error_it_is_sent_again_soon(clock):
    grid = Grid(clock, lambda node, times: 0.1, error={(1, 0)})
    assert came(clock, Carrier(grid).exchange({1: b"a"}, 60.0)) == [(1, b"a!")]
    (_, first), (_, second) = grid.pushed
    assert 0.5 < second - first < 3.0


def test_what_is_lost_among_quick_answers_is_sent_again_after_seconds(clock):
    """A SuperLink or a node that was killed forgets a message; nobody waits 20 s for it."""
    grid = Grid(clock, lambda node, times: 0.1 if (node, times) != (1, 1) else None)
    carrier = Carrier(grid)
    assert came(clock, carrier.exchange({1: b"a"}, 60.0)) == [(1, b"a!")]
    began = clock.now
    assert came(clock, carrier.exchange({1: b"b"}, 60.0)) == [(1, b"b!")]
    assert 3.0 <= clock.now - began < 5.0
    grid.plan = lambda node, times: None
    assert came(clock, carrier.exchange({1: b"c"}, 60.0)) == []
    gaps = np.diff([when for _, when in grid.pushed][3:])
    assert [round(gap) for gap in gaps[:3]] == sorted(round(gap) for gap in gaps[:3])
    assert gaps.max() < 23


def test_an_answer_to_an_earlier_exchange_is_waited_for(clock):
    """A slow node is not asked twice for the same."""
    grid = Grid(clock, lambda node, times: 8.0)
    carrier = Carrier(grid)
    assert came(clock, carrier.exchange({1: b"a"}, 5.0)) == []
    assert came(clock, carrier.exchange({1: b"a"}, 5.0)) == [(1, b"a!")]
    assert len(grid.pushed) == 1
    assert came(clock, carrier.exchange({1: b"a"}, 9.0)) == [(1, b"a!")]  # once answered, asked anew
    assert len(grid.pushed) == 2


def test_two_who_wait_for_each_other_come_down_to_what_the_work_takes(clock):
    """A round begins slow (5 s); whoever looks for a message finds it at the first look after it came."""
    node, carrier, gap = PollSchedule(), PollSchedule(), 5.0
    for _ in range(60):
        for schedule in (node, carrier):
            schedule.begin()
            until, clock_before = clock.now + gap, clock.now
            while clock.now < until:
                clock.sleep(schedule.pause())
            schedule.end()
            gap = 0.15 + (clock.now - until) + 0.05 * (clock.now - clock_before)
    assert gap < 0.4


def test_the_relay_hands_bytes_to_the_guard(tmp_path):
    path = tmp_path / "g"
    request = seal(MessageKind.HELLO, {"run": "r"}, b"", Signer.new())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def guard():
            peer, _ = listener.accept()
            with peer:
                peer.sendall(peer.recv(65536))

        threading.Thread(target=guard, daemon=True).start()
        message = Message(wrapped(request), 5, "query")
        message.metadata.__dict__["_message_id"] = "m"
        context = Context(1, 5, {"guard": str(path)}, RecordDict(), {})
        assert opened(flower.client(message, context)) == request
    with pytest.raises(OSError, match=r"refused|No such"):
        flower.client(message, context)


def test_content_of_others_is_nothing():
    assert opened(Message(RecordDict(), 5, "query")) == b""


def test_a_reply_without_an_answer_is_an_error_and_the_relay_goes_on(clock, monkeypatch):
    """A node of somebody else may reply with anything: the others are heard, and it is asked again."""
    grid = Grid(clock, lambda node, times: 0.1)
    whole = grid.pull_messages

    def pulled(numbers):
        for message in whole(numbers):
            if opened(message) == b"b!" and len(grid.pushed) < 3:
                message.content.clear()
            yield message

    monkeypatch.setattr(grid, "pull_messages", pulled)
    found = came(clock, Carrier(grid).exchange({1: b"a", 2: b"b"}, 60.0))
    assert found == [(1, b"a!"), (2, b"b!")]
    assert [node for node, _ in grid.pushed] == [1, 2, 2]


def test_the_app_names_what_is_there():
    assert 'serverapp = "farthing.deploy.flower.app:server"' in APP
    assert 'clientapp = "farthing.deploy.flower.app:client"' in APP
    assert flower.BRIDGE == BRIDGE
    assert callable(flower_node.attend)


def test_hurry():
    from flwr.supercore.inflatable import inflatable_utils

    flower_carrier.shorten_backoff()
    assert inflatable_utils.pull_objects.__kwdefaults__["initial_backoff"] == 0.1


class Coordinator:
    """A clock, and a port that opens at some time."""

    def __init__(self, monkeypatch, opens):
        self.now, self.opens = 0.0, opens
        monkeypatch.setattr(flower_node, "time", self)
        monkeypatch.setattr(flower_node, "_is_open", lambda host, port: self.now >= self.opens)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("opens", "ends"),
    [(3.0, 3.0), (1000.0, 20.0), (0.0, 20.0)],
    ids=["once it is there", "not there for long", "there, and it fails all the same"],
)
def test_a_node_looks_for_a_coordinator_that_is_not_there(monkeypatch, opens, ends):
    clock = Coordinator(monkeypatch, opens)
    flower_node.wait_until_open("[::1]:9092", 20.0)
    assert ends - 1e-6 <= clock.now <= ends + 0.2


def test_every_connection_of_a_node_looks_for_the_coordinator(monkeypatch):
    from flwr.supernode import fleet_http_connection

    made = fleet_http_connection.make_simple_http_retry_invoker
    monkeypatch.setattr(fleet_http_connection, "make_simple_http_retry_invoker", made)
    for _ in range(2):  # a node that reconnects does it again
        flower_node._reconnect_soon("localhost:1")
    wait = fleet_http_connection.make_simple_http_retry_invoker().wait_function
    assert (wait.func, wait.args) == (flower_node.wait_until_open, ("localhost:1",))


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (KeyboardInterrupt(), "clocks of both machines must agree"),
        (ValueError("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get issuer"), "use the ca.pem that came"),
        (ValueError("CERTIFICATE_VERIFY_FAILED: certificate has expired"), "--renew coordinator"),
        (ValueError("CERTIFICATE_VERIFY_FAILED: Hostname mismatch"), "made with --host coordinator.example"),
        (ValueError("[code: 2004] Failed to activate SuperNode."), "lists another public.toml"),
        (ValueError("something\nelse"), "something else"),
    ],
)
def test_a_node_that_is_not_admitted_says_why_in_its_last_line(error, what, monkeypatch, capsys):
    def attend(*_):
        raise error if isinstance(error, KeyboardInterrupt) else flower_node._NotAdmitted(str(error))

    monkeypatch.setattr(flower_node, "attend", attend)
    monkeypatch.setattr(flower_node, "end_with_parent", lambda: None)
    with pytest.raises(SystemExit):
        flower_node.main(["coordinator.example:9092", "ca.pem", "node.key", "guard.sock"])
    assert what in capsys.readouterr().err.splitlines()[-1]


def test_what_flower_says_before_it_gives_up_is_kept(monkeypatch):
    from flwr.supernode import fleet_http_connection

    monkeypatch.setattr(fleet_http_connection, "flwr_exit", fleet_http_connection.flwr_exit)
    flower_node._explain_exits()
    with pytest.raises(flower_node._NotAdmitted, match="why"):
        fleet_http_connection.flwr_exit(305, "why")


def test_a_port_that_is_in_use_is_named(monkeypatch, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = Address("127.0.0.1", other.getsockname()[1])
        assert place.taken()
        link = object.__new__(superlink.SuperLink)
        link._place, link._folder = place, tmp_path
        clock = Coordinator(monkeypatch, 0.0)
        monkeypatch.setattr(superlink, "time", clock)
        ended = SimpleNamespace(running=False, revive=lambda: None)
        with pytest.raises(FarthingError, match="another program listens at 127"):
            link._await_link(ended)
    assert not place.taken()
    with pytest.raises(FarthingError, match="did not start"):
        link._await_link(ended)


# --- access control


KEY, BUNDLE = "5" * 64, flower_link.our_bundle()


def start(content, spec=""):
    """A request that would start such an app."""
    return StartRunRequest(fab=Fab(content=content), app_spec=spec).SerializeToString()


def ask(path, peer=("192.0.2.7", 1), kind="http", key=None, body=b""):
    """What comes of a request: where it was passed on to and with what, or the status of a refusal."""
    sent, passed = [], []
    incoming = [
        {"type": "http.request", "body": body[:7], "more_body": True},
        {"type": "http.request", "body": body[7:], "more_body": False},
    ]

    async def receive():
        return incoming.pop(0)

    async def app(scope, receive, send):
        passed.append(scope["path"])
        if body:
            passed.append((await receive())["body"])

    async def send(message):
        sent.append(message)

    headers = [] if key is None else [(flower_link.KEY_HEADER.encode(), key.encode())]
    scope = {"type": kind, "path": path, "client": peer, "server": ("192.0.2.1", 9092), "headers": headers}
    asyncio.run(flower_link.AccessControl(app, KEY, BUNDLE)(scope, receive, send))
    return passed or sent[0]["status"]


HERE, THERE = ("127.0.0.1", 1), ("192.0.2.7", 1)


@pytest.mark.parametrize(
    ("path", "peer", "key", "said"),
    [
        ("/v1/fleet/pull-messages", THERE, None, ["/v1/fleet/pull-messages"]),
        (flower_link.REGISTER, THERE, KEY, 403),
        (flower_link.REGISTER, HERE, None, 403),
        (flower_link.REGISTER, HERE, "6" * 64, 403),
        (flower_link.REGISTER, HERE, "", 403),
        (flower_link.REGISTER, HERE, KEY, [flower_link.REGISTER]),
        (flower_link.REGISTER, ("::ffff:127.0.0.1", 1), KEY, [flower_link.REGISTER]),
        (flower_link.REGISTER, ("192.0.2.1", 1), KEY, [flower_link.REGISTER]),
        (flower_link.REGISTER, None, KEY, 403),
        (flower_link.REGISTER, ("unix", 0), KEY, 403),
        (flower_link.START, HERE, None, 403),
        (flower_link.START, HERE, KEY, 403),
        ("/v1/control/list-runs", HERE, KEY, 403),
        ("/v1/control/start-automation", HERE, KEY, 403),
        ("/v1/runtime/acquire-task", THERE, None, 403),
        ("/v1/runtime/acquire-task", HERE, None, ["/v1/runtime/acquire-task"]),
        ("/v1/fleet/../control/start-run", THERE, None, 403),
        ("/v1/runtime/../control/register-node", HERE, None, 403),
        ("/v1/control/register-node/", HERE, None, 403),
        ("//v1/control/register-node", HERE, None, 403),
        ("/docs", THERE, None, 403),
        ("/docs", HERE, None, 403),
        ("/openapi.json", HERE, KEY, 403),
        (flower_link.ACCESS_CHECK, HERE, KEY, 204),
        (flower_link.ACCESS_CHECK, HERE, None, 403),
        (flower_link.ACCESS_CHECK, THERE, KEY, 403),
        (ORDER, HERE, None, 403),
        (ORDER, THERE, KEY, 403),
        (ORDER, HERE, KEY, 403),  # of a SuperLink that takes none
    ],
)
def test_access_control(path, peer, key, said):
    assert ask(path, peer, key=key) == said


def test_only_our_own_app_is_started():
    """Known by its bundle, whose hash follows from our source alone."""
    ours = start(flower_link.bundled({"pyproject.toml": APP.encode()}))
    assert ask(flower_link.START, HERE, key=KEY, body=ours) == [flower_link.START, ours]
    assert ask(flower_link.START, HERE, body=ours) == 403
    other = APP.replace("farthing.deploy.flower.app:server", "os:abort").encode()
    lies = [
        start(flower_link.bundled({"pyproject.toml": other})),
        start(flower_link.bundled({"pyproject.toml": APP.encode(), "more.py": b"1"})),
        start(flower_link.bundled({"pyproject.toml": APP.encode()}), "@someone/else"),
        StartRunRequest(fab=Fab(hash_str=BUNDLE), app_spec="@farthing/farthing-relay").SerializeToString(),
        b"not a request at all",
        bytes(2**23),
    ]
    for lie in lies:
        assert ask(flower_link.START, HERE, key=KEY, body=lie) == 403


def ordered(key, body, orders):
    """The status and the content of the answer to an order."""
    sent, incoming = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        sent.append(message)

    headers = [] if key is None else [(flower_link.KEY_HEADER.encode(), key.encode())]
    scope = {"type": "http", "path": ORDER, "client": HERE, "server": HERE, "headers": headers}
    asyncio.run(flower_link.AccessControl(None, KEY, BUNDLE, orders)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_orders_need_the_key_and_what_fails_is_left_to_the_command_line():
    given = []

    def orders(command, arguments):
        given.append((command, arguments))
        if command == "fail":
            raise AttributeError("another Flower")
        return [{"node-id": 7}]

    assert ordered(KEY, b'["register", "ssh-key"]', orders) == (200, b'[{"node-id": 7}]')
    assert ordered(KEY, b'["fail"]', orders)[0] == 500
    assert ordered(KEY, b"not JSON", orders)[0] == 500
    assert ordered(None, b'["register", "ssh-key"]', orders)[0] == 403
    assert given == [("register", ["ssh-key"]), ("fail", [])]


def test_access_control_has_a_key():
    with pytest.raises(ValueError, match="key"):
        flower_link.AccessControl(None, "", BUNDLE)


def test_access_control_refuses_other_protocols():
    assert ask("/v1/fleet/pull-messages", kind="websocket") == 403


def test_places():
    assert str(Address.of("0.0.0.0:9092").near) == "127.0.0.1:9092"
    assert str(Address.of("[::]:9092").near) == "[::1]:9092"
    assert Address.of("host.example:1") == Address("host.example", 1)
    for text in ("host", "host:", ":1", "host:0", "host:70000", "host:x"):
        with pytest.raises(InvalidValue, match="HOST:PORT"):
            Address.of(text)


def test_nothing_is_reported_or_installed(tmp_path):
    found = environment(tmp_path / "home")
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_HOME"] == str(tmp_path / "home")
    assert os.pathsep in found["PATH"]


@pytest.fixture
def flower_orders():
    """Orders to Flower's own state, in memory."""
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    factory = LinkStateFactory(":flwr-in-memory:", NoOpFederationManager(), ObjectStoreFactory())
    return flower_link.Orders(SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory)))


def node_key():
    private = ec.generate_private_key(ec.SECP384R1()).public_key()
    return private.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


class Starting:
    """A SuperLink that starts: what answers at its address, look by look, and whether it runs."""

    def __init__(self, folder, answers, running=True):
        self._folder, self._place, self._left = folder, Address("127.0.0.1", 1), list(answers)
        self.running, self.revived = running, 0
        self._remove_unmade = functools.partial(superlink.SuperLink._remove_unmade, self)
        self._answers = functools.partial(superlink.SuperLink._answers, self)
        self._keys, self._request = folder, lambda path: path
        self._opener = lambda: SimpleNamespace(open=self.open)

    def open(self, path, timeout):
        status = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if status != 204:
            raise urllib.error.HTTPError(path, status, "", None, None)
        return contextlib.nullcontext(SimpleNamespace(status=204))

    def revive(self):
        self.revived += 1
        self.running = not (self._folder / "superlink.db").exists()  # Flower does not start with this one


@pytest.fixture
def no_waiting(monkeypatch):
    """Seconds that pass at once."""
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(superlink, "time", clock)
    return now


def test_the_superlink_of_a_killed_coordinator_is_given_time_to_end(tmp_path, no_waiting):
    """It does not know the new key; only what still answers after twenty seconds is somebody else's."""
    link = Starting(tmp_path, [403, 403, 204])
    superlink.SuperLink._await_link(link, link)
    assert (tmp_path / "superlink.made").exists()
    with pytest.raises(FarthingError, match="not our SuperLink"):
        superlink.SuperLink._await_link(other := Starting(tmp_path, [403]), other)
    assert 20 <= no_waiting[0] < 25


def test_a_database_that_was_never_whole_is_made_anew(tmp_path, no_waiting):
    """A coordinator that was killed while Flower made it would never start again."""
    for end in ("", "-wal", "-shm"):
        (tmp_path / f"superlink.db{end}").write_bytes(b"half of it")
    link = Starting(tmp_path, [204], running=False)
    superlink.SuperLink._await_link(link, link)
    assert link.revived == 1
    assert {path.name for path in tmp_path.iterdir()} == {"superlink.made"}
    (tmp_path / "superlink.db").write_bytes(b"all of it")
    superlink.SuperLink._remove_unmade(link)
    assert (tmp_path / "superlink.db").read_bytes() == b"all of it"


def test_a_coordinator_that_was_killed_finds_the_nodes_that_it_registered(tmp_path, flower_orders):
    """Flower registers a key once; whatever a coordinator noted, the numbers are those of the database."""
    cards = {"a": node_key(), "b": node_key()}
    link = SimpleNamespace(_folder=tmp_path, _ordered=lambda what, *keys: flower_orders(what, list(keys)))
    first = superlink.SuperLink._registered(link, cards)
    assert len(set(first.values())) == 2
    assert superlink.SuperLink._registered(link, cards) == first
    more = superlink.SuperLink._registered(link, {"c": node_key(), **cards})
    assert [more["a"], more["b"]] == [first["a"], first["b"]]
    assert len(set(more.values())) == 3
