"""Serve the live page of a run: one document without external scripts, and its figures as JSON.

It shows public figures only: the parties' announcements, the progress of the run, accuracy on public test
data or, with noise and charged, on the parties' own records. By default it is served on the loopback address;
it rejects requests under another host name (so that no other web page can read it through the browser), and
it accepts no input.
"""

import base64
import hashlib
import html
import http.server
import json
import math
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from farthing.deploy.metrics import HostNames, PartyView, View
from farthing.errors import InvalidValue
from farthing.report import drawing

_SECONDS = 2  # seconds between two updates


def coarse(rounds: int | None) -> str:
    """Return a number of rounds as one figure and zeros.

    >>> coarse(7), coarse(1234), coarse(None)
    ('7', 'about 1,000', '')
    """
    if rounds is None:
        return ""
    if rounds < 10:
        return str(rounds)
    unit = 10 ** (len(str(rounds)) - 1)
    return f"about {rounds // unit * unit:,}"


def duration(seconds: float | None) -> str:
    """Return a duration as text.

    >>> duration(75), duration(8000), duration(None)
    ('1 min 15 s', '2 h 13 min', '')
    """
    if seconds is None or not math.isfinite(seconds):
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"


def body(view: View) -> str:
    """Return the part of the page that changes."""
    counts = {state: sum(p.state == state for p in view.parties) for state in dict.fromkeys(_STATES[:-1])}
    there = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    figures = [
        ("Round", f"{view.round:,}"),
        ("Parties here", f"{counts['here']} of {len(view.parties)}"),
        ("Accuracy", f"{view.accuracy[-1][1]:.1%}" if view.accuracy else "not measured"),
        ("At the parties", _at_parties(view)),
        ("Noise over clip", "" if view.noise is None else f"{view.noise:.3g}"),
        ("A round takes", "" if view.seconds is None else f"{view.seconds:.1f} s"),
        ("Ends in about", "over" if view.phase.startswith("over") else duration(view.end) or "not known yet"),
    ]
    cards = "".join(
        f"<div class=card><dt>{name}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in figures
        if value
    )
    rows = "".join(map(_row, view.parties))
    return (
        f"<p class=phase>{html.escape(' · '.join(filter(None, (view.phase, there))))}</p>"
        f"<dl class=cards>{cards}</dl><div class=charts>{_chart(view.accuracy, _PUBLIC)}"
        f"{_chart([(t, accuracy) for t, accuracy, _ in view.evaluated], _CHARGED)}</div>"
        "<table><thead><tr><th>Party</th><th>State</th><th class=n>Records</th><th>Budget</th>"
        f"<th>Rounds left</th></tr></thead><tbody>{rows}</tbody></table>"
    )


_STATES = ("here", "missing", "spent", "refused", "revoked", "away", "awaited", "")


def _row(party: PartyView) -> str:
    state = party.state if party.state in _STATES else ""
    reason = f" <small>({html.escape(party.reason)})</small>" if party.reason not in ("", party.state) else ""
    budget = ""
    if party.epsilon is not None and party.delta is not None:
        budget = f"ε {party.epsilon:g}, δ {party.delta:g}".replace("e-0", "e-")
    left = html.escape(coarse(party.left))
    if party.left is not None and party.most:
        left = f"<meter min=0 max={party.most} value={party.left}></meter> {left}"
    records = "" if party.records is None else f"{party.records:,}"
    return (
        f"<tr><th scope=row>{html.escape(party.name)}</th>"
        f"<td><span class='state {state}'>{html.escape(party.state)}</span>{reason}</td>"
        f"<td class=n data-label=Records>{records}</td><td data-label=Budget>{budget}</td>"
        f"<td data-label='Rounds left'>{left}</td></tr>"
    )


_PUBLIC = "Accuracy on the coordinator's public test data"
_CHARGED = "Accuracy on the parties' own records, with noise, charged to their budgets"


def _at_parties(view: View) -> str:
    """Return the last accuracy on the parties' records and how noisy it is; empty without one."""
    if not view.evaluated:
        return ""
    _, accuracy, deviation = view.evaluated[-1]
    return f"{accuracy:.1%} ± {deviation:.1%}"


def _chart(given: Sequence[tuple[int, float]], caption: str) -> str:
    """Return accuracy over rounds, as a line; where noise carries it past 0 or 1 it is at the edge."""
    points = [(t, min(1.0, max(0.0, y))) for t, y in given]
    if len(points) < 2:
        return ""
    low = max(0.0, math.floor(min(y for _, y in points) * 20) / 20)
    high = max(min(1.0, math.ceil(max(y for _, y in points) * 20) / 20), low + 0.05)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    axes = drawing.frame((first, last), (low, high), across="round", upwards="", percents=True)
    axes.curve(points, "line c0")
    said = f"{points[-1][1]:.1%} after round {points[-1][0]:,}"
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f"{drawing.svg('Accuracy over rounds', said, axes.parts, 'accuracy')}</figure>"
    )


