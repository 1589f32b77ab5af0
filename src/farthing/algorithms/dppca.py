"""Principal components from one noisy matrix of second moments.

"Analyze Gauss" (Dwork, Talwar, Thakurta & Zhang 2014, Algorithm 1), AdaDP's DpPCA: rows are clipped, XᵀX is
released once with symmetric Gaussian noise, and its eigenvectors are post-processing. One answer, which is
μ-GDP: the matrix moves by at most clip² when a record comes or goes and √2 clip² when it is replaced
(`ClipOuter`). Columns are not centred by their own means, which would be another release.

>>> import numpy as np
>>> import farthing as ft
>>> from farthing.tables import Features, Table
>>> X = np.random.default_rng(0).normal(size=(5000, 3)) * [1.0, 0.1, 0.1]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(X, unit=True))
>>> (step,) = dppca(ledger, Features(3, intercept=0.0))
>>> step.w.shape, bool(abs(step.w[0, 0]) > 0.5 * 5000)
((3, 3), True)
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from farthing.algorithms.spending import gaussian_mu, noise_of
from farthing.bounds import ClipOuter
from farthing.ledger import Ledger
from farthing.losses import Gram
from farthing.mechanisms import SymmetricGaussian
from farthing.query import Query, Step
from farthing.samplers import Everyone
from farthing.tables import Features


def dppca(ledger: Ledger, features: Features, *, clip: float = 1.0) -> Iterator[Step]:
    """One step: the noisy second moments Σ z zᵀ, rows z longer than ``clip`` being shrunk onto it."""
    bound = ClipOuter(clip)
    noise = noise_of(bound, ledger.budget.adjacency, gaussian_mu(ledger))
    query = Query(Everyone(), Gram(features), bound, SymmetricGaussian(noise))
    answer = ledger.ask(query)
    yield Step(1, answer.value, (answer.receipt,))


def components(moments: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The leading eigenvalues and eigenvectors (one a row), each with its largest entry positive."""
    values, vectors = np.linalg.eigh(moments)
    values, rows = values[::-1][:count], vectors.T[::-1][:count]
    largest = rows[np.arange(count), np.abs(rows).argmax(axis=1)]
    return values, rows * np.where(largest < 0, -1.0, 1.0)[:, None]
