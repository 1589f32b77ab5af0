"""Requests there, answers back; who does not answer is absent."""

import socket
import tempfile
import threading
from pathlib import Path

import pytest

from farthing.deploy.messages.forms import InProcess, UnixSockets
from farthing.deploy.messages.signed import MessageKind, Refused, Signer, seal
from farthing.deploy.messages.sockets import call

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
