"""Run the job of a federated simulation: a table, its clients, their budgets and a method.

``farthing simulate`` makes a `Job` from its arguments and ``farthing serve`` from its file. `checked` refuses
everything that contradicts the method's record before a table is read, and `steps` runs the method.

`simulate` splits a table among clients, in the order of its rows; each client trains on its own budget. All
input is checked before the first round. Budgets are public, so messages may show them; messages never show a
cell of a table.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Adjacency, Guarantee, Unit
from farthing.data import table_files
from farthing.data.schema import Categorical, Schema
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated.budgets import dealt
from farthing.federated.methods.table import METHODS, Method, named
from farthing.federated.protocol import Clients, Trust
from farthing.federated.simulated import Simulated, personal
from farthing.linear import losses
from farthing.linear.problem import Problem
from farthing.queries.query import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A table, the clients that share it, and the method by which they train.

    Parameters
    ----------
    table : str
        A CSV or Parquet file, or the word adult.
    schema : Schema
        Its public bounds and vocabularies.
    clients : int
        The number of clients.
    epsilon : str, optional
        A number, numbers with commas (assigned in turn), or FILE:COLUMN.
    delta : float, optional
        δ of every client's budget.
    records : int, optional
        The number of records of each; by default all rows, divided evenly.
    method : Method or str
        A record, or the name of one in `farthing.federated.methods.table.METHODS`.
    options : mapping
        Options of the method by name; the others have its defaults.
    trust : str, optional
        The trust model; by default the method's first.
    survivors : int, optional
        The least number of honest clients of a round under distributed trust; by default all.
    noise : {"sum", "each"}
        Whether noise is simulated as one draw for the sum, or as one for each upload.
    adjacency : Adjacency, optional
        The adjacency of every budget; by default the method's.
    unit : Unit
        The unit of every budget.
    test : str, optional
        Another table to evaluate the model on, without privacy.
    """

    table: str
    schema: Schema
    clients: int
    epsilon: str | None = None
    delta: float | None = None
    records: int | None = None
    method: Method | str = "federated-descent"
    options: Mapping[str, Any] = field(default_factory=dict)
    trust: str | None = None
    survivors: int | None = None
    noise: str = "sum"
    adjacency: Adjacency | None = None
    unit: Unit = Unit.RECORD
    test: str | None = None

    @property
    def record(self) -> Method:
        """Return the method's record."""
        return named(self.method)

    @property
    def trusted(self) -> Trust:
        """Return the given trust model, or the method's first."""
        return Trust(self.trust or self.record.trusts[0])

    def features(self, clients: Clients | None, problem: Problem) -> Features:
        """Return the map of rows in which the method's weights give probabilities."""
        found: Features = self.record.features(clients, problem, trust=self.trusted, survivors=self.survivors)
        return found


def checked(job: Job) -> Method:
    """Return the method's record; refuse options that contradict it, before a table is read."""
    method = job.record
    validate.count(**{"--clients": job.clients})
    if job.noise not in ("sum", "each"):
        raise InvalidValue(f"--noise must be one of ['sum', 'each'], got {job.noise!r}")
    if job.trust is not None and job.trust not in method.trusts:
        raise InvalidValue(
            f"--trust must be one of {list(method.trusts)} with --method {method.name}, got {job.trust!r}"
        )
    method.check(job.options, job.trust)
    if method.networks and find_spec("torch") is None:
        raise Unsupported(f"--method {method.name} needs PyTorch: pip install torch")
    for option, budget in (("epsilon", job.epsilon), ("delta", job.delta)):
        if budget is not None and not method.private:
            raise InvalidValue(
                f"--{option} must be left out with --method {method.name}, which guarantees nothing, got "
                f"{budget!r}"
            )
    if job.records is not None:
        validate.count(**{"--records-per-client": job.records})
    if job.survivors is not None:
        if job.trust != Trust.DISTRIBUTED:
            raise InvalidValue("--survivors is for --trust distributed only")
        if validate.count(**{"--survivors": job.survivors}) > job.clients:
            raise InvalidValue(
                f"--survivors must be at most the number of clients, {job.clients}, got {job.survivors}"
            )
    return method


def steps(job: Job, clients: Any, problem: Any) -> Iterator[Step]:
    """Return the method's steps over its clients; omitted options have the algorithm's defaults."""
    method = job.record
    arguments = method.arguments(job.options)
    if len(method.trusts) > 1:
        arguments |= {"trust": job.trusted, "survivors": job.survivors}
    found: Iterator[Step] = method.algorithm(clients, problem, **arguments)
    return found


def holds(job: Job, clients: Clients, noise: float, client: int, rounds: int) -> list[Guarantee]:
    """Return the guarantees of published noise (a multiplier) for a client's record, if there are any."""
    published = job.record.published
    if published is None or not job.options.get("published_noise"):
        return []
    return list(published(clients, noise, client, rounds))


Array = NDArray[np.float64]

