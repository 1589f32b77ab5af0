"""Give dropout and augmentation secret random numbers, and restore torch's generators afterwards.

The random numbers that a model or a transform draws for one example depend on how many examples came before
it in its batch. As long as the generator's state is secret, these are fresh, independent draws for every
example, and one more example changes nothing for the others. So every sum uses a seed from the operating
system, and the caller's generator state is restored afterwards, so that it does not reveal the size of
batches.

A dataset's own code, or a model in isolation, may draw from Python's or numpy's generator, which people often
give a public seed. Where such code runs, these two generators are seeded with secrets as well.

For the same reason a transform that draws elsewhere is refused, or from a seed of its own, and one that mixes
examples as well: it would move other examples' gradients with the one that comes or goes. What a transform
keeps of a batch (its last input, a size) is put back after every sum.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farthing.errors import Unsupported
from farthing.ledger.answers import zero_sum
from farthing.queries.query import Contribution
from farthing.torch.checks.chance import RARE, SEED, SEEDS, AtQuantile, hidden
from farthing.torch.checks.leftovers import Wall
from farthing.torch.gradients.tape import leaves, mapped
from farthing.torch.training.collating import from_outside

_LOOKS = {4**k for k in range(16)}  # updates after which a model is looked at again


@dataclass(frozen=True, slots=True, eq=False)
class OwnRandomness:
    """A contribution computed on generators of its own: torch's, and ``elsewhere`` Python's and numpy's."""

    contribution: Contribution
    device: torch.device
    elsewhere: bool = False
    wall: AbstractContextManager[object] = field(default_factory=nullcontext)  # around a transform

    @classmethod
    def of(cls, gradient: Any, examples: Any, device: torch.device) -> "OwnRandomness":
        """Return sums of these examples' gradients."""
        wall = nullcontext() if examples.augment is None else Wall(examples.augment, None, everything=True)
        return cls(gradient, device, foreign(gradient, examples), wall)

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Any:
        """Return the contribution's sum; the generators are afterwards as they were."""
        isolated = getattr(self.contribution, "isolation", None) is not None  # perhaps since the last sum
        random = apart(self.device, elsewhere=self.elsewhere or isolated)
        with random, self.wall, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one would tell about a record
            try:
                return self.contribution.bounded_sum(records, w, bound)
            except BaseException as error:
                if isinstance(error, Exception) or from_outside(error):
                    raise
        raise RuntimeError("the sum over some records ended with an error that is no Exception")

    def look_again(self, updates: int) -> None:
        """Check the model at its present weights, after 1, 4, 16, … updates."""
        look = getattr(self.contribution, "look_again", None)
        if look is not None and updates in _LOOKS:
            with apart(self.device):
                look()

    @property
    def honours(self) -> Collection[str]:
        """Return the kinds of bound that the contribution honours."""
        return self.contribution.honours

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the contribution's sum."""
        return self.contribution.shape

    def zero(self, records: Any, w: Any, bound: Any) -> Any:
        """Return the contribution's sum over nobody."""
        return zero_sum(self.contribution, records, w, bound)


