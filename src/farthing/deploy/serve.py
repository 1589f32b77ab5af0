"""Serve a run (``farthing serve``): the coordinator of parties on other machines.

A run that was interrupted resumes when it is started again, and ends with the same model. Privacy is not
decided here: every party's guard enforces its own budget.
"""

import contextlib
import json
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing.budget import FORMAT, Budget
from farthing.data import model_file
from farthing.deploy.coordinator import PartyStatus, Remote, State
from farthing.deploy.flower.superlink import SuperLink, needs_flower
from farthing.deploy.messages.signed import Signer
from farthing.deploy.messages.transport import Bridge, Transport
from farthing.deploy.metrics import MetricsServer, PartyView, View, of_run
from farthing.deploy.run_file import PublicData, RunFile
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.federated.evaluation import Evaluated, evaluate_clients
from farthing.federated.jobs import holds, measured, steps
from farthing.queries.query import Step

log = logging.getLogger("farthing.federated")

Array = NDArray[np.float64]
Weights = tuple[Array, Array]

_POINTS = 200  # of the accuracy curve on the page
_LATELY = 10  # recent rounds that the time of one is averaged over


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
    test = None if plan.test is None else plan.learner.read(plan.test)
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
        if plan.metrics is not None:
            counted = MetricsServer(lambda: of_run(board.view()), plan.metrics)
            open_.callback(counted.close)
            say(f"metrics     http://{plan.metrics}/metrics")
        transport = _transport(plan, open_, say)
        return coordinate(plan, transport, signer, test, board, say)


def _transport(plan: RunFile, open_: contextlib.ExitStack, say: Callable[[str], None]) -> Transport:
    """Return the way to the parties: over a SuperLink of our own, or over a relay on one of others."""
    if plan.external is not None:
        bridge = Bridge(plan.external.nodes, plan.external.bridge)
        open_.callback(bridge.close)
        say(f"waiting     for the relay, at {bridge.path}")
        return bridge
    nodes = {name: card.node for name, card in plan.parties.items()}
    link = SuperLink(plan.listen, plan.keys, nodes, plan.folder)
    open_.callback(link.close)
    say(f"listening   {plan.listen}, for {', '.join(plan.parties)}")
    assert link.bridge is not None
    return link.bridge


def coordinate(
    plan: RunFile,
    transport: Transport,
    signer: Signer,
    test: PublicData | None,
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
        report = _written(plan, clients, step, end, test, board.evaluations)
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
                floor=plan.floor,
            )
        except InvalidValue:
            raise
        except FarthingError as error:
            if time.monotonic() > until:
                raise
            log.info("%s: waiting", error)


def _trained(
    plan: RunFile, clients: Remote, test: PublicData | None, board: "RunProgress"
) -> tuple[Step, str]:
    """Return the last step, and the reason why it was the last."""
    records, most = int(clients.records.sum()), plan.job.record.most_records
    if most is not None and records > most:
        each = zip(clients.names, clients.records.tolist(), strict=True)
        raise InvalidValue(
            f"method {plan.job.record.name} takes as many iterations as the square of all records: at most "
            f"{most} in all, got " + ", ".join(f"{many} of {name}" for name, many in each)
        )
    problem = plan.learner.problem(records)
    step, end = None, ""
    board.begun(clients)
    for step in steps(plan.job, clients, problem):
        board.stepped(step, None if test is None else plan.learner.accuracy(step.w, *test))
        if plan.evaluate is not None and step.t % plan.evaluate == 0:
            with contextlib.suppress(Unsupported, BudgetSpent):  # nobody allows it, or can pay: train on
                board.evaluated(step, evaluate_clients(clients, problem, step.w))
        if plan.most is not None and step.t >= plan.most:
            end = f"{plan.most} rounds were taken, as the run's file says"
            break
    if step is None:
        status = clients.status()
        told = ", ".join(
            f"{party.name}: {party.reason or party.state}" for party in (*status.parties, *status.left_out)
        )
        raise BudgetSpent(f"no round was completed: {told}")
    if not end:
        end = "all rounds were taken" if clients.alive else "no party is left that can afford another round"
    return step, end


def _written(
    plan: RunFile,
    clients: Remote,
    step: Step,
    end: str,
    test: PublicData | None,
    evaluations: list[tuple[int, Evaluated]],
) -> dict[str, Any]:
    """Write the model and the report, and return the report."""
    widest = int(np.argmax([budget.epsilon for budget in clients.budgets]))
    noise = clients.terms(widest).mechanism.noise_multiplier
    really = [asdict(one) for one in holds(plan.job, clients, noise, widest, step.t)]
    report: dict[str, Any] = {
        "format": FORMAT,
        "run": plan.run,
        "dataset": plan.dataset,
        "method": plan.job.record.name,
        "trust": str(plan.job.trusted),
        "rounds": step.t,
        "stopped": end,
        "records": int(clients.records.sum()),
        **plan.learner.size,
        "parties": [_told(clients, place) for place in range(len(clients))],
        "left_out": [{"party": one.name, "reason": one.reason} for one in clients.status().left_out],
        **({"holds": really} if really else {}),
        "note": "budgets as announced; each is kept by the party's own ledger, whatever a coordinator does",
        "model": str(plan.model),
    }
    if evaluations:
        names = ("loss", "accuracy", "deviation", "clients")
        told = [{"round": t, **{name: getattr(one, name) for name in names}} for t, one in evaluations]
        report["evaluations"] = told
    if test is not None:
        said = plan.learner.probabilities(plan.job, clients, step.w, test[0])
        report["test"] = {"table": plan.test, **measured(said, test[1])}
    text = json.dumps(report, allow_nan=False, indent=1)
    model_file.write(plan.model, plan.learner.to_bytes(step.w, text))
    model_file.write(plan.report, (text + "\n").encode())
    return report