__all__ = [
    "METHODS",
    "Job",
    "Reached",
    "checked",
    "epsilons",
    "measured",
    "simulate",
    "steps",
]

_MOST_KINDS = 200  # the most clients that are listed exactly
_SHOWN = 0.1  # seconds between two reports of progress


@dataclass(frozen=True, slots=True)
class Reached:
    """The progress of a simulation: rounds, clients that can afford another, and the share of rounds left."""

    rounds: int
    alive: int
    clients: int
    left: float

    def __str__(self) -> str:
        clients = f"{self.alive:,} of {self.clients:,} clients"
        return f"round {self.rounds:,}: {clients}, {self.left:.0%} of budgets left"


Watch = Callable[[Reached], None]


def simulate(job: Job, watch: Watch | None = None) -> dict[str, Any]:
    """Train until no client can afford a round or until interrupted; return all public results."""
    method = checked(job)
    target = job.schema.target
    if not isinstance(target, Categorical):
        raise InvalidValue(f"federated methods learn labels, and target {target.name!r} is a number")
    X, y = table_files.read(job.table, job.schema)
    test = table_files.held_out(job.test, job.table, job.schema)
    n = _rows(job, len(X))
    budgets = _budgets(job, method)  # one a client, of whom there are now as many as records at most
    labels = len(target.values)
    table = Table(X[:n], y[:n].astype(np.float64) if labels == 2 else y[:n])
    loss: losses.Loss = losses.logistic if labels == 2 else losses.multinomial
    problem = Problem(loss, n, job.schema.width, labels if labels > 2 else 0, unit=False)
    told: dict[str, Any] = {
        "method": method.name,
        "clients": job.clients,
        "records": n,
        "features": job.schema.width,
    }
    if method.private:
        fidelity: Literal["sum", "each"] = "each" if job.noise == "each" else "sum"
        held, trained = _held(job, table, problem, X[:n], y[:n])
        clients = Simulated.split(held, clients=job.clients, budgets=budgets, noise=fidelity)
        step, interrupted = _taken(steps(job, clients, trained), clients, watch)
        each = [budget.epsilon for budget in budgets]
        told |= {**_reached(job, clients, step, int(np.argmax(each))), "smallest_epsilon": min(each)}
        if job.trust == Trust.DISTRIBUTED:
            told["survivors"] = job.survivors or job.clients
        end = "the budgets allow no further round"
        if clients.alive:
            short = f"{clients.alive} clients are too few to make up the noise of another round"
            end = short if job.trust == Trust.DISTRIBUTED else "all rounds were taken"
    else:
        largest = len(job.schema.columns) + 1  # squared norm of a row
        options = {"lr": 2 / (loss.curvature * largest), **job.options}
        step, interrupted = _taken(steps(replace(job, options=options), table, problem))
        told |= {"epsilon": None, "note": "no noise, no budgets: nothing is promised"}
        end = "all rounds were taken"
    told |= {"rounds": step.t, "stopped": "interrupted" if interrupted else end}
    if test is None:
        return told
    if method.networks:
        from farthing.torch.training.network import probabilities

        return {
            **told,
            "test": {"table": job.test, **measured(probabilities(trained, step.w, test[0]), test[1])},
        }
    features = job.features(clients if method.private else None, problem)
    said = problem.probabilities(
        step.w, test[0], clip_norm=told.get("clip_norm", math.inf), features=features
    )
    return {**told, "test": {"table": job.test, **measured(said, test[1])}}


def _held(job: Job, table: Table, problem: Problem, X: Any, y: Any) -> tuple[Any, Any]:
    """Return the clients' data and the model: examples and a network, or the table and its problem."""
    if not job.record.networks:
        return table, problem
    from farthing.torch.training.network import table_examples, table_network

    offsets = dealt(len(y), job.clients, None)
    owners = np.repeat(np.arange(job.clients), np.diff(offsets)) if job.unit is not Unit.RECORD else None
    return table_examples(X, y, owners), table_network(job.schema.width, max(2, problem.outputs), most=len(y))


def _budgets(job: Job, method: Method) -> Any:
    if not method.private:
        return []
    if job.epsilon is None or job.delta is None:
        raise InvalidValue(f"--method {method.name} needs --epsilon and --delta")
    delta = validate.probability(**{"--delta": job.delta})
    return personal(epsilons(job.epsilon, job.clients), delta, job.adjacency or method.adjacency, job.unit)


