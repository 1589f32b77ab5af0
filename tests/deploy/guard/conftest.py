"""Parties with policies, records and keys in a folder; guards as objects or as real processes; a checker.

The checker reads ledgers, heads and answer logs with its own SQL, hashing and parsing.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import select
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_ndtr

import farthing
from farthing.data.tables import Features
from farthing.deploy import factories
from farthing.deploy.coordinator import Remote
from farthing.deploy.guard import server
from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages.forms import Question, RoundId
from farthing.deploy.messages.signed import MessageKind, Reason, Signer, pack_numbers, seal, unseal
from farthing.deploy.messages.transport import InProcess, UnixSockets
from farthing.federated.terms import Invitation
from farthing.ledger import verifier
from farthing.ledger.journal import Journal
from farthing.linear.losses import LinearGradient, logistic

GRADIENT = LinearGradient(logistic, Features(2))
PLAIN = Invitation(1.0, rounds=5)

# Forks guards, each a process of its own, after everything was imported once. A guard may be told to die (by
# SIGKILL) the nth time that it comes to a place, to distrust clocks, and to draw the same noise for the same
# round however often it was started.
NURSERY = """
import gc, json, os, signal, sys, time, traceback
from pathlib import Path
from farthing.ledger import journal, journal_rows
from farthing.ledger import verifier
from farthing.deploy.guard import (keeper, server)
from farthing.noise.lattice import SeededStream
import mpmath, scipy.special

def live(policy, place, number, seed):
    countdown = number

    def reached(where):
        nonlocal countdown
        if where == place:
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(kind, name, before, after, when=lambda *a, **k: True):
        whole = getattr(kind, name)
        def wrapped(self, *args, **kwargs):
            here = when(*args, **kwargs)
            if here: reached(before)
            result = whole(self, *args, **kwargs)
            if here: reached(after)
            return result
        setattr(kind, name, wrapped)

    charged = lambda kind, decide, key=None, request=None: key is not None
    around(journal.Journal, "append", "before-charge", "after-charge", charged)
    around(journal.Journal, "store_answer", "before-store", "after-store")
    around(keeper.AnswerLog, "append", "before-log", "after-log")
    around(keeper.Guard, "answer", "before-anything", "after-answer")
    if place == "slow":  # to be killed by others at any moment
        answer = keeper.Guard.answer
        def late(self, data):
            time.sleep(number / 1000)
            return answer(self, data)
        keeper.Guard.answer = late
    if place == "clock":  # every look at it shows another year
        class Jumping(journal_rows.datetime):
            years = [1971, 2038, 1999, 9998]
            @classmethod
            def now(cls, zone=None):
                cls.years.append(cls.years.pop(0))
                return journal_rows.datetime(cls.years[0], 1, 1, tzinfo=zone)
        journal_rows.datetime = Jumping
        time.time = lambda: -1e9
    stream = None
    if seed is not None:
        stream, ask = SeededStream(seed), keeper.Guard.ask
        def reseeded(self, question, terms, w, key):
            stream._seed, stream._generation = 1000 * seed + question.turn.round, 0
            stream._rekey()
            return ask(self, question, terms, w, key)
        keeper.Guard.ask = reseeded
    server.guard(Path(policy), stream=stream)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.freeze()
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stderr = open(os.devnull, "w")
        try:
            live(*json.loads(line))
            os._exit(0)
        except BaseException as error:
            print("failed", type(error).__name__, flush=True)
            os._exit(1)
    print("pid", pid, flush=True)
"""


class Nursery:
    """Starts guards."""

    def __init__(self, first: str = "") -> None:
        source = Path(farthing.__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONUNBUFFERED", None)  # a line is written whole: several processes share a pipe
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{first}\n{NURSERY}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, policy: Path, place: str, number: int, seed: int | None) -> tuple["Child", str]:
        """A guard, and the first that it says: that it listens, or that it failed."""
        with self._lock:
            self._process.stdin.write(json.dumps([str(policy), place, number, seed]) + "\n")
            self._process.stdin.flush()
            lines = dict(self._process.stdout.readline().split(maxsplit=1) for _ in range(2))
        child = Child(int(lines.pop("pid")))
        ((word, rest),) = lines.items()
        return child, f"{word} {rest.strip()}"

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(300)
        self._process.stdout.close()


class Child:
    """A process that is somebody else's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._file = -1

    def gone(self, seconds: float = 0.0) -> bool:
        return self._file < 0 or bool(select.select([self._file], [], [], seconds)[0])

    def end(self, number: int) -> None:
        if not self.gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        assert self.gone(60)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@pytest.fixture(scope="session")
