"""Verify exported ledgers by code that imports nothing of farthing.

    python verifier.py EXPORT.jsonl [HASH]

It recomputes the hash chain, every state and the spend (of a promised plan, by composing its losses on grids)
and exits with 0 (in order), 1 (not, and why) or 2 (unreadable). A chain shows that rows belong together, not
that they are the first ones written: if the HASH of the newest row was kept elsewhere, pass it too.

It takes one thing on trust: a refund gives back answers that were reserved and never released. It checks that
no row gives back more than it holds, nor an answer that was kept under a key, but no row can prove that the
other answers were never released. So it reports their number, and the largest spend if all of them had been
released.
"""

import copy
import hashlib
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Event = dict[str, Any]
FIELDS = ("previous", "seq", "time", "kind", "body", "state")  # in the order in which they are hashed
SOUND = "lattice noise from a cryptographic stream"
SHIFTS = {"add-remove": 1.0, "zero-out": 1.0, "replace-one": 2.0}  # how far a sum moves, in contributions
SLACK = 1e-5  # relative, of states, and of what an RDP filter spent
FINE = 1e-9  # of what the others spent; ledgers round inward by more than the TOLERANCE that totals may take
TOLERANCE = 2.0**-39  # of Σε and Σδ, which are only added: twice what a ledger allows them
CELLS, PANELS = 2**16, 2**15  # of the coarser grid of losses, and of the integral over a density
NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)  # within each panel
COUNTS = ("count", "size", "of", "turns", "bins")  # fields that are whole numbers
GDP = ("gdp", "personal")  # filters that add up μ², the second for each level of budget
BALANCED = 0.01  # relative: by how much the law of balanced draws here and there may be apart
TUNED = 0.04  # relative: by how much a grid here and certified cells there may price a best run apart
MENU = 1.02  # times δ: what grids and FFTs here may be off by in the best strategy from a menu
TILTS = np.geomspace(1e-3, 1e6, 40)
_text = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


@dataclass
class Findings:
    """The findings of a check; ``spent`` and ``plan`` (of promises) enclose ε at the budget's δ.

    ``spent`` takes refunds on trust; ``unrefunded`` is what was spent had nothing been given back.
    """

    code: int = 0
    reason: str = "OK: recomputed from the ledger, and consistent"
    budget: str = "unknown"
    rule: str = "unknown"
    charged: dict[str, int] = field(default_factory=dict)  # by event, less what was given back
    refunded: dict[str, int] = field(default_factory=dict)  # by event: taken on trust
    spent: tuple[float, float] | None = None
    unrefunded: tuple[float, float] | None = None
    plan: tuple[float, float] | None = None
    levels: dict[float, tuple[float, float]] = field(default_factory=dict)  # spent or planned, by own budget
    rows: int = 0
    head: str = "0" * 64

    def __str__(self) -> str:
        lines = [f"budget   {self.budget}", f"rule     {self.rule}"]
        lines += [f"charged  {count} x {event}" for event, count in self.charged.items()]
        for name, found in (("spent", self.spent), ("plan", self.plan)):
            lines += [f"{name:8} epsilon from {found[0]:.6g} to {found[1]:.6g}"] if found else []
        for level, (low, high) in self.levels.items():
            lines += [f"level    {level:g}: epsilon from {low:.6g} to {high:.6g} in all"]
        lines += [f"trusted  {self.trust}"] if self.refunded else []
        return "\n".join([*lines, f"head     {self.head}, {self.rows} rows", f"verdict  {self.reason}"])

    @property
    def trust(self) -> str:
        """A sentence on refunds, which no row can prove; empty if there were none."""
        if not self.refunded:
            return ""
        most = (
            f"; had all of them been, epsilon is {self.unrefunded[1]:.6g} at most" if self.unrefunded else ""
        )
        return f"{sum(self.refunded.values())} answers were given back as never released{most}"


def verify(lines: Iterable[str], head: str | None = None) -> Findings:
    """Check an export row by row; ``head`` is the hash of its last row, where that is known."""
    found = (audit := _Audit()).found
    try:
        for line in lines:
            audit.row(line)
        _must(found.rows, "it is empty")
        _must(head in (None, found.head), f"the last row is not the one with hash {head}")
        audit.spend()
        found.code = 0
    except Exception as error:  # whatever it is, not all of it could be checked
        found.reason = f"{'FAILED' if found.code == 1 else 'UNREADABLE'}, line {found.rows}: {error}"
    return found


