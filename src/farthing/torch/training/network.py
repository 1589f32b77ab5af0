"""Query networks at flat weights: sums of clipped gradients, and of whole updates of a user or a party.

A federated method holds the weights of a network as one flat array, sends it to parties and adds up what
comes back. A `Network` is a model that takes such an array; two questions are asked about it:

* `NetworkGradient`: the sum of clipped per-example gradients at w.
* `WholeUpdate`: for every user (or for a party as one user), the update of local training without noise on
  that user's records alone, clipped as a whole and added up over users (McMahan et al. 2018, "Learning
  differentially private recurrent language models", Algorithm 1, UserUpdate with flat clipping). A user
  moves the sum by one clipping norm, by two where users are replaced.

**Float32 sums under noise of the core.** `farthing.torch.kernels.totals` bounds how far apart float32 sums of
neighbours are: with terms clipped at C' they are within C' (1 + slack) of each other for up to 2¹⁵ examples
(and a slack of n 2⁻²² more for n examples beyond). `NetworkGradient` clips at C' = C / (1 + slack), so that
neighbours are within C, or 2C where a record is replaced, and every mechanism of the core (also shares of
noise, and masked ones) and its price hold as they are. ``most`` is public: it must not follow from the batch.
`WholeUpdate` adds up in float64, under the theorem of `farthing.noise.summing`.

>>> from farthing.queries.bounds import ClipNorm
>>> from farthing.torch.training.records import Examples
>>> network = Network(nn.Linear(2, 1), lambda out, y: (out.squeeze(1) - y).square())
>>> records = network.check(Examples((torch.ones(4, 2), torch.full((4,), 100.0))))
>>> total = network.gradient.bounded_sum(records.take(slice(None)), network.start(), ClipNorm(1.0))
>>> total.dtype, bool(3.96 < np.linalg.norm(total) <= 4.0)
(dtype('float64'), True)

`table_network` is a small one for the rows of a table: one hidden layer, with public weights to begin with.

>>> network = table_network(width=3, labels=2, hidden=4)
>>> network.size, bool((network.start() == table_network(3, 2, 4).start()).all())
(26, True)
>>> probabilities(network, network.start(), np.zeros((5, 3))).shape
(5, 2)
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from farthing import validate
from farthing.budget import Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, Kind
from farthing.torch.checks.leftovers import Wall
from farthing.torch.checks.selfcheck import refuse_other_kinds
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.plain import evaluating
from farthing.torch.gradients.tape import call, mapped, record_losses, ungrouped
from farthing.torch.kernels.totals import SLACK
from farthing.torch.training.placing import PlacedBatch
from farthing.torch.training.plan import checked
from farthing.torch.training.randomness import apart, foreign
from farthing.torch.training.records import Examples

Array = NDArray[np.float64]

COVERED = 2**15  # examples of a sum that the slack of float32 sums covers
_BEYOND = 2.0**-22  # more slack for each, where there are more
_PLACES = 64  # rows of a batch whose examples are placed


class Network:
    """A model whose weights are one flat array of float32 values.

    Parameters
    ----------
    model : nn.Module
        The model, with weights in float32.
    loss : callable
        ``loss(outputs, targets)`` returns one value a record (``reduction="none"``).
    name : str, default "network"
        What parties call it, where they are elsewhere.
    source : str, default ""
        The hash of the source that it was made from, where parties have a copy of their own.
    most : int, default 2**15
        The most examples in a sum, a public number; more widen the slack for rounding.
    physical_batch_size : int, default 512
        Rows that go through the model at once.
    route : str, default "auto"
        How each example's gradient is made, as in `farthing.torch.train`.
    placed : bool, default False
        Whether others choose the weights, so that no last bit of an example may depend on who is beside it
        (`farthing.torch.training.records`). Guards ask so.

    Raises
    ------
    Unsupported
        For weights in another precision than float32.

    Examples
    --------
    >>> network = Network(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"))
    >>> network.size, network.start().shape
    (8, (8,))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        *,
        name: str = "network",
        source: str = "",
        most: int = COVERED,
        physical_batch_size: int = 512,
        route: str = "auto",
        placed: bool = False,
    ) -> None:
        refuse_other_kinds(model)
        self.sums = Gradient(model, loss, physical_batch_size=physical_batch_size, route=route)
        self.model, self.loss, self.name, self.source = self.sums.model, loss, name, source
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        other = {str(p.dtype)[6:] for p in self.parameters if p.dtype is not torch.float32}
        if other:
            raise Unsupported(f"weights must be float32, {name} has some in {', '.join(sorted(other))}")
        self.most = max(COVERED, validate.count(most=most))
        self.slack = SLACK + (self.most * _BEYOND if self.most > COVERED else 0.0)
        self.device, self._placed = self.parameters[0].device, placed

    @property
    def size(self) -> int:
        """Return the number of trained weights."""
        return self.sums.layout.size

    @property
    def gradient(self) -> "NetworkGradient":
        """Return the contribution of its gradients."""
        return NetworkGradient(self)

    def update(self, steps: int, lr: float, batch: int = 0) -> "WholeUpdate":
        """Return the contribution of whole updates, by so many local steps."""
        return WholeUpdate(self, steps, lr, batch)

    def start(self) -> Array:
        """Return the weights that the model holds, end to end in the order of its parameters."""
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        return flat.cpu().numpy().astype(np.float64)

    @torch.no_grad()
    def put(self, w: ArrayLike) -> None:
        """Give the model these weights, rounded to float32."""
        given = np.asarray(w)
        if given.shape != (self.size,):
            raise InvalidValue(f"w must be {self.size} numbers, got shape {given.shape}")
        flat = torch.from_numpy(given.astype(np.float32))
        for parameter, part in zip(self.parameters, self.sums.layout.views(flat), strict=True):
            parameter.copy_(part)

    def check(self, examples: Examples) -> Examples:
        """Check the model on made-up examples of these records' shape; return those that its loss can take.

        Once, before anything is charged: no refusal of the model depends on a record.
        """
        if len(examples) > self.most:
            raise InvalidValue(
                f"there are more records than most={self.most}, the public number that sums are proven for"
            )
        with apart(self.device):
            return checked(self.sums, examples.on(self.device))

    def arranged(self, batch: Any) -> Any:
        """Return a batch as it goes through the model: placed, where others choose the weights."""
        if not self._placed:
            return batch
        if self.sums.isolation is Isolation.LOOP:  # each by itself in any case
            return PlacedBatch(batch, 1)
        rows = min(_PLACES, self.sums.most_rows() or _PLACES)
        return PlacedBatch(batch, max(1, rows // batch.examples.width))

    def outputs(self, inputs: Any, w: ArrayLike) -> Any:
        """Return the model's outputs on public inputs at these weights, as an array."""
        self.put(w)
        with evaluating(self.model), torch.no_grad():
            parts = torch.as_tensor(inputs).to(self.device).split(512)
            return torch.cat([call(self.model, part) for part in parts]).cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class NetworkGradient:
    """A contribution: the sum of clipped per-example gradients of a network at flat weights ``w``.

    Parameters
    ----------
    network : Network
        The model and its loss; its records are `farthing.torch.Examples`.

    Examples
    --------
    >>> network = Network(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"))
    >>> NetworkGradient(network).shape
    (8,)
    """

    network: Network
    honours: ClassVar[Collection[str]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the sum: one number a trained weight."""
        return (self.network.size,)

    @property
    def most(self) -> int:
        """Return the most examples in a sum that its rounding is proven for."""
        return self.network.most

    @property
    def described(self) -> dict[str, Any]:
        """Return how a coordinator asks for it: words and numbers, no code."""
        return _described(self.network, "gradient")

    def bounded_sum(self, batch: Any, w: Any, bound: Any) -> Array:
        """Return the sum over a batch, of gradients clipped at C / (1 + slack)."""
        network = self.network
        network.put(w)
        with apart(network.device, elsewhere=foreign(network.sums, batch.examples)):
            total = network.sums.bounded_sum(network.arranged(batch), None, _inner(bound, network.slack))
        return total.detach().cpu().numpy().astype(np.float64)

    def judged(self, batch: Any, w: Any) -> list[tuple[Array, Array, Array]]:
        """Return losses, whether labels are found and weights of examples: of users, the means of theirs.

        The model stays in the mode that it is in. Where examples could meet in it, or it is not what was
        checked, each goes alone.
        """
        network, found = self.network, list[tuple[Array, Array, Array]]()
        network.put(w)
        wall = Wall(network.model, network.loss)
        own = foreign(network.sums, batch.examples)
        with apart(network.device, elsewhere=own), network.sums.plain.running(), torch.no_grad():
            sums = network.sums
            together = sums.isolation is None and sums.checked.holds(network.model, network.loss)
            arranged = network.arranged(batch) if together else PlacedBatch(batch, 1)
            for physical in arranged.physical_batches(network.sums.physical_batch_size):
                with wall:
                    found.append(self._judged(*physical))
        return found

    def _judged(self, inputs: Any, targets: Any, weights: Tensor | None) -> tuple[Array, Array, Array]:
        """Return losses, hits and weights of the examples of a physical batch."""
        grouped = weights is not None and weights.ndim == 2
        x, y = (ungrouped(part) if grouped else part for part in (inputs, targets))
        outputs = call(self.network.model, x)
        losses = record_losses(self.network.loss, outputs, y, len(_first(y)))
        hits = torch.zeros_like(losses)
        if isinstance(outputs, Tensor) and outputs.ndim == 2 and isinstance(y, Tensor) and y.ndim == 1:
            hits = (outputs.argmax(dim=1) == y).float()
        found = [values.double().cpu().numpy() for values in (losses, hits)]
        if weights is None:
            return found[0], found[1], np.ones(len(found[0]))
        share = weights.double().cpu().numpy()
        if not grouped:
            return found[0], found[1], share
        there, counts = share.sum(axis=1) > 0, np.maximum(share.sum(axis=1), 1e-300)
        means = [(np.where(share > 0, one.reshape(share.shape), 0.0) * share).sum(axis=1) for one in found]
        return means[0] / counts, means[1] / counts, there.astype(np.float64)

    def judge_nobody(self, w: Any) -> None:
        """Refuse weights that do not fit."""
        self.network.put(w)

    def zero(self, records: Any, w: Any, bound: Any) -> Array:
        """Return the sum over nobody; refuses weights and bounds that do not fit."""
        self.network.put(w)
        self.network.sums.zero(records, None, _inner(bound, self.network.slack))
        return np.zeros(self.shape)


def _inner(bound: Any, slack: float) -> ClipNorm:
    """Return the bound at which float32 terms are clipped, so that computed sums keep the bound asked for."""
    if not isinstance(bound, ClipNorm) or bound.order != 2:
        raise Unsupported(f"networks are clipped by their L2 norm, ClipNorm(clip), got {bound!r}")
    return ClipNorm(bound.norm() / (1 + slack))


@dataclass(frozen=True, slots=True, eq=False)
class WholeUpdate:
    """A contribution: each user's update by local training without noise, clipped as a whole.

    A user's records train alone, from the same public weights: no other user's record has a part in it, not
    even by what a module keeps, which is put back after every user. An update that is not finite counts as
    zero.

    Parameters
    ----------
    network : Network
        The model and its loss; its records are `farthing.torch.Examples` with ``users``.
    steps : int, default 1
        The local steps.
    lr : float, default 0.1
        The local learning rate.
    batch : int, default 0
        Records of a local step, in their order; 0: all of the user's.

    Examples
    --------
    >>> from farthing.queries.bounds import ClipNorm
    >>> network = Network(nn.Linear(1, 1), lambda out, y: (out.squeeze(1) - y).square())
    >>> people = Examples((torch.ones(4, 1), torch.full((4,), 9.0)), users=[1, 1, 2, 2], records_per_user=2)
    >>> update = WholeUpdate(network, steps=3, lr=0.1)
    >>> total = update.bounded_sum(people.take(slice(None)), network.start(), ClipNorm(0.5))
    >>> round(float(np.linalg.norm(total)), 6)
    1.0
    """

    network: Network
    steps: int = 1
    lr: float = 0.1
    batch: int = 0
    honours: ClassVar[Collection[str]] = (Kind.NORM,)
    clipped: ClassVar[Unit] = Unit.USER  # or a party: more than a record

    def __post_init__(self) -> None:
        validate.count(steps=self.steps)
        validate.positive(lr=self.lr)
        if self.batch != 0:
            validate.count(batch=self.batch)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the sum: one number a trained weight."""
        return (self.network.size,)

    @property
    def described(self) -> dict[str, Any]:
        """Return how a coordinator asks for it: words and numbers, no code."""
        return _described(self.network, "update", steps=self.steps, lr=self.lr, batch=self.batch)

    def bounded_sum(self, batch: Any, w: Any, bound: Any) -> Array:
        """Return the sum of the clipped updates of the users in a batch."""
        network, total = self.network, Sum(max(1, len(batch)), self.shape)
        w, wall = np.asarray(w, dtype=np.float64), Wall(network.model, network.loss)
        try:
            with apart(network.device, elsewhere=True), network.sums.plain.running():
                for inputs, targets, weights in batch.physical_batches(1):
                    with wall:  # around each: what one user's records leave in the model, no other meets
                        update = self._trained(w, *_own(inputs, targets, weights))
                    total.add(bound.apply(update[None, :])[0], 1)
        finally:
            network.put(w)  # the model keeps nothing of the last user's training
        return np.asarray(total.value)

    def zero(self, records: Any, w: Any, bound: Any) -> Array:
        """Return the sum over nobody; refuses weights that do not fit."""
        self.network.put(w)
        return np.zeros(self.shape)

    def _trained(self, w: Array, inputs: Any, targets: Any) -> Array:
        """Return the update of one user."""
        network = self.network
        network.put(w)
        first = network.start()
        rows = len(_first(targets))
        size = rows if self.batch == 0 else min(self.batch, rows)
        for step in range(self.steps):
            at = (torch.arange(size, device=network.device) + step * size) % rows
            x, y = mapped(inputs, partial(_rows, at)), mapped(targets, partial(_rows, at))
            losses = record_losses(network.loss, call(network.model, x), y, size)
            found = torch.autograd.grad(losses.mean(), network.parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, part in zip(network.parameters, found, strict=True):
                    if part is not None:
                        parameter.sub_(part, alpha=self.lr)
        return network.start() - first


def _own(inputs: Any, targets: Any, weights: Tensor | None) -> tuple[Any, Any]:
    """Return the records of the one user in a batch."""
    if weights is None or weights.ndim != 2:
        return inputs, targets
    there = weights[0] > 0
    return mapped(inputs, lambda x: x[0][there]), mapped(targets, lambda x: x[0][there])


def _rows(at: Tensor, x: Tensor) -> Tensor:
    return x[at]


def _first(value: Any) -> Tensor:
    while isinstance(value, tuple):
        value = value[0]
    found: Tensor = value
    return found


def _described(network: Network, kind: str, **told: Any) -> dict[str, Any]:
    return {"network": network.name, "hash": network.source, "kind": kind, **told}


HIDDEN = 32


def table_network(width: int, labels: int, hidden: int = HIDDEN, most: int = 1) -> Network:
    """Return a network of rows of ``width`` numbers, whose first weights are the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, labels))
    return Network(model, nn.CrossEntropyLoss(reduction="none"), name="table", most=most)


def table_examples(X: Any, y: NDArray[Any], owners: NDArray[np.int64] | None = None) -> Examples:
    """Return the rows of a table; with ``owners`` all rows of one are an example together."""
    rows = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float32)
    data = torch.from_numpy(rows), torch.from_numpy(np.asarray(y, dtype=np.int64))
    if owners is None:
        return Examples(data)
    return Examples(data, users=owners, records_per_user=int(np.bincount(owners).max()))


def probabilities(network: Network, w: NDArray[np.float64], X: Any) -> NDArray[np.float64]:
    """Return each label's probability for public rows."""
    rows = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float32)
    found: NDArray[np.float64] = torch.from_numpy(network.outputs(rows, w)).double().softmax(1).numpy()
    return found