def nursery():
    """One for all tests of a process."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("processes are waited for by their file descriptors, which only Linux has")
    found = Nursery()
    yield found
    found.close()


@pytest.fixture(scope="session")
def torch_nursery():
    """One whose guards find torch imported."""
    pytest.importorskip("torch")
    found = Nursery("import farthing.torch.training.network")
    yield found
    found.close()


@dataclass
class House:
    """A party's folder."""

    name: str
    folder: Path
    signer: Signer
    nursery: Nursery
    process: Child | None = None
    objects: list = field(default_factory=list)

    @property
    def policy(self) -> Path:
        return self.folder / "policy.toml"

    @property
    def ledger(self) -> Path:
        return self.folder / "my.ledger"

    @property
    def log(self) -> Path:
        return self.folder / "my.ledger.answers"

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    def open(self, **options):
        """The guard as an object of this process."""
        self.objects.append(server.opened(Policy.load(self.policy), **options))
        return self.objects[-1]

    def start(self, place="", number=1, seed=None):
        """The guard as a process of its own, once it listens."""
        self.stop()
        self.process, said = self.nursery.start(self.policy, place, number, seed)
        assert said == f"listening {self.signer.public.hex()}", said
        return self

    def fails(self):
        """How one more guard fails to start."""
        child, said = self.nursery.start(self.policy, "", 1, None)
        child.end(signal.SIGKILL)
        return said

    @contextlib.contextmanager
    def kept_alive(self, seed=None):
        """Starts the guard again whenever it dies, until the end of the block."""
        over = threading.Event()

        def watch():
            while not over.wait(0.01):
                if self.process.gone():
                    self.start(seed=seed)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(300)

    def stop(self, number=signal.SIGKILL):
        if self.process is not None:
            self.process.end(number)
            self.process = None
        while self.objects:
            self.objects.pop().close()


class Village:
    """Some parties, and a coordinator's key."""

    def __init__(self, folder: Path, nursery: Nursery | None = None) -> None:
        self.folder, self.nursery, self.coordinator = folder, nursery, Signer.new()
        self.houses: dict[str, House] = {}
        self.remotes: list[Remote] = []

    def settle(self, parties=3, records=20, width=2, *, budget="", limits="", top="", epsilon=1.0):
        """Parties with random records of their own; further lines for their policies may be given."""
        signers = {f"p{i}": Signer.new() for i in range(parties)}
        for i, (name, signer) in enumerate(signers.items()):
            house = House(name, self.folder / name, signer, self.nursery)
            house.folder.mkdir()
            rng = np.random.default_rng(i)
            X, y = rng.uniform(size=(records + i, width)), rng.integers(0, 2, records + i) * 1.0
            np.savez(house.folder / "records.npz", X=X, y=y)
            signer.save(house.folder / "key")
            enrolled = "\n".join(f'{other} = "{s.public.hex()}"' for other, s in signers.items())
            house.policy.write_text(
                f'dataset = "d"\nrecords = "records.npz"\nsize = {records + i}\nledger = "my.ledger"\n'
                f'socket = "s"\nkey = "key"\ncoordinators = ["{self.coordinator.public.hex()}"]\n{top}\n'
                f"[budget]\nepsilon = {epsilon}\ndelta = 1e-6\n{budget}\n"
                f"[limits]\nnoise = 0.5\nclip = 3.0\nrounds = 1000\nwidth = {width}\n"
                f'draws = ["all", "poisson:0.5", "exactly:1"]\n{limits}\n[parties]\n{enrolled}\n'
            )
            self.houses[name] = house
        return self

    @property
    def enrolled(self):
        return {name: house.signer.public for name, house in self.houses.items()}

    def sockets(self):
        return UnixSockets({name: house.socket for name, house in self.houses.items()})

    def functions(self, **options):
        return InProcess({name: house.open(**options).answer for name, house in self.houses.items()})

    def clients(self, transport, **options):
        settings = {"run": "run-1", "dataset": "d", "seconds": 60.0} | options
        self.remotes.append(Remote(transport, self.coordinator, self.enrolled, **settings))
        return self.remotes[-1]

    def question(
        self,
        number=1,
        *,
        w=(0.0, 0.0, 0.0),
        run="run-1",
        nonce=None,
        dataset="d",
        invitation=PLAIN,
        gradient=GRADIENT,
        seen=None,
        signer=None,
        kind=MessageKind.QUESTION,
        body=None,
        lies=None,
    ):
        """A question as the coordinator asks it, with ``lies`` in place of some fields."""
        w = np.asarray(w)
        turn = RoundId(run, number, f"{number:032x}" if nonce is None else nonce)
        header = Question(turn, dataset, invitation, gradient, w.shape, seen).header() | (lies or {})
        return seal(kind, header, pack_numbers(w) if body is None else body, signer or self.coordinator)

    def start(self, **options):
        for house in self.houses.values():
            house.start(**options)
        return self

    def stop(self):
        for clients in self.remotes:
            clients.close()
        for house in self.houses.values():
            house.stop()

    def check(self, verify=False):
        """All parties' books: see `check`; ``verify`` may name one of them."""
        return {name: check(house, verify in (True, name)) for name, house in self.houses.items()}


