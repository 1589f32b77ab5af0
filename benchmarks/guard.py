"""Measure the cost of a round at a guard: a question over its Unix socket, and its parts.

    python benchmarks/guard.py [--questions 200] [--records 500] [--folder FOLDER]

A guard in a process of its own holds records of 108 features; a question is one gradient with noise, charged
and kept durably (two commits of the ledger, one line of the log). Beside it, in the same run: the same bytes
to a socket that only echoes them, the same gradient and noise in this process without accounting, and the
same with a ledger on the same disk. Medians of wall-clock time; most of a question is waiting for the disk.
"""

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from farthing.budget import Budget
from farthing.data.tables import Features, Table
from farthing.deploy.messages.forms import Question, RoundId
from farthing.deploy.messages.signed import MessageKind as Message
from farthing.deploy.messages.signed import Signer, pack_numbers, seal
from farthing.deploy.messages.transport import call
from farthing.federated.terms import Invitation
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import LinearGradient, logistic

WIDTH = 108


def settle(folder: Path, records: int, coordinator: Signer) -> tuple[np.ndarray, np.ndarray]:
    """Write a party's records, key and policy."""
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(records, WIDTH)), rng.integers(0, 2, records) * 1.0
    np.savez(folder / "records.npz", X=X, y=y)
    Signer.new().save(folder / "key")
    (folder / "policy.toml").write_text(
        f'dataset = "d"\nrecords = "records.npz"\nsize = {records}\nledger = "my.ledger"\nsocket = "s"\n'
        f'key = "key"\ncoordinators = ["{coordinator.public.hex()}"]\n'
        f"[budget]\nepsilon = 8.0\ndelta = 1e-6\n"
        f"[limits]\nnoise = 0.1\nclip = 3.0\nrounds = 1000000\nwidth = {WIDTH}\n"
    )
    return X, y


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Run a guard."""
    command = [sys.executable, "-m", "farthing.cli.main", "guard", str(folder / "policy.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def echo(path: Path) -> Iterator[None]:
    """Run a socket that echoes its input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(peer.recv(2**20))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def median(questions: int, ask: Callable[[int], object]) -> float:
    """Return the median time in milliseconds."""
    taken = []
    for number in range(1, questions + 1):
        start = time.perf_counter()
        ask(number)
        taken.append(time.perf_counter() - start)
    return 1e3 * float(np.median(taken))


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--records", type=int, default=500)
    parser.add_argument("--folder", default=None)
    chosen = parser.parse_args([] if arguments is None else arguments)
    folder, coordinator = Path(tempfile.mkdtemp(prefix="g", dir=chosen.folder)), Signer.new()
    invitation = Invitation(1.0, rounds=10 * chosen.questions)
    gradient, w = LinearGradient(logistic, Features(WIDTH)), np.zeros(WIDTH + 1)

    def message(number: int) -> bytes:
        turn = RoundId("run-1", number, f"{number:032x}")
        return seal(
            Message.QUESTION,
            Question(turn, "d", invitation, gradient, w.shape).header(),
            pack_numbers(w),
            coordinator,
        )

    try:
        X, y = settle(folder, chosen.records, coordinator)
        with guarded(folder):
            asked = median(chosen.questions, lambda t: call(folder / "s", message(t), seconds=60))
        with echo(folder / "e"):
            bare = median(chosen.questions, lambda t: call(folder / "e", message(t), seconds=60))
        budget = Budget(8.0, 1e-6, observer="server")  # type: ignore[arg-type]
        query = invitation.terms(budget, chosen.records).query(gradient)
        with Ledger(budget, journal=folder / "other.ledger") as ledger:
            ledger.promise(query, 10 * chosen.questions)
            attached = ledger.over(Table(X, y))
            kept = median(chosen.questions, lambda t: attached.ask(query, w, key=str(t)))
            unkept = median(chosen.questions, lambda t: attached.ask(query, w))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{chosen.records} records of {WIDTH} features, {chosen.questions} questions, medians in ms")
    print(f"{'a question to a guard':52}{asked:8.2f}")
    print(f"{'  of which: the bytes there and back':52}{bare:8.2f}")
    print(f"{'  of which: a ledger that charges and keeps answers':52}{kept:8.2f}")
    print(f"{'  of which: gradient and noise, charged in blocks':52}{unkept:8.2f}")
    print(f"a guard answers {1e3 / asked:.0f} questions a second")


if __name__ == "__main__":
    main(sys.argv[1:])
