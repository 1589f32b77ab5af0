"""Make up examples, and find the batch axis of a model with them.

Made-up inputs have the shapes and dtypes of real ones and nothing else of them: floats between 0.05 and
0.95, whole numbers 0 or 1, and where a model runs on them much wider ones. So whatever is found, or refused,
reveals nothing about private records.

A model without its random numbers, so that its results can be compared: dropout keeps everything.

While `Calm` is entered, torch's random functions return what they are given or one fixed number for all
examples; a permutation turns the order round, so that whoever mixes by one is seen. Training mode stays,
which `model.eval()` would end: a model may mix examples in training only. Numbers of a generator that a call
names, or that the model has seeded, are left as they are: its seed is not ours.

>>> with Calm():
...     torch.rand(2).tolist() == [0.375, 0.375], torch.randperm(3).tolist()
(True, [2, 1, 0])
"""

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.torch.checks.chance import SEED
from farthing.torch.gradients.layers import rules_of
from farthing.torch.gradients.tape import call, leaves, mapped, reseed
from farthing.torch.gradients.tape_plan import TapePlan, Use

_SIZES = (2, 3)
_SCALES = (1e4, 100.0, 3.0)
_HIGHS = (1000, 100, 10, 3, 2)


class Range(NamedTuple):
    """Ranges of made-up values: floats up to ``scale`` of either sign and far below, integers < high.

    With a scale of 1 they are mild: between 0.05 and 0.95. ``ignored``: among targets there are some of -100.
    ``alike``: all numbers are the largest, floats 1 (a mask of ones, with which models take short cuts).
    """

    scale: float = 1.0
    high: int = 2
    ignored: bool = False
    alike: bool = False


class Ranges(NamedTuple):
    """The ranges of inputs and of targets."""

    inputs: Range = Range()
    targets: Range = Range()


@dataclass(frozen=True, eq=False)
class Source:
    """Where examples for a check come from: the shapes of a batch, or a public one's examples themselves."""

    inputs: Any
    targets: Any
    public: bool = False

    def batch(self, size: int, seed: int = 0, ranges: Ranges = Ranges()) -> tuple[Any, Any]:  # noqa: B008  frozen
        """Return ``size`` examples, which depend on the seed."""
        generator = torch.Generator().manual_seed(seed)

        def fill(x: Tensor, given: Range) -> Tensor:
            if self.public and given == Range():
                return x[(torch.arange(size, device=x.device) + seed) % len(x)]
            shape = (size, *x.shape[1:])
            if self.public:
                values = _recombined(x.cpu(), size, generator)
                if not x.is_floating_point():
                    return (torch.full_like(values, int(x.amax())) if given.alike else values).to(x.device)
                values = values * (torch.rand(shape, generator=generator) * 0.4 + 0.8)
            elif x.is_floating_point() or x.is_complex():
                values = torch.rand(shape, generator=generator) * 0.9 + 0.05
                values = torch.ones_like(values) if given.alike else values
            else:
                values = torch.randint(
                    0, 2 if x.dtype is torch.bool else given.high, shape, generator=generator
                )
                few = values.view(-1)[:1] if not given.alike else values
                few[:] = given.high - 1  # a model that does not take the largest is seen not to
                if given.ignored:
                    values[torch.rand(shape, generator=generator) < 0.25] = -100
                return values.to(x.device, x.dtype)
            return (values * _factors(size, seed, given.scale, values.ndim)).to(x.device, x.dtype)

        return (
            mapped(self.inputs, lambda x: fill(x, ranges.inputs)),
            mapped(self.targets, lambda x: fill(x, ranges.targets)),
        )

    def blank(self) -> "Source":
        """Return this source without the values of a batch, unless they are public."""
        if self.public:
            return self
        return Source(
            *(mapped(part, lambda x: torch.zeros_like(x[:1])) for part in (self.inputs, self.targets))
        )

    def wildest(self, runs: Callable[[Ranges], bool]) -> Ranges:
        """Return the widest ranges on which a model runs; whole numbers are tried on a CPU only.

        (On a GPU an index that is out of range ends the process.)
        """
        found = Ranges()
        for side in ("inputs", "targets"):
            parts = leaves((getattr(self, side),))
            whole = any(not x.is_floating_point() and x.dtype is not torch.bool for x in parts)
            safe = all(x.device.type == "cpu" for x in parts)
            highs = _HIGHS if whole and safe and not self.public else (2,)
            tries = [Range(scale, high) for scale in _SCALES for high in highs]
            found = next((more for each in tries if runs(more := found._replace(**{side: each}))), found)
            if side == "targets" and len(highs) > 1:
                more = found._replace(targets=found.targets._replace(ignored=True))
                found = more if runs(more) else found
        return found


