"""Train a model by DP-AGD: a noisy line search decides how much budget each gradient gets.

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
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from farthing import validate
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import Limited, Pricing
from farthing.linear.methods.dpagd import Lengths
from farthing.linear.methods.dpagd_menu import of_menu, on_menu, sold
from farthing.noise.summing import Sum
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
from farthing.torch.gradients.plain import Plain
from farthing.torch.gradients.tape import leaves, mapped
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

    A batch is read once for all candidates. A float32 product over a batch of another size rounds an
    example's loss otherwise, by about 1e-7; over all examples that is more than the slack of `NoisyMax`,
    2⁻¹⁴ of a bound (`farthing.noise.summing`). So losses are computed in float64, where n such errors are
    within the slack for n <= 2³⁰; with ``double=False``, for models that do not compute in float64
    (`in_double`), one example at a time, where a loss depends on its example alone.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    layout: Layout
    physical_batch_size: int | None = None
    isolated: Isolation | None = None
    penalty: float = 0.0
    double: bool = True
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Batch, w: ModelRay, bound: ClipValue) -> Array:
        with Plain(self.model).running(), Wall(self.model, self.loss):
            return self._sum(records, w, bound)

    @torch.no_grad()
    def _sum(self, records: Batch, w: ModelRay, bound: ClipValue) -> Array:
        named = dict(self.model.named_parameters())
        weights = {name: self._fine(p) for name, p in (named | dict(self.model.named_buffers())).items()}
        device = next(iter(named.values())).device
        direction = torch.as_tensor(w.direction, dtype=torch.float64, device=device)
        along = dict(zip(self.layout.names, self.layout.views(direction), strict=True))
        total = Sum(len(records), (len(w.steps),))
        rows = self.physical_batch_size if self.double else 1
        for inputs, targets, present in records.physical_batches(rows):
            given, wanted = mapped((inputs, targets), self._fine)
            scores = []
            for step in w.steps.tolist():
                moved = {
                    name: weights[name] - (step * away).to(weights[name].dtype)
                    for name, away in along.items()
                }
                scores.append(self._losses(weights | moved, given, wanted, present).double())
            terms = bound.apply(-torch.stack(scores, 1).cpu().numpy())
            for place in range(0, len(terms), total.rows):
                part = terms[place : place + total.rows]
                total.add(part.sum(axis=0), len(part))
        if not self.penalty:
            return total.value
        now = _weights(self.model, self.layout)
        squares = np.array([np.sum((now - step * w.direction) ** 2) for step in w.steps])
        return np.asarray(total.value - self.penalty / 2 * squares)

    def _fine(self, tensor: Tensor) -> Tensor:
        return tensor.double() if self.double and tensor.is_floating_point() else tensor

    def in_double(self, examples: Examples) -> bool:
        """Return whether the model computes losses in float64 throughout, as one made-up example shows."""
        inputs, targets, present = examples.made_up_batch()
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        weights = {name: self._fine(p) for name, p in named.items()}
        seen = _Dtypes()  # type: ignore[no-untyped-call]
        try:
            with torch.no_grad(), Plain(self.model).running(), Wall(self.model, self.loss), seen:
                given, wanted = mapped((inputs, targets), self._fine)
                self._losses(weights, given, wanted, present)
        except Exception:  # its own tensors or casts are in float32
            return False
        return not seen.coarse

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
    """Take steps until the budget is spent; it pays for ``splits`` rounds if no gradient is bought again.

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
    scores = RayLosses(model, loss, sums.layout, physical_batch_size, sums.isolation, shrinks)
    with apart(device):
        scores = replace(scores, double=scores.in_double(examples))
    losses = OwnRandomness(scores, device, own)
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


class _Dtypes(TorchDispatchMode):
    """A mode that notes whether any operation gives numbers coarser than float64."""

    coarse = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:  # which computes nothing
            self.coarse |= any(t.is_floating_point() and t.dtype is not torch.float64 for t in leaves(out))
        return out


def _weights(model: nn.Module, layout: Layout) -> Array:
    """Return the trained weights, end to end."""
    named = dict(model.named_parameters())
    flat = torch.cat([named[name].detach().flatten().double().cpu() for name in layout.names])
    return np.asarray(flat.numpy())


def _called(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _flat(value: Any) -> Any:
    """Return users and their records as one batch of records."""
    return tuple(_flat(part) for part in value) if isinstance(value, tuple) else value.flatten(0, 1)
