"""Requests there, answers back; who does not answer is absent."""

import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from farthing.deploy.messages.signed import MessageKind, Refused, Signer, seal
from farthing.deploy.messages.transport import Bridge, InProcess, UnixSockets, call, carry

SIGNER = Signer.new()
MESSAGE = seal(MessageKind.ANSWER, {"x": 1}, bytes(1000), SIGNER)


@pytest.fixture
def peer():
    """A socket that says what it is told to whoever connects."""
    opened = []

    def listen(*replies):
        path = Path(tempfile.mkdtemp(prefix="t")) / "s"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()

        def serve():
            for reply in replies:
                try:
                    guest, _ = listener.accept()
                except OSError:
                    return
                with guest:
                    guest.recv(2**16)
                    guest.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        opened.append((listener, thread, path))
        return path

    yield listen
    for listener, thread, path in opened:
        listener.close()
        thread.join(300)
        path.unlink()
        path.parent.rmdir()


def test_a_call_returns_the_whole_answer(peer):
    assert call(peer(MESSAGE), b"question", seconds=60) == MESSAGE


def test_answers_that_are_cut_off_too_large_or_none(peer):
    for reply in (b"", MESSAGE[:10], MESSAGE[:-1]):
        with pytest.raises(ConnectionError):
            call(peer(reply), b"question", seconds=60)
    with pytest.raises(Refused):
        call(peer(MESSAGE), b"question", seconds=60, largest=500)
    with pytest.raises(Refused):
        call(peer(b"HTTP/1.1 200 OK\r\n\r\n"), b"question", seconds=60)
    with pytest.raises(FileNotFoundError):
        call("/nonexistent/socket", b"question", seconds=60)


def test_a_silent_guard_is_not_waited_for_forever():
    with tempfile.TemporaryDirectory(prefix="t") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        with pytest.raises(TimeoutError):
            call(f"{folder}/s", b"question", seconds=0.05)


def test_those_who_answer_are_there(peer):
    sockets = UnixSockets(
        {"a": peer(MESSAGE), "b": peer(b"?"), "c": "/nonexistent/socket", "d": peer(MESSAGE)}
    )
    assert sockets.parties == ["a", "b", "c", "d"]
    came = dict(sockets.exchange(dict.fromkeys("abcd", b"question"), seconds=60))
    assert came == {"a": MESSAGE, "d": MESSAGE}


def test_functions_that_raise_are_absent():
    clients = InProcess({"a": lambda request: request * 2, "b": lambda request: request / 0})
    assert clients.parties == ["a", "b"]
    assert list(clients.exchange({"b": b"x", "a": b"x"}, seconds=1.0)) == [("a", b"xx")]


@pytest.fixture
def bridge():
    found = Bridge({"a": 7, "b": 2**63 + 9})
    yield found
    found.close()


def carrier(bridge, exchange):
    thread = threading.Thread(target=carry, args=(bridge.path, exchange), daemon=True)
    thread.start()
    return thread


def upper(requests, seconds):
    for node, request in requests.items():
        yield node, request.upper()


def test_requests_go_to_nodes_and_answers_come_back_under_names(bridge):
    thread = carrier(bridge, upper)
    assert bridge.parties == ["a", "b"]
    for _ in range(3):
        assert dict(bridge.exchange({"a": b"one\n{", "b": b""}, 300.0)) == {"a": b"ONE\n{", "b": b""}
    assert bridge.connected
    bridge.close()
    thread.join(300)
    assert not thread.is_alive()


def test_only_its_owner_can_open_it(bridge):
    assert stat.S_IMODE(os.stat(bridge.path.parent).st_mode) == 0o700


def test_a_carrier_that_waits_notices_the_next_exchange(bridge):
    """It yields how long it would wait; the exchange before it was given up early."""
    seen = []

    def waits(requests, seconds):
        seen.append(dict(requests))
        for node, request in requests.items():
            if request == b"x":
                yield node, b"X"
        while True:
            yield 300.0

    carrier(bridge, waits)
    answers = bridge.exchange({"a": b"x", "b": b"y"}, 300.0)
    assert next(answers) == ("a", b"X")
    answers.close()
    assert next(bridge.exchange({"b": b"x"}, 300.0)) == ("b", b"X")
    assert len(seen) == 2


def test_without_a_carrier_nobody_answers(bridge):
    assert list(bridge.exchange({"a": b"x"}, 0.05)) == []