def epsilons(text: str, clients: int) -> Array:
    """Return one ε per client, from one number, a list assigned in turn, or a column of a file.

    >>> epsilons("0.1,1", 5)
    array([0.1, 1. , 0.1, 1. , 0.1])
    """
    file, colon, column = text.rpartition(":")
    if colon:
        blocks = [block[column] for block in table_files.columns(file, [column])]
        cells = [str(cell) for cell in np.concatenate(blocks)] if blocks else []
        if len(cells) != clients:
            raise InvalidValue(
                f"--epsilon must hold one budget per client, {text} has {len(cells)} for {clients}"
            )
        return np.array(
            [_number(cell, f"epsilon of client {client} in {text}") for client, cell in enumerate(cells)]
        )
    parts = text.split(",")
    if len(parts) > clients:
        raise InvalidValue(f"--epsilon may hold one budget per client, got {len(parts)} for {clients}")
    names = (
        ["--epsilon"]
        if len(parts) == 1
        else [f"--epsilon of client {client}" for client in range(len(parts))]
    )
    values = [
        validate.positive(**{name: _number(part, name, ", numbers with commas, or FILE:COLUMN")})
        for part, name in zip(parts, names, strict=True)
    ]
    return np.resize(np.array(values), clients)


def _number(text: str, name: str, otherwise: str = "") -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(f"{name} must be a number{otherwise}, got {text!r}") from None


def _rows(job: Job, n: int) -> int:
    """Return the number of rows that are assigned to clients."""
    if job.clients > n:
        raise InvalidValue(f"--clients must be at most the number of records, {n}, got {job.clients}")
    taken = n if job.records is None else job.clients * job.records
    most = job.record.most_records
    if most is not None and taken > most:
        raise InvalidValue(
            f"--method {job.record.name} takes as many iterations as the square of its {taken} records: pass "
            f"--records-per-client, so that there are at most {most} in all"
        )
    if job.records is None:
        return n
    if taken > n:
        raise InvalidValue(
            f"{job.clients} clients with {job.records} records each need {taken} records, "
            f"{job.table!r} has {n}"
        )
    return taken


def _taken(
    steps: Iterator[Step], clients: Simulated | None = None, watch: Watch | None = None
) -> tuple[Step, bool]:
    """Return the last step, and whether the run was interrupted after it."""
    last, interrupted, seen = None, False, 0.0
    try:
        for last in steps:
            if watch is not None and clients is not None and time.monotonic() - seen >= _SHOWN:
                watch(Reached(last.t, clients.alive, len(clients), _left(clients)))
                seen = time.monotonic()
    except KeyboardInterrupt:
        interrupted = True
    if last is None and interrupted:
        raise KeyboardInterrupt
    if last is None:
        raise BudgetSpent("not even one round fits the budget of any client")
    return last, interrupted


def _left(clients: Simulated) -> float:
    """Return the fraction of all affordable rounds that clients can still afford."""
    left = int(clients.left.sum())
    return left / (left + int(clients.done.sum()))


def _reached(job: Job, clients: Simulated, step: Step, client: int) -> dict[str, Any]:
    """Return the guarantee of the client with the largest ε (δ is equal for all), and public figures."""
    terms = clients.terms(client)
    really = [asdict(one) for one in holds(job, clients, terms.mechanism.noise_multiplier, client, step.t)]
    return {
        **({"holds": really} if really else {}),
        **asdict(clients.guarantee(client)),
        "trust": str(job.trusted),
        "noise": job.noise,
        "clip_norm": terms.bound.clip,
        "noise_multiplier": terms.mechanism.noise_multiplier,
        "alive": clients.alive,
        "left": _left(clients),
        # one client at a time: whose turns they were is secret
        "groups": budget_groups(clients, expected=job.record.most_records is not None),
    }


def budget_groups(clients: Simulated, expected: bool = False) -> list[dict[str, Any]]:
    """Return the number of clients by budget, affordable rounds and rounds taken, all of them public.

    If there are many different clients, numbers are rounded, so that the summary stays short. ``expected``
    counts the rounds that clients take on average, in proportion to their records.
    """
    done = clients.done
    if expected:
        done = np.rint(done.sum() * (clients.records / clients.records.sum()))
    each = np.stack([[budget.epsilon for budget in clients.budgets], clients.done + clients.left, done])
    kinds, counts = np.unique(each, axis=1, return_counts=True)
    if kinds.shape[1] > _MOST_KINDS:
        kinds, counts = np.unique(_rounded(each), axis=1, return_counts=True)
    return [
        {"epsilon": float(epsilon), "clients": int(count), "rounds": int(rounds), "done": int(done)}
        for (epsilon, rounds, done), count in zip(kinds.T, counts, strict=True)
    ]


def _rounded(values: Array) -> Array:
    """Return values with two significant digits."""
    unit = 10.0 ** (np.floor(np.log10(np.where(values > 0, values, 1.0))) - 1)
    rounded: Array = np.round(values / unit) * unit
    return rounded


def measured(said: Array, y: NDArray[Any]) -> dict[str, Any]:
    """Return the accuracy of probabilities on another table, with a note that it is not private."""
    each = np.stack([1 - said, said], axis=1) if said.ndim == 1 else said
    true = each[np.arange(len(y)), y]
    return {
        "records": len(y),
        "accuracy": float(np.mean(each.argmax(axis=1) == y)),
        "guessing": float(np.bincount(y).max() / len(y)),
        "log_loss": float(-np.mean(np.log(np.maximum(true, 1e-300)))),
        "note": table_files.WITHOUT_PRIVACY,
    }
