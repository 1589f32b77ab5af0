"""Train networks over clients by FedSGD, FedAvg, FedProx and DP-FedAvg, each client within its own budget.

The three methods differ in the contribution that a client clips, which decides whom the guarantee protects.

`fedsgd`     One noisy sum of clipped per-example gradients a round: A-DDP (Cheng et al. 2020) and SGD2 for
             any model. Noise may be local, distributed or added by an aggregator.
`fedavg`     Several local steps of DP-SGD a round (McMahan et al. 2017, Algorithm 1; with ``proximal`` Li et
             al. 2020, Algorithm 2); each step is an answer of the client's ledger, and the update is
             post-processing. Noise is local.
`dp_fedavg`  Local training without noise, whose whole update is clipped and noised (McMahan et al. 2018,
             Algorithm 1, flat clipping): it protects a user, or a party, with all records. With
             ``sampling_rate`` a party draws which of its users, or whether the party itself, take part in a
             round, and sends noise in any case. In the paper the server draws and knows the result; here
             only the party does.

The server applies the mean update by any rule of `farthing.federated.methods.server` (Reddi et al. 2021).
Uploads of clients with different budgets are weighted by their precision.

**Guarantee.** Each client has its own (ε, δ) for one record, or with `dp_fedavg` for one user or party, under
its adjacency, by the plan that its ledger promises: tight accounting of one unchanging query
(`farthing.accounting.pld`), amplified if the client draws records, users or itself and no other party sees
the draw. Under local noise it holds against the server. Under distributed noise it holds against an observer
who sees the sums and colludes with all but ``survivors`` of the clients that answered: the honest clients'
shares make up the whole noise, and the colluders' shares, which the observer knows, change nothing
(`farthing.federated.noise.Share`). A client leaves before the first round that does not fit its budget.

>>> from farthing.budget import Budget
>>> from farthing.federated.simulated import Simulated
>>> from farthing.linear.losses import LinearGradient, logistic
>>> from farthing.data.tables import Features
>>> from farthing.queries.query import run
>>> class Linear:  # in place of a farthing.torch.Network
...     gradient = LinearGradient(logistic, Features(2))
...     def start(self):
...         return np.zeros(3)
>>> X = np.random.default_rng(0).uniform(size=(4000, 2))
>>> clients = Simulated.split(X, (X[:, 0] > X[:, 1]) * 1.0, clients=4, budgets=Budget(1.0, 1e-6))
>>> trained = run(fedsgd(clients, Linear(), rounds=20, sampling_rate=0.2, lr=2.0))
>>> trained.steps, bool(trained.w[0] > 0 > trained.w[1])
(20, True)
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting.correlated import best_exponent
from farthing.budget import Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.methods.server import ServerOptimizer
from farthing.federated.protocol import Clients, Invitation, Trust, Weights, under
from farthing.federated.rounds import LocalSteps, rounded
from farthing.queries.correlated import Cyclic
from farthing.queries.query import Contribution, Step, until_spent
from farthing.queries.samplers import Everyone, Poisson

Array = NDArray[np.float64]
Rate = float | Callable[[int], float]


class FlatModel(Protocol):
    """A model with flat weights that methods train, such as `farthing.torch.Network`."""

    @property
    def gradient(self) -> Contribution:
        """Return the contribution whose values are the model's gradients."""

    def start(self) -> Array:
        """Return the initial weights, which are public."""


class UpdatedModel(FlatModel, Protocol):
    """A model that a client can also train locally, for whole updates."""

    def update(self, steps: int, lr: float) -> Contribution:
        """Return the contribution whose values are updates of ``steps`` local steps."""


