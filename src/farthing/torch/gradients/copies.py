"""Follow parameters that modules use by themselves: in products, and copied once for each record elsewhere.

While a tape runs, `Copies` stand in for a parameter of a module that has no rule. What is made of parameters
alone (a mask times a weight, a table at fixed places) is made once. A product with a tensor of records has
the terms of a layer (`farthing.torch.gradients.products`). Beside such a tensor in anything else every record
gets a copy of its own, so that its gradients are rows; what is not elementwise runs in lanes of
torch.func.vmap, that one operation alone. What cannot be followed raises `Unmapped`.

Which tensor has a row for each record follows from its dimensions and its length. Where that is mistaken in
the check, its gradients are not those of plain autograd, and the module is mapped as a whole.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from farthing.errors import Unsupported
from farthing.torch.gradients.joint_terms import MaskedTerm
from farthing.torch.gradients.terms import RowTerms


class Unmapped(Unsupported):
    """A module does something to a parameter of its own that `Copies` cannot follow."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__(f"{type(module).__name__} uses a parameter of its own in {what}")
        self.module = module


class Past(Unsupported):
    """A parameter is used past its module, whose rule does not see it."""

    def __init__(self, module: nn.Module, message: str) -> None:
        super().__init__(message)
        self.module = module


_BOTH = {"add", "sub", "mul", "div", "true_divide", "rsub", "pow", "maximum", "minimum", "where", "atan2"}
_BOTH |= {"gt", "ge", "lt", "le", "logaddexp", "hypot", "fmod", "remainder"}
_EACH = _BOTH | {
    "neg",
    "exp",
    "sigmoid",
    "tanh",
    "relu",
    "sign",
    "round",
    "floor",
    "abs",
    "clamp",
    "softplus",
}
_EACH |= {"square", "sqrt", "rsqrt", "log", "clone", "contiguous", "float", "to", "type_as", "masked_fill"}
_EACH |= {"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"}
_MASKED = {"scaled_dot_product_attention"}  # its mask, of copies, stands beside queries of records
_SIGNS = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "matmul": "matmul"}


class Own:
    """A parameter that modules use by themselves, while a tape runs, and the products that are known."""

    def __init__(self, tape: Any, p: Tensor, products: dict[str, Callable[..., Any]]) -> None:
        self.tape, self.p, self.products = tape, p, products
        if tape.records > 1:  # before a checkpoint begins
            _ = self.values

    @cached_property
    def values(self) -> Tensor:
        """Return the parameter once for each record."""
        found: Tensor = self.tape.copies(self.p, tuple(self.p.shape))
        return found


