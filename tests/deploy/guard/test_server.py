"""The socket: who may open it, what is read of it, and that nothing sent to it stops the guard."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import farthing
from farthing.deploy.guard import server as serving
from farthing.deploy.guard.server import Server
from farthing.deploy.messages.signed import PREFIX, MessageKind, Reason
from farthing.deploy.messages.transport import UnixSockets, call
from farthing.errors import InvalidValue

SOURCE = {**os.environ, "PYTHONPATH": str(Path(farthing.__file__).parents[1])}


@pytest.fixture
def house(village):
    return village.settle(1).houses["p0"].start()


def test_a_question_over_the_socket(village, house, told):
    assert told(call(house.socket, village.question(), seconds=60), house)["left"] == 4
    house.stop(signal.SIGTERM)
    assert not house.socket.exists()
    assert village.check() == {"p0": (1, 1)}


def test_an_end_that_came_just_before_it_began_to_wait_is_seen(village):
    """A signal that arrives between the last look at it and the wait for a peer wakes nobody."""
    guard = village.settle(1).houses["p0"].open()
    server = Server(guard)
    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    server._closing.set()  # without waking it
    serving.join(300)
    assert not serving.is_alive()
    server._closing.clear()
    server.close()


def test_only_its_owner_can_open_the_socket(house):
    found = os.stat(house.socket)
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_are_turned_away_by_the_kernels_word(village, house, told):
    os.chmod(house.socket, 0o666)  # as if the mode were wrong
    os.chmod(house.folder, 0o755)
    os.chmod(village.folder, 0o755)
    ask = (
        "import os, sys; from farthing.deploy.messages.transport import call; os.setuid(65534)\n"
        "try: print(len(call(sys.argv[1], bytes.fromhex(sys.argv[2]), seconds=60)))\n"
        "except ConnectionError as error: print('turned away')"
    )
    command = [sys.executable, "-c", ask, str(house.socket), village.question().hex()]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=SOURCE)
    assert out.stdout == "turned away\n"
    assert village.check() == {"p0": (0, 0)}
    policy = house.policy.read_text()
    house.policy.write_text(f"peers = [65534]\ngroup = {os.getegid()}\n{policy}")
    house.start()
    assert stat.S_IMODE(os.stat(house.socket).st_mode) == 0o660
    os.chmod(house.socket, 0o666)
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=SOURCE)
    assert int(out.stdout) > 100
    assert village.check() == {"p0": (1, 1)}


def raw(house, data, end=True):
    """Sends bytes as they are; what comes back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(300)
        peer.connect(str(house.socket))
        with contextlib.suppress(BrokenPipeError):
            peer.sendall(data)
        if end:
            peer.shutdown(socket.SHUT_WR)
            parts = []
            with contextlib.suppress(ConnectionResetError):  # it did not read all of it
                while part := peer.recv(2**16):
                    parts.append(part)
            return b"".join(parts)
        return b""


def test_what_is_too_large_is_refused_before_it_is_read(village, house, told):
    announced = PREFIX.pack(b"frth", 1, MessageKind.QUESTION, 0, 100, 2**31)
    assert told(raw(house, announced), house) is Reason.OVERSIZED
    assert told(raw(house, announced + bytes(10**5)), house) is Reason.OVERSIZED
    assert told(raw(house, b"GET / HTTP/1.1\r\n\r\n"), house) is Reason.MALFORMED
    assert told(raw(house, village.question()), house)["left"] == 4


def test_peers_that_go_away_or_end_early(village, house, told):
    message = village.question()
    for size in (0, 1, 15, 16, 50, len(message) - 1):
        reply = raw(house, message[:size])
        assert reply == b"" or told(reply, house) is Reason.MALFORMED
        raw(house, message[:size], end=False)
    raw(house, message, end=False)  # and does not wait for the answer
    waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(8)]
    for peer in waiting:
        peer.connect(str(house.socket))
        peer.sendall(message[:20])
    assert told(call(house.socket, message, seconds=60), house)["round"] == 1
    for peer in waiting:
        peer.close()
    assert village.check() == {"p0": (1, 1)}


