"""Serve a run (``farthing serve``): the coordinator of parties on other machines.

    run = "wards-1"
    dataset = "wards"                 # as in the parties' policies
    listen = "0.0.0.0:9092"           # the address that nodes connect to; by default 127.0.0.1:9092
    keys = "keys/coordinator"         # the folder that `farthing keys` made
    folder = "wards-1"                # checkpoint, model.npz, report.json, logs
    schema = "adult"                  # public bounds and vocabularies, a JSON file or the word adult
    test = "adult"                    # optional: public test data, to watch accuracy on
    wait = 3600                       # seconds until enough parties have connected
    seconds = 60                      # seconds that a round may take
    patience = 3                      # rounds that a party may miss in a row before it is not waited for
    least = 3                         # parties that a run needs to begin: by default all; others may join
    deadline = 10                     # optional: seconds after which a round ends with
    quorum = 0.8                      # this share of the answers

    [method]
    name = "addp"                     # or federated-descent, sgd2, sgd1
    weights = "plain"                 # options of `farthing simulate`: --epsilon-iter becomes epsilon_iter
    most = 200                        # stop after so many rounds, whatever is left

    [averaging]                       # optional, see `farthing.deploy.averages`
    mean = "trimmed"                  # or "weighted" (the default), "median": one liar moves it little
    records = 20000                   # no statement of more records, or of a larger epsilon, counts more
    staleness = 2                     # rounds by which an answer may be late and still count

    [parties]
    ward-7 = "keys/ward-7/public.toml"

A run that was interrupted resumes when it is started again, and ends with the same model. Privacy is not
decided here: every party's guard enforces its own budget.
"""

import contextlib
import json
import logging
import math
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Budget
from farthing.data import model_file, table_files
from farthing.data.schema import Categorical, Schema
from farthing.deploy.averages import Averaging, MeanRule
from farthing.deploy.coordinator import Remote, State
from farthing.deploy.flower.superlink import Address, SuperLink, needs_flower
from farthing.deploy.keys import PublicKeys
from farthing.deploy.messages.forms import Transport
from farthing.deploy.messages.signed import Signer, checked_name
from farthing.deploy.toml_settings import Settings
from farthing.deploy.view import PartyView, View
from farthing.errors import BudgetSpent, FarthingError, InvalidValue
from farthing.federated.jobs import Job, checked, holds, measured, steps
from farthing.federated.methods import table
from farthing.federated.terms import Trust
from farthing.linear import losses
from farthing.linear.problem import Problem
from farthing.queries.query import Step

log = logging.getLogger("farthing.federated")

Array = NDArray[np.float64]
Weights = tuple[Array, Array]

