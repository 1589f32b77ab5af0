"""Serve health and metrics for operators: Prometheus text over HTTP, on the loopback address unless told.

``/metrics`` has the figures of a coordinator's live page, or whether a party's guard and node run and how
often they were started; ``/healthz`` answers 200 where all is well and 503 where not, with one line that says
why. Everything is public: what parties announced, rounds, states, accuracy that was released. No record,
weight or update is shown.

>>> print(exposition([Metric("farthing_round", "The last round.", "gauge", [({}, 3.0)])]), end="")
# HELP farthing_round The last round.
# TYPE farthing_round gauge
farthing_round 3

A `View` shows a run in public figures, as its live page, its ``status.json`` and its metrics have it.
"""

import http.server
import ipaddress
import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farthing.deploy.flower.superlink import Address
from farthing.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyView:
    """A party, as the live page shows it."""

    name: str
    state: str
    left: int | None = None  # rounds it can still afford, as it announced
    most: int | None = None  # rounds it could afford at the beginning
    records: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    reason: str = ""
    stale: int = 0  # rounds by which its last answer was late


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run, as the live page shows it."""

    run: str
    method: str
    phase: str  # begins with "over" at the end
    round: int = 0
    parties: tuple[PartyView, ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()  # (round, accuracy on public test data)
    # (round, accuracy on the parties' records, deviation of its noise): noisy, and charged to their budgets
    evaluated: tuple[tuple[int, float, float], ...] = ()
    noise: float | None = None  # noise multiplier, the least over the parties
    clip: float | None = None
    seconds: float | None = None  # of one round, on average
    end: float | None = None  # estimated seconds until the end


class HostNames:
    """The names under which a server answers: a web page elsewhere can have its own name lead here.

    On the loopback address they are its own; where all addresses are served, any address but no name.

    >>> names = HostNames("127.0.0.1", 9100)
    >>> names.ours(["localhost:9100"]), names.ours(["rebound.example:9100"]), names.ours([])
    (True, False, False)
    """

    def __init__(self, host: str, port: int) -> None:
        self.loopback, self._anywhere, self._port = _loopback(host), host in ("0.0.0.0", "::"), port
        shown = f"[{host}]" if ":" in host else host
        names = {shown.lower()} | ({"localhost", "127.0.0.1", "[::1]"} if self.loopback else set())
        self._names = {f"{name}:{port}" for name in names} | (names if port == 80 else set())

    def ours(self, asked: Sequence[str] | None) -> bool:
        """Return whether the Host headers of a request are one, of ours."""
        if not asked or len(asked) != 1:
            return False
        if asked[0].lower() in self._names:
            return True
        host = asked[0].removesuffix(f":{self._port}")
        return self._anywhere and _address(host.strip("[]")) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _loopback(host: str) -> bool:
    found = _address(host)
    return host == "localhost" if found is None else found.is_loopback


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its samples: labels and values."""

    name: str
    help: str
    kind: str  # gauge or counter
    samples: Sequence[tuple[Mapping[str, str], float]]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether all is well, and a line that says why not."""

    well: bool
    line: str


Look = Callable[[], tuple[Health, Iterable[Metric]]]


def exposition(metrics: Iterable[Metric]) -> str:
    """Return metrics in Prometheus' text format, version 0.0.4."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.samples:
            inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{{{inner}}} {value:g}" if inner else f"{metric.name} {value:g}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def of_run(view: View) -> tuple[Health, list[Metric]]:
    """Return the health and the metrics of a run: those of its live page.

    It is well while parties are awaited, while some are here, and when it is over.
    """
    from farthing.deploy.roster import State  # not for parties, whose figures are of processes

    here = sum(party.state == State.HERE for party in view.parties)
    waiting = view.round == 0 and any(party.state == "awaited" for party in view.parties)
    over = view.phase.startswith("over")
    states = [*map(str, State), "awaited"]
    parties = [
        ({"party": party.name, "state": state}, float(party.state == state))
        for party in view.parties
        for state in states
    ]
    metrics = [
        Metric("farthing_round", "The last round that was taken.", "gauge", [({}, float(view.round))]),
        Metric("farthing_over", "Whether the run is over.", "gauge", [({}, float(over))]),
        Metric(
            "farthing_parties_here", "Parties that answered the last round.", "gauge", [({}, float(here))]
        ),
        Metric("farthing_party_state", "The state of each party: 1 for the one it is in.", "gauge", parties),
        _each(view, "farthing_party_rounds_left", "Rounds a party can still afford, as announced.", "left"),
        _each(view, "farthing_party_epsilon", "The epsilon of a party's budget, as announced.", "epsilon"),
        _each(view, "farthing_party_staleness", "Rounds by which its last answer was late.", "stale"),
    ]
    if view.seconds is not None and math.isfinite(view.seconds):
        metrics.append(
            Metric("farthing_round_seconds", "Seconds of a round, lately.", "gauge", [({}, view.seconds)])
        )
    if view.accuracy:
        last = view.accuracy[-1][1]
        metrics.append(Metric("farthing_accuracy", "Accuracy on public test data.", "gauge", [({}, last)]))
    if view.evaluated:
        said = "Accuracy on the parties' records, noisy and charged."
        metrics.append(Metric("farthing_party_accuracy", said, "gauge", [({}, view.evaluated[-1][1])]))
    well = over or waiting or here > 0
    return Health(well, view.phase if well else "no party answered the last round"), metrics


def _each(view: View, name: str, help: str, field: str) -> Metric:
    values = [(party.name, getattr(party, field)) for party in view.parties]
    return Metric(name, help, "gauge", [({"party": p}, float(v)) for p, v in values if v is not None])


def of_processes(running: Mapping[str, bool], starts: Mapping[str, int]) -> tuple[Health, list[Metric]]:
    """Return the health and the metrics of a party's processes."""
    up = [({"process": name}, float(runs)) for name, runs in running.items()]
    begun = [({"process": name}, float(count)) for name, count in starts.items()]
    metrics = [
        Metric("farthing_process_up", "Whether a process runs.", "gauge", up),
        Metric("farthing_process_starts_total", "How often it was started.", "counter", begun),
    ]
    down = [name for name, runs in running.items() if not runs]
    return Health(not down, f"not running: {', '.join(down)}" if down else "running"), metrics


class MetricsServer:
    """A server of ``/metrics`` and ``/healthz`` until closed.

    On the loopback address it answers under its own names only; elsewhere under any, as scrapers use them.
    """

    def __init__(self, look: Look, place: Address) -> None:
        def reply(path: str, asked: Sequence[str] | None) -> tuple[int, str]:
            names = HostNames(place.host, int(self._server.server_address[1]))
            if names.loopback and not names.ours(asked):
                return 421, "metrics are not served under that name\n"
            return _reply(path, look)

        class Handler(http.server.BaseHTTPRequestHandler):
            server_version, sys_version = "farthing", ""
            timeout = 10.0

            def do_GET(self) -> None:
                status, text = reply(self.path.partition("?")[0], self.headers.get_all("Host"))
                content = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads, allow_reuse_address = True, True
            address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the client disconnected

        try:
            self._server = Server((place.host, place.port), Handler)
        except OSError as error:
            raise InvalidValue(f"metrics must be a free address, got {place}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _reply(path: str, look: Look) -> tuple[int, str]:
    if path not in ("/metrics", "/healthz"):
        return 404, "there are /metrics and /healthz\n"
    health, metrics = look()
    if path == "/metrics":
        return 200, exposition(metrics)
    return (200 if health.well else 503), f"{health.line}\n"