def test_several_messages_over_one_connection(village, house, told):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(300)
        peer.connect(str(house.socket))
        for number in (1, 2):
            peer.sendall(village.question(number))
            assert peer.recv(2**16)[:4] == b"frth"
    assert village.check() == {"p0": (2, 2)}


def test_many_at_once_are_charged_one_by_one(village, house, told):
    transport = UnixSockets({f"a{i}": house.socket for i in range(12)})
    questions = {f"a{i}": village.question(1, run=f"run-{i}") for i in range(12)}
    replies = dict(transport.exchange(questions, seconds=120))
    found = [told(reply, house) for reply in replies.values()]
    assert sum(reply is Reason.SPENT for reply in found) == 7  # five rounds fit the budget
    assert village.check() == {"p0": (5, 5)}


def test_a_second_guard_does_not_start(village, house, told):
    assert house.fails() == "failed InvalidValue"
    assert told(call(house.socket, village.question(), seconds=60), house)["left"] == 4


def test_a_socket_left_behind_is_replaced_and_other_files_are_not(village, house):
    house.stop()
    assert house.socket.exists()
    house.start().stop()
    house.socket.unlink()
    house.socket.write_text("mine")
    guard = house.open()
    with pytest.raises(InvalidValue, match="another file"):
        Server(guard)
    assert house.socket.read_text() == "mine"


def test_a_path_too_long_for_a_socket(village):
    house = village.settle(1).houses["p0"]
    house.policy.write_text(house.policy.read_text().replace('"s"', f'"{"s" * 120}"'))
    with pytest.raises(InvalidValue, match="at most 100 bytes"):
        Server(house.open())


def test_the_command(village, told):
    house = village.settle(1).houses["p0"]
    command = [sys.executable, "-m", "farthing.cli.main", "guard", str(house.policy)]
    subprocess.run([*command, "--check"], check=True, capture_output=True, env=SOURCE)
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=SOURCE, **quiet) as process:
        try:
            assert process.stdout.readline() == f"listening {house.signer.public.hex()}\n"
            assert told(call(house.socket, village.question(), seconds=60), house)["left"] == 4
        finally:
            process.terminate()
        assert process.wait(300) == 0
    house.policy.write_text("nonsense")
    failed = subprocess.run(command, capture_output=True, text=True, env=SOURCE)
    assert failed.returncode == 2
    assert "TOML" in failed.stderr
    assert village.check(verify=True) == {"p0": (1, 1)}


def test_peers_that_send_a_byte_now_and_then_keep_nobody_out(village, told, monkeypatch):
    """A message has to be complete in time, however often a part of it comes."""
    monkeypatch.setattr(serving, "_PATIENCE", 0.5)
    server = Server(village.settle(1).houses["p0"].open())
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    over, peers = threading.Event(), []
    for _ in range(serving._MOST_PEERS):
        peers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        peers[-1].connect(str(server.path))

    def trickle():
        for byte in village.question()[:400]:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.sendall(bytes([byte]))
            if over.wait(0.2):
                return

    slow = threading.Thread(target=trickle, daemon=True)
    slow.start()
    try:
        reply = call(server.path, village.question(), seconds=60)  # the peers have more to send for longer
        assert told(reply, village.houses["p0"])["round"] == 1
        assert slow.is_alive()
    finally:
        over.set()
        server.close()
        thread.join(300)
        for peer in peers:
            peer.close()


def test_peers_that_hold_every_place_do_not_keep_it_from_ending(village):
    server = Server(village.settle(1).houses["p0"].open())
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(serving._MOST_PEERS + 1)]
    for peer in peers:
        peer.connect(str(server.path))
    while server._room._value:
        threading.Event().wait(0.01)
    server.close()
    thread.join(20)  # far below _PATIENCE, after which the places would be free
    assert not thread.is_alive()
    for peer in peers:
        peer.close()
