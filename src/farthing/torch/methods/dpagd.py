"""DP-AGD for a model: gradients bought as exactly as a noisy line search says they must be.

Lee & Kifer 2018, Algorithm 2, as in `farthing.linear.methods.dpagd`, with a model's gradients and losses. A
round buys a noisy gradient of all examples, lets `NoisyMax` choose how far to go along it, and goes there.
Where no step helps, the memory of earlier directions is dropped, and after that the gradient is bought again
for a part γ of its price and averaged with the first.

Guarantee: zCDP composes fully adaptively up to a ρ fixed ahead (Whitehouse et al. 2023, Theorem 1), so a run
is (ε, δ)-DP whatever it chose on the way, under the ledger's adjacency. The ledger must have a `ZcdpFilter`.
Without a ``sampling_rate`` every gradient and every choice is that of all examples: nobody is drawn, and
nothing amplified. Networks want more rounds than a budget pays for in this way. With one each has a Poisson
batch of its own, through an `RdpFilter` or a menu made by `dpagd_menu`, as `farthing.linear.methods.dpagd`
says; AdaDP's authors compare with that kind (Xu et al. 2020, Section V), by a theorem that leaves the choices
out. For networks it is here to be compared with.

>>> import farthing as ft
>>> from farthing.accounting.filters import ZcdpFilter
>>> from farthing.torch.training.records import Examples
>>> model = torch.nn.Linear(2, 2)
>>> examples = Examples((torch.randn(2000, 2), torch.randint(2, (2000,))))
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=ZcdpFilter)
>>> loss = torch.nn.CrossEntropyLoss(reduction="none")
>>> len(list(dpagd(ledger, model, loss, examples, splits=3))) <= 3, ledger.share <= 1
(True, True)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from farthing import validate
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import Limited, Pricing
from farthing.linear.methods.dpagd import Lengths
from farthing.linear.methods.dpagd_menu import of_menu, on_menu, sold
from farthing.queries.bounds import ClipNorm, ClipValue, Kind
from farthing.queries.mechanisms import NoisyMax
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone
from farthing.torch.checks import overlap
from farthing.torch.checks.leftovers import Wall
from farthing.torch.gradients import isolation
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.layout import Layout
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.training.plan import checked
from farthing.torch.training.randomness import OwnRandomness, apart, foreign
from farthing.torch.training.records import Batch, Examples

Array = NDArray[np.float64]


class ModelRay(NamedTuple):
    """Candidates w - step · direction, w being the model's own weights."""

    direction: Array
    steps: Array


