"""Define the messages of one round, the server's question and a client's upload, and their sum.

>>> uploads = [Reply(np.array([2.0]), 4.0, 1.0), Reply(np.array([6.0]), 4.0, 9.0)]
>>> [round(float(combined(uploads, weights, alive=2).mean[0]), 3) for weights in ("records", "precision")]
[1.0, 0.6]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.federated.terms import Weights, weight_of
from farthing.queries.query import Contribution, Receipt

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """The server's question of one round.

    Attributes
    ----------
    round : int
        Its number, from 1 on.
    contribution : Contribution
        What is summed over records: a gradient, above all.
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
        The number of records that it holds on average.
    variance : float
        The variance of its noise on each coordinate.
    receipt : Receipt or None
        The charge to the client's own ledger; None where it is simulated without one.
    earlier : tuple of Receipt
        The charges before it, where the upload is made of several answers (`LocalSteps`).

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
    """The uploads of one round, added up; all of it is public.

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
        The charges, where the clients have ledgers of their own.

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
        """Return the noisy mean contribution of a record."""
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