def test_who_does_not_answer_is_absent(bridge):
    carrier(bridge, lambda requests, seconds: [(7, b"y"), (7, b"again"), (99, b"who?")])
    assert list(bridge.exchange({"a": b"x", "b": b"x"}, 300.0)) == [("a", b"y")]


def test_what_is_open_goes_to_the_next_carrier(bridge):
    """The first answers one request and dies; the second gets what is left."""

    def dies(requests, seconds):
        yield 7, b"first"
        raise OSError

    carrier(bridge, dies)
    seen = []

    def second(requests, seconds):
        seen.append(dict(requests))
        return upper(requests, seconds)

    answers = bridge.exchange({"a": b"x", "b": b"z"}, 300.0)
    assert next(answers) == ("a", b"first")
    carrier(bridge, second)
    assert list(answers) == [("b", b"Z")]
    assert seen == [{2**63 + 9: b"z"}]


def test_answers_of_an_exchange_that_is_over_do_not_count(bridge):
    late = threading.Event()

    def slow(requests, seconds):
        if requests[7] == b"old":
            late.wait(300)
        yield 7, requests[7]

    carrier(bridge, slow)
    assert list(bridge.exchange({"a": b"old"}, 0.2)) == []
    late.set()
    assert list(bridge.exchange({"a": b"new"}, 300.0)) == [("a", b"new")]


def test_an_answer_that_comes_late_is_kept_for_who_asks_the_same_again(bridge):
    """One look at the nodes takes longer than an exchange: otherwise every answer would come too late."""
    late, calls = threading.Event(), []

    def slow(requests, seconds):
        calls.append(dict(requests))
        if len(calls) == 1:
            late.wait(30)
            yield from upper(requests, seconds)

    thread = carrier(bridge, slow)
    assert list(bridge.exchange({"a": b"x", "b": b"y"}, 0.2)) == []
    late.set()
    assert dict(bridge.exchange({"a": b"x"}, 30.0)) == {"a": b"X"}  # b's came too, and nobody asked for it
    assert dict(bridge.exchange({"b": b"y"}, 30.0)) == {"b": b"Y"}
    assert list(bridge.exchange({"a": b"x"}, 0.2)) == []  # an answer is given out once
    bridge.close()
    thread.join(30)
    assert calls[0] == {7: b"x", 2**63 + 9: b"y"}


def test_a_kept_answer_is_not_one_to_another_request(bridge):
    late, calls = threading.Event(), []

    def slow(requests, seconds):
        calls.append(dict(requests))
        if len(calls) == 1:
            late.wait(30)
            yield from upper(requests, seconds)

    carrier(bridge, slow)
    assert list(bridge.exchange({"a": b"x", "b": b"y"}, 0.2)) == []
    late.set()
    assert dict(bridge.exchange({"a": b"x"}, 30.0)) == {"a": b"X"}
    assert list(bridge.exchange({"b": b"other"}, 0.2)) == []
    assert list(bridge.exchange({"b": b"y"}, 0.2)) == []  # asked anew, since another was asked between


def test_a_carrier_that_is_behind_leaves_out_what_is_over(bridge):
    began, late, calls = threading.Event(), threading.Event(), []

    def slow(requests, seconds):
        calls.append(requests[7])
        began.set()
        late.wait(30)
        yield from upper(requests, seconds)

    carrier(bridge, slow)
    assert list(bridge.exchange({"a": b"0"}, 0.2)) == []
    assert began.wait(30)
    for number in range(1, 6):
        assert list(bridge.exchange({"a": b"%d" % number}, 0.02)) == []
    late.set()
    assert list(bridge.exchange({"a": b"6"}, 30.0)) == [("a", b"6")]
    assert (calls[0], calls[-1]) == (b"0", b"6")
    assert len(calls) <= 3  # not seven


def test_a_carrier_that_talks_nonsense_is_dropped(bridge):
    from multiprocessing.connection import Client

    liar = Client(str(bridge.path), "AF_UNIX")
    found = []
    thread = threading.Thread(target=lambda: found.extend(bridge.exchange({"a": b"x"}, 300.0)))
    thread.start()
    liar.recv_bytes()
    liar.send_bytes(b"[]\nnothing")
    carrier(bridge, upper)
    thread.join(300)
    liar.close()
    assert found == [("a", b"X")]
