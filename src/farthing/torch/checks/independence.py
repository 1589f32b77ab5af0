"""Check on made-up examples that the output for one example does not depend on the others.

Two questions are asked of per-example gradients, by what is going to sum them:

* *Exchanges.* In batches of several sizes some examples are exchanged for others, mild or very unlike (10⁴
  times as large, negative, tiny, whole numbers far out), on the same seed: the gradients of those that stay
  must stay. Exchanged are those whose place has a 1 (then a 0) in its k-th binary digit, for every k: any two
  places differ in some digit, so that every place is seen to move no other one. In a batch of the size that
  training expects, a random half is exchanged, and losses must stay, and the sum of the gradients of those
  that stay.
* *Sizes.* In batches of 1 to 40, of 64, 128 and so on, as long as other sides of the model's tensors, or as
  large as expected, an example's loss and gradient must be those of the example alone, without random numbers
  (`Calm`), in training mode where that is the model's.

These are checks, not proofs: what mixes in larger batches only, or for one input in a million, passes. How
much is tried follows from the model's size, never from a clock, so that an answer can be had again.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.torch.checks.chance import RARE, SEEDS, AtQuantile
from farthing.torch.checks.leftovers import Wall
from farthing.torch.checks.probe import Range, Ranges, Source, brief, calm, close, operations
from farthing.torch.gradients.copies import Past
from farthing.torch.gradients.layout import Sketch, dense, real
from farthing.torch.gradients.tape import Loss, call, leaves, mapped, one, reseed

Rows = Callable[[Any, Any], Tensor]

_FIRST, _LARGEST = 4, 40
_OTHERS = (8, 33, 16, 7, 2)
_PLACES = (0, 1, 3, 6, 7, 15, 32, 39)  # whose gradient alone is looked at: the last of every size
_MOST = 4096  # examples of a batch of the expected size
_WHOLE = {"cpu": 3e9, "cuda": 2e13}  # multiply-adds of a batch of that size
_WORK = 4e9  # multiply-adds of one check, where not even the least takes more
_LARGE = 1e11  # multiply-adds of an example, beyond which a CPU is given one at a time
_CALLS = 4000  # of modules, likewise
_ROWS = 2**23  # numbers in the gradients of a batch
_UNMOVED = 1e-4  # relative: exchanged examples change no shape, so that hardly a digit may move
_PULLED = 1e-3  # relative: of a gradient that is added up over a batch
_SIDES = 24  # the most sizes that are tried because they are those of other sides
_SPOILT = Ranges(Range(math.nan))
_ALIKE = Ranges(Range(alike=True), Range(alike=True))
_WIDE = 30.0  # the largest inputs for comparisons between sizes, which round in different ways


class Mixed(Unsupported):
    """What a model computes for an example depends on its company."""


@dataclass
class Effort:
    """How much may still be tried; ``rows`` is the largest batch whose gradients are made."""

    work: float
    calls: float
    rows: int
    each: float
    modules: int

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> "Effort":
        """Return the effort that a model of this size allows."""
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        work = operations(model, inputs) / len(leaves((inputs,))[0]) / 2 + trained
        rows = min(_LARGEST, max(2, _ROWS // trained))
        return cls(_WORK, _CALLS, rows, 3 * work, 1 + sum(1 for _ in model.modules()))

    def affords(self, passes: int, size: int) -> bool:
        """Return whether so many passes with batches of this size can be had; they are then paid."""
        work, calls = passes * size * self.each, passes * self.modules
        if work > self.work or calls > self.calls:
            return False
        self.work, self.calls = self.work - work, self.calls - calls
        return True


@dataclass(eq=False)
class Company:
    """A model, its loss, made-up examples, and what gives their gradients."""

    model: nn.Module
    loss: Loss
    source: Source
    rows: Rows
    effort: Effort
    sketch: Sketch
    expected: int = 0  # how many examples the model is going to be given at once; 0: nobody knows
    spoilt: bool = False  # whether the model runs on inputs that are not numbers

    def __post_init__(self) -> None:
        self.wall = Wall(
            self.model, self.loss, everything=True
        )  # so that every pass begins with the same state

    @functools.cached_property
    def wild(self) -> Ranges:
        """The widest ranges on which the model runs; tried on a CPU, where a wrong index is harmless."""
        try:
            model = self.model if _on_cpu(self.model) else _beside(self.model)
        except Exception:  # a model that cannot be copied
            return Ranges()
        own, examples = self.source, 4 * _FIRST if self.effort.each < _LARGE else 1
        source = Source(mapped(own.inputs, Tensor.cpu), mapped(own.targets, Tensor.cpu), own.public)

        def runs(ranges: Ranges) -> bool:
            try:
                with self.wall:
                    losses(model, self.loss, *source.batch(examples, ranges=ranges))
            except Exception:  # whatever a model does not take
                return False
            return True

        self.spoilt = runs(_SPOILT)
        return source.wildest(runs)

    def exchanges(self) -> None:
        """Check that results of some examples do not change when the other examples are exchanged."""
        mild, first = Ranges(), min(_FIRST, self.effort.rows)
        pairs = [(mild, mild), (mild, self.wild), (self.wild, mild)]
        for at, (before, after) in enumerate(pairs):
            if at < 2 or self.effort.affords(6, first):
                self._exchange(first, before, after, seed=at)
        if self.spoilt:
            self._exchange(first, mild, _SPOILT, seed=4, digits=1)
        self._exchange(first, _ALIKE, mild, seed=5, digits=1)
        for at, (before, after) in enumerate(pairs):
            if self.effort.affords(14, _LARGEST):
                self._exchange(_LARGEST, before, after, seed=at + 3, digits=1 if at == 0 else None)
        for at, size in enumerate(_OTHERS):
            if self.effort.affords(4, size):
                self._exchange(size, *pairs[at % 2], seed=at + 6, digits=1)
        if (size := self._affordable()) > _LARGEST:
            for at, (before, after) in enumerate(pairs[:2]):
                self._exchange(size, before, after, seed=at + 11, digits=1)

    def chances(self) -> None:
        """Make the same check with rare values of the random numbers that a model draws."""
        size, away = _FIRST, next(_patterns(_FIRST, 1))
        batch, others = (self.source.batch(size, seed) for seed in (0, 1))
        mixed = tuple(_exchanged(one, other, away) for one, other in zip(batch, others, strict=True))

        def same(seed: int) -> bool:
            base, after = (self._losses(one, seed) for one in (batch, mixed))
            return unmoved(base[~away], after[~away])

        for level in RARE:
            with AtQuantile(level) as draws:
                kept = same(0)
            if not draws.seen:
                return
            if not kept:
                raise Mixed(_BY_CHANCE)
        for seed in SEEDS:
            if self.effort.affords(1, size) and not same(seed):
                raise Mixed(_BY_CHANCE)

    def low_precision(self, autocast: torch.dtype) -> None:
        """Make the same check under mixed precision, where a scale may be that of a whole batch."""
        away, device = next(_patterns(_FIRST, 1)), next(self.model.parameters()).device.type
        batch = self.source.batch(_FIRST)
        for after in (Ranges(), self.wild):
            others = self.source.batch(_FIRST, 1, after)
            mixed = tuple(_exchanged(one, other, away) for one, other in zip(batch, others, strict=True))
            with torch.autocast(device, autocast):
                base, moved = (self._losses(one, 0)[~away] for one in (batch, mixed))
            if not unmoved(base, moved):
                raise Mixed(
                    f"the model ({type(self.model).__name__}) or its loss mixes examples under "
                    f"autocast={autocast}: {MIXED}"
                )

    def _losses(self, batch: tuple[Any, ...], seed: int) -> Tensor:
        """Return losses as rows, on a seed."""
        reseed(seed)
        with self.wall:
            return losses(self.model, self.loss, *batch)[:, None]

    def _affordable(self) -> int:
        """Return the expected size of a batch, or the largest size that can be afforded."""
        device = next(self.model.parameters()).device.type
        return min(self.expected, _MOST, int(_WHOLE.get(device, 0.0) / max(1.0, self.effort.each)))

    def _sides(self, most: int) -> list[int]:
        """Return sizes at which a batch is as long as another side of a tensor: its axis may be mistaken.

        And 3: torch.cross takes the first axis of that length. Powers of two, as parts of a batch have them.
        """
        made = self.source.batch(2)
        outputs = (out for _, out in _outputs(self.model, made[0]))
        sides = {side for x in (*self.model.parameters(), *leaves(made), *outputs) for side in x.shape}
        powers = [2**k for k in range(6, 13) if 2**k < most]
        return sorted(side for side in sides | {3} if 1 < side <= most)[:_SIDES] + powers

    def sizes(self) -> None:
        """Check that an example's result is the same alone and in batches of any size."""
        inputs, targets = self.wild
        wide = Ranges(inputs._replace(scale=min(_WIDE, inputs.scale)), targets._replace(scale=1.0))
        most = max(_LARGEST, self._affordable())
        sides = self._sides(most)
        few, mild, other = (self.source.batch(*of) for of in ((_FIRST,), (most, 9), (_LARGEST, 10, wide)))

        def run() -> list[Tensor]:
            return [
                *leaves(call(self.model, mapped(few[0], torch.clone))),
                losses(self.model, self.loss, *few),
            ]

        with calm(self.model, run) as steady:  # inputs are made up outside of it
            if not steady:
                return  # random by itself: the exchanges are what can be said of it
            self._sized(mild, 1e-3, must=True, sides=sides)
            if wide != Ranges() and self.effort.affords(16, _FIRST):
                self._sized(other, 0.05, must=False)

    def _exchange(
        self, size: int, before: Ranges, after: Ranges, seed: int, digits: int | None = None
    ) -> None:
        batch = self.source.batch(size, seed, before)
        others = self.source.batch(size, seed + 1, after)
        try:
            base, again = (self._seen(batch, size, seed) for _ in range(2))
            if not unmoved(base, again):
                raise Unsupported(_STATE)
            for away in _patterns(size, digits):
                mixed = tuple(_exchanged(one, other, away) for one, other in zip(batch, others, strict=True))
                same = unmoved(base[~away], self._seen(mixed, size, seed)[~away])
                if not same or (size > self.effort.rows and self._pulled(batch, mixed, ~away, seed)):
                    who = culprit(self.model, batch[0], mixed[0], ~away)
                    raise Mixed(f"{who} mixes examples: {MIXED}")
        except FarthingError:
            raise
        except Exception as error:
            if before == after == Ranges():
                raise Mixed(_fails(size, error)) from error

    def _seen(self, batch: tuple[Any, ...], size: int, seed: int) -> Tensor:
        """Return the results to compare: gradients, or losses of large models and batches."""
        if size > self.effort.rows:
            return self._losses(batch, seed)
        reseed(seed)
        with self.wall:
            return self.rows(*batch)

    def _pulled(self, batch: Any, mixed: Any, stay: Tensor, seed: int) -> bool:
        """Return whether exchanged examples move the gradient of the losses of the others.

        Where gradients one by one are too many, this finds a backward pass that mixes examples. What others
        make infinite says nothing, as 0 times it is no number.
        """
        found = []
        for inputs, targets in (batch, mixed):
            reseed(seed)
            with self.wall:
                found.append(gradient(self.model, self.loss, inputs, targets, stay))
        one, other = (torch.cat([real(part).flatten().double() for part in parts]) for parts in found)
        finite = bool(one.isfinite().all() and other.isfinite().all())
        return finite and float((one - other).norm()) > _PULLED * float(one.norm()) + 1e-9

    def _gradient(self, inputs: Any, targets: Any, of: Any = slice(None)) -> list[Tensor]:
        """Return an example's gradient by ordinary autograd, as short as those that it is compared with."""
        found = gradient(self.model, self.loss, inputs, targets, of)
        return [self.sketch(n, real(part).reshape(1, -1))[0] for n, part in enumerate(found)]

    def _sized(self, whole: tuple[Any, Any], tolerance: float, must: bool, sides: Sequence[int] = ()) -> None:
        """Check every size that can be afforded; a model ``must`` run on some examples."""
        sizes = [1, min(_FIRST, self.effort.rows)]
        sizes += [size for size in (*_OTHERS, _LARGEST) if self.effort.affords(3, size)]
        odd = [size for size in sides if size not in sizes and self.effort.affords(1, size)]
        odd += [most] if (most := len(leaves((whole,))[0])) > _LARGEST else []  # as many as are expected
        batches = {size: _first(whole, size) for size in (*sizes, *odd)}
        places = [place for place in _PLACES if place < max(sizes)]
        alone = {place: one(*batches[max(sizes)], place) for place in places}
        size = 0
        try:
            lone = torch.cat([losses(self.model, self.loss, *alone[place]) for place in places])
            for size in (*sizes[1:], *odd):
                here = [place for place in places if place < size]
                together = losses(self.model, self.loss, *batches[size])[here]
                _unscaled(self.model, batches[size][0], size, together, lone[: len(here)], tolerance)
            wanted = [self._gradient(*alone[place]) for place in places]
            for size in (size for size in sizes if size <= self.effort.rows):
                found = self.rows(*batches[size])
                for n, place in enumerate(place for place in places if place < size):
                    agree(self.model, wanted[n], found[place], tolerance, alone=size == 1)
            for size in odd:
                n, place = [(n, place) for n, place in enumerate(places) if place < size][-1]
                found = torch.cat(self._gradient(*batches[size], place))
                if found.isfinite().all():  # 0 times what others make infinite is no number
                    agree(self.model, wanted[n], found, tolerance, alone=False)
        except FarthingError:
            raise
        except Exception as error:
            if must:
                raise Mixed(_fails(size, error)) from error


