"""Draw the pictures of docs/budgets.md from the library itself.

    python -m tools.pictures      writes docs/pictures/*.svg; needs matplotlib

Noise is seeded, so that the same code draws the same picture.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from experiments import frame

import farthing as ft
from farthing.accounting import calibrate as search
from farthing.accounting import composition
from farthing.accounting.filters import Filter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.data.adult import load_adult
from farthing.federated.methods.addp import addp
from farthing.federated.simulated import Simulated, personal
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.queries.events import BoundedRangeEvent, Event, GaussianEvent, PoissonEvent

OUT = Path(__file__).parent.parent / "docs" / "pictures"
SIGMA, RATE, DELTA = 4.0, 0.01, 1e-5
BUDGET = ft.Budget(1.0, DELTA)
GAUSSIAN_FILTERS = {"Rényi filter": RdpFilter, "zCDP filter": ZcdpFilter, "GDP filter": GdpFilter}


def rules() -> None:
    """Draw the cost of batches under each rule, and where each rule stops."""
    figure, ((axes,),) = frame.canvas(1, 1, width=6.4, height=3.4)
    steps = np.unique(np.geomspace(1, 30_000, 80).round().astype(int)).tolist()
    event = ft.Poisson(RATE).amplify(ft.Gaussian(SIGMA))
    curves: list[tuple[str, Callable[[int], float]]] = [
        ("promise: tight accounting", lambda t: ft.epsilon(event, steps=t, delta=DELTA)),
        ("filter: Rényi divergences", lambda t: _asked_of_filter(event, t)),
        ("advanced composition", lambda t: composition.advanced_sampled(SIGMA, RATE, t, DELTA)),
    ]
    for place, (label, cost) in enumerate(curves):
        most = _most(cost)
        axes.plot(
            steps, [cost(t) for t in steps], color=frame.COLOURS[place], label=f"{label}, {most:,} batches"
        )
        axes.plot([most], [cost(most)], color=frame.COLOURS[place], marker=frame.MARKERS[place])
    frame.level(axes, BUDGET.epsilon, "the budget")
    axes.set(xscale="log", ylim=(0, 2), xlabel="batches", ylabel="ε of all batches")
    axes.legend(frameon=False, loc="upper left")
    frame.save(figure, OUT / "rules.svg")


def ways() -> None:
    """Draw how many answers each way of spending gets from one budget: on batches, and on everybody."""
    figure, (axes,) = frame.canvas(1, 2, width=7.2, height=2.8)
    everybody = [GaussianEvent(noise) for noise in (20.0, 40.0, 80.0)]
    sampled = [ft.Poisson(RATE).amplify(GaussianEvent(noise)) for noise in (2.0, SIGMA, 8.0)]
    titles = f"batches of rate {RATE:g}, noise multiplier {SIGMA:g}", "everybody, noise multiplier 40"
    for panel, entries, title in zip(axes, (sampled, everybody), titles, strict=True):
        event = entries[1]
        found = {
            "promise": search.steps(event, BUDGET),
            "menu": ft.Menu(entries)(BUDGET).most(event),
            **{name: _allowed(rule(BUDGET), event) for name, rule in GAUSSIAN_FILTERS.items()},
        }
        for place, count in enumerate(found.values()):
            panel.barh([-place], [count], color=frame.COLOURS[place])
            panel.annotate(f" {count:,}", (count, -place), va="center")
        panel.set(title=title, xlabel="answers", xlim=(0, 1.22 * max(found.values())))
        panel.set_yticks([-place for place in range(len(found))], list(found))
        panel.grid(False, axis="y")
    frame.save(figure, OUT / "ways.svg")


def _allowed(rule: Filter, event: Event) -> int:
    """Return how many of an event a filter allows; without sampling, where it cannot amplify."""
    if not isinstance(rule, RdpFilter) and isinstance(event, PoissonEvent):
        event = event.event
    low, high = 0, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rule.fits(rule.add(rule.start(), event, middle)) else (low, middle)
    return low


def _asked_of_filter(event: Event, steps: int) -> float:
    """Return the least ε with which an RDP filter allows so many."""
    rule = RdpFilter(BUDGET)
    total = rule.add(rule.start(), event, steps)
    return min(spent + BUDGET.epsilon - limit for spent, limit in zip(total, rule.limits, strict=True))


def _most(cost: Callable[[int], float]) -> int:
    """Return how many batches fit the budget."""
    low, high = 0, 1
    while cost(high) <= BUDGET.epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= BUDGET.epsilon else (low, middle)
    return low


def prices() -> None:
    """Draw the cost of DP-AGD's steps: prices that it chose on the way, from released answers only."""
    figure, ((axes,),) = frame.canvas(1, 1, width=6.4, height=3.4)
    adult, rule = load_adult(), ZcdpFilter(BUDGET)
    model = ft.LogisticRegression(
        BUDGET.epsilon, DELTA, bounds=(0, 1), solver="dpagd", random_state=frame.seed("prices")
    ).fit(adult.X_train, adult.y_train)
    bottom = np.zeros(len(model.history_))
    for place, (kind, label) in enumerate(
        [(GaussianEvent, "Gaussian answers"), (BoundedRangeEvent, "choices")]
    ):
        paid = np.array([_share(rule, kind, step) for step in model.history_])
        steps = np.arange(1, len(paid) + 1)
        axes.bar(steps, paid, bottom=bottom, color=frame.COLOURS[place], label=f"{label}: {sum(paid):.1f} %")
        bottom = bottom + paid
    axes.bar(
        [len(bottom) + 1], [100 - sum(bottom)], color=frame.COLOURS[-1], label="too little for another step"
    )
    axes.set_axisbelow(True)
    axes.set(xlabel="step", ylabel="of the budget, %", ylim=(0, 14), xticks=[1, 5, 10, 15])
    axes.legend(frameon=False, loc="upper right")
    frame.save(figure, OUT / "prices.svg")