@dataclass(frozen=True, slots=True, eq=False)
class RayLosses:
    """-Σ loss at the candidates of a `ModelRay`, each term clipped (`ClipValue`), less penalty |w|²/2.

    A batch is read once for all candidates.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    layout: Layout
    physical_batch_size: int | None = None
    isolated: Isolation | None = None
    penalty: float = 0.0
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Batch, w: ModelRay, bound: ClipValue) -> Array:
        with Wall(self.model, self.loss):
            return self._sum(records, w, bound)

    @torch.no_grad()
    def _sum(self, records: Batch, w: ModelRay, bound: ClipValue) -> Array:
        weights = dict(self.model.named_parameters())
        device = next(iter(weights.values())).device
        direction = torch.as_tensor(w.direction, dtype=torch.float32, device=device)
        along = dict(zip(self.layout.names, self.layout.views(direction), strict=True))
        total = np.zeros(len(w.steps))
        for inputs, targets, present in records.physical_batches(self.physical_batch_size):
            scores = []
            for step in w.steps:
                moved = {
                    name: p - float(step) * along[name] if name in along else p for name, p in weights.items()
                }
                scores.append(self._losses(moved, inputs, targets, present))
            total += bound.apply(-torch.stack(scores, 1).double().cpu().numpy()).sum(axis=0)
        if self.penalty:
            start = _weights(self.model, self.layout)
            total -= self.penalty / 2 * np.array([np.sum((start - s * w.direction) ** 2) for s in w.steps])
        return total

    def _losses(
        self, weights: dict[str, Tensor], inputs: Any, targets: Any, present: Tensor | None
    ) -> Tensor:
        """Return one number an example: its own loss, or the sum over a user's records."""
        if present is None or present.ndim == 1:
            found = self._each(weights, inputs, targets)
            return found if present is None else torch.where(present > 0, found, 0.0)
        flat = [_flat(part) for part in (inputs, targets)]
        found = self._each(weights, *flat)
        return torch.where(present > 0, found.reshape(present.shape) * present, 0.0).sum(1)

    def _each(self, weights: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        """Return one loss a record."""
        if self.isolated is not None:
            return isolation.losses(self.isolated, self.model, self.loss, weights, inputs, targets)
        return self.loss(functional_call(self.model, weights, _called(inputs)), targets)


@until_spent
def dpagd(
    ledger: Ledger,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    examples: Examples,
    *,
    splits: float = 30.0,
    search: float = 0.2,
    growth: float | None = 0.1,
    clip_norm: float = 1.0,
    objective_clip: float = 4.0,
    grid: Lengths = Lengths(),  # noqa: B008  frozen
    momentum: float = 0.7,
    physical_batch_size: int | None = 512,
    route: str = "auto",
    sampling_rate: float | None = None,
    penalty: float = 0.0,
    records: int | None = None,
    rho: float | None = None,
    noise_multiplier: float | None = None,
) -> Iterator[Step]:
    """Steps until the budget is spent; ``splits`` is how many rounds it pays for if nothing is bought again.

    ``search`` is the part of a round that pays for choosing the step, ``growth`` is γ, ``clip_norm`` C_grad
    and ``objective_clip`` C_obj. ``route`` as for `farthing.torch.train`. The step's ``w`` is the model,
    moved in place. ``sampling_rate``, ``penalty`` and ``rho`` are those of `farthing.linear.methods.dpagd`; a
    penalty is on everything that is trained and needs ``records``, a public number of examples in place of
    the true one. ``noise_multiplier`` is the noise of the first gradient over ``clip_norm``, in place of
    ``splits``.
    """
    for name, part in (("momentum", momentum), ("search", search)):
        if not validate.non_negative(**{name: part}) < 1:
            raise InvalidValue(f"{name} must be below 1, got {part!r}")
    if validate.non_negative(penalty=penalty) and records is None:
        raise InvalidValue(
            "a penalty needs records, a public number of examples: how many there are is private"
        )
    shrinks = (
        penalty * validate.count(records=records or 1) * (1.0 if sampling_rate is None else sampling_rate)
    )
    pricing = Pricing.of(ledger.budget, sampling_rate, rho)
    menu = on_menu(ledger, sampling_rate)
    if not menu and not isinstance(ledger.filter, pricing.filter):
        raise InvalidValue(
            f"DP-AGD chooses its prices on the way: open the ledger with filter={pricing.filter.__name__} "
            f"(farthing.accounting.filters), not {type(ledger.filter).__name__}"
        )
    device = next(model.parameters()).device
    sums = Gradient(model, loss, physical_batch_size=physical_batch_size, route=route)
    with apart(device):
        examples = checked(sums, examples.on(device))
    overlap.remember(examples.data)
    door = Limited(ledger.over(examples), pricing)
    own = foreign(sums, examples)
    gradient = Query(Everyone(), OwnRandomness(sums, device, own), ClipNorm(clip_norm), TensorGaussian(1.0))
    low = ClipValue(-validate.positive(objective_clip=objective_clip), 0.0)
    losses = OwnRandomness(
        RayLosses(model, loss, sums.layout, physical_batch_size, sums.isolation, shrinks), device, own
    )
    choice = Query(Everyone(), losses, low, NoisyMax(1.0))
    if sampling_rate is not None and menu:
        exactness, search_price = of_menu(ledger, sampling_rate)
    else:
        if noise_multiplier is None:
            each = pricing.each([(gradient, 1 - search), (choice, validate.positive(search=search))], splits)
        else:
            each = pricing.rho_of(gradient, noise_multiplier) / (1 - search)
        exactness, search_price = (1 - search) * each, search * each
    choice = pricing.query(choice, search_price)
    growth = None if growth is None else validate.positive(growth=growth)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory, chosen, receipts = np.zeros(sums.layout.size), list[float](), []
    while True:
        sums.weights.refuse_changes()
        answer = door.ask(pricing.query(gradient, exactness))
        known = answer.value.double().cpu().numpy()
        receipts.append(answer.receipt)
        while True:
            direction = known + memory
            if shrinks:
                direction = direction + shrinks * _weights(model, sums.layout)
            unit = direction / max(float(np.linalg.norm(direction)), 1e-300)
            steps = grid.after(chosen)
            picked = door.ask(choice, ModelRay(unit, steps))
            receipts.append(picked.receipt)
            if picked.value > 0:
                break
            if np.any(memory):
                memory = np.zeros_like(memory)
                continue
            more = exactness if growth is None else growth * exactness
            again = door.ask(pricing.query(gradient, more))
            receipts.append(again.receipt)
            fresh = again.value.double().cpu().numpy()
            if growth is None:
                known = fresh
                continue
            known = (exactness * known + more * fresh) / (exactness + more)
            if sold(ledger, pricing.query(gradient, exactness + more)):
                exactness += more
        chosen.append(float(steps[picked.value]))
        moves = torch.as_tensor(chosen[-1] * unit, dtype=torch.float32, device=device)
        with torch.no_grad():
            for parameter, move in zip(trained, sums.layout.views(moves), strict=True):
                parameter.sub_(move.to(parameter.dtype))
        memory = momentum * direction
        yield Step(len(chosen), model, tuple(receipts))
        receipts = []


def _weights(model: nn.Module, layout: Layout) -> Array:
    """Return the trained weights, end to end."""
    named = dict(model.named_parameters())
    flat = torch.cat([named[name].detach().flatten().double().cpu() for name in layout.names])
    return np.asarray(flat.numpy())


def _called(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _flat(value: Any) -> Any:
    """Users and their records as one batch of records."""
    return tuple(_flat(part) for part in value) if isinstance(value, tuple) else value.flatten(0, 1)
