"""Checks the export of a ledger without the code that wrote it: this file imports nothing of farthing.

    python verifier.py EXPORT.jsonl [HASH]

It recomputes the hash chain, the state after every row and the spend, and exits with 0 (in order), 1 (not,
and why) or 2 (unreadable). A chain shows that rows belong together, not that they are the first ones written:
if the HASH of the newest row was kept elsewhere, pass it too. A filter's spend is recomputed by its formulas,
a promised plan's by composing pairs of distributions on a grid, rounded once down and once up (`_enclose`).
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Event = dict[str, Any]
Interval = tuple[float, float]
Curve = tuple[float, float, Callable[[Array], Array], Callable[[Array], Array]]  # from, to, log density, loss
Way = tuple[list[Interval], list[Curve], float]  # atoms (mass, loss), curves, shift

FIELDS = ("previous", "seq", "time", "kind", "body", "state")  # in the order in which they are hashed
SOUND = "lattice noise from a cryptographic stream"
SHIFTS = {"add-remove": 1.0, "zero-out": 1.0, "replace-one": 2.0}  # how far a sum moves, in contributions
SLACK = 1e-5  # relative, of states and of what a filter spent
DEAD = 1e300  # the total of an order at which an RDP filter counts no more
CELLS = PANELS = 2**16  # of the grid of losses, and of the integral over a density
NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)  # within each panel
TILTS = np.geomspace(1e-3, 1e8, 300)
MISTAKES = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Unreadable(Exception):
    """What was given is not the export of a ledger."""


@dataclass
class Verdict:
    """What was found; ``spent`` and ``plan`` (of promises) enclose ε at the budget's δ."""

    code: int = 0
    reason: str = "in order: all of it follows from its rows"
    budget: str = "unknown"
    rule: str = "unknown"
    charged: dict[str, int] = field(default_factory=dict)  # by event, less what was given back
    spent: Interval | None = None
    plan: Interval | None = None
    rows: int = 0
    head: str = "0" * 64

    def __str__(self) -> str:
        lines = [f"budget   {self.budget}", f"rule     {self.rule}"]
        lines += [f"charged  {count} x {event}" for event, count in self.charged.items()]
        for name, found in (("spent", self.spent), ("plan", self.plan)):
            lines += [f"{name:8} epsilon from {found[0]:.6g} to {found[1]:.6g}"] if found else []
        return "\n".join([*lines, f"head     {self.head}, {self.rows} rows", f"verdict  {self.reason}"])


def verify(lines: Iterable[str], head: str | None = None) -> Verdict:
    """Checks an export row by row; ``head`` is the hash of its last row, where that is known."""
    audit, number = _Audit(), 0
    found = audit.found
    try:
        for line in lines:
            number += 1
            audit.row(line)
        if not number:
            raise Unreadable("it is empty")
        _must(head in (None, found.head), f"the last row is not the one with hash {head}")
        audit.spend()
    except Unreadable as error:
        found.code, found.reason = 2, f"UNREADABLE, line {number}: {error}"
    except MISTAKES as error:
        found.code, found.reason = 1, f"FAILED, line {number}: {error}"
    return found