def _share(rule: ZcdpFilter, kind: type[Event], step: ft.Step) -> float:
    events = [receipt.event for receipt in step.receipts if isinstance(receipt.event, kind)]
    return 100 * sum(rule.cost(event)[0] for event in events) / rule.rho


def clients() -> None:
    """Draw clients with budgets of their own: each leaves when its next round does not fit."""
    figure, ((axes,),) = frame.canvas(1, 1, width=6.4, height=3.0)
    adult, budgets = load_adult(), (0.1, 0.2, 0.4, 0.8)
    X, y = adult.X_train[:20_000], adult.y_train[:20_000] * 1.0
    simulated = Simulated.split(
        X, y, records=100, budgets=personal(np.repeat(budgets, 50), 1e-8), stream=frame.stream("clients")
    )
    problem = Problem(logistic, len(X), X.shape[1], unit=False)
    # one round is enough: the terms say how many there are
    next(addp(simulated, problem, draw=ft.Poisson(0.01), noise_multiplier=200.0))
    rounds = np.sort(simulated.left + simulated.done)
    axes.step([100, *rounds, 2 * rounds[-1]], [*range(200, -1, -1), 0], where="post", color=frame.COLOURS[0])
    for place, epsilon in enumerate(budgets):
        last = int(rounds[50 * place])
        axes.annotate(
            f"ε = {epsilon:g}: {last:,} rounds",
            (last, 200 - 50 * place),
            ha="right",
            xytext=(-4, -12),
            textcoords="offset points",
        )
    axes.set(xscale="log", xlim=(100, None), xlabel="rounds", ylabel="clients that take part", ylim=(0, 212))
    frame.save(figure, OUT / "clients.svg")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for picture in (rules, ways, prices, clients):
        picture()
    for path in sorted(OUT.glob("*.svg")):
        frame.say(f"{path.relative_to(OUT.parent.parent)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