@contextmanager
def apart(device: torch.device, seed: int | None = None, elsewhere: bool = False) -> Iterator[None]:
    """Seed torch's generators of the CPU and of ``device`` for a while, and restore their states.

    ``seed`` is for checks on made-up examples; ``elsewhere``: Python's generator and numpy's as well.

    Generator by generator: `torch.manual_seed` also leaves a note for every backend that is not in use.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        place = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[place])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            secret = int.from_bytes(os.urandom(8), "little", signed=True)
            generator.manual_seed(secret if seed is None else seed)
        with hidden() if elsewhere else nullcontext():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def foreign(gradient: Any, examples: Any) -> bool:
    """Return whether code that may draw from Python's generator or numpy's runs in sums of these examples."""
    return gradient.isolation is not None or examples.tensors is None


def one_by_one(augment: Callable[[Any], Any], inputs: Any, device: torch.device) -> None:
    """Refuse a transform that mixes examples, or whose random numbers are not torch's.

    A check, on made-up inputs of the same shapes, of several sizes and scales: one of them is exchanged, and
    the others must stay as they are; and where every draw is the same number, an example by itself must
    become what it becomes among others. Numbers from a seed of its own are left as they are.
    """
    numbers = max(x[0].numel() for x in leaves((inputs,)))
    cases = [case for case in _CASES if case[0] <= max(70, _MOST // max(1, numbers))]
    for size, seed, scale in cases:
        batch, other = (_made(inputs, size, 2 * seed + more, scale) for more in range(2))
        swapped = _with_one(other, batch, seed % size)
        with AtQuantile(RARE[seed % 2]) if seed in _RARELY else nullcontext():
            views, again, exchanged = (_seen(augment, one, device, seed) for one in (batch, batch, swapped))
        if any(len(view) != size for view in views):
            raise Unsupported("augment must return a batch of as many examples as it was given")
        if not all(map(torch.equal, views, again)):
            raise Unsupported(
                "augment must draw from torch's generators only, so that its numbers stay secret"
            )
        kept = torch.arange(size, device=views[0].device) != seed % size
        if not all(torch.equal(a[kept], b[kept]) for a, b in zip(views, exchanged, strict=True)):
            raise Unsupported(_MIXES)
    for size, scale in sorted({(size, scale) for size, _, scale in cases}):
        batch, place = _made(inputs, size, size, scale), size // 2
        one = mapped(batch, partial(_row, place))
        with _Still():  # type: ignore[no-untyped-call]
            together, alone = (_seen(augment, given, device, SEED) for given in (batch, one))
        if not all(map(_alike, (view[place : place + 1] for view in together), alone)):
            raise Unsupported(_MIXES)


_MIXES = "augment mixes examples: it must make a view of each one from that one alone"
_SIZES = 2, 4, 9, 33, 70, 160, 512
_MOST = 2**24  # numbers in the inputs of a batch of more than 70
_RARELY = 200, 201  # seeds of batches that meet rare numbers only
_CASES = (
    *((4, seed, 1.0) for seed in (*range(8), *SEEDS, *_RARELY)),
    *((size, size, 1.0) for size in _SIZES),
    *((size, 1, scale) for size in (4, 33) for scale in (-1.0, 1e-4, 300.0)),
)


class _Still(TorchDispatchMode):
    """Every random number on `SEED` is one half, or zero among whole numbers, however many are drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        own = (kwargs or {}).get("generator") is not None or torch.default_generator.initial_seed() != SEED
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, torch.Tensor) and not own:
            found.fill_(0.5 if found.is_floating_point() else 0)
        return found


def _seen(augment: Callable[[Any], Any], value: Any, device: torch.device, seed: int) -> list[torch.Tensor]:
    with apart(device, seed):
        found = leaves((augment(mapped(value, torch.clone)),))
        if torch.default_generator.initial_seed() != seed:
            raise Unsupported("augment must not seed torch's generator: its numbers stay secret")
    return found


def _made(inputs: Any, size: int, seed: int, scale: float) -> Any:
    """Return made-up examples: floats up to ``scale``, integers, and bytes of all values (pixels)."""
    made = torch.Generator().manual_seed(seed)

    def fill(x: torch.Tensor) -> torch.Tensor:
        shape = (size, *x.shape[1:])
        if x.is_floating_point() or x.is_complex():
            values = (torch.rand(shape, generator=made) * 0.9 + 0.05) * scale
        else:
            values = torch.randint(0, 256 if x.dtype is torch.uint8 else 2, shape, generator=made)
        return values.to(x.device, x.dtype)

    return mapped(inputs, fill)


def _with_one(other: Any, value: Any, place: int) -> Any:
    """Return ``value`` with one example of ``other``."""
    if isinstance(value, list | tuple):
        return tuple(_with_one(a, b, place) for a, b in zip(other, value, strict=True))
    exchanged = value.clone()
    exchanged[place] = other[place]
    return exchanged


def _row(place: int, x: torch.Tensor) -> torch.Tensor:
    return x[place : place + 1]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True))