def _must(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


class _Audit:
    def __init__(self) -> None:
        self.found = Verdict()
        self.net = self.found.charged
        self.promised: dict[str, int] = {}
        self.totals = np.zeros(1)
        self.costs: dict[str, Array] = {}
        self.charges: dict[int, tuple[str, int]] = {}  # seq -> event, how many of it can be given back
        self.answers: dict[str, tuple[str, bool]] = {}  # key -> request, whether it was released

    def row(self, line: str) -> None:
        found = self.found
        try:
            row = json.loads(line)
            digest = hashlib.sha256(_text([row[name] for name in FIELDS]).encode()).hexdigest()
            kind, body, state = row["kind"], row["body"], [float(total) for total in row["state"]]
            right, place = row["hash"] == digest, (row["seq"], row["previous"])
            _must(found.rows or (kind, body["farthing"]) == ("open", 1), "no ledger of format 1 is opened")
        except MISTAKES as error:
            raise Unreadable(f"not a row of a ledger ({error!r})") from None
        _must(right, "it was changed, it does not have its hash")
        _must(place == (found.rows, found.head), "it does not follow the row before it")
        self._apply(row["seq"], kind, body)
        found.rows, found.head = found.rows + 1, digest
        truth = [*self.totals.tolist(), *(float(self.net.get(name, 0)) for name in self.promised)]
        begun, same = state or self.charges or self.promised, len(state) == len(truth)
        dead = [total == DEAD and self.rule == "rdp" for total in state]
        same = same and bool(np.all(np.isclose(state, truth, SLACK, 1e-9) | dead))
        _must(same or not begun, f"its state is {state}, and should be {truth} by the rows so far")

    def _apply(self, seq: int, kind: str, body: Event) -> None:
        answer: Any = body.get("answer")
        if kind == "open" and seq == 0:
            self._open(body["noise"], body["budget"], **body["filter"])
        elif kind == "release":
            key, request = answer["key"], answer["request"]
            _must(self.answers.get(key) == (request, False), f"key {key!r} has no charge of its own")
            self.answers[key] = request, True
        elif kind not in ("note", "close"):
            name, count = _text(body["event"]), body["times" if kind == "promise" else "count"]
            _must(type(count) is int and count > 0, f"there cannot be {count!r} of them")
            drawn = any(part["kind"] in ("poisson", "fixed-size") for part, _ in _flat(body["event"]))
            _must(not (drawn and self.seen), "the coordinator sees who is drawn: that hides nobody from it")
            if kind == "promise":
                _must(name not in self.promised and not any(self.net.values()), "promised after a charge")
                self.promised[name], self.found.rule = count, "a plan promised ahead"
            elif kind == "charge":
                if answer:
                    _must(count == 1 and answer["key"] not in self.answers, "a key is charged once")
                    self.answers[answer["key"]] = answer["request"], False
                self.charges[seq] = name, 0 if answer else count
                self._add(name, count)
            else:
                event, left = self.charges.get(body["of"], ("", 0))
                _must(kind == "refund" and event == name, f"{kind} of what row {body['of']} did not charge")
                _must(count <= left, f"{count} are given back of {left} that row {body['of']} holds")
                self.charges[body["of"]] = name, left - count
                self._add(name, -count)

    def _open(self, noise: str, budget: Event, name: str, approximate: float = 0.0, orders: Any = ()) -> None:
        self.epsilon, self.delta, self.adjacency = budget["epsilon"], budget["delta"], budget["adjacency"]
        self.rule, self.aside, self.orders = name, approximate, np.array(orders, float)
        self.shift, self.seen = SHIFTS[self.adjacency], budget["observer"] == "coordinator"
        self.totals = np.zeros({"basic": 2, "zcdp": 2, "gdp": 1, "rdp": len(orders)}[name])
        text = f"({self.epsilon:g}, {self.delta:g})-DP, {self.adjacency}, per {budget['unit']}"
        self.found.rule, self.found.budget = f"the {name} filter", f"{text}, against {budget['observer']}"
        valid = self.epsilon > 0 and 0 <= approximate <= self.delta < 1 < min(orders, default=2)
        _must(valid and noise == SOUND, f"there is no privacy in {text} by {name} with {noise}")

    def _add(self, name: str, count: int) -> None:
        self.net[name] = self.net.get(name, 0) + count
        if self.promised:
            most = self.promised.get(name, 0)
            return _must(self.net[name] <= most, f"overspent: {self.net[name]} x {name}, promised {most}")
        if name not in self.costs:
            parts = [times * self._cost(part) for part, times in _flat(json.loads(name))]
            self.costs[name] = np.sum([np.zeros_like(self.totals), *parts], axis=0)
        self.totals = self.totals + count * self.costs[name]
        # The zCDP filter sets part of δ aside, the RDP filter shares δ among its orders.
        most = {"basic": self.delta, "zcdp": self.aside}.get(self.rule, math.inf)
        found = self._epsilon(self.delta / max(len(self.orders), 1) - self.aside)
        fits = found <= self.epsilon * (1 + SLACK) and self.totals[-1] <= most * (1 + SLACK)
        return _must(fits, f"overspent: {count} x {name} does not fit by {self.found.rule}")

    def _cost(self, event: Event) -> Array:
        """What one event adds to the totals of the filter."""
        kind, delta, pure = event["kind"], event.get("delta", 0.0), _pure(event, self.adjacency)
        mu = self.shift / event["noise"] if kind == "gaussian" else 0.0
        rho = event["rho"] if kind == "zcdp" else mu**2 / 2
        if pure and kind in ("pure", "bounded-range", "laplace"):
            mu = -2 * NormalDist().inv_cdf(1 / (1 + math.exp(pure)))
            rho = min(pure * math.tanh(pure / 2), pure**2 / 8 if kind == "bounded-range" else math.inf)
        if self.rule == "rdp" and not delta:
            bound = self.orders * (rho if kind in ("zcdp", "bounded-range") else math.inf)
            ways = [] if kind == "zcdp" else _ways(event, self.adjacency)
            return np.minimum(bound, _renyi(ways, self.orders) if ways else math.inf)
        costs = {"zcdp": [rho, delta], "gdp": [mu**2], "basic": [pure or event.get("epsilon", 0.0), delta]}
        known = costs[self.rule][0] > 0 and (self.rule != "basic" or pure or kind == "approximate")
        _must(known, f"not recomputed: {self.found.rule} has no price for {_text(event)}")
        return np.array(costs[self.rule])

    def _epsilon(self, delta: float) -> float:
        """ε of the totals at δ, as the filter converts them."""
        total, orders, spent = float(self.totals[0]), self.orders, self.totals
        if self.rule == "basic" or not self.totals.any():
            return total
        if self.rule == "gdp":
            mu = math.sqrt(total)
            return _first(lambda epsilon: _gaussian_delta(mu, epsilon) <= delta, total + 40 * mu)
        if self.rule == "zcdp":
            orders = 1 + math.sqrt(-math.log(delta) / total) * np.geomspace(0.02, 50, 2**12)
            spent = total * orders
        logs = (orders - 1) * np.log1p(-1 / orders) - np.log(orders) - math.log(delta)
        return max(0.0, float(np.min(spent + logs / (orders - 1))))

    def spend(self) -> None:
        found = self.found
        if self.promised:
            found.spent, found.plan = self._tight(self.net), self._tight(self.promised)
        else:
            size = self._epsilon(self.delta - (self.totals[1] if self.rule == "zcdp" else 0.0))
            found.spent = size * (1 - SLACK), size * (1 + SLACK)
        lower = max(found.spent[0], found.plan[0] if found.plan else 0.0)
        _must(lower <= self.epsilon, f"overspent: epsilon is {lower:.6g} or more, of {self.epsilon:g}")

    def _tight(self, plan: dict[str, int]) -> Interval:
        flat = [(part, times * n) for name, n in plan.items() if n for part, times in _flat(json.loads(name))]
        parts = [(_ways(part, self.adjacency), count) for part, count in flat]
        sides = range(max((len(ways) for ways, _ in parts), default=0))
        found = [_enclose([(w[min(side, len(w) - 1)], n) for w, n in parts], self.delta) for side in sides]
        return max((low for low, _ in found), default=0.0), max((high for _, high in found), default=0.0)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _flat(event: Event, times: int = 1) -> list[tuple[Event, int]]:
    """Repetitions and compositions unrolled; every number must be one that an event can have."""
    most = {"rate": 1.0, "delta": 1.0, "size": event.get("of", 0)}
    for key in event.keys() - {"kind", "event", "events"}:
        value, whole = event[key], key not in ("count", "size", "of") or type(event[key]) is int
        fits = 0 < value <= most.get(key, math.inf) or (key, value) == ("delta", 0)
        _must(whole and fits, f"{key} cannot be {value!r}")
    parts = [event["event"]] if "event" in event else event.get("events", [])
    inner = [pair for part in parts for pair in _flat(part, times * event.get("count", 1))]
    return inner if event["kind"] in ("repeated", "composed") else [(event, times)]


def _first(holds: Callable[[float], bool], high: float) -> float:
    """The smallest number from 0 to ``high`` from which on it holds."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _gaussian_delta(mu: float, epsilon: float) -> float:
    near, far = ((epsilon / mu + sign * mu / 2) / math.sqrt(2) for sign in (-1, 1))
    return (math.erfc(near) - math.exp(min(epsilon, 700.0)) * math.erfc(far)) / 2


def _rate(event: Event) -> float:
    return float(event["size"] / event["of"] if event["kind"] == "fixed-size" else event.get("rate", 1.0))


def _pure(event: Event, adjacency: str) -> float:
    """ε where the event is ε-DP, else 0; a sample has log(1 + q(e^ε - 1)) if it suits the adjacency."""
    kind = event["kind"]
    if "event" in event:
        everyone = _rate(event) == 1 and (kind == "poisson" or adjacency != "add-remove")
        suits = everyone or kind == ("fixed-size" if adjacency == "replace-one" else "poisson")
        return math.log1p(_rate(event) * math.expm1(_pure(event["event"], adjacency))) if suits else 0.0
    noisy = SHIFTS[adjacency] / event["noise"] if kind == "laplace" else 0.0
    return float(event["epsilon"] if kind in ("pure", "bounded-range") else noisy)


def _ways(event: Event, adjacency: str) -> list[Way]:
    """The pairs (P, Q) of an event, one a direction: how P spreads over the privacy losses log P/Q."""
    kind, inner, q, pure = event["kind"], event.get("event", event), _rate(event), _pure(event, adjacency)
    if pure and inner["kind"] == "laplace" and q == 1:
        curve = 0.0, 1.0, lambda x: math.log(pure / 2) - pure * x, lambda x: pure * (1 - 2 * x)
        return [([(0.5, pure), (math.exp(-pure) / 2, -pure)], [curve], 0.0)]
    if pure:
        return [([(1 / (1 + math.exp(-pure)), pure), (1 / (1 + math.exp(pure)), -pure)], [], 0.0)]
    known = inner["kind"] == "gaussian" and not (kind == "drawn" and adjacency == "add-remove")
    _must(known, f"not recomputed: no pair of distributions is known for {_text(event)}")
    pushed = kind == "fixed-size" and (adjacency == "add-remove" or q < 1)  # one comes in, another goes out
    poisson, seen = kind == "poisson" and q < 1, kind == "drawn"
    a = (2.0 if pushed else 1.0 if poisson else SHIFTS[adjacency]) / inner["noise"]

    def over(x: Array) -> Array:  # log of (1-q) N(0) + q N(a) over N(0)
        tilted: Array = a * x - a * a / 2
        return tilted if seen or q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + tilted)

    def base(x: Array) -> Array:
        return -x * x / 2 - math.log(2 * math.pi) / 2

    start, end = a / 2 if pushed and q < 1 else -math.inf, math.inf
    up: Curve = start, end, lambda x: base(x) + over(x) + (math.log(q) if seen else 0.0), over
    down: Curve = start, end, base, lambda x: -over(x)
    if seen or q == 1:
        return [([(1 - q, 0.0)] if q < 1 else [], [up], a)]
    if pushed:  # the larger direction on either side of zero
        return [([((1 - q) * math.erf(a / math.sqrt(8)), 0.0)], [up, down], a)]
    if adjacency == "replace-one":
        return [([], [(start, end, up[2], lambda x: over(x) - over(-x))], a)]
    return [([], [up], a), ([], [down], a)]


def _nodes(way: Way, reach: float, panels: int) -> tuple[Array, Array]:
    """Log masses and losses: the atoms, and the curves by Gauss-Legendre quadrature."""
    atoms = np.reshape(way[0], (-1, 2))
    masses, losses = [np.log(atoms[:, 0])], [atoms[:, 1]]
    for start, end, density, loss in way[1]:
        edges, width = np.linspace(max(start, -reach), min(end, reach), panels, endpoint=False, retstep=True)
        x = (edges[:, None] + width * (NODES + 1) / 2).ravel()
        masses.append(density(x) + np.tile(np.log(WEIGHTS * width / 2), panels))
        losses.append(loss(x))
    return np.concatenate(masses), np.concatenate(losses)


def _log_moment(mass: Array, loss: Array, tilt: float) -> float:
    terms = mass + tilt * loss
    return float(terms.max() + np.log(np.exp(terms - terms.max()).sum()))


def _renyi(ways: list[Way], orders: Array) -> Array:
    reach = 40 + ways[0][2] * orders.max()
    nodes = [_nodes(way, reach, int(16 * reach)) for way in ways]
    return np.array([max(_log_moment(*found, a - 1) for found in nodes) / (a - 1) for a in orders])


def _enclose(parts: list[tuple[Way, int]], delta: float) -> Interval:
    """ε at δ from below and above, in one direction.

    Masses are tilted by e^(λ loss), so that the tail becomes the bulk, put on a grid such that the profile
    rises nowhere, or falls nowhere, and composed by FFT in a window of all but e^-25 of the tilted mass.
    """
    goal, steps = -math.log(delta), sum(count for _, count in parts)
    reach = 12 + math.sqrt(2 * goal) + max(way[2] for way, _ in parts)
    coarse = [(_nodes(way, reach, 256), count) for way, count in parts]

    def moment(tilt: float) -> float:
        return sum(count * _log_moment(*nodes, tilt) for nodes, count in coarse)

    chernoff = [(moment(t) + goal - t * math.log1p(1 / t) - math.log1p(t)) / t for t in TILTS]
    ceiling = min(chernoff)
    if ceiling <= 0:
        return 0.0, 0.0
    tilt = min(float(TILTS[np.argmin(chernoff)]), 200 / ceiling)
    total = moment(tilt)
    top = min((moment(tilt + t) - total + 25) / t for t in TILTS)
    bottom = max((total - moment(tilt - t) - 25) / t for t in TILTS)
    step = max((top - bottom) / (CELLS - 16), 1e-7 * ceiling)
    edge = max((loss for way, _ in parts for _, loss in way[0]), default=0.0)
    step = edge / (edge // step) if edge >= step else step  # an atom on the grid is not rounded
    first = int(bottom // step) - 8
    losses = step * (first + np.arange(CELLS))

    def end(up: bool) -> float:
        spectrum = np.ones(CELLS // 2 + 1, complex)
        for way, count in parts:
            spectrum *= np.fft.rfft(_cells(*_nodes(way, reach, PANELS), step, tilt, up)) ** count
        density = np.roll(np.fft.irfft(spectrum, CELLS), -first)

        def excess(epsilon: float) -> float:  # of δ(ε) over δ, in units of e^(K - λε)
            gap = np.maximum(losses - epsilon, 0.0)
            found = float(density @ (np.exp(-tilt * gap) * -np.expm1(-gap)))
            return found - math.exp(tilt * epsilon - total - goal)

        found, slack = _first(lambda epsilon: excess(epsilon) <= 0, ceiling), 1e-9 + 1e-15 * steps
        near = (found * (1 + (1 if up else -1) * 2.0**-k) for k in range(40, 0, -1))
        shown = (epsilon for epsilon in near if (excess(epsilon) < -slack if up else excess(epsilon) > slack))
        return next(shown, ceiling if up else 0.0)

    return end(False), min(ceiling, end(True))


def _cells(mass: Array, loss: Array, step: float, tilt: float, up: bool) -> Array:
    """The tilted masses on the grid, modulo its length, divided by their sum before rounding."""
    mass = mass - _log_moment(mass, loss, tilt)

    def put(place: Array, weights: Array) -> Array:
        return np.bincount(place.astype(np.int64) % CELLS, weights, CELLS).astype(float)

    low, near = np.floor(loss / step + 1e-9), np.rint(loss / step)
    weights = np.exp(mass + tilt * step * low)
    if up:  # split between neighbours so that P and Q keep their mass (Doroshenko et al. 2022)
        part = np.expm1(low * step - loss) / math.expm1(-step)
        return put(low, weights * (1 - part)) + put(low + 1, weights * part * math.exp(tilt * step))
    # Tangents of the profile at the middles of cells, cut off where two meet: nowhere above it, all knots on
    # the grid. Where losses are too uneven for that (a mass would be negative) they are rounded down instead.
    gains, uneven = np.exp(mass + tilt * step * near) * -np.expm1(near * step - loss), np.zeros(CELLS, bool)
    for _ in range(40):
        rough = uneven[near.astype(np.int64) % CELLS]
        gain = put(near, np.where(rough, 0.0, gains))
        more, less = np.maximum(gain, 0.0), np.maximum(-gain, 0.0)
        cells = put(near, np.where(rough, 0.0, np.exp(mass + tilt * step * near))) - gain
        cells += (more - np.roll(less, 1) * math.exp(tilt * step)) / -math.expm1(-step)
        cells += (less - np.roll(more, -1) * math.exp(-tilt * step)) / math.expm1(step)
        cells += put(low, np.where(rough, weights, 0.0))
        if cells[cells < 0].sum() > -1e-14:
            return np.maximum(cells, 0.0)
        for offset in (-1, 0, 1):
            uneven |= np.roll(cells < 0, offset)
    return put(low, weights)


if __name__ == "__main__":
    try:
        with open(sys.argv[1], encoding="utf-8", errors="replace") as export:
            outcome = verify(export, *sys.argv[2:3])
    except (IndexError, OSError) as problem:
        outcome = Verdict(2, f"UNREADABLE: {problem}")
    print(outcome)
    sys.exit(outcome.code)