def _recombined(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return records whose values each come from one of the given ones."""
    rows = torch.randint(0, len(x), (size, *x.shape[1:]), generator=generator)
    return x.gather(0, rows)


def _factors(size: int, seed: int, scale: float, ndim: int) -> Tensor:
    """Return factors that are large, ordinary, large and negative, and small, in turn."""
    turns = torch.tensor([1.0] * 4 if scale == 1 else [scale, 1.0, -scale, 1 / scale])
    return turns[(torch.arange(size) + seed) % 4].view(-1, *(1,) * (ndim - 1))


def refuse_equal(example: tuple[Any, Any]) -> None:
    """Refuse public examples that are equal: exchanging them shows nothing about a model."""
    parts = leaves((example[0],))
    records = min((len(x) if x.ndim else 0 for x in parts), default=0)
    if records < 2 or all(bool((x == x[:1]).all()) for x in parts):
        raise InvalidValue(
            f"example must hold at least two records whose inputs differ, got {records}"
            f"{' that are equal' if records > 1 else ''}: on these a model that mixes examples shows nothing"
        )


def plan_of(
    model: nn.Module,
    source: Source,
    whole: Collection[nn.Module] = (),
    again: bool = True,
    free: Collection[nn.Module] = (),
) -> TapePlan:
    """Return the rules of a model and the batch axes of every use of them; see `rules_of`."""
    plan = TapePlan(model, *rules_of(model, whole, free), again=again, free=free)
    seen = [_shapes(plan, source.batch(size)[0]) for size in _SIZES]
    for use, (inner, outer) in seen[0].items():
        others = seen[1].get(use)
        if others is None:
            module = list(plan.rules)[use[0]]
            raise Unsupported(
                f"{plan.names[module]} ({type(module).__name__}) is called as often as there are examples: "
                "call it once, on the whole batch"
            )
        plan.axes[use] = _axes(inner, others[0]), _axes(outer, others[1])
        plan.lengths[use] = _lengths(inner, others[0], plan.axes[use][0])
    small, large = (
        sum(math.prod(shape) for use in s.values() for side in use for shape in side) for s in seen
    )
    plan.held = (large - small) // (_SIZES[1] - _SIZES[0])
    return plan


Shapes = dict[Use, tuple[list[torch.Size], list[torch.Size]]]


def _shapes(plan: TapePlan, inputs: Any) -> Shapes:
    """Return the shapes of every use's inputs and outputs on one batch."""
    found: Shapes = {}
    calls: dict[nn.Module, int] = defaultdict(int)

    def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls[module] += 1
        shapes = [x.shape for x in leaves((args, kwargs))], [x.shape for x in leaves(out)]
        found[plan.numbers[module], calls[module]] = shapes

    handles = [_hooked(plan, module, note) for module in plan.rules]
    buffers = {name: buffer.clone() for name, buffer in plan.model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices(plan.model)):
            call(plan.model, inputs)
    except FarthingError:
        raise
    except Exception as error:
        raise Unsupported(
            f"the model does not run on made-up inputs of the records' shape, {form_of(inputs)} each "
            f"({type(error).__name__}: {error}){_advice(plan.model, inputs)}; if it needs values that make "
            "sense, give public ones, example=(inputs, targets), with at least two different records"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in plan.model.named_buffers():
            buffer.copy_(buffers[name])
    return found


def _hooked(plan: TapePlan, module: nn.Module, note: Callable[..., None]) -> Any:
    """Return a hook's handle; a part that is compiled to TorchScript takes none and cannot be followed."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Unsupported(f"{plan.names[module]} is compiled to TorchScript; give the module it was made of")
    return module.register_forward_hook(note, with_kwargs=True)


def form_of(value: Any) -> str:
    """Return dtype and shape of one record in a batch, which are public.

    >>> form_of((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
    'float32 (3,) and int64 ()'
    """
    return " and ".join(f"{str(x.dtype)[6:]} {tuple(x.shape[1:])}" for x in leaves((value,)))


def brief(error: Exception) -> str:
    """Return in one line what another library said of made-up inputs."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _advice(model: nn.Module, inputs: Any) -> str:
    """Return what to do about inputs of another precision than the weights."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    given = {x.dtype for x in leaves((inputs,)) if x.is_floating_point()}
    if len(kinds) != 1 or given <= kinds:
        return ""
    wanted = str(next(iter(kinds)))
    return f"; the model's weights are {wanted[6:]}: convert the inputs, inputs.to({wanted})"


def _axes(small: list[torch.Size], large: list[torch.Size]) -> tuple[int | None, ...]:
    """Return the axis along which each tensor grew with the batch."""
    return tuple(
        next((axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        for one, other in zip(small, large, strict=False)
    )


def _lengths(
    small: list[torch.Size], large: list[torch.Size], axes: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Return how long each tensor is for every record, along the batch's axis; 0: that differs."""
    found: list[int | None] = []
    for one, other, axis in zip(small, large, axes, strict=False):
        even = axis is None or one[axis] * _SIZES[1] == other[axis] * _SIZES[0]
        found.append(None if axis is None else one[axis] // _SIZES[0] if even else 0)
    return tuple(found)


def devices(model: nn.Module) -> list[int]:
    """Return the GPUs a model is on, whose generators are put back after a check."""
    places = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return [place.index or 0 for place in places]


_NUMBER = 0.375
_KEPT = {f"{kind}dropout{end}" for kind in ("", "feature_", "alpha_", "feature_alpha_") for end in ("", "_")}
_KEPT |= {"dropout1d", "dropout2d", "dropout3d"}
_FILLED = {"rand", "randn", "rand_like", "randn_like", "normal", "poisson"}
_WRITTEN = {"uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}


class Calm(TorchFunctionMode):
    """Random functions of torch, without chance."""

    def __enter__(self) -> "Calm":
        self._seed = torch.default_generator.initial_seed()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if kwargs.get("generator") is not None or torch.default_generator.initial_seed() != self._seed:
            return func(*args, **kwargs)
        if name in _KEPT:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention" and len(args) <= 4:
            kwargs["dropout_p"] = 0.0
        elif name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:])
        elif name in ("rrelu", "rrelu_", "multi_head_attention_forward"):
            kwargs["training"], args = False, args[:3] if name.startswith("rrelu") else args
        elif name == "gumbel_softmax":
            return torch.softmax(args[0], kwargs.get("dim", -1))
        elif name in _WRITTEN or name == "bernoulli_":
            floats = args[0].is_floating_point()
            return args[0].fill_(1 if name == "bernoulli_" else _NUMBER if floats else 0)
        found = func(*args, **kwargs)
        if name in _FILLED:
            return torch.full_like(found, _NUMBER, requires_grad=found.requires_grad)
        if name == "bernoulli":
            return torch.ones_like(found)
        if name in ("randint", "randint_like"):
            return torch.zeros_like(found)
        if name == "multinomial":
            return torch.arange(found.shape[-1], device=found.device).expand(found.shape).clone()
        if name == "randperm":
            return torch.arange(len(found) - 1, -1, -1, device=found.device).to(found.dtype)
        return found


@contextmanager
def calm(model: nn.Module, run: Callable[[], list[Tensor]]) -> Iterator[bool]:
    """Run a model without random numbers, and in eval mode if it still does not repeat its results.

    As it is where it draws none from torch's generator: any others follow from places in a batch.
    """
    modes = [(module, module.training) for module in model.modules()]
    random = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)
    try:
        reseed(SEED)
        before = torch.get_rng_state()
        with torch.no_grad():
            first, second = run(), run()
        if torch.equal(before, torch.get_rng_state()):
            yield all(close(a, b) for a, b in zip(first, second, strict=True))
            return
        with Calm():
            for module, _ in modes:
                if isinstance(module, random):
                    module.training = False
            for again in range(2):
                with torch.no_grad():
                    first, second = run(), run()
                steady = all(close(a, b) for a, b in zip(first, second, strict=True))
                if steady or again:
                    break
                model.eval()
            yield steady
    finally:
        for module, training in modes:
            module.training = training


def close(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> bool:
    """Return whether two results are the same, up to rounding."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    coarse = a.dtype in (torch.float16, torch.bfloat16)
    finite = a.detach()[a.isfinite()].abs()
    size = float(finite.amax()) if finite.numel() else 0.0
    relative = max(tolerance, 0.02) if coarse else tolerance
    return bool(torch.allclose(a, b, rtol=relative, atol=0.01 * relative * size, equal_nan=True))


def operations(model: nn.Module, inputs: Any) -> int:
    """Return the floating-point operations of a forward pass.

    Torch's own counter imports its compiler, which takes seconds. Where nobody has imported that, no part of
    the model is compiled, and counting is simple.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of counting in a model with compiled parts
        if "torch._dynamo" in sys.modules:
            try:
                with FlopCounterMode(display=False) as counter:
                    call(model, inputs)
                return int(counter.get_total_flops())
            except Exception:  # its tracker of modules stumbles over views of parameters, and inner gradients
                pass
        with _Counted() as counted:  # type: ignore[no-untyped-call]
            call(model, inputs)
    return int(counted.total)


class _Counted(TorchDispatchMode):
    """A mode that counts by torch's own table of operations."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it means to import it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, count = kwargs or {}, flop_registry.get(func._overloadpacket)
        if count is None:
            with self:
                made = func.decompose(*args, **given)
            if made is not NotImplemented:
                return made
        made = func(*args, **given)
        self.total += 0 if count is None else count(*args, **given, out_val=made)
        return made
