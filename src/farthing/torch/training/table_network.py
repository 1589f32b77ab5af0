"""Make a small network for the rows of a table: one hidden layer, with public weights to begin with.

>>> network = table_network(width=3, labels=2, hidden=4)
>>> network.size, bool((network.start() == table_network(3, 2, 4).start()).all())
(26, True)
>>> probabilities(network, network.start(), np.zeros((5, 3))).shape
(5, 2)
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from farthing.torch.training.network import Network
from farthing.torch.training.records import Examples

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