def _must(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


class _Audit:
    def __init__(self) -> None:
        self.found, self.totals, self.near = Findings(2), np.zeros(1), SLACK
        self.promised: dict[str, int] = {}
        self.costs: dict[str, Array] = {}
        self.charges: dict[int, tuple[str, int]] = {}  # seq -> event, how many of it can be given back
        self.answers: dict[str, tuple[str, bool]] = {}  # key -> request, whether it was released

    def row(self, line: str) -> None:
        """Check the hash and the place of one more row, what it does, and the state after it."""
        found = self.found
        found.rows, found.code = found.rows + 1, 2  # until the row is read
        row = json.loads(line)
        digest = hashlib.sha256(_text([row[name] for name in FIELDS]).encode()).hexdigest()
        kind, body, state, claimed = row["kind"], row["body"], [float(x) for x in row["state"]], row["hash"]
        _must(found.rows > 1 or (kind, body["farthing"]) == ("open", 1), "no ledger of format 1 is opened")
        found.code = 1  # until all is checked
        _must(claimed == digest, "it was changed, it does not have its hash")
        follows = (row["seq"], row["previous"]) == (found.rows - 1, found.head)
        _must(follows, "it does not follow the last row")
        self._apply(row["seq"], kind, body, body.get("answer"))
        found.head = digest
        truth = [*self.totals.tolist(), *(float(self.found.charged.get(name, 0)) for name in self.promised)]
        dead = [total == 1e300 and self.rule == "rdp" for total in state]  # orders that count no more
        same = len(state) == len(truth) and np.all(np.isclose(state, truth, self.near, 1e-9) | dead)
        _must(same or not (state or self.charges or self.promised), f"its state is {state}, and not {truth}")

    def _apply(self, seq: int, kind: str, body: Event, answer: Any) -> None:
        """Apply a row; its charge must fit the promise, or else the filter."""
        if kind == "open" and seq == 0:
            self._open(body["noise"], body["budget"], **body["filter"])
        if kind == "release":
            _must(self.answers.get(answer["key"]) == (answer["request"], False), f"{answer} was not charged")
            self.answers[answer["key"]] = answer["request"], True
        if kind in ("release", "note", "close") or seq == 0:
            return None
        name, count = _text(body["event"]), body["times" if kind == "promise" else "count"]
        _must(type(count) is int and count > 0, f"there cannot be {count!r} of them")
        many = len(body["event"]["events"]) if body["event"]["kind"] == "personal" else len(self.levels)
        _must(many == len(self.levels), f"it has {many} levels of budget, and the ledger {len(self.levels)}")
        drawn = _flat(body["event"]) and any(
            f'"{kind}"' in name for kind in ("poisson", "truncated", "fixed-size", "balanced")
        )
        _must(not (drawn and self.seen), "the coordinator sees who is drawn: that hides nobody from it")
        if kind == "promise":
            late = name in self.promised or any(self.found.charged.values())
            _must(not late, "promised after a charge")
            self.promised[name], self.found.rule = count, "a plan promised ahead"
            return None
        if kind == "charge" and answer:
            _must(count == 1 and answer["key"] not in self.answers, "a key is charged once")
            self.answers[answer["key"]] = answer["request"], False
        if kind == "charge":
            self.charges[seq] = name, 0 if answer else count
        else:
            event, left = self.charges.get(body["of"], ("", 0))
            _must(kind == "refund" and event == name, f"{kind} of what row {body['of']} did not charge")
            _must(count <= left, f"{count} are given back of {left} that row {body['of']} holds")
            self.found.refunded[name] = self.found.refunded.get(name, 0) + count
            self.charges[body["of"]], count = (name, left - count), -count
        self.found.charged[name] = total = self.found.charged.get(name, 0) + count
        if self.promised:
            return _must(total <= self.promised.get(name, 0), f"overspent: more than was promised of {name}")
        if name not in self.costs:
            flats = [_flat(_level(body["event"], level)) for level in range(len(self.levels))]
            parts = [sum((n * self._cost(part) for part, n in flat), np.zeros(1)) for flat in flats]
            self.costs[name] = np.concatenate(parts)
        self.totals = self.totals + count * self.costs[name]
        if self.rule == "menu":
            used = int(np.ceil(self.totals / self.steps) @ self.prices)
            return _must(used <= self.units, f"overspent: {used} units are used of {self.units}")
        most = {"basic": self.delta, "zcdp": self.aside}.get(self.rule, math.inf)
        delta = self.delta / max(len(self.orders), 1) - self.aside  # orders share δ
        balances = zip(self.levels, self._balances(self.totals), strict=True)
        fits = all(self._epsilon(delta, own) <= level * (1 + self._slack(own)) for level, own in balances)
        fits = fits and self.totals[-1] <= most * (1 + TOLERANCE)
        return _must(fits, f"overspent: {count} x {name} does not fit by {self.found.rule}")

    def _open(
        self, noise: str, budget: Event, name: str, approximate: float = 0.0, orders: Any = (), **menu: Any
    ) -> None:
        self.epsilon, self.delta, self.adjacency = budget["epsilon"], budget["delta"], budget["adjacency"]
        self.rule, self.aside, self.orders = name, approximate, np.array(orders, float)
        self.seen, self.shift = budget["observer"] == "coordinator", SHIFTS[self.adjacency]
        self.entries: list[Event] = menu.get("events", [])
        self.levels: list[float] = menu.get("epsilons", [self.epsilon])
        rising = all(0 < low < high for low, high in zip(self.levels, self.levels[1:], strict=False))
        _must(rising and self.levels[-1:] == [self.epsilon], f"the personal budgets are {self.levels}")
        sizes = {"basic": 2, "zcdp": 2, "gdp": 1, "rdp": len(orders), "menu": len(self.entries)}
        sizes["personal"] = len(self.levels)
        self.totals = np.zeros(sizes[name])
        text = f"({self.epsilon:g}, {self.delta:g})-DP, {self.adjacency}, per {budget['unit']}"
        self.found.rule, self.found.budget = f"the {name} filter", f"{text}, against {budget['observer']}"
        valid = self.epsilon > 0 and 0 <= approximate <= self.delta < 1 < min(orders, default=2)
        _must(valid and noise == SOUND, f"there is no privacy in {text} by {name} with {noise}")
        if name == "menu":
            self._open_menu(**menu)

    def _balances(self, totals: Array) -> list[Array]:
        return np.split(totals, len(self.levels)) if self.rule == "personal" else [totals]

    def _open_menu(self, events: list[Event], steps: list[int], prices: list[int], units: int) -> None:
        """Check that no strategy within these prices passes the budget."""
        whole = all(type(one) is int and one > 0 for one in (*steps, *prices, units))
        _must(whole and len(events) == len(steps) == len(prices) > 0, "the menu has no prices")
        self.steps, self.prices, self.units = np.array(steps), np.array(prices), units
        worst = max(self._worst(side) for side in (0, 1))
        _must(worst <= self.delta * MENU, f"a strategy from the menu reaches delta {worst:.3g}")

    def _worst(self, side: int) -> float:
        """Return δ at ε of the best adaptive strategy in one direction: a recursion over units, by FFT.

        With r the ratio of densities, φ₀ = (1 - e^ε r)₊ and φ_u = max over entries of E φ_{u-c}(r Q/P).
        """
        spread = 1 / _first(lambda x: x > 0 and _gaussian_delta(1 / x, self.epsilon) <= self.delta, 1e6)
        step, low = spread / math.sqrt(self.units) / 10, math.ceil(80 * math.sqrt(self.units))
        losses = step * (np.arange(2 * low + 1 + int(self.epsilon / step)) - low)
        values = [-np.expm1(np.minimum(self.epsilon - losses, 0))]
        blocks = zip(self.entries, self.steps.tolist(), self.prices.tolist(), strict=True)
        kernels = [(*self._block(event, count, step, side), price) for event, count, price in blocks]
        for unit in range(1, self.units + 1):
            new = values[-1]
            for first, masses, price in kernels:
                if price <= unit:
                    expected = _correlated(values[-price], first, masses) + max(0.0, 1 - masses.sum())
                    new = np.maximum(new, expected)
            values = [*values[1 - int(self.prices.max()) :], np.minimum(new, 1.0)]
        return float(values[-1][low])

    def _block(self, event: Event, count: int, step: float, side: int) -> tuple[int, Array]:
        """Return the place of the first loss on a grid, and the masses, of so many events."""
        pair = self._pair(event, side, 1.0)
        while count > 4096:  # in stages, so that a grid resolves a single event as well
            part = min(range(512, 2048), key=lambda part: -(-count // part) * part)
            pair, count = self._composed(pair, part), -(-count // part)
        mass, loss = self._composed(pair, count)
        return _split(np.exp(mass), loss, step)

    def _composed(self, pair: tuple[Array, Array], count: int) -> tuple[Array, Array]:
        low, high = (_end([(pair, count)], sign, 25 - math.log(self.delta)) for sign in (-1, 1))
        cells, width = 2 * CELLS, (low + high) / (2 * CELLS - 16)
        first, masses = _split(np.exp(pair[0]), pair[1], width)
        grid = np.bincount((first + np.arange(len(masses))) % cells, masses, cells)
        back = int(low // width) + 8
        density = np.roll(np.fft.irfft(np.fft.rfft(grid) ** count, cells), back)
        return np.log(np.maximum(density, 1e-300)), width * np.arange(-back, cells - back, dtype=float)

    def _entry(self, event: Event) -> Array:
        """Return 1 at the cheapest entry of the menu with no more noise and no smaller a rate."""

        def seen(one: Event) -> list[tuple[str, float, float]]:
            """Return (kind, rate, noise) of an event; for ε-DP ones also the worst case ("pure", 1, -ε)."""
            kind, inner, (rate, pure) = one["kind"], one.get("event", one), self._sampled(one)
            ranged = [("range", rate, -inner["epsilon"])] if self._ranged(one) else []
            cut = f" {one['rate']} {one['size']} {one['of']}" if kind == "truncated" else ""
            own = [("poisson" if kind == "gaussian" else kind + cut, rate, inner.get("noise", math.inf))]
            return ranged + own * (kind == "laplace" or not pure) + [("pure", 1.0, -pure)] * (pure > 0)

        asked, first = seen(event), [seen(entry)[0] for entry in self.entries]
        fits = [any(k == kind and r >= q and n <= noise for kind, q, noise in asked) for k, r, n in first]
        _must(any(fits), f"not recomputed: no entry of the menu dominates {_text(event)}")
        return np.asarray(np.eye(len(fits))[np.argmin(np.where(fits, self.prices / self.steps, np.inf))])

    def _cost(self, event: Event) -> Array:
        """Return what one event adds to the totals of the filter."""
        if self.rule == "menu":
            return self._entry(event)
        if '"tuning"' in _text(event):
            best, rate = (event["event"], event["rate"]) if event["kind"] == "poisson" else (event, 1.0)
            known = self.rule == "basic" and (rate == 1 or self.adjacency == "add-remove")
            _must(known and best["kind"] == "tuning", f"not recomputed: no price is known for {_text(event)}")
            epsilon = max(self._best(best, best["delta"], side) for side in (0, 1))
            return np.array([math.log1p(rate * math.expm1(epsilon)), rate * best["delta"]])
        kind, delta, (_, pure) = event["kind"], event.get("delta", 0.0), self._sampled(event)
        mu = self.shift / event["noise"] if kind == "gaussian" else 0.0
        rho = event["rho"] if kind == "zcdp" else mu**2 / 2
        if kind in ("pure", "bounded-range", "laplace"):
            mu = _first(lambda mu: math.erfc(mu / math.sqrt(8)) <= 2 / (1 + math.exp(pure)), 100.0)
            rho = min(pure * math.tanh(pure / 2), pure**2 / 8 if kind == "bounded-range" else math.inf)
        if self.rule == "rdp" and not delta:
            ranged = pure and (event["event"] if kind == "poisson" else event)["kind"] == "bounded-range"
            rho = pure**2 / 8 if ranged else rho  # on a batch the range shrinks as a pure ε does
            bound, up = self.orders * (rho if kind == "zcdp" or ranged else np.inf), self.orders - 1
            costs = [_moments(self._pair(event, side, max(up)), up) / up for side in (0, 1) if kind != "zcdp"]
            return np.asarray(np.minimum(bound, np.max(costs or [bound], axis=0)))
        prices = {"zcdp": [rho, delta], "gdp": [mu**2], "basic": [pure or event.get("epsilon", 0.0), delta]}
        prices["personal"] = prices["gdp"]
        known = prices[self.rule][0] > 0 and (self.rule != "basic" or pure or kind == "approximate")
        _must(known, f"not recomputed: {self.found.rule} has no price for {_text(event)}")
        return np.array(prices[self.rule])

    def _best(self, event: Event, delta: float, side: int) -> float:
        """Return ε of the best of K runs: δ = E_P sup_x (f'(x) - e^ε f'(g(x)) Q/P)₊, f(x) = E[x^K]."""
        mean, eta, step, self.near = event["mean"], event["shape"], self.epsilon / 400, TUNED
        first, mass = 0, np.ones(1)
        for part, n in _flat(event["event"]):
            at, more = self._block(part, n, step, side)
            first, mass = first + at, np.convolve(mass, more)
        loss = step * (first + np.arange(len(mass)))
        x = 1 - np.append(np.geomspace(1, 1e-9, 600), 0)
        p, q = (np.append(0, np.cumsum(part[::-1])) for part in (mass, mass * np.exp(-loss)))
        here, there = (_slope(y, mean, eta) for y in (x, np.interp(x, p, q)))  # g: Q's least mass

        def fits(epsilon: float) -> bool:
            most = (here - np.exp(epsilon - loss)[:, None] * there).max(axis=1)
            return bool(mass @ np.maximum(most, 0.0) <= delta)

        return _first(fits, 64.0)

    def _epsilon(self, delta: float, totals: Array) -> float:
        """Return ε of totals at δ, by the filter's conversion."""
        total, orders, spent = float(totals[0]), self.orders, totals
        if self.rule == "basic" or not totals.any() or delta <= 0:
            return total if self.rule == "basic" or delta > 0 else math.inf
        if self.rule in GDP:
            return _first(
                lambda epsilon: _gaussian_delta(total**0.5, epsilon) <= delta, total + 40 * total**0.5
            )
        if self.rule == "zcdp":
            best, wide = math.sqrt(-math.log(delta) / total), 50.0
            for _ in range(3):  # on finer and finer grids around the best order
                orders = 1 + best * np.geomspace(1 / wide, wide, 2**10)
                spent = total * orders
                best, wide = float(orders[np.argmin(_converted(spent, orders, delta))]) - 1, wide ** (1 / 64)
        return max(0.0, float(np.min(_converted(spent, orders, delta))))

    def spend(self) -> None:
        """Check that what was spent and promised in all is within the budget."""
        found, back = self.found, self.found.refunded
        if self.promised:
            gross = {name: n + back.get(name, 0) for name, n in found.charged.items()}
            plans = [found.charged, self.promised, *([gross] if back else [])]
            each = [self._by_level(plan) for plan in plans]
            found.spent, found.plan, *more = ((low, high) for low, high in np.max(each, axis=1).tolist())
            self._within(each[1])
        elif self.rule == "menu":
            gross = {name: n + back.get(name, 0) for name, n in found.charged.items()}
            ends = [[self._enclose(plan, side) for side in (0, 1)] for plan in (found.charged, gross)]
            found.spent, *more = ((low, high) for low, high in np.max(ends, axis=1).tolist())
        else:
            given = sum((n * self.costs[name] for name, n in back.items()), np.zeros(1))
            ends = [self._between(total) for total in (self.totals, self.totals + given)]
            found.spent, *more = ((low, high) for low, high in np.max(ends, axis=1).tolist())
            self._within(ends[0])
        found.unrefunded = more[0] if back else found.spent
        lower = max(found.spent[0], (found.plan or found.spent)[0])
        _must(lower <= self.epsilon, f"overspent: epsilon is {lower:.6g} or more, of {self.epsilon:g}")

    def _within(self, ends: list[tuple[float, float]]) -> None:
        """Check that each level of personal budgets is within its own."""
        if self.rule == "personal":
            for level, (low, high) in zip(self.levels, ends, strict=True):
                self.found.levels[level] = low, high
                _must(low <= level, f"overspent: epsilon is {low:.6g} or more of a personal {level:g}")

    def _between(self, totals: Array) -> list[tuple[float, float]]:
        delta, balances = self.delta - (totals[1] if self.rule == "zcdp" else 0.0), self._balances(totals)
        sizes = [(self._epsilon(delta, own), self._slack(own)) for own in balances]
        return [(size * (1 - slack), size * (1 + slack)) for size, slack in sizes]

    def _by_level(self, plan: dict[str, int]) -> list[tuple[float, float]]:
        """Enclose ε of a plan, for each level of personal budgets."""
        levels = range(len(self.levels))
        ends = [[self._enclose(plan, side, level) for side in (0, 1)] for level in levels]
        return [(low, high) for low, high in np.max(ends, axis=1).tolist()]

    def _slack(self, totals: Array) -> float:
        """Return the relative error of the arithmetic; differences of tails lose digits if μ is tiny."""
        tiny = 1e-14 / math.sqrt(max(float(totals[0]), 1e-28)) if self.rule in GDP else 0.0
        return {"basic": TOLERANCE + self.near - SLACK, "rdp": SLACK}.get(self.rule, FINE) + tiny

    def _sampled(self, event: Event) -> tuple[float, float]:
        """Return how often a record takes part, and ε where the event is ε-DP, else 0."""
        kind = event["kind"]
        if kind in ("poisson", "fixed-size", "drawn"):
            rate = event["size"] / event["of"] if kind == "fixed-size" else event["rate"]
            everyone = rate == 1 and (kind == "poisson" or self.adjacency != "add-remove")
            suits = everyone or kind == ("fixed-size" if self.adjacency == "replace-one" else "poisson")
            return rate, math.log1p(rate * math.expm1(self._sampled(event["event"])[1])) if suits else 0.0
        noisy = self.shift / event["noise"] if kind == "laplace" else 0.0
        return 1.0, event["epsilon"] if kind in ("pure", "bounded-range") else noisy

    def _ranged(self, event: Event) -> bool:
        """Return whether an event is a choice, perhaps on a batch: a menu prices it by its range."""
        suits = event["kind"] in ("poisson", "bounded-range") and event.get("event", event)["kind"]
        twice = self.adjacency == "replace-one" and event.get("rate", 1) < 1
        return self.rule == "menu" and suits == "bounded-range" and not twice

    def _pair(self, event: Event, side: int, order: float) -> tuple[Array, Array]:
        """Return log masses of P and losses log P/Q in one direction, for moments up to ``order``."""
        kind, inner, (q, pure) = event["kind"], event.get("event", event), self._sampled(event)
        if self._ranged(event):  # the worst choice: density e^(x/2) / (4 sinh(ε/2)) on [-ε, ε]
            x = inner["epsilon"] * (np.arange(0.5, PANELS) / PANELS * 2 - 1)
            loss, mass = np.log1p(q * np.expm1(x)), -x / 2 - np.log(np.exp(-x / 2).sum())
            return (mass, -loss) if side else (mass + loss, loss)
        if pure and (inner["kind"] != "laplace" or q < 1):  # randomised response is the worst
            return -np.log1p(np.exp([-pure, pure])), np.array([pure, -pure])
        if kind == "balanced" and inner["kind"] == "gaussian" and self.adjacency != "replace-one":
            return _balanced(event["bins"], 1 / inner["noise"], side)
        if kind == "truncated" and inner["kind"] == "gaussian":
            return self._truncated(event, side, order)
        known = pure or (inner["kind"] == "gaussian" and (kind != "drawn" or self.adjacency != "add-remove"))
        _must(known, f"not recomputed: no pair of distributions is known for {_text(event)}")
        pushed = kind == "fixed-size" and (q < 1 or self.adjacency == "add-remove")  # one comes, another goes
        a = (2.0 if pushed else 1.0 if kind == "poisson" and q < 1 else self.shift) / inner["noise"]
        end = 1.0 if pure else 14 + a * order
        edges = np.linspace(0.0 if pure else a / 2 if pushed and q < 1 else -end, end, PANELS + 1)
        x = (edges[:-1, None] + (NODES + 1) * (edges[1] - edges[0]) / 2).ravel()
        weights = np.tile(np.log(WEIGHTS * (edges[1] - edges[0]) / 2), PANELS)
        if pure:
            mass = np.append(weights + math.log(pure / 2) - pure * x, [-math.log(2), -math.log(2) - pure])
            return mass, np.append(pure * (1 - 2 * x), [pure, -pure])
        absent, tilted = math.log(1 - q + 1e-300), a * x - a * a / 2  # of (1-q) N(0) + q N(a) over N(0)
        loss = tilted if kind == "drawn" else np.logaddexp(absent, math.log(q) + tilted)
        down = weights - x * x / 2 - math.log(2 * math.pi) / 2
        if kind == "drawn" or q == 1:
            return np.append(down + loss + math.log(q), absent), np.append(loss, 0.0)
        if pushed:  # the larger direction on either side of zero
            atom = absent + math.log(math.erf(a / math.sqrt(8)))
            return np.concatenate([down + loss, down, [atom]]), np.concatenate([loss, -loss, [0.0]])
        if self.adjacency == "replace-one":
            return down + loss, loss - loss[::-1]
        return (down, -loss) if side else (down + loss, loss)

    def _truncated(self, event: Event, side: int, order: float) -> tuple[Array, Array]:
        """Return a mixture: a Poisson sample's pair, and a dearer one with the chance of a full batch."""
        full, pushed, found = _tail(event["of"] - 1, event["rate"], event["size"]), copy.copy(self), []
        if self.adjacency != "add-remove":
            pushed.adjacency, pushed.shift = "replace-one", SHIFTS["replace-one"]
        for audit, chance, scale in ((self, 1 - full, 1), (pushed, full, 2)):
            inner = {"kind": "gaussian", "noise": event["event"]["noise"] / scale}
            mass, loss = audit._pair({"kind": "poisson", "rate": event["rate"], "event": inner}, side, order)
            found.append((mass + math.log(chance + 1e-300), loss))
        return np.concatenate([mass for mass, _ in found]), np.concatenate([loss for _, loss in found])

    def _enclose(self, plan: dict[str, int], side: int, level: int = 0) -> tuple[float, float]:
        """Return ε of a plan from below and above, in one direction and for one level, composed by FFT."""
        parts = ((_level(json.loads(name), level), n) for name, n in plan.items() if n)
        once = ((event, -(-n // event.get("turns", 1))) for event, n in parts)  # all turns are one event
        flat = [pair for event, n in once for pair in _flat(event, n)]
        if not flat:
            return 0.0, 0.0
        if any(part["kind"] == "tuning" for part, _ in flat):
            _must([n for _, n in flat] == [1], "a best run was promised beside something else")
            return (epsilon := self._best(flat[0][0], self.delta, side)) * (1 - TUNED), epsilon
        pairs = [(self._pair(part, side, 1.0), n) for part, n in flat]
        low, high = (_end(pairs, sign, 20 - math.log(self.delta)) for sign in (-1, 1))  # but for e^-20 δ
        *odd, (edge, _) = sorted([(0.0, 0), *((self._sampled(part)[1], n) for part, n in flat)])
        step = max((low + high) / (CELLS - 16), 1e-7 * high)
        step = edge / (edge // step) if edge >= step else step  # an atom on the grid is not rounded

        def upper(finer: int, delta: float) -> float:
            """Return ε with losses split between grid points, P and Q kept (Doroshenko et al. 2022)."""
            cells, width, spectrum = CELLS * finer, step / finer, np.ones(CELLS * finer // 2 + 1, complex)
            for (mass, loss), count in pairs:
                place = np.floor(loss / width + 1e-9)
                part = np.expm1(place * width - loss) / math.expm1(-width)
                split = np.append(np.exp(mass) * (1 - part), np.exp(mass) * part)
                place = np.append(place, place + 1).astype(np.int64) % cells
                spectrum *= np.fft.rfft(np.bincount(place, split, cells)) ** count
            density = np.roll(np.fft.irfft(spectrum, cells), int(low // width) + 8)
            losses = width * (np.arange(cells, dtype=float) - int(low // width) - 8)
            return _smallest(density[losses > 0], losses[losses > 0], delta)

        # Halving the cells takes away 3/4 of the error of smooth losses: the lower end extrapolates by twice
        # what was taken away, six times the usual rest. Atoms off the grid move a cell at most (Hoeffding).
        slack, odds = 2e-16 * (50 + sum(n for _, n in flat)), sum(n for pure, n in odd if pure)
        wide, top = upper(1, self.delta - slack), upper(2, self.delta - slack)
        margin = 2 * abs(wide - top) + 1e-7 * top + step * min(odds, 4 * math.sqrt(odds))
        margin += BALANCED * top * any(part["kind"] == "balanced" for part, _ in flat)
        return max(0.0, upper(2, self.delta + slack) - margin), top * (1 + 1e-8)


def _tail(n: int, rate: float, least: int) -> float:
    """Return P[Binomial(n, rate) >= ``least``], by the ratios of its probabilities."""
    if least > n or rate == 1:
        return float(least <= n)
    first = math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1)
    first += least * math.log(rate) + (n - least) * math.log1p(-rate)
    far = min(n - least, int(max(n * rate - least, 0.0) + 50 * math.sqrt(n * rate) + 1000))
    k = np.arange(least, least + far, dtype=float)
    more = np.cumsum(np.log((n - k) / (k + 1)) + math.log(rate / (1 - rate)))
    return min(1.0, float(np.exp(first + np.append(0.0, more)).sum()))


def _balanced(bins: int, mu: float, side: int) -> tuple[Array, Array]:
    """Return log masses and losses of a balanced pass: a mean of ``bins`` log-normal ratios, by doubling."""

    def points(n: int) -> Array:  # even in the logarithm around n, in its deviations, and sparse far out
        wide = math.sqrt(math.log1p(math.expm1(mu * mu) / n))
        far = max(8.5 * mu + mu * mu / 2 - math.log(n), 0.0) + 9 * wide
        low, high = math.asinh(-4.5 - 0.05 / wide), math.asinh(far / 2 / wide)
        return np.append(0.0, n * np.exp(2 * wide * np.sinh(np.linspace(low, high, 600))))

    def put(at: Array, mass: Array, grid: Array) -> Array:  # split between neighbours: means are kept
        place = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
        part = np.clip((at - grid[place]) / (grid[place + 1] - grid[place]), 0.0, 1.0)
        split = np.append(mass * (1 - part), mass * part)
        return np.asarray(np.bincount(np.append(place, place + 1), split, len(grid)), float)

    x, n = np.arange(-9.5, 9.5 + mu, 1e-4) + 5e-5, 1
    mass = one = put(np.exp(mu * x - mu * mu / 2), np.exp(-x * x / 2) / 1e4 / math.tau**0.5, points(1))
    for bit in bin(bins)[3:]:
        for other, more in ((mass, n), (one, 1))[: 1 + int(bit)]:
            sums, weights = np.add.outer(points(n), points(more)), np.multiply.outer(mass, other)
            n, mass = n + more, put(sums.ravel(), weights.ravel(), points(n + more))
    log_mass, loss = np.log(mass[1:] + 1e-300), np.log(points(n)[1:] / bins)
    return (log_mass, -loss) if side else (log_mass + loss, loss)


def _split(mass: Array, loss: Array, width: float) -> tuple[int, Array]:
    """Return masses on a grid: each is split between neighbours so that P and Q keep theirs."""
    kept = mass > 1e-25
    mass, loss = mass[kept], loss[kept]
    place = np.floor(loss / width + 1e-9)
    part = np.expm1(place * width - loss) / math.expm1(-width)
    first, size = int(place.min()), int(place.max() - place.min()) + 2
    places = np.append(place, place + 1).astype(np.int64) - first
    return first, np.asarray(np.bincount(places, np.append(mass * (1 - part), mass * part), size), float)


def _correlated(values: Array, first: int, masses: Array) -> Array:
    """Return Σ masses[j] · values[i + first + j] for every i, with 1 above values and their first below."""
    wide, below = len(masses), max(0, -first)
    padded = np.concatenate([np.full(below, values[0]), values, np.ones(max(0, first) + wide)])
    padded = padded[first + below :][: len(values) + wide - 1]
    size = 1 << (len(padded) + wide).bit_length()
    product = np.fft.rfft(padded, size) * np.fft.rfft(masses[::-1], size)
    return np.asarray(np.fft.irfft(product, size)[wide - 1 : wide - 1 + len(values)])


def _slope(x: Array, mean: float, eta: float | None) -> Array:
    """Return E[K x^(K-1)] for a Poisson K, or a truncated negative binomial one of shape η."""
    if eta is None:
        return np.asarray(mean * np.exp(mean * (x - 1)))
    eta = eta or 1e-9
    odds = math.exp(_first(lambda s: s > 0 and math.expm1(s) * eta / -math.expm1(-eta * s) >= mean, 30.0))
    return np.asarray(mean * (x + (1 - x) * odds) ** (-1 - eta))


def _flat(event: Event, times: int = 1) -> list[tuple[Event, int]]:
    """Return simple events with their counts, without repetitions and compositions; check their numbers."""
    most = {"rate": 1.0, "delta": 1.0, "size": event.get("of", 0)}
    for key in event.keys() - {"kind", "event", "events", "by"}:
        value, whole = (
            event[key],
            key not in ("count", "size", "of", "turns", "bins") or type(event[key]) is int,
        )
        fits = key == "shape" or 0 < value <= most.get(key, math.inf) or (key, value) == ("delta", 0)
        _must(whole and fits, f"{key} cannot be {value!r}")
    parts = [event["event"]] if "event" in event else event.get("events", [])
    inner = [pair for part in parts for pair in _flat(part, times * event.get("count", 1))]
    return inner if event["kind"] in ("repeated", "composed", "turn", "personal") else [(event, times)]


def _level(event: Event, level: int) -> Event:
    """Return the event that one level of budget pays; personal events further inside stay whole."""
    if event["kind"] in ("turn", "repeated"):
        return {**event, "event": _level(event["event"], level)}
    own: Event = event["events"][level] if event["kind"] == "personal" else event
    return own


def _first(holds: Callable[[float], bool], high: float) -> float:
    """Return the smallest number from 0 to ``high`` from which on it holds."""
    return bisect_left(range(2**50), True, key=lambda k: holds(high * k / 2**50)) * high / 2**50


def _smallest(density: Array, losses: Array, delta: float) -> float:
    """Return the ε from 0 on at which δ(ε) = Σ density (1 - e^(ε - loss)), over larger losses, is δ."""

    def fits(place: int) -> bool:
        return bool(density[place:] @ -np.expm1(losses[place] - losses[place:]) <= delta)

    # between two losses ε is where a - b e^ε is δ
    place = bisect_left(range(len(losses) - 1), True, key=fits)
    above, near = density[place:].sum(), density[place:] @ np.exp(losses[place] - losses[place:])
    return max(0.0, float(losses[place] + math.log((above - delta) / near))) if above > delta else 0.0


def _converted(spent: Array, orders: Array, delta: float) -> Array:
    """Return ε at δ of Rényi DP at orders (Canonne, Kamath & Steinke 2020, Prop. 12)."""
    logs = (orders - 1) * np.log1p(-1 / orders) - np.log(orders) - math.log(delta)
    return np.asarray(spent + logs / (orders - 1))


def _gaussian_delta(mu: float, epsilon: float) -> float:
    near, far = ((epsilon / mu + sign * mu / 2) / math.sqrt(2) for sign in (-1, 1))
    return (math.erfc(near) - math.exp(min(epsilon, 700.0)) * math.erfc(far)) / 2


def _moments(pair: tuple[Array, Array], tilts: Array) -> Array:
    terms = (pair[0] + tilt * pair[1] for tilt in tilts)
    return np.array([each.max() + np.log(np.exp(each - each.max()).sum()) for each in terms])


def _end(pairs: list[tuple[tuple[Array, Array], int]], sign: int, room: float) -> float:
    """Return the least (log moment + room) / tilt, which falls and then rises."""

    def bound(place: int) -> float:
        tilts = sign * TILTS[place : place + 1]
        return float(sum(n * _moments(pair, tilts)[0] for pair, n in pairs) + room) / float(TILTS[place])

    return bound(bisect_left(range(len(TILTS) - 1), True, key=lambda k: bound(k) <= bound(k + 1)))


if __name__ == "__main__":
    try:
        with open(sys.argv[1], encoding="utf-8", errors="replace") as export:
            outcome = verify(export, *sys.argv[2:3])
    except (IndexError, OSError) as problem:
        outcome = Findings(2, f"UNREADABLE: {problem}")
    print(outcome)
    sys.exit(outcome.code)