_POINTS = 200  # of the accuracy curve on the page
_LATELY = 10  # recent rounds that the time of one is averaged over


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run's file: the method, the parties, and all paths."""

    run: str
    dataset: str
    listen: Address
    keys: Path
    folder: Path
    schema: Schema
    job: Job
    parties: dict[str, PublicKeys]
    test: str | None = None
    wait: float = 3600.0
    seconds: float = 60.0
    patience: int = 3
    least: int | None = None
    most: int | None = None
    quorum: float = 1.0
    deadline: float | None = None
    averaging: Averaging = field(default_factory=Averaging)

    @classmethod
    def load(cls, path: Path) -> "RunFile":
        try:
            return cls._of(Settings.load(path))
        except InvalidValue as error:
            said = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), str(error))
            raise InvalidValue(f"{path}: {said}") from None

    @classmethod
    def _of(cls, given: Settings) -> "RunFile":
        method, places = given.table("method"), given.table("parties")
        parties = {checked_name(party=name): PublicKeys.load(places.path(name)) for name in places.names}
        name = given.text("schema")
        found = table_files.schema_of(name if name == table_files.EMBEDDED else str(given.beside(name)), None)
        test = given.text("test", None)
        deployed = [one for one in table.METHODS.values() if one.deployed]
        job = Job(
            table="",
            schema=found,
            clients=max(1, len(parties)),
            method=table.named(method.text("name"), deployed, "method.name"),
            trust=method.text("trust", None),
            survivors=method.whole("survivors", None),
            options=_options(method),
        )
        plan = cls(
            run=checked_name(run=given.text("run")),
            dataset=checked_name(dataset=given.text("dataset")),
            listen=Address.of(given.text("listen", "127.0.0.1:9092")),
            keys=given.path("keys"),
            folder=given.path("folder"),
            schema=found,
            job=job,
            parties=parties,
            test=test if test is None or test == table_files.EMBEDDED else str(given.beside(test)),
            wait=given.number("wait", 3600.0),
            seconds=given.number("seconds", 60.0),
            patience=given.whole("patience", 3),
            least=given.whole("least", None),
            most=method.whole("most", None),
            quorum=given.number("quorum", 1.0),
            deadline=given.number("deadline", None),
            averaging=_averaging(given.table("averaging")) if "averaging" in given.names else Averaging(),
        )
        given.done()
        method.done()
        plan._check()
        return plan

    def _check(self) -> None:
        checked(self.job)
        if self.job.trust == Trust.TRUSTED:
            raise InvalidValue("trust must be local or distributed: a guard releases nothing without noise")
        if self.job.trusted is not Trust.LOCAL and self.averaging.sees_uploads:
            raise InvalidValue("[averaging] needs local trust: under distributed trust only sums are seen")
        if self.quorum > 1:
            raise InvalidValue(f"quorum must be a share of the parties, at most 1, got {self.quorum:g}")
        if not self.parties:
            raise InvalidValue("[parties] must name at least one, with its public.toml")
        if len({card.key for card in self.parties.values()}) != len(self.parties):
            raise InvalidValue("[parties] must each have a key of their own")
        if self.least is not None and self.least > len(self.parties):
            raise InvalidValue(
                f"least must be at most the number of parties, {len(self.parties)}, got {self.least}"
            )
        if not isinstance(self.schema.target, Categorical):
            raise InvalidValue(
                f"federated methods learn labels, and target {self.schema.target.name!r} is a number"
            )

    @property
    def labels(self) -> int:
        assert isinstance(self.schema.target, Categorical)
        return len(self.schema.target.values)

    @property
    def model(self) -> Path:
        return self.folder / "model.npz"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    def problem(self, records: int) -> Problem:
        loss: losses.Loss = losses.logistic if self.labels == 2 else losses.multinomial
        outputs = self.labels if self.labels > 2 else 0
        return Problem(loss, records, self.schema.width, outputs, unit=False)


def _options(given: Settings) -> dict[str, Any]:
    """Return the options in a [method] table; `checked` refuses those of other methods by name."""
    read: dict[type, Callable[..., Any]] = {float: given.number, int: given.whole, str: given.text}
    return {
        name: given.flag(name) if option.kind is bool else read[option.kind](name, None)
        for name, (option, _) in table.every_option().items()
        if name in given.names
    }


def _averaging(given: Settings) -> Averaging:
    """Return the settings of the mean in an [averaging] table."""
    made = Averaging(
        mean=validate.choice(MeanRule, mean=given.text("mean", "weighted")),
        trim=given.number("trim", 0.1),
        records=given.whole("records", None),
        epsilon=given.number("epsilon", None),
        staleness=given.whole("staleness", None) or 0,
    )
    given.done()
    return made


class OpenPage(Protocol):
    """A live page that is open."""

    address: str

    def close(self) -> None: ...