def read(reply: bytes, house: House):
    """What a guard replied: the reason of a refusal, or the fields of its answer."""
    found = unseal(reply, {house.signer.public}, 10**7)
    fields = found.fields().plain()
    if found.kind is MessageKind.REFUSAL:
        return Reason(fields["reason"])
    value = np.frombuffer(found.body, dtype="<f4" if len(found.body) % 8 else "<f8")
    return fields | {"kind": found.kind, "value": value, "body": found.body}


def check(house: House, verify: bool = False) -> tuple[int, int]:
    """How many answers were logged and charged, if every answer was charged and all files are whole.

    ``verify`` also has the spend recomputed from an export by `farthing.ledger.verifier`, which takes a
    second.
    """
    content = house.log.read_bytes() if house.log.exists() else b""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # torn: never sent
    previous, logged = "0" * 64, {}
    for line in lines:
        entry = json.loads(line)
        assert entry["previous"] == previous
        assert entry["key"] not in logged
        logged[entry["key"]] = entry
        previous = hashlib.sha256(line[:-1]).hexdigest()
    if not house.ledger.exists():
        assert not logged
        return 0, 0
    head = Path(f"{house.ledger}.head").read_bytes()
    with contextlib.closing(sqlite3.connect(house.ledger)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if not connection.execute("SELECT name FROM sqlite_master").fetchall():
            assert not logged
            return 0, 0
        rows = connection.execute("SELECT * FROM chain ORDER BY seq").fetchall()
        answers = connection.execute("SELECT key, seq, released, value FROM answers").fetchall()

    charged, promised, forfeited, events, previous = {}, 0, 0, [], "0" * 64
    for number, (seq, moment, kind, body, state, before, digest) in enumerate(rows):
        values = [before, seq, moment, kind, json.loads(body), json.loads(state)]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        assert (seq, before) == (number, previous)
        assert digest == hashlib.sha256(text.encode()).hexdigest()
        promised += values[4]["times"] if kind == "promise" else 0
        if kind == "charge" and "answer" not in values[4]:
            forfeited += values[4]["count"]  # turns of a plan that were skipped
        elif kind == "charge":
            assert values[4]["count"] == 1
            assert values[4]["answer"]["key"] not in charged
            charged[values[4]["answer"]["key"]] = (seq, digest)
            events.append(values[4]["event"])
        previous = digest
    for slot in (head[:64], head[4096:4160]):
        if len(slot) == 64 and hashlib.sha256(b"farthing head" + slot[:48]).digest()[:16] == slot[48:]:
            _, seq, digest = struct.unpack(">8sQ32s", slot[:48])
            assert rows[seq][6] == digest.hex()

    stored = {}
    for key, seq, released, value in answers:
        assert charged[key][0] == seq
        if released is not None:
            array = np.load(io.BytesIO(value.split(b"\n", 1)[1]), allow_pickle=False)
            stored[key] = hashlib.sha256(array.tobytes()).hexdigest()
    for key, entry in logged.items():
        assert charged[key] == (entry["row"], entry["hash"]), f"{key} was answered and not charged"
        assert stored[key] == entry["answer"], f"{key} was answered with something else"
    if promised:
        assert len(charged) + forfeited <= promised
    else:
        assert fits(json.loads(rows[0][3])["budget"], events), "more was charged than the budget"
    if verify:
        export = io.StringIO()
        with Journal(house.ledger) as journal:
            journal.export(export)
        verdict = verifier.verify(export.getvalue().splitlines())
        assert verdict.code == 0, verdict
    return len(logged), len(charged)


def fits(budget, events) -> bool:
    """Whether Gaussian answers fit a budget: Σ (shift/σ)² = μ², and δ_μ(ε) by the formula of Balle & Wang.

    Sampled ones, which a menu pays for, are not checked here.
    """
    if any(event["kind"] != "gaussian" for event in events):
        return True
    shift = 2.0 if budget["adjacency"] == "replace-one" else 1.0
    mu, epsilon = math.sqrt(sum((shift / event["noise"]) ** 2 for event in events)), budget["epsilon"]
    if not mu:
        return True
    above, below = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(above) - math.exp(min(below, above)) <= budget["delta"] * (1 + 1e-6)


def roomy(prefix: str) -> Path:
    """A new folder, in memory where that is possible."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=prefix, dir=memory))


MODELS = """
import torch
from torch import nn


def make_model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


class Installed:
    """Parties that have installed a small network; see `install`."""

    size = 23

    def __init__(self, village: Village, source: str = MODELS) -> None:
        self.village, self.folder = village, village.folder / "models"
        self.module = f"models_{os.urandom(4).hex()}"
        self.folder.mkdir()
        (self.folder / f"{self.module}.py").write_text(source)
        self.names = f"{self.module}:make_model", f"{self.module}:loss"
        self.hash = factories.source_hash(self.names, self.folder)

    def settle(self, parties=2, records=40, *, models="", inputs="", unit="record", **more):
        """Parties with records for the network; what is given goes into their policies."""
        limits = more.pop("limits", "")
        self.village.settle(parties, records, budget=f'unit = "{unit}"', **more)
        entries = {"factory": self.names[0], "loss": self.names[1], "hash": self.hash}
        lines = "\n".join(f'{name} = "{value}"' for name, value in entries.items())
        for seed, house in enumerate(self.village.houses.values()):
            rng = np.random.default_rng(seed)
            X = rng.normal(size=(records + seed, 4)).astype(np.float32)
            users = np.arange(records + seed) // 4
            np.savez(house.folder / "records.npz", X=X, y=(X[:, 0] > 0).astype(np.int64), users=users)
            text = house.policy.read_text().replace("width = 2\n", f"{limits}\n")
            size = {"record": records + seed, "user": int(users[-1]) + 1, "party": 1}[unit]
            text = text.replace(f"size = {records + seed}\n", f'size = {size}\nmodules = "../models"\n')
            each = "records_per_user = 4\n" if unit == "user" else ""
            text += f"\n[models.small]\n{lines}\nweights = 100\nsteps = 4\n{models}\n"
            house.policy.write_text(text + f"\n[inputs]\nshape = [4]\nclasses = 2\n{each}{inputs}\n")
        return self

    def question(self, number=1, *, w=None, body=None, lies=None, **more):
        """A question about the network: see `Village.question`; ``lies`` bend what is asked about it."""
        w = np.zeros(self.size) if w is None else np.asarray(w)
        asked = {"network": "small", "hash": self.hash, "kind": "gradient"} | (lies or {})
        more = {"lies": {"contribution": asked, "shape": list(w.shape)}} | more
        body = np.asarray(w, dtype="<f4").tobytes() if body is None else body
        return self.village.question(number, body=body, **more)


@pytest.fixture
def installed(village):
    """See `Installed`."""
    pytest.importorskip("torch")
    return functools.partial(Installed, village)


@pytest.fixture
def told():
    """See `read`."""
    return read


@pytest.fixture
def books():
    """See `check`."""
    return check


@pytest.fixture
def village(nursery):
    """Parties in a folder with a short name (paths of sockets are short) and, where there is one, in memory.

    Processes are killed here, not machines: what they wrote is there whether or not a disk was waited for.
    """
    folder = roomy("v")
    found = Village(folder, nursery)
    try:
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)