@until_spent
def fedsgd(
    clients: Clients,
    network: FlatModel,
    *,
    rounds: int = 200,
    clip_norm: float = 1.0,
    sampling_rate: float = 0.1,
    lr: Rate = 0.5,
    server: str = "momentum",
    weights: Weights = Weights.PRECISION,
    noise_multiplier: float | None = None,
    bands: int = 1,
    trust: Trust = Trust.LOCAL,
    survivors: int | None = None,
) -> Iterator[Step]:
    """Train a network by one noisy sum of clipped gradients per client and round, until budgets are spent.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    network : Network
        The model at flat weights, and its gradient (`farthing.torch.Network`).
    rounds : int, default 200
        The number of rounds for which the noise is calibrated.
    clip_norm : float, default 1.0
        The norm at which one record's gradient is clipped.
    sampling_rate : float, default 0.1
        The probability that a record is in its client's batch, which the client draws; 1.0 for all records.
    lr : float or callable, default 0.5
        The server's learning rate, or a function of t = 1, 2, ….
    server : {"sgd", "momentum", "adam", "yogi"}, default "momentum"
        The server's optimiser.
    weights : Weights, default "precision"
        The weights of uploads under local noise.
    noise_multiplier : float, optional
        The noise divided by the clipping norm, in place of the least for ``rounds``.
    bands : int, default 1
        The number of rounds over which noise is correlated. Above 1, records take turns in as many groups
        (`farthing.Cyclic`) and later noise cancels earlier noise. `farthing.choose_bands` chooses the number.
    trust : Trust, default "local"
        The party that adds the noise.
    survivors : int, optional
        The least number of honest clients in a round under distributed trust; by default all clients.

    Returns
    -------
    Iterator of Step
        One step per round, with flat weights.

    Notes
    -----
    The module's docstring states the guarantee.

    Examples
    --------
    >>> import farthing as ft
    >>> import torch
    >>> x = torch.randn(300, 4)
    >>> network = ft.torch.Network(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> clients = ft.federated.Simulated.split(
    ...     ft.torch.Examples((x, (x[:, 0] > 0).long())), clients=3, budgets=ft.Budget(1.0, 1e-5)
    ... )
    >>> ft.run(ft.federated.fedsgd(clients, network, rounds=5, trust="distributed")).steps
    5
    """
    invitation = Invitation(clip_norm, _draw(sampling_rate), rounds, noise_multiplier)
    if validate.count(bands=bands) > 1:
        if bands > (most := int(1 / sampling_rate + 2.0**-30)):
            raise InvalidValue(
                f"bands must be at most {most} at the sampling rate {sampling_rate}: records take turns in "
                f"as many groups, got {bands}"
            )
        draw, exponent = Cyclic(sampling_rate, bands), best_exponent(bands, rounds)
        invitation = replace(invitation, draw=draw, bands=bands, exponent=exponent)
    clients.invite(under(clients, invitation, trust, survivors), weights)
    yield from _rounds(clients, network.gradient, network.start(), ServerOptimizer(server, lr), sign=-1.0)


@until_spent
def fedavg(
    clients: Clients,
    network: FlatModel,
    *,
    rounds: int = 50,
    local_steps: int = 4,
    local_lr: float = 0.5,
    proximal: float = 0.0,
    clip_norm: float = 1.0,
    sampling_rate: float = 0.1,
    lr: Rate = 1.0,
    server: str = "sgd",
    weights: Weights = Weights.PRECISION,
    noise_multiplier: float | None = None,
) -> Iterator[Step]:
    """Train a network by updates of several local steps of DP-SGD, until all budgets are spent.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties; they are invited here.
    network : Network
        The model at flat weights, and its gradient (`farthing.torch.Network`).
    rounds : int, default 50
        The number of rounds for which the noise is calibrated.
    local_steps : int, default 4
        The steps of DP-SGD that a client takes in a round; each is charged as an answer.
    local_lr : float, default 0.5
        The learning rate of local steps.
    proximal : float, default 0.0
        μ of FedProx, which pulls local weights back to the server's; 0 is FedAvg.
    clip_norm : float, default 1.0
        The norm at which one record's gradient is clipped.
    sampling_rate : float, default 0.1
        The probability that a record is in a local batch; 1.0 for all records.
    lr : float or callable, default 1.0
        The server's learning rate, or a function of t = 1, 2, ….
    server : {"sgd", "momentum", "adam", "yogi"}, default "sgd"
        The server's optimiser.
    weights : Weights, default "precision"
        The weights of updates: by precision, by records (FedAvg's n_k/n), or plain.
    noise_multiplier : float, optional
        The noise divided by the clipping norm, in place of the least for all local steps.

    Returns
    -------
    Iterator of Step
        One step per round, with flat weights.

    Notes
    -----
    The module's docstring states the guarantee.

    Examples
    --------
    >>> import farthing as ft
    >>> import torch
    >>> x = torch.randn(300, 4)
    >>> network = ft.torch.Network(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> clients = ft.federated.Simulated.split(
    ...     ft.torch.Examples((x, (x[:, 0] > 0).long())), clients=3, budgets=ft.Budget(1.0, 1e-5)
    ... )
    >>> ft.run(ft.federated.fedavg(clients, network, rounds=5, local_steps=2)).steps, clients.done.tolist()
    (5, [10, 10, 10])
    """
    local = LocalSteps(network.gradient, local_steps, local_lr, proximal)
    taken = rounds * local_steps
    clients.invite(Invitation(clip_norm, _draw(sampling_rate), taken, noise_multiplier), weights)
    yield from _rounds(clients, local, network.start(), ServerOptimizer(server, lr))