class Copies:
    """What a module makes of parameters of its own alone: ``make`` of them, or the one parameter itself.

    ``each``: every number follows from the same number of one parameter. It is ``raw`` where it is the very
    numbers of one parameter in their order, in whatever shape, and ``turned`` if it is a matrix, transposed.
    """

    def __init__(
        self,
        module: nn.Module,
        own: tuple[Own, ...],
        make: Callable[..., Tensor] | None = None,
        one: Tensor | None = None,
        each: bool = True,
    ) -> None:
        self.module, self.own, self.each = module, own, each
        self.make: Callable[..., Tensor] = _itself if make is None else make
        self.one = own[0].p.detach() if one is None else one
        same = len(own) == 1 and _same_numbers(self.one, own[0].p)
        self.turned = same and not self.one.is_contiguous()
        self.raw = same and (self.turned or self.one.is_contiguous())

    @property
    def tape(self) -> Any:
        """Return the tape that runs."""
        return self.own[0].tape

    @cached_property
    def values(self) -> Tensor:
        """Return what is made of the parameters, once for each record."""
        leaves = [own.values for own in self.own]
        found: Tensor = leaves[0] if self.make is _itself else vmap(self.make)(*leaves)
        return found

    def put(self, term: Callable[[], Any]) -> None:
        """Hand on the term of one use, as one of each parameter that it follows from."""
        if self.raw:
            self.tape.put(self.own[0].p, term)
            return
        if (mask := self._mask()) is not None:
            self.tape.put(self.own[0].p, lambda: MaskedTerm(term(), mask))
            return
        rows = term().rows(slice(None)).view(-1, *self.one.shape).to(self.one.dtype)
        with torch.enable_grad():
            given = [own.p.detach().requires_grad_() for own in self.own]
            made = self.make(*given)
        found = torch.autograd.grad(made, given, rows, is_grads_batched=True, allow_unused=True)
        for own, gradients in zip(self.own, found, strict=True):
            if gradients is not None:
                self.tape.put(own.p, partial(RowTerms, gradients.float().flatten(1)))

    def _mask(self) -> Tensor | None:
        """Return the slopes of what is made of one parameter number by number, if all are zeros and ones."""
        if not self.each or self.one.device.type != "cpu":  # a graph of a GPU cannot ask
            return None
        with torch.enable_grad():
            given = self.own[0].p.detach().requires_grad_()
            made = self.make(given)
        (slopes,) = torch.autograd.grad(made, given, torch.ones_like(made))
        plain = bool(((slopes == 0) | (slopes == 1)).all())
        return slopes.flatten().float() if plain else None

    def __getattr__(self, name: str) -> Any:
        found = getattr(Tensor, name, None)
        if name.startswith("_") or found is None or name in ("data", "grad", "grad_fn"):
            raise Unmapped(self.module, name)
        if not callable(found):  # a shape, a dtype, a transposition
            value = getattr(self.one, name)
            return (
                self._alone(name, lambda x: getattr(x, name), (self,), {})
                if isinstance(value, Tensor)
                else value
            )
        return lambda *args, **kwargs: self._applied(name, found, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = next(_copies((args, kwargs or {})))
        return own._applied(getattr(func, "__name__", ""), func, args, kwargs or {})

    def _applied(self, written: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a function of these copies and others, in the first way that follows it."""
        operator, writes = written.startswith("__"), written.endswith("_") and not written.startswith("__")
        name = written.strip("_")
        if operator and name[1:] in _SIGNS and name[0] in "ri":
            name, writes = name[1:], name[0] == "i"
        name = _SIGNS.get(name, name) if operator else name
        if (writes and isinstance(args[0], Copies)) or "out" in kwargs:
            raise Unmapped(self.module, written)
        counts = {id(x): self._rows_each(x, name) for x in _tensors((args, kwargs))}
        self.tape.rowed = rowed = {number: each for number, each in counts.items() if each}
        if writes and (name not in _BOTH or not rowed):
            raise Unmapped(self.module, written)
        product = self.own[0].products.get(name)
        if product is not None and (found := product(self.tape, *args, **kwargs)) is not None:
            return found
        if not rowed:
            return self._alone(name, func, args, kwargs)
        if len({*rowed.values()}) > 1:
            raise Unmapped(self.module, "an operation with different numbers of rows for a record")
        if name in _MASKED or (
            name in _BOTH and not any(isinstance(x, Tensor | Copies) for x in kwargs.values())
        ):
            return self._side_by_side(func, args, kwargs)
        return self._in_lanes(name, func, args, kwargs)

    def _rows_each(self, x: Tensor, name: str) -> int:
        """Return how many rows a tensor has for each record, one after the other; 0: it is the same for all.

        Its length in the first pass of the check says so: see `TapePlan.telling`. Where an operation was not
        in the check, only what follows from trained weights has several rows.
        """
        if x.ndim == 0 or x.untyped_storage().data_ptr() in self.tape.shared:
            return 0
        each, rest = divmod(len(x), self.tape.rows)
        found = rest == 0 and each > 0
        likely = found and (each == 1 or x.requires_grad)
        settled: bool = self.tape.settled(found, self.module, name, likely)
        if not found and (settled or x.requires_grad):  # all that follows from trained weights is of records
            raise Unmapped(self.module, "an operation with a tensor that has no rows for each record")
        return each if settled else 0

    def _side_by_side(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a function that takes records and copies along the same first dimension."""
        rowed = self.tape.rowed
        rows = [x for x in _tensors((args, kwargs)) if id(x) in rowed]
        most, each = max(x.ndim for x in rows), rowed[id(rows[0])]

        def pick(x: Any) -> Any:
            if isinstance(x, Copies):
                return x._beside(most + (each > 1))
            return x.unflatten(0, (-1, each)) if each > 1 and id(x) in rowed else x

        found = func(*_filled(args, pick, Tensor), **_filled(kwargs, pick, Tensor))
        return found.flatten(0, 1) if each > 1 else found

    def _alone(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what follows from parameters, and from what all records share."""
        own = tuple({id(o): o for copies in _copies((args, kwargs)) for o in copies.own}.values())

        def make(*given: Tensor) -> Any:
            values = dict(zip(map(id, own), given, strict=True))

            def pick(copies: Copies) -> Tensor:
                return copies.make(*(values[id(o)] for o in copies.own))

            return func(*_filled(args, pick), **_filled(kwargs, pick))

        before = _chance(self.one.device)
        found = func(*_filled(args, lambda c: c.one), **_filled(kwargs, lambda c: c.one))
        if _chance(self.one.device) != before:  # it would be drawn anew wherever it is made again
            raise Unmapped(self.module, "a function with chance")
        if isinstance(found, Tensor):
            each = name in _EACH and len(own) == 1 and found.shape == own[0].p.shape
            each = each and all(copies.each for copies in _copies((args, kwargs)))
            return Copies(self.module, own, make, found, each)
        if isinstance(found, list | tuple) and any(isinstance(x, Tensor) for x in found):
            parts = [Copies(self.module, own, partial(_part, make, n), x, False) for n, x in enumerate(found)]
            return type(found)(parts)
        return found

    def _in_lanes(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a function of copies and of tensors of records, for each record alone."""
        rowed = self.tape.rowed
        rows = [x for x in _tensors((args, kwargs)) if id(x) in rowed]
        copies, each = list(_copies((args, kwargs))), rowed[id(rows[0])]

        def lane(values: list[Tensor], given: list[Tensor]) -> Any:
            one, other = iter(values), iter(given)

            def pick(x: Any) -> Any:
                return next(one) if isinstance(x, Copies) else next(other) if id(x) in rowed else x

            found = func(*_filled(args, pick, Tensor), **_filled(kwargs, pick, Tensor))
            if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != each:
                raise Unmapped(self.module, name)
            return found

        lanes = [x.unflatten(0, (-1, each)) for x in rows]
        found: Tensor = vmap(lane, randomness="different")([c.values for c in copies], lanes)
        return found.flatten(0, 1)

    def _beside(self, dimensions: int) -> Tensor:
        """Return the copies as they stand beside records of so many dimensions."""
        if dimensions > self.ndim:
            return self.values.view(len(self.values), *(1,) * (dimensions - self.ndim - 1), *self.shape)
        if dimensions < self.ndim or self.shape[0] != 1:
            raise Unmapped(self.module, "an operation with a tensor of fewer dimensions")
        return self.values.squeeze(1)

    def detach(self) -> Tensor:
        """Return the numbers alone."""
        return self.one.detach()

    def __len__(self) -> int:
        return len(self.one)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind())

    def __float__(self) -> float:
        return float(self.one)

    def __int__(self) -> int:
        return int(self.one)

    def __bool__(self) -> bool:
        return bool(self.one)

    def __neg__(self) -> Any:
        return self.neg()

    def __getitem__(self, key: Any) -> Any:
        return self._applied("getitem", lambda x, key: x[key], (self, key), {})

    def expand(self, *sizes: Any) -> Any:
        """Return the copies along a dimension of one that grows to the number of records, or a new one."""
        wanted = self._sizes(sizes)
        own = (1,) * (len(wanted) - self.ndim) + tuple(self.shape)
        grown = [d for d, size in enumerate(wanted) if size not in (-1, own[d])]
        return self._grown("expand", wanted, wanted, grown)

    def repeat(self, *times: Any) -> Any:
        """Return the copies as `expand` does, or as rows of each record, of what is there once for each."""
        wanted = self._sizes(times)
        own = (1,) * (len(wanted) - self.ndim) + tuple(self.shape)
        grown = [d for d, count in enumerate(wanted) if count != 1]
        sizes = tuple(count * size for count, size in zip(wanted, own, strict=True))
        return self._grown("repeat", wanted, sizes, grown)

    def _sizes(self, sizes: Any) -> tuple[int, ...]:
        """Return the sizes of the dimensions that there are, and of more."""
        given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else tuple(sizes)
        if not all(isinstance(size, int) for size in given) or len(given) < self.ndim:
            raise Unmapped(self.module, "an expansion")
        return given

    def _grown(self, name: str, wanted: tuple[int, ...], sizes: tuple[int, ...], grown: list[int]) -> Any:
        """Return the copies in the sizes that were ``wanted``, of which some have ``grown``.

        Whether one is the number of records is seen on the first batch of the check, and stays so.
        """
        records, new = self.tape.rows, len(wanted) - self.ndim
        if records == 1:
            return getattr(self.values[0], name)(wanted)
        at = next((d for d in grown if sizes[d] == records and (d == 0 if new else self.shape[d] == 1)), None)
        tiled = name == "repeat" and not new and wanted[0] == records
        if not self.tape.settled(tiled or at is not None, self.module, name):
            return self._alone(name, getattr(Tensor, name), (self, wanted), {})
        if tiled:
            at, each = 0, self.values.flatten(0, 1)
        elif at is None:
            raise Unmapped(self.module, "an expansion to another number than that of records")
        elif new:
            each = self.values.view(records, *(1,) * (new - 1), *self.shape)
        else:
            each = self.values.squeeze(at + 1).movedim(0, at)
        rest = tuple((-1 if name == "expand" else 1) if d == at else size for d, size in enumerate(wanted))
        found: Tensor = getattr(each, name)(rest)
        return found


def _same_numbers(one: Tensor, p: Tensor) -> bool:
    """Return whether a tensor is a parameter's memory, in its order or as a matrix that is transposed."""
    if one.data_ptr() != p.data_ptr() or one.numel() != p.numel() or one.dtype is not p.dtype:
        return False
    turned = p.ndim == 2 == one.ndim and one.shape == p.shape[::-1] and one.stride() == p.stride()[::-1]
    return p.is_contiguous() and (one.is_contiguous() or turned)


def _part(make: Callable[..., Any], n: int, *given: Tensor) -> Any:
    return make(*given)[n]


def _itself(x: Tensor) -> Tensor:
    return x


def _copies(value: Any) -> Iterator[Copies]:
    """Yield the copies in nested tuples, lists and dictionaries."""
    if isinstance(value, Copies):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _copies(part)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [leaf for part in parts for leaf in _tensors(part)]


def _filled(value: Any, pick: Callable[[Any], Any], *kinds: type) -> Any:
    """Return a structure like ``value`` with other things in place of copies, and of these kinds."""
    if isinstance(value, (Copies, *kinds)):
        return pick(value)
    if isinstance(value, dict):
        return {key: _filled(part, pick, *kinds) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_filled(part, pick, *kinds) for part in value])
    return value


def _chance(device: torch.device) -> Any:
    """Return where torch's random numbers stand; nothing while a graph is captured."""
    state = torch.default_generator.get_state()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return bytes(state.numpy()), torch.cuda.default_generators[device.index or 0].get_offset()
    return bytes(state.numpy())


def _operator(name: str, turned: bool = False) -> Callable[..., Any]:
    """Return an operator of `Copies`."""
    function = getattr(torch, name)

    def operate(self: Copies, *other: Any) -> Any:
        return self._applied(name, function, (*other, self) if turned else (self, *other), {})

    return operate


for _sign, _name in _SIGNS.items():
    setattr(Copies, f"__{_sign}__", _operator(_name))
    setattr(Copies, f"__r{_sign}__", _operator(_name, turned=True))
for _sign in ("gt", "ge", "lt", "le"):
    setattr(Copies, f"__{_sign}__", _operator(_sign))


def one_first(module: nn.Module, name: str) -> bool:
    """Return whether records get copies of a parameter along its first dimension, which is one.

    So they do of what stands beside other modules, such as a class token.
    """
    p = module._parameters[name]
    return p is not None and p.ndim > 1 and len(p) == 1 and not alone(module)


def alone(module: nn.Module) -> bool:
    """Return whether a module with parameters has no other module with parameters that are trained in it."""
    return not any(p.requires_grad for child in module.children() for p in child.parameters())