_STATE = (
    "the model or its loss does not repeat itself on the same examples and the same seed of torch: it keeps "
    "a state, or draws random numbers that are not torch's; leave that out, or use route='vmap'"
)
_BY_CHANCE = (
    "the model or its loss mixes examples by chance, for some of the random numbers that it draws: leave "
    "that out"
)
MIXED = (
    "what it computes for one depends on the others in the batch; use statistics of one example "
    "(GroupNorm, LayerNorm) in place of those of a batch"
)


def _fails(size: int, error: Exception) -> str:
    return (
        f"the model does not run on a batch of {size} made-up inputs ({brief(error)}): a batch may have any "
        "size; or give public inputs, example=(inputs, targets), with at least two different records"
    )


def _first(batch: tuple[Any, Any], size: int) -> tuple[Any, Any]:
    inputs, targets = (mapped(part, lambda x: x[:size]) for part in batch)
    return inputs, targets


def _beside(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU, without one on the model's own device."""
    memo: dict[int, Any] = {id(b): b.detach().cpu() for b in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().cpu(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo).cpu()


def _on_cpu(model: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in model.parameters())


def _patterns(size: int, digits: int | None) -> Iterator[Tensor]:
    """Yield the examples to exchange: digit by digit, those with a 1 there and those with a 0.

    Of a large batch a random half, then the other: by digits a pair of even places would stay together.
    """
    if size > _LARGEST:
        away = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
        yield from (away, ~away)
        return
    places = torch.arange(size)
    all_digits = max(1, math.ceil(math.log2(size)))
    for digit in range(all_digits if digits is None else min(digits, all_digits)):
        away = places.bitwise_right_shift(digit) % 2 == 1
        yield from (away, ~away)


def _exchanged(batch: Any, others: Any, away: Tensor) -> Any:
    fresh = iter(leaves((others,)))

    def put(x: Tensor) -> Tensor:
        where = away.to(x.device).view(-1, *(1,) * (x.ndim - 1))
        return torch.where(where, next(fresh), x)

    return mapped(batch, put)


def unmoved(before: Tensor, after: Tensor) -> bool:
    """Return whether rows are the same, up to rounding; what is not finite must stay so."""
    if before.shape != after.shape or not torch.equal(before.isfinite(), after.isfinite()):
        return False
    before, after = (torch.nan_to_num(side.detach().double(), 0.0, 0.0, 0.0) for side in (before, after))
    size, error = before.norm(dim=1), (before - after).norm(dim=1)
    return bool((error <= _UNMOVED * size + 1e-9 * size.amax() + 1e-12).all()) if len(size) else True


def losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    """Return one loss a record."""
    with torch.no_grad():
        found = loss(call(model, mapped(inputs, torch.clone)), mapped(targets, torch.clone))
    size = len(leaves((inputs,))[0])
    if found.shape != (size,):
        raise InvalidValue(
            f"loss must return one value a record, shape ({size},), got {tuple(found.shape)}: "
            'use reduction="none" and sum over what belongs to one record'
        )
    return found.float()


def gradient(model: nn.Module, loss: Loss, inputs: Any, targets: Any, of: Any = slice(None)) -> list[Tensor]:
    """Return the gradient of one example by ordinary autograd, or that of some of a batch together."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        outputs = call(model, mapped(inputs, torch.clone))
        value = loss(outputs, mapped(targets, torch.clone)).float()[of].sum()
        if not value.requires_grad:
            return [torch.zeros_like(p) for p in trained]
        found = torch.autograd.grad(value, trained, allow_unused=True)
    return [dense(g, p) for g, p in zip(found, trained, strict=True)]


def _unscaled(
    model: nn.Module, inputs: Any, size: int, together: Tensor, alone: Tensor, tolerance: float
) -> None:
    if close(together, alone, tolerance):
        return
    for ratio, what in ((size, "divided"), (1 / size, "multiplied")):
        if close(together * ratio, alone, tolerance):
            raise Unsupported(
                f"the loss is {what} by the size of the batch: return each record's own loss, "
                'reduction="none"; the step is divided by a public number later'
            )
    raise Mixed(f"{_in_company(model, inputs)} mixes examples in a batch of {size}: {MIXED}")


def agree(
    model: nn.Module, expected: list[Tensor], found: Tensor, tolerance: float = 1e-3, alone: bool = True
) -> None:
    """Raise unless every parameter's gradient equals that of ordinary autograd on the example alone."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    expected = [real(part).flatten() for part in expected]
    parts = torch.split(found, list(map(len, expected)))
    size = math.sqrt(sum(float(part.double().square().sum()) for part in expected))
    if not math.isfinite(size):
        return  # counts as zero
    coarse = any(p.dtype in (torch.float16, torch.bfloat16) for _, p in trained)
    relative = max(tolerance, 0.05) if coarse else tolerance
    relative = relative if alone else 5 * relative  # batches of different sizes round in different ways
    for (name, p), want, got in zip(trained, expected, parts, strict=True):
        error = float((want.double() - got.double()).norm())
        if error <= relative * (float(want.double().norm()) + size):
            continue
        if not alone:
            raise Mixed(f"the model ({type(model).__name__}) or its loss mixes examples: {MIXED}")
        owner = name.rpartition(".")[0] or "the model"
        module = model.get_submodule(name.rpartition(".")[0])
        kind = type(module).__name__
        if p._backward_hooks:
            raise Unsupported(
                f"{owner} ({kind}): a hook changes the gradient of its parameter {name}, before it could be "
                "clipped; remove it (handle.remove()), and change the released gradient in the optimizer"
            )
        raise Past(
            module,
            f"{owner} ({kind}): its parameter {name} {tuple(p.shape)} is used past its module, so that "
            f"its gradient is not seen; call {owner} itself in forward, or use route='vmap', which is slower",
        )


def culprit(model: nn.Module, inputs: Any, others: Any, stay: Tensor) -> str:
    """Return the first module whose output for an example that stays changes with those exchanged."""
    for (module, before), (_, after) in zip(_outputs(model, inputs), _outputs(model, others), strict=False):
        fits = before.ndim and len(before) == len(stay) and before.shape == after.shape
        if fits and before.is_floating_point() and not _same_rows(before[stay], after[stay]):
            return _named(model, module)
    return f"the model ({type(model).__name__}) or its loss"


def _same_rows(before: Tensor, after: Tensor) -> bool:
    return unmoved(before.flatten(1) if before.ndim > 1 else before[:, None], after.reshape(len(after), -1))


def _in_company(model: nn.Module, inputs: Any) -> str:
    """Return the first module whose output for the first example is not the one alone."""
    size = len(leaves((inputs,))[0])
    batch, ones = _outputs(model, inputs), _outputs(model, one(inputs, None, 0)[0])
    for (module, together), (_, alone) in zip(batch, ones, strict=False):
        same_kind = together.ndim and together.shape[0] == size and alone.shape == (1, *together.shape[1:])
        if same_kind and together.is_floating_point() and not close(together[:1], alone):
            return _named(model, module)
    return f"the model ({type(model).__name__}) or its loss"


def _named(model: nn.Module, module: nn.Module) -> str:
    name = next(name for name, found in model.named_modules() if found is module)
    return f"{name or 'the model'} ({type(module).__name__})"


def _outputs(model: nn.Module, inputs: Any) -> list[tuple[nn.Module, Tensor]]:
    """Return every module's output, inner ones first."""
    found: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        found.extend((module, leaf.detach().clone()) for leaf in leaves(out))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            reseed(0)
            call(model, mapped(inputs, torch.clone))
    finally:
        for handle in handles:
            handle.remove()
    return found
