"""Check the random numbers that a model draws: that they are private, and that rare ones do no harm.

Sums run on torch's generators under a secret seed (`farthing.torch.training.randomness`). A model that seeds
them itself, or that has a generator with its own seed, makes its random numbers public: the numbers of an
example then depend on its position in the batch, so an added or removed example changes the numbers of all
others. Numbers from Python's or numpy's generator are as public as the seeds of these. In isolation all
examples may share them (`farthing.torch.gradients.isolation`); book-keeping cannot tell whether they do.

A dataset's own code draws from Python's and numpy's generators under secret seeds (`hidden`).

A model may mix examples in rare cases only ("mixup in one batch of twenty"). `AtQuantile` gives every draw of
torch a value that is rarely so small or so large, so that such cases occur in the check.

>>> with AtQuantile(0.999) as draws:
...     bool(torch.rand(()) > 0.99), int(torch.randint(20, ())), draws.seen
(True, 19, True)
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farthing.errors import Unsupported
from farthing.torch.gradients.tape import reseed

RARE = (0.0005, 0.9995)
SEEDS = range(100, 148)
SEED = 7_346_129  # a seed that no model is likely to use
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DRAWS: tuple[Any, ...] = (np.random.rand, random.random)
SHARED = {id(torch.default_generator), *(id(draw.__self__) for draw in _DRAWS)}  # the global generators

_UNIFORM = ("rand", "rand_like", "uniform_")
_NORMAL = ("randn", "randn_like", "normal", "normal_")
_WHOLE = ("randint", "randint_like", "random_")
_OTHERS = ("multinomial", "randperm", "poisson", "exponential_", "geometric_", "cauchy_", "log_normal_")


class AtQuantile(TorchFunctionMode):
    """Every random number of torch is one quantile of what it is drawn from; dropouts are left alone.

    ``seen``: whether any was drawn.
    """

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level, self.seen = level, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = getattr(func, "__name__", ""), func(*args, **(kwargs or {}))
        known = name in (*_UNIFORM, *_NORMAL, *_WHOLE, "bernoulli", "bernoulli_")
        self.seen |= known or name in _OTHERS
        if not known or not isinstance(found, Tensor):
            return found
        with torch.no_grad():
            return self._filled(name, found, args, kwargs or {})

    def _filled(self, name: str, found: Tensor, args: Any, kwargs: Any) -> Tensor:
        if name in _UNIFORM:
            low, high = _span(name, args, kwargs)
            return found.fill_(low + (high - low) * self.level)
        if name in _NORMAL:
            return found.mul_(0).add_(NormalDist().inv_cdf(self.level))
        if name in _WHOLE:
            ends = [value for value in args if isinstance(value, int)][:2] or [2]
            low, high = (0, ends[0]) if len(ends) == 1 else ends
            return found.fill_(low if self.level < 0.5 else max(low, high - 1))
        chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5) if name == "bernoulli_" else args[0]
        return found.copy_(torch.as_tensor(chance, device=found.device) > self.level)


def _span(name: str, args: Any, kwargs: Any) -> tuple[float, float]:
    """Return the ends of a uniform draw."""
    if name != "uniform_":
        return 0.0, 1.0
    given = dict(zip(("from", "to"), args[1:], strict=False)) | kwargs
    return float(given.get("from", 0.0)), float(given.get("to", 1.0))


def refuse_public(run: Callable[[], object], elsewhere: bool = True) -> None:
    """Refuse a pass that seeds torch's generator, or draws ``elsewhere``, from Python's or numpy's."""
    reseed(SEED)
    before = _elsewhere()
    run()
    if torch.default_generator.initial_seed() != SEED:
        raise Unsupported(
            "the model or its loss seeds torch's generator (torch.manual_seed), so that the numbers of a "
            "batch would be public: leave that out of forward"
        )
    if elsewhere and _elsewhere() != before:
        raise Unsupported(
            "the model or its loss draws from Python's generator or numpy's, whose seed may be public: draw "
            "from torch's (torch.rand), which has a secret one; or use route='vmap'"
        )


def _elsewhere() -> tuple[object, ...]:
    """Return the states of Python's generator and of numpy's."""
    state: Any = np.random.get_state()  # noqa: NPY002  that of models
    return random.getstate(), state[1].tobytes(), state[2:]


@contextmanager
def hidden() -> Iterator[None]:
    """Seed Python's and numpy's generators with secrets for a while, and restore their states afterwards."""
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002  that of a dataset's code
    random.seed(os.urandom(32))
    np.random.seed(np.frombuffer(os.urandom(32), dtype=np.uint32))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002


def rewinding(generator: Any) -> Callable[[], object]:
    """Return a call that puts a random generator back to where it is now."""
    match generator:
        case np.random.Generator():
            bits, state = generator.bit_generator, generator.bit_generator.state
            return partial(setattr, bits, "state", state)
        case random.Random():
            return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def state_of(generator: Any) -> str:
    """Return the state of a random generator, as text."""
    match generator:
        case torch.Generator():
            return str(generator.get_state().tolist())
        case np.random.Generator():
            return repr(generator.bit_generator.state)
        case np.random.RandomState():
            kind, words, *rest = generator.get_state()
            return repr((kind, np.asarray(words).tolist(), rest))
    return repr(generator.getstate())
