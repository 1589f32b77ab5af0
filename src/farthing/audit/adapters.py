"""Adapt mechanisms of other libraries to audits: Opacus, diffprivlib, OpenDP.

Each adapter returns a mechanism for `audit_mechanism` and, where the library states a guarantee, the claim.
The libraries use their own randomness, so a seeded stream does not make these audits repeatable. A library is
imported only when its adapter is used.

`audit_mechanism` takes mechanisms of diffprivlib and measurements of OpenDP as they are, too:

    laplace = diffprivlib.mechanisms.Laplace(epsilon=1, sensitivity=1)
    ft.audit_mechanism(laplace, (0.0, 1.0), diffprivlib_claim(laplace))
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import pld
from farthing.audit.auditing import Mechanism, each, repeated
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream
from farthing.queries.events import Event, GaussianEvent, PoissonEvent

Array = NDArray[np.float64]


def diffprivlib(mechanism: Any) -> Mechanism:
    """Return a diffprivlib mechanism, or one that is made for each world; the data is its argument."""

    def many(data: Any, runs: int, stream: Stream) -> Any:
        ready = hasattr(mechanism, "randomise") and not isinstance(mechanism, type)
        made = mechanism if ready else mechanism()
        if not callable(getattr(made, "randomise", None)):
            raise InvalidValue(f"mechanism must be one of diffprivlib, got {type(made).__name__}")
        return repeated(made)(data, runs, stream)

    return many


def diffprivlib_claim(mechanism: Any, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> Budget:
    """Return the claim of a diffprivlib mechanism, for data that differ by its sensitivity."""
    return Budget(float(mechanism.epsilon), float(getattr(mechanism, "delta", 0.0)), adjacency)


def opendp(measurement: Callable[[Any], Any]) -> Mechanism:
    """Return an OpenDP measurement as a mechanism; the data is its argument."""
    return each(lambda data, stream: measurement(data))


def opendp_claim(
    measurement: Any,
    distance: Any,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    delta: float | None = None,
) -> Budget:
    """Return the claim of an OpenDP measurement at input distance ``distance``: its privacy map, as a budget.

    A map to ε is used directly; one to a privacy profile or to ρ needs ``delta``.
    """
    cost = measurement.map(distance)
    if delta is None:
        return Budget(float(cost), 0.0, adjacency)
    if hasattr(cost, "epsilon"):
        return Budget(float(cost.epsilon(delta)), delta, adjacency)
    from farthing.accounting import zcdp

    return Budget(zcdp.epsilon(float(cost), validate.probability(delta=delta)), delta, adjacency)


@dataclass(frozen=True, slots=True, eq=False)
class OpacusStep:
    """Opacus's training steps as a mechanism: clipped gradients of ``model()``, summed, with its noise.

    The data is a pair of tensors (x, y), for which the model computes ``loss(model(x), y)``, one term per
    record. With a ``rate`` each record is drawn by a coin of the audit's stream. A run's output is the noisy
    sum of gradients, before any division.
    """

    model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    noise_multiplier: float
    clip_norm: float = 1.0
    sampling_rate: float | None = None

    def __call__(self, data: tuple[Any, Any], runs: int, stream: Stream) -> Array:
        import torch

        opacus: Any = import_module("opacus")
        module = opacus.GradSampleModule(self.model(), loss_reduction="sum")
        plain = torch.optim.SGD(module.parameters(), lr=0.0)
        optimizer = opacus.optimizers.DPOptimizer(
            plain,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.clip_norm,
            expected_batch_size=1,
            loss_reduction="sum",
        )
        x, y = data
        outputs = []
        for _ in range(runs):
            came = np.arange(len(x))
            if self.sampling_rate is not None:
                came = stream.poisson_indices(self.sampling_rate, len(x))
            optimizer.zero_grad()
            self.loss(module(x[came]), y[came]).backward()
            optimizer.pre_step()
            parts = [parameter.grad.detach().flatten() for parameter in module.parameters()]
            outputs.append(torch.cat(parts).to(torch.float64).numpy())
        return np.array(outputs)

    def claim(self, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> Budget:
        """Return the cost of one such step, assuming that its noise is exactly Gaussian."""
        event: Event = GaussianEvent(self.noise_multiplier)
        if self.sampling_rate is not None:
            event = PoissonEvent(self.sampling_rate, event)
        return Budget(pld.epsilon(event, delta, adjacency), delta, adjacency)
