"""The job of a federated run: who trains on which table, on which budgets, by which method.

``farthing simulate`` and ``farthing serve`` make one from their arguments and their file. `checked` refuses
everything that contradicts the method's record before a table is read, and `steps` runs the method.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from farthing import validate
from farthing.budget import Adjacency, Guarantee, Unit
from farthing.data.schema import Schema
from farthing.data.tables import Features
from farthing.errors import InvalidValue
from farthing.federated.methods.table import Method, named
from farthing.federated.protocol import Clients, Trust
from farthing.linear.problem import Problem
from farthing.queries.query import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A table, the clients it is dealt out to, and the method by which they train.

    Parameters
    ----------
    table : str
        A CSV or Parquet file, or the word adult.
    schema : Schema
        Its public bounds and vocabularies.
    clients : int
        How many clients share the records.
    epsilon : str, optional
        A number, numbers with commas (dealt out in turn), or FILE:COLUMN.
    delta : float, optional
        δ of every client's budget.
    records : int, optional
        The number of records of each; all rows, dealt out evenly, if left out.
    method : Method or str
        A record, or the name of one in `farthing.federated.methods.table.METHODS`.
    options : mapping
        Options of the method by their names; its own defaults hold for the others.
    trust : str, optional
        Who adds the noise; the method's first if left out.
    survivors : int, optional
        The least number of honest clients of a round under distributed trust; all if left out.
    noise : {"sum", "each"}
        Whether noise is simulated as one draw for the sum, or as one for each upload.
    adjacency : Adjacency, optional
        The adjacency of every budget; the method's if left out.
    unit : Unit
        The unit of every budget.
    test : str, optional
        Another table to measure the model on, without privacy.
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
        """The method's record."""
        return named(self.method)

    @property
    def trusted(self) -> Trust:
        """Who adds the noise: the one given, or the method's first."""
        return Trust(self.trust or self.record.trusts[0])

    def features(self, clients: Clients | None, problem: Problem) -> Features:
        """Return the map of rows in which the method's weights give probabilities."""
        found: Features = self.record.features(clients, problem, trust=self.trusted, survivors=self.survivors)
        return found


def checked(job: Job) -> Method:
    """Return the method's record; refuses what contradicts it. Nothing is read yet."""
    method = job.record
    validate.count(**{"--clients": job.clients})
    if job.noise not in ("sum", "each"):
        raise InvalidValue(f"--noise must be one of ['sum', 'each'], got {job.noise!r}")
    if job.trust is not None and job.trust not in method.trusts:
        raise InvalidValue(
            f"--trust must be one of {list(method.trusts)} with --method {method.name}, got {job.trust!r}"
        )
    method.check(job.options, job.trust)
    for option, budget in (("epsilon", job.epsilon), ("delta", job.delta)):
        if budget is not None and not method.private:
            raise InvalidValue(
                f"--{option} must be left out with --method {method.name}, which promises nothing, got "
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


def steps(job: Job, clients: Any, problem: Problem) -> Iterator[Step]:
    """Return the method's steps over its clients; options that are left out keep the algorithm's defaults."""
    method = job.record
    arguments = method.arguments(job.options)
    if len(method.trusts) > 1:
        arguments |= {"trust": job.trusted, "survivors": job.survivors}
    found: Iterator[Step] = method.algorithm(clients, problem, **arguments)
    return found


def holds(job: Job, clients: Clients, noise: float, client: int, rounds: int) -> list[Guarantee]:
    """Return the guarantees that published noise, over the clip, gives a client's record; else none."""
    published = job.record.published
    if published is None or not job.options.get("published_noise"):
        return []
    return list(published(clients, noise, client, rounds))
