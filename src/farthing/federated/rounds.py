"""Define the messages of one round, the sum of its uploads, local steps, and the forecast of an invitation.

>>> uploads = [Reply(np.array([2.0]), 4.0, 1.0), Reply(np.array([6.0]), 4.0, 9.0)]
>>> [round(float(combined(uploads, weights, alive=2).mean[0]), 3) for weights in ("records", "precision")]
[1.0, 0.6]

`LocalSteps` are several private steps at a client before it uploads: FedAvg and FedProx with local DP-SGD,
McMahan et al. 2017, Algorithm 1 (ClientUpdate), and Li et al. 2020, Algorithm 2, whose proximal term μ/2 |w -
w₀|² keeps local weights near the server's. Every local gradient is an answer of the client's ledger, under
the terms of the invitation: ``steps`` of them are charged in a round, one by one, each before it is computed.
The update w_k - w₀ depends on those answers and on public numbers only.

**Guarantee of local steps.** The price is that of the answers that were given: adaptive composition of one
fixed query (which the terms promise), under the budget's adjacency, unit and observer; the update is
post-processing. It needs local trust: the client acts on its own answers, so its own noise must suffice. A
client with fewer answers left than ``steps`` takes the remaining ones.

An upload is the update times the expected number of records, so that the server's weights have the same
meaning as for gradients: by records (FedAvg's n_k/n), plain, or by precision.

>>> local = LocalSteps(None, steps=3, lr=0.5)
>>> local.run(lambda w: w, np.array([8.0]), left=2)  # a loss of w²/2, and two answers left
(array([-6.]), 2)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import BudgetSpent, Unsupported
from farthing.federated.terms import Invitation, Terms, Trust, Weights, weight_of, weights_under
from farthing.queries.query import Contribution, Receipt

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """The server's message of one round.

    Attributes
    ----------
    round : int
        The number of the round, from 1 on.
    contribution : Contribution
        The function that is summed over records, usually a gradient.
    w : object
        The parameters, which are public.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.Ask(round=1, contribution=None, w=[0.0, 0.0]).round
    1
    """

    round: int
    contribution: Contribution
    w: Any


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A client's upload.

    Attributes
    ----------
    value : ndarray
        The noisy sum of clipped contributions.
    expected : float
        The expected number of records in it.
    variance : float
        The variance of its noise on each coordinate.
    receipt : Receipt or None
        The charge to the client's ledger; None if it is simulated without one.
    earlier : tuple of Receipt
        The earlier charges of an upload with several answers (`LocalSteps`).

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> ft.federated.Reply(value=np.zeros(2), expected=10.0, variance=4.0, receipt=None).expected
    10.0
    """

    value: Array
    expected: float
    variance: float
    receipt: Receipt | None = None
    earlier: tuple[Receipt, ...] = ()

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """Return all charges, in order."""
        return self.earlier if self.receipt is None else (*self.earlier, self.receipt)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The sum of the uploads of one round; all of it is public.

    Attributes
    ----------
    total : ndarray
        Σ weight · upload.
    divisor : float
        Σ weight · expected records.
    count : int
        The number of clients that took part.
    alive : int
        The number of clients that can afford another round.
    variance : float
        The variance of the noise on each coordinate of `mean`.
    receipts : tuple of Receipt
        The charges, if the clients have ledgers.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> ft.federated.Answers(np.array([3.0, 1.0]), 2.0, count=2, alive=2, variance=0.1).mean
    array([1.5, 0.5])
    """

    total: Array
    divisor: float
    count: int
    alive: int
    variance: float
    receipts: tuple[Receipt, ...] = ()

    @property
    def mean(self) -> Array:
        """Return the noisy mean contribution per record."""
        return self.total / self.divisor


def combined(replies: Sequence[Reply], weights: Weights, alive: int) -> Answers:
    """Return the weighted sum of the uploads of a round."""
    expected, variance = (np.array([getattr(r, name) for r in replies]) for name in ("expected", "variance"))
    weight = weight_of(weights, expected, variance)
    total = np.tensordot(weight, np.array([reply.value for reply in replies]), axes=1)
    divisor = float(weight @ expected)
    noise = float(np.square(weight) @ variance) / divisor**2
    receipts = tuple(receipt for reply in replies for receipt in reply.receipts)
    return Answers(total, divisor, len(replies), alive, noise, receipts)


@dataclass(frozen=True, slots=True, eq=False)
class LocalSteps:
    """Several private gradient steps of a client in one round, in place of one gradient.

    Pass it to ``clients.ask`` like a contribution; `Answers.mean` is then the mean update.

    Parameters
    ----------
    gradient : Contribution
        The contribution of every step.
    steps : int
        The number of steps in a round, and of answers that are charged.
    lr : float
        The local learning rate.
    proximal : float, default 0.0
        μ of FedProx, which pulls local weights back to the server's; 0 is FedAvg.

    Raises
    ------
    InvalidValue
        For values out of range.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.LocalSteps(None, steps=5, lr=0.1).steps
    5
    """

    gradient: Contribution
    steps: int
    lr: float
    proximal: float = 0.0
    honours: ClassVar[tuple[str, ...]] = ()  # not for queries: its gradients are queried one by one
    shape: ClassVar[None] = None

    def __post_init__(self) -> None:
        validate.count(steps=self.steps)
        validate.positive(lr=self.lr)
        validate.non_negative(proximal=self.proximal)

    @property
    def described(self) -> dict[str, Any]:
        """Return the fields of a message that asks for it."""
        own = {"kind": "steps", "steps": self.steps, "lr": self.lr, "proximal": self.proximal}
        return {**getattr(self.gradient, "described", {}), **own}

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Any:
        """Refuse: an update consists of several answers."""
        raise Unsupported("local steps are several answers, not one sum: ask clients, not a ledger")

    def run(self, ask: Callable[[Array], Array], w: Array, left: int) -> tuple[Array, int]:
        """Return the update w_k - w₀, and the number of its answers.

        ``ask`` returns the noisy mean gradient at given weights. Weights are float32 values, as in a model.
        """
        local, done = w, 0
        for _ in range(min(self.steps, left)):
            try:
                mean = ask(local)
            except BudgetSpent:  # another user of the ledger spent the rest
                if not done:
                    raise
                break
            local, done = rounded(local - self.lr * (mean + self.proximal * (local - w))), done + 1
        return local - w, done

    def upload(self, terms: Terms, update: Array, taken: int) -> tuple[Array, float]:
        """Return an upload, and the variance of the noise that its steps added to each coordinate."""
        return terms.expected * update, self.lr**2 * taken * terms.variance


def rounded(w: Any) -> Array:
    """Return weights as the float32 values of models and messages."""
    found: Array = np.asarray(w, dtype=np.float32).astype(np.float64)
    return found


def refuse_shares(terms: Iterable[Terms]) -> None:
    """Refuse local steps if a client's own noise does not suffice."""
    if any(term.survivors > 1 for term in terms):
        raise Unsupported(
            "local steps need local trust: a client acts on its own answers, so its own noise has to suffice"
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of an invitation, from public numbers.

    Attributes
    ----------
    deviation : float
        The standard deviation of the noise on the first round's mean.
    rounds : int
        The rounds until the last client leaves.

    Examples
    --------
    >>> import farthing as ft
    >>> x, y = [[1.0]] * 20, [1.0] * 20
    >>> clients = ft.federated.Simulated.split(x, y, clients=2, budgets=ft.Budget(1.0, 1e-6))
    >>> clients.forecast(ft.federated.Invitation(1.0, rounds=7)).rounds
    7
    """

    deviation: float
    rounds: int


def forecast_of(invitation: Invitation, weights: Weights, terms: Sequence[Terms], which: Any) -> Forecast:
    """Return the forecast for clients whose terms are ``terms[which]``."""
    afford = np.array([term.rounds > 0 for term in terms])[which]
    expected, variance = (
        np.array([getattr(term, name) for term in terms], dtype=np.float64)[which][afford]
        for name in ("expected", "variance")
    )
    if not afford.any():
        raise BudgetSpent(f"not even one round fits the budget of any of {len(afford)} clients")
    weight = weight_of(weights_under(invitation.trust, weights), expected, variance)
    noise = float(np.square(weight) @ variance)
    if invitation.trust is Trust.TRUSTED:
        noise = variance_of_trusted(invitation, terms[0])
    return Forecast(math.sqrt(noise) / float(weight @ expected), max(term.rounds for term in terms))


def variance_of_trusted(invitation: Invitation, terms: Terms) -> float:
    """Return the variance of the noise that a trusted aggregator adds to the sum."""
    assert invitation.noise_multiplier is not None
    return (invitation.noise_multiplier * invitation.clip_norm * terms.correlation) ** 2