_STYLE = (
    drawing.PALETTE
    + drawing.CHART
    + """
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1.2rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif}
h1{font-size:1.3rem;margin:0;overflow-wrap:anywhere}h1 small{color:var(--soft);font-weight:400}
.phase{margin:.2rem 0 1rem;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.7rem;margin:0 0 1.2rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.6rem .8rem}
dt{color:var(--soft);font-size:.8rem}dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
figure{margin:0 0 1.2rem;background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:.8rem;max-width:36rem;break-inside:avoid}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:0 1.2rem}
figcaption{color:var(--soft);font-size:.85rem;margin-bottom:.4rem}
figure>svg{width:100%;height:auto;display:block}
table{width:100%;border-collapse:collapse;background:var(--card);border:1px solid var(--line)}
th,td{text-align:left;padding:.5rem .8rem;border-bottom:1px solid var(--line);font-weight:400}
thead th{color:var(--soft);font-size:.8rem}tbody th{font-weight:600;overflow-wrap:anywhere}
td{white-space:nowrap}td small{white-space:normal;overflow-wrap:anywhere}
.n{text-align:right;font-variant-numeric:tabular-nums}
.state{border:1px solid;border-radius:1rem;padding:.05rem .6rem;font-size:.85rem;color:var(--soft)}
.here{color:var(--good)}.missing,.spent,.away{color:var(--care)}.refused,.revoked{color:var(--bad)}
meter{width:5rem;vertical-align:middle}
footer{color:var(--soft);font-size:.8rem;margin-top:1rem}
@media(max-width:36rem){table,tbody,tr,td,tbody th{display:block}thead{display:none}
tr{border-bottom:1px solid var(--line);padding:.4rem 0}td,tbody th{border:0;padding:.15rem .8rem}
.n{text-align:left}svg text{font-size:14px}
td[data-label]:not(:empty):before{content:attr(data-label) ': ';color:var(--soft)}}
@media print{body{background:none;max-width:none;padding:0}tr{break-inside:avoid}}
"""
)

_SCRIPT = (
    f"const SECONDS={_SECONDS};"
    + """
(async function(){
  const live=document.getElementById('live'),note=document.getElementById('note');
  for(;;){
    await new Promise(wait=>setTimeout(wait,SECONDS*1000));
    try{
      const answer=await fetch('part',{cache:'no-store'});
      if(answer.ok){live.innerHTML=await answer.text();note.textContent='';}
    }catch(gone){note.textContent='The coordinator does not answer: this is the last that was known.';}
  }
})();
"""
)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def document(view: View) -> str:
    """Return the whole page; without scripts it reloads itself."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<noscript><meta http-equiv=refresh content={_SECONDS * 2}></noscript>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(view.run)} · farthing</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(view.run)} <small>{html.escape(view.method)}</small></h1>"
        f"<main id=live>{body(view)}</main><footer><span id=note></span> Budgets are kept by each party's "
        "own ledger; what is shown is public.</footer>"
        f"<script>{_SCRIPT}</script></body></html>"
    )


class Page:
    """A server of the page that ``look`` returns, until closed. Port 0 takes any free port."""

    def __init__(self, look: Callable[[], View], port: int, host: str = "127.0.0.1") -> None:
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            server_version, sys_version = "farthing", ""
            timeout = 10.0

            def do_GET(self) -> None:
                page._reply(self, look, whole=True)

            def do_HEAD(self) -> None:
                page._reply(self, look, whole=False)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads, allow_reuse_address = True, True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the client disconnected

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InvalidValue(f"--page must be a free port of {host}, got {port}: {error}") from None
        self.host, self.port = host, int(self._server.server_address[1])
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.port}/"
        self._names = HostNames(host, self.port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _reply(
        self, handler: http.server.BaseHTTPRequestHandler, look: Callable[[], View], whole: bool
    ) -> None:
        if not self._names.ours(handler.headers.get_all("Host")):
            status, kind, text = 421, "text/plain", "this page is not served under that name\n"
        else:
            match handler.path.partition("?")[0]:
                case "/":
                    status, kind, text = 200, "text/html", document(look())
                case "/part":
                    status, kind, text = 200, "text/html", body(look())
                case "/status.json":
                    status, kind, text = 200, "application/json", json.dumps(asdict(look()))
                case _:
                    status, kind, text = 404, "text/plain", "there is no such page\n"
        content = text.encode()
        handler.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            handler.send_header(name, value)
        handler.end_headers()
        if whole:
            handler.wfile.write(content)