def serve(
    plan: RunFile,
    *,
    page: Callable[[Callable[[], View]], OpenPage] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run to the end and return the report. SIGTERM and Ctrl-C interrupt the run, which can be resumed.

    ``page`` opens a live page that shows a function's result (`farthing.report.live_page.Page`).
    """
    if plan.report.exists():
        raise InvalidValue(f"run {plan.run!r} is over, see {str(plan.report)!r}: give another run and folder")
    needs_flower()
    signer = Signer.load(plan.keys / "coordinator.key")
    test = None if plan.test is None else table_files.read(plan.test, plan.schema, test=True)
    try:
        plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValue(f"folder must be writable, {str(plan.folder)!r}: {error.strerror}") from None
    board = RunProgress(plan)
    with contextlib.ExitStack() as open_:
        open_.enter_context(_ending_by_signal())
        if page is not None:
            shown = page(board.view)
            open_.callback(shown.close)
            say(f"page        {shown.address}")
        link = SuperLink(
            plan.listen, plan.keys, {name: card.node for name, card in plan.parties.items()}, plan.folder
        )
        open_.callback(link.close)
        say(f"listening   {plan.listen}, for {', '.join(plan.parties)}")
        assert link.bridge is not None
        return coordinate(plan, link.bridge, signer, test, board, say)


def coordinate(
    plan: RunFile,
    transport: Transport,
    signer: Signer,
    test: tuple[Array, NDArray[Any]] | None,
    board: "RunProgress",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Coordinate the run over any transport."""
    try:
        clients = _gathered(plan, transport, signer)
        say(f"here        {', '.join(clients.names)}")
        try:
            step, end = _trained(plan, clients, test, board)
        finally:
            clients.close()
        report = _written(plan, clients, step, end, test)
        board.over(end)
        return report
    except KeyboardInterrupt:
        raise FarthingError(f"interrupted: start run {plan.run!r} again to resume it") from None


def _gathered(plan: RunFile, transport: Transport, signer: Signer) -> Remote:
    """Return the parties, once enough of them have connected."""
    until = time.monotonic() + plan.wait
    enrolled = {name: card.key for name, card in plan.parties.items()}
    while True:
        try:
            return Remote(
                transport,
                signer,
                enrolled,
                run=plan.run,
                dataset=plan.dataset,
                checkpoint=plan.folder / "checkpoint",
                seconds=plan.seconds,
                patience=plan.patience,
                least=plan.least,
                quorum=plan.quorum,
                deadline=plan.deadline,
                averaging=plan.averaging,
            )
        except InvalidValue:
            raise
        except FarthingError as error:
            if time.monotonic() > until:
                raise
            log.info("%s: waiting", error)


def _trained(
    plan: RunFile, clients: Remote, test: tuple[Array, NDArray[Any]] | None, board: "RunProgress"
) -> tuple[Step, str]:
    """Return the last step, and the reason why it was the last."""
    problem = plan.problem(int(clients.records.sum()))
    step, end = None, ""
    board.begun(clients)
    for step in steps(plan.job, clients, problem):
        board.stepped(step, None if test is None else _accuracy(step.w, *test))
        if plan.most is not None and step.t >= plan.most:
            end = f"{plan.most} rounds were taken, as the run's file says"
            break
    if step is None:
        told = ", ".join(f"{party.name}: {party.reason or party.state}" for party in clients.status().parties)
        raise BudgetSpent(f"no round was completed: {told}")
    if not end:
        end = "all rounds were taken" if clients.alive else "no party is left that can afford another round"
    return step, end


def _accuracy(w: Weights, X: Array, y: NDArray[Any]) -> float:
    scores = X @ w[0] + w[1]
    labels = scores.argmax(axis=1) if scores.ndim == 2 else scores > 0
    return float(np.mean(labels == y))


def _written(
    plan: RunFile, clients: Remote, step: Step, end: str, test: tuple[Array, NDArray[Any]] | None
) -> dict[str, Any]:
    """Write the model and the report, and return the report."""
    widest = int(np.argmax([budget.epsilon for budget in clients.budgets]))
    noise = clients.terms(widest).mechanism.noise_multiplier
    really = [asdict(one) for one in holds(plan.job, clients, noise, widest, step.t)]
    report: dict[str, Any] = {
        "run": plan.run,
        "dataset": plan.dataset,
        "method": plan.job.record.name,
        "trust": str(plan.job.trusted),
        "rounds": step.t,
        "stopped": end,
        "records": int(clients.records.sum()),
        "features": plan.schema.width,
        "parties": [_told(clients, place) for place in range(len(clients))],
        **({"holds": really} if really else {}),
        "note": "budgets as announced; each is kept by the party's own ledger, whatever a coordinator does",
        "model": str(plan.model),
    }
    if test is not None:
        said = _said(plan, clients, step.w, test[0])
        report["test"] = {"table": plan.test, **measured(said, test[1])}
    u, constant = (np.asarray(part) for part in step.w)
    coef, intercept = (u.T, constant) if u.ndim == 2 else (u[None, :], np.atleast_1d(constant))
    text = json.dumps(report, allow_nan=False, indent=1)
    model_file.write(plan.model, model_file.Model(plan.schema, coef, intercept).to_bytes(text))
    model_file.write(plan.report, (text + "\n").encode())
    return report


def _said(plan: RunFile, clients: Remote, w: Weights, X: Array) -> Array:
    """Return probabilities for test rows, as `farthing simulate` does."""
    problem = plan.problem(int(clients.records.sum()))
    features = plan.job.features(clients, problem)
    return problem.probabilities(w, X, clip_norm=clients.terms(0).bound.clip, features=features)


def _told(clients: Remote, place: int) -> dict[str, Any]:
    """Return a party's announced figures and its state."""
    status, terms = clients.status().parties[place], clients.terms(place)
    return {
        "party": status.name,
        "records": int(clients.records[place]),
        "guarantee": asdict(clients.budgets[place]),
        "noise": terms.mechanism.noise_multiplier,
        "clip": terms.bound.clip,
        "state": str(status.state),
        "left": status.left,
        "reason": status.reason,
    }


@contextlib.contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Turn SIGTERM into Ctrl-C, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True, eq=False)
class RunProgress:
    """A run's progress for the live page; written by one thread, read by others."""

    plan: RunFile
    phase: str = "waiting for parties"
    clients: Remote | None = None
    round: int = 0
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_LATELY + 1))

    def begun(self, clients: Remote) -> None:
        self.clients, self.phase = clients, "training"

    def stepped(self, step: Step, accuracy: float | None) -> None:
        assert self.clients is not None
        self.round = step.t
        for party in self.clients.status().parties:
            self.most.setdefault(party.name, max(1, party.left + (step.t == 1)))
        self.ends.append(time.monotonic())
        if accuracy is not None:
            if len(self.accuracy) >= _POINTS:  # keep every second point
                self.accuracy = self.accuracy[::2]
            self.accuracy = [*self.accuracy, (step.t, accuracy)]

    def over(self, end: str) -> None:
        self.phase = f"over: {end}"

    def view(self) -> View:
        """Return the run as the page shows it; safe from any thread."""
        plan, clients = self.plan, self.clients
        what = " · ".join(part for part in (plan.job.record.name, plan.job.trust, plan.dataset) if part)
        if clients is None:
            parties = tuple(PartyView(name=name, state="awaited") for name in plan.parties)
            return View(run=plan.run, method=what, phase=self.phase, parties=parties)
        status, records, budgets = clients.status().parties, clients.records, clients.budgets
        parties = tuple(
            PartyView(
                name=party.name,
                state=str(party.state),
                left=party.left if self.round else None,
                most=self.most.get(party.name),
                records=int(records[place]),
                epsilon=budgets[place].epsilon,
                delta=budgets[place].delta,
                reason=party.reason,
                stale=party.stale,
            )
            for place, party in enumerate(status)
        )
        ends, seconds = list(self.ends), None
        if len(ends) > 1:
            seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        left = max((p.left for p in status if p.state in (State.HERE, State.MISSING)), default=0)
        if plan.most is not None:
            left = min(left, plan.most - self.round)
        asked = [clients.terms(place) for place in range(len(clients))] if self.round else []
        return View(
            run=plan.run,
            method=what,
            phase=self.phase,
            round=self.round,
            parties=parties,
            accuracy=tuple(self.accuracy),
            noise=min((terms.mechanism.noise_multiplier for terms in asked), default=None),
            clip=min((terms.bound.clip for terms in asked), default=None),
            seconds=seconds,
            end=None if seconds is None or math.isnan(seconds) else left * seconds,
        )


def lines(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report as text, line by line."""
    words: dict[str, Any] = {
        "run": f"{report['run']}, {report['method']}, {report['rounds']:,} rounds",
        "stopped": report["stopped"],
        "model": report["model"],
        "parties": [
            f"{told['party']}: {told['records']:,} records, {Budget(**told['guarantee'])}, {told['state']}"
            for told in report["parties"]
        ],
        "note": report["note"],
    }
    if "holds" in report:
        words["published noise"] = [
            f"epsilon {one['epsilon']:.4g} against {one['observer']}" for one in report["holds"]
        ]
    if "test" in report:
        test = report["test"]
        words["test"] = [
            f"{test['table']}: accuracy {test['accuracy']:.4f}, guessing {test['guessing']:.4f}",
            test["note"],
        ]
    return words
