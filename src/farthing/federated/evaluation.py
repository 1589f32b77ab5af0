"""Evaluate weights on the clients' own records, as a noisy answer that is charged.

A loss or an accuracy on private records is a release. Here it is a query: every record contributes two
numbers, its loss up to a cap (over the cap) and 1 if its label is predicted, scaled so that their norm is
within the clipping norm. For a user or a party protected as a whole they are means over its records. The sum
uses the terms that clients were invited on: the same draw, noise multiplier and price as a round of training.

**Guarantee.** The sum has terms within a clipping norm, under the mechanism of the terms: the event of one
round, under each budget's adjacency, unit and observer, charged by the client's own ledger before it is
computed (`Ledger.ask`). So an evaluation costs a round. A guard computes each record at a random position
(`farthing.data.weighted`, `farthing.torch.training.records`), because a predicted label may depend on a last
bit.

>>> import farthing as ft
>>> from farthing.linear.losses import logistic
>>> from farthing.linear.problem import Problem
>>> X = np.random.default_rng(0).uniform(size=(20_000, 2))
>>> clients = ft.federated.Simulated.split(X, (X[:, 0] > 0.5) * 1.0, clients=4, budgets=ft.Budget(2.0, 1e-6))
>>> clients.invite(ft.federated.Invitation(1.0, rounds=10))
>>> w = np.array([20.0, 0.0]), np.array(-10.0)
>>> found = evaluate_clients(clients, Problem(logistic, 20_000, 2, unit=False), w)
>>> 0.98 < found.accuracy < 1.02, found.deviation < 0.003, int(clients.left[0])
(True, True, 9)
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features
from farthing.federated.protocol import Clients
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, Kind
from farthing.queries.query import Receipt

Array = NDArray[np.float64]

_LENGTH = math.sqrt(2)  # the largest norm of two numbers from 0 to 1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A contribution with two numbers per record: its loss, up to a cap, and whether its label is predicted.

    Parameters
    ----------
    gradient : Contribution
        The gradient of the model's loss, of a table or a network, which also evaluates records.
    cap : float, default 4.0
        The largest loss that counts.
    clip : float, default 1.0
        The norm that terms are scaled to, the clipping norm of the invitation.

    Raises
    ------
    InvalidValue
        For values that are not positive.

    Examples
    --------
    >>> from farthing.data.tables import Table
    >>> from farthing.linear.losses import logistic
    >>> evaluation = Evaluation(LinearGradient(logistic, Features(1)))
    >>> table = Table(np.array([[1.0], [-1.0]]), np.array([1.0, 1.0]))
    >>> np.round(evaluation.bounded_sum(table, np.array([9.0, 0.0]), ClipNorm(1.0)), 3)
    array([0.707, 0.707])
    """

    gradient: Any
    cap: float = 4.0
    clip: float = 1.0
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)
    shape: ClassVar[tuple[int, ...]] = (2,)

    def __post_init__(self) -> None:
        validate.positive(cap=self.cap)
        validate.positive(clip=self.clip)

    @property
    def most(self) -> float:
        """Return the largest number of records for which the rounding bound of a sum holds."""
        return float(getattr(self.gradient, "most", math.inf))

    @property
    def described(self) -> dict[str, Any] | None:
        """Return the fields of a coordinator's message that asks for it, for networks."""
        of = getattr(self.gradient, "described", None)
        return None if of is None else {**of, "kind": "evaluation", "cap": self.cap, "clip": self.clip}

    def bounded_sum(self, records: Any, w: Any, bound: ClipNorm) -> Array:
        """Return the sum over records of both numbers, in clipping norms over √2."""
        total = Sum(max(1, len(records)), self.shape)
        for losses, hits, there in self.gradient.judged(records, w):
            with np.errstate(invalid="ignore"):
                rows = np.stack([np.clip(losses, 0.0, self.cap) / self.cap, hits], axis=1)
            terms = bound.apply(rows * (self.clip / _LENGTH))
            total.add((terms * there[:, None]).sum(axis=0), len(terms))
        return np.asarray(total.value)

    def zero(self, records: Any, w: Any, bound: Any) -> Array:
        """Return the sum over no records; refuse weights of the wrong shape."""
        self.gradient.judge_nobody(w)
        return np.zeros(self.shape)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Loss and accuracy on the clients' own records, with noise.

    Attributes
    ----------
    loss : float
        The mean of the capped losses.
    accuracy : float
        The fraction of records whose label is predicted; noise may move it below 0 or above 1.
    deviation : float
        The standard deviation of the noise on the accuracy; that on the loss is ``cap`` times it.
    clients : int
        The number of clients that answered.
    receipts : tuple of Receipt
        Their charges, if they have ledgers.

    Examples
    --------
    >>> str(Evaluated(0.41, 0.8312, 0.012, 3))
    'accuracy 83.1 % ± 1.2 %, loss 0.41, of 3 clients'
    """

    loss: float
    accuracy: float
    deviation: float
    clients: int
    receipts: tuple[Receipt, ...] = ()

    def __str__(self) -> str:
        spread = f"{100 * self.accuracy:.1f} % ± {100 * self.deviation:.1f} %"
        return f"accuracy {spread}, loss {self.loss:.3g}, of {self.clients} clients"


def evaluate_clients(clients: Clients, trained: Any, w: Any, *, cap: float = 4.0) -> Evaluated:
    """Evaluate weights on the clients' own records; this costs each client a round.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties that a training method has invited.
    trained : Network or Problem
        The network, or the linear problem of a table.
    w : object
        The weights, as in a method's `Step.w`.
    cap : float, default 4.0
        The largest loss of a record that counts.

    Returns
    -------
    Evaluated
        The noisy mean loss and accuracy, with their noise.

    Raises
    ------
    BudgetSpent
        If no client can afford a round.
    Unsupported
        If no party's policy allows evaluations.

    Notes
    -----
    The module's docstring states the guarantee. Clients with a clipping norm below that of the first client
    count less.

    Examples
    --------
    >>> import farthing as ft
    >>> import torch
    >>> x = torch.randn(300, 4)
    >>> network = ft.torch.Network(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> clients = ft.federated.Simulated.split(
    ...     ft.torch.Examples((x, (x[:, 0] > 0).long())), clients=3, budgets=ft.Budget(8.0, 1e-5)
    ... )
    >>> training = ft.federated.fedsgd(clients, network, rounds=5)
    >>> step = next(training)
    >>> ft.federated.evaluate_clients(clients, network, step.w).clients, clients.left.tolist()
    (3, [3, 3, 3])
    """
    gradient, at = _flat(trained, w)
    clip = clients.terms(0).bound.clip
    got = clients.ask(Evaluation(gradient, cap, clip), at)
    loss, accuracy = (_LENGTH / clip * got.mean).tolist()
    deviation = _LENGTH / clip * math.sqrt(got.variance)
    return Evaluated(cap * loss, accuracy, deviation, got.count, got.receipts)


def _flat(trained: Any, w: Any) -> tuple[Any, Array]:
    """Return the gradient that evaluates records, and the weights in the form that clients expect."""
    if not isinstance(trained, Problem):
        return trained.gradient, w
    u, constant = (np.asarray(part, dtype=np.float64) for part in w)
    return LinearGradient(trained.loss, Features(trained.width)), np.concatenate([u, constant[None]])