@until_spent
def dp_fedavg(
    clients: Clients,
    network: UpdatedModel,
    *,
    rounds: int = 50,
    local_steps: int = 4,
    local_lr: float = 0.5,
    clip_norm: float = 1.0,
    sampling_rate: float = 1.0,
    lr: Rate = 1.0,
    server: str = "sgd",
    weights: Weights = Weights.PRECISION,
    noise_multiplier: float | None = None,
    trust: Trust = Trust.LOCAL,
    survivors: int | None = None,
) -> Iterator[Step]:
    """Train a network by whole updates of users or parties, each clipped and noised as one.

    Parameters
    ----------
    clients : Clients
        Simulated clients or parties whose budgets protect a user or a party, and whose records are grouped by
        user or party (`farthing.torch.Examples` with ``users``); they are invited here.
    network : Network
        The model at flat weights, and its updates (`farthing.torch.Network`).
    rounds : int, default 50
        The number of rounds for which the noise is calibrated.
    local_steps : int, default 4
        The steps of plain gradient descent in an update.
    local_lr : float, default 0.5
        The learning rate of local steps.
    clip_norm : float, default 1.0
        The norm at which a whole update is clipped.
    sampling_rate : float, default 1.0
        The probability that a user, or a party, takes part in a round; each party draws for itself.
    lr : float or callable, default 1.0
        The server's learning rate, or a function of t = 1, 2, ….
    server : {"sgd", "momentum", "adam", "yogi"}, default "sgd"
        The server's optimiser.
    weights : Weights, default "precision"
        The weights of uploads under local noise.
    noise_multiplier : float, optional
        The noise divided by the clipping norm, in place of the least for ``rounds``.
    trust : Trust, default "local"
        The party that adds the noise.
    survivors : int, optional
        The least number of honest clients in a round under distributed trust; by default all clients.

    Returns
    -------
    Iterator of Step
        One step per round, with flat weights.

    Notes
    -----
    The module's docstring states the guarantee.

    Examples
    --------
    >>> import farthing as ft
    >>> import torch
    >>> x = torch.randn(300, 4)
    >>> network = ft.torch.Network(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(reduction="none"))
    >>> whose = torch.arange(300) // 100
    >>> records = ft.torch.Examples((x, (x[:, 0] > 0).long()), users=whose, records_per_user=100)
    >>> budget = ft.Budget(8.0, 1e-5, unit="party")
    >>> clients = ft.federated.Simulated.split(records, clients=3, budgets=budget)
    >>> ft.run(ft.federated.dp_fedavg(clients, network, rounds=5)).steps
    5
    """
    units = Counter(budget.unit for budget in clients.budgets)
    (unit, _), *others = units.most_common()  # of parties, those with another have no terms and are left out
    if unit is Unit.RECORD or (others and others[0][1] == units[unit]):
        raise Unsupported(
            "whole updates protect users or parties: give every budget unit='user', or unit='party', got "
            + ", ".join(sorted(units))
        )
    invitation = Invitation(clip_norm, _draw(sampling_rate), rounds, noise_multiplier)
    invitation = under(clients, replace(invitation, clipped=unit), trust, survivors)
    clients.invite(invitation, weights)
    update = network.update(local_steps, local_lr)
    yield from _rounds(clients, update, network.start(), ServerOptimizer(server, lr))


def _draw(sampling_rate: float) -> Everyone | Poisson:
    """Return the sampler of a round, which the client runs itself."""
    return Everyone() if sampling_rate == 1.0 else Poisson(sampling_rate)


def _rounds(
    clients: Clients, asked: Contribution, start: Array, follow: ServerOptimizer, sign: float = 1.0
) -> Iterator[Step]:
    """Yield a step per round, each applying the mean answer times ``sign`` (-1 for a gradient)."""
    w = rounded(start)
    for t in itertools.count(1):
        got = clients.ask(asked, w)
        w = rounded(follow.step(w, sign * got.mean, got.variance))
        yield Step(t, w, got.receipts)