def _told(clients: Remote, place: int) -> dict[str, Any]:
    """Return a party's announced figures and its state."""
    status, terms = _shown(clients)[place], clients.terms(place)
    return {
        "party": status.name,
        "records": int(clients.records[place]),
        "budget": asdict(clients.budgets[place]),
        "noise_multiplier": terms.mechanism.noise_multiplier,
        "clip_norm": terms.bound.clip,
        "state": str(status.state),
        "left": None if clients.picks else status.left,
        "reason": status.reason,
    }


def _shown(clients: Remote) -> tuple[PartyStatus, ...]:
    """Return what may be shown of the parties: nothing that tells whose turn it was, if turns are secret.

    SGD1's guarantee against anyone else assumes that. A party that is missing was asked.
    """
    parties = clients.status().parties
    if not clients.picks:
        return parties
    here = {State.MISSING: State.HERE}
    return tuple(
        replace(
            party,
            state=here.get(party.state, party.state),
            reason="" if party.state in (State.HERE, State.MISSING) else party.reason,
            left=0,
            missed=0,
            stale=0,
        )
        for party in parties
    )


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
    evaluations: list[tuple[int, Evaluated]] = field(default_factory=list)
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

    def evaluated(self, step: Step, found: Evaluated) -> None:
        self.evaluations = [*self.evaluations, (step.t, found)]
        log.info("after round %d, at the parties: %s", step.t, found)

    def over(self, end: str) -> None:
        self.phase = f"over: {end}"

    def view(self) -> View:
        """Return the run as the page shows it; safe from any thread."""
        plan, clients = self.plan, self.clients
        what = " · ".join(part for part in (plan.job.record.name, plan.job.trust, plan.dataset) if part)
        if clients is None:
            parties = tuple(PartyView(name=name, state="awaited") for name in plan.parties)
            return View(run=plan.run, method=what, phase=self.phase, parties=parties)
        status, records, budgets = _shown(clients), clients.records, clients.budgets
        parties = tuple(
            PartyView(
                name=party.name,
                state=str(party.state),
                left=party.left if self.round and not clients.picks else None,
                most=None if clients.picks else self.most.get(party.name),
                records=int(records[place]),
                epsilon=budgets[place].epsilon,
                delta=budgets[place].delta,
                reason=party.reason,
                stale=party.stale,
            )
            for place, party in enumerate(status)
        )
        parties += tuple(
            PartyView(name=one.name, state=str(one.state), reason=one.reason)
            for one in clients.status().left_out
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
            evaluated=tuple((t, one.accuracy, one.deviation) for t, one in self.evaluations[-_POINTS:]),
            noise=min((terms.mechanism.noise_multiplier for terms in asked), default=None),
            clip=min((terms.bound.clip for terms in asked), default=None),
            seconds=seconds,
            end=None if seconds is None or math.isnan(seconds) or clients.picks else left * seconds,
        )


def lines(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report as text, line by line."""
    words: dict[str, Any] = {
        "run": f"{report['run']}, {report['method']}, {report['rounds']:,} rounds",
        "stopped": report["stopped"],
        "model": report["model"],
        "parties": [
            f"{told['party']}: {told['records']:,} records, {Budget(**told['budget'])}, {told['state']}"
            + (f" ({told['reason']})" if told["reason"] not in ("", told["state"]) else "")
            for told in report["parties"]
        ]
        + [f"{told['party']}: left out, {told['reason']}" for told in report.get("left_out", ())],
        "note": report["note"],
    }
    if "holds" in report:
        words["published noise"] = [
            f"epsilon {one['epsilon']:.4g} against {one['observer']}" for one in report["holds"]
        ]
    if "evaluations" in report:
        last = report["evaluations"][-1]
        words["at the parties"] = (
            f"accuracy {last['accuracy']:.4f} (noise {last['deviation']:.4f}), loss {last['loss']:.3g}, "
            f"after round {last['round']}; charged to the parties' budgets"
        )
    if "test" in report:
        test = report["test"]
        words["test"] = [
            f"{test['table']}: accuracy {test['accuracy']:.4f}, guessing {test['guessing']:.4f}",
            test["note"],
        ]
    return words
