"""Spending from a menu: the batches that each entry affords, as a share of a plan that is fixed ahead.

`farthing.accounting.menu` lets noise and sampling rate follow the answers. For every setting the table shows
the share of the least and of the best served entry: batches of that entry alone, divided by what a promise of
the same batches affords; and the shares that the Rényi filter gives to the same entries. A strategy that
mixes entries gets a share between these, less the rest of one block of each entry. Seconds are CPU time,
without that of the promises.
"""

import time
from typing import Any

from experiments.frame import COLOURS, INK, MARKERS, Grid, Row, Size, canvas, say
from farthing.accounting import calibrate
from farthing.accounting.filters import RdpFilter
from farthing.accounting.menu import Menu
from farthing.budget import Budget
from farthing.queries.events import Event, GaussianEvent, PoissonEvent

NOISES = (2.0, 4.0, 8.0, 16.0)
WIDE = (1.0, 2.0, 4.0, 8.0)
RATES = (0.005, 0.02, 0.08)
EPSILONS = (0.1, 0.5, 1.0, 3.0, 10.0)
FEW = 20  # batches: a share of fewer is one of whole numbers


def settings(small: bool) -> list[tuple[float, float, tuple[Event, ...], str]]:
    """ε, δ, the entries and what to call them."""
    if small:
        return [(1.0, 1e-5, _noises(0.01, NOISES[:2]), "rate 0.01, noise 2, 4")]
    found = [
        (epsilon, 1e-5, _noises(rate, NOISES), f"rate {rate:g}, noise 2 … 16")
        for epsilon in EPSILONS
        for rate in (1e-4, 1e-3, 0.01, 0.1)
    ]
    found += [(epsilon, 1e-5, _noises(0.5, NOISES), "rate 0.5, noise 2 … 16") for epsilon in (3.0, 10.0)]
    found += [(10.0, 1e-5, _noises(1.0, NOISES), "rate 1, noise 2 … 16")]
    found += [
        (epsilon, delta, _noises(0.01, NOISES), "rate 0.01, noise 2 … 16")
        for epsilon in (1.0, 8.0)
        for delta in (1e-6, 1e-8)
    ]
    found += [(epsilon, 1e-5, _noises(0.01, WIDE), "rate 0.01, noise 1 … 8") for epsilon in EPSILONS]
    found += [
        (
            epsilon,
            1e-5,
            tuple(PoissonEvent(rate, GaussianEvent(noise)) for rate in RATES),
            f"noise {noise:g}, rates 0.005, 0.02, 0.08",
        )
        for epsilon in (1.0, 3.0, 8.0)
        for noise in (2.0, 4.0)
    ]
    found += [
        (3.0, 1e-5, _noises(0.02, (1.0, 2.0, 4.0)), "rate 0.02, noise 1, 2, 4"),
        (8.0, 1e-5, _noises(0.08, (1.5, 3.0, 6.0)), "rate 0.08, noise 1.5, 3, 6"),
        (3.0, 1e-5, _noises(0.001, (0.7, 1.4, 2.8, 4.0)), "rate 0.001, noise 0.7 … 4"),
        (1.0, 1e-8, _noises(0.1, (8.0, 16.0, 32.0, 64.0)), "rate 0.1, noise 8 … 64"),
    ]
    return found


def _noises(rate: float, noises: tuple[float, ...]) -> tuple[Event, ...]:
    return tuple(GaussianEvent(n) if rate == 1 else PoissonEvent(rate, GaussianEvent(n)) for n in noises)


def measure(size: Size) -> list[Row]:
    size.only()
    rows = []
    for epsilon, delta, entries, name in settings(size.small):
        budget = Budget(epsilon, delta)
        fixed = {event: calibrate.steps(event, budget) for event in entries}
        entries = tuple(event for event in entries if fixed[event] >= 1)
        begun = time.process_time()
        menu = Menu(entries)(budget)
        seconds = time.process_time() - begun
        for event in entries:
            shares = menu.most(event) / fixed[event], _renyi(event, budget) / fixed[event]
            rows.append(
                {"ε": epsilon, "δ": delta, "menu": name, "entry": str(event), "promise": fixed[event]}
                | {"share": shares[0], "rényi": shares[1], "seconds": round(seconds, 2), "units": menu.units}
            )
        least = min(row["share"] for row in rows[-len(entries) :])
        say(f"ε {epsilon:g}, {name}: {least:.3f}, {seconds:.2f} s")
    return rows


def _renyi(event: Event, budget: Budget) -> int:
    """How many of an event the Rényi filter allows."""
    rule, low, high = RdpFilter(budget), 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rule.fits(rule.add(rule.start(), event, middle)) else (low, middle)
    return low


def tables(rows: list[Row]) -> list[Grid]:
    cells = []
    for key in dict.fromkeys((row["ε"], row["δ"], row["menu"]) for row in rows):
        here = [row for row in rows if (row["ε"], row["δ"], row["menu"]) == key]
        many = [row for row in here if row["promise"] >= FEW] or here
        least, best = (pick(many, key=lambda row: row["share"]) for pick in (min, max))
        renyi = [row["rényi"] for row in many]
        cells.append(
            [
                *(f"{key[0]:g}", f"{key[1]:g}", key[2]),
                " / ".join(f"{row['promise']:,}" for row in here),
                f"{least['share']:.3f} – {best['share']:.3f}",
                f"{min(renyi):.2f} – {max(renyi):.2f}",
                f"{here[0]['seconds']:.2f}",
            ]
        )
    head = ["ε", "δ", "menu", "batches of a promise", "share from the menu", "share by the Rényi filter", "s"]
    note = f"Add-remove. Entries of which a promise affords fewer than {FEW} batches are left out."
    return [Grid("Batches from a menu, as a share of a promise's", head, cells, note)]


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=7.2, height=3.4)
    axes = grid[0, 0]
    many = [row for row in rows if row["promise"] >= FEW] or rows
    for place, (name, label) in enumerate((("share", "from a menu"), ("rényi", "by the Rényi filter"))):
        style = {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": "none", "markersize": 4}
        batches, shares = ([row[key] for row in many] for key in ("promise", name))
        axes.plot(batches, shares, label=label, alpha=0.7, **style)
    axes.axhline(1.0, color=INK, linestyle=":", linewidth=1)
    axes.set(xscale="log", ylim=(0.0, 1.05), xlabel="batches that a promise affords", ylabel="share of them")
    axes.legend(frameon=False, loc="lower right")
    return figure
