"""Copy parameters that a module holds beside other modules, one copy for each record."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farthing.errors import Unsupported


class Unmapped(Unsupported):
    """A module does something to a parameter of its own that `Copies` cannot follow."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__(f"{type(module).__name__} uses a parameter of its own in {what}")
        self.module = module


_BOTH = {"add", "sub", "mul", "div", "true_divide", "rsub", "pow", "maximum", "minimum", "where"}
_ALONE = {"neg", "exp", "sigmoid", "tanh", "relu", "softplus", "square", "sqrt", "rsqrt", "log", "abs", "cos"}
_ALONE |= {"sin", "clamp", "clamp_min", "clamp_max", "float", "double", "to", "contiguous", "detach"}


class Copies:
    """A parameter that a module holds beside other modules, once for each record: its gradients are rows.

    It follows an expansion to the number of records, and what is elementwise: beside a tensor with more
    dimensions (or as many, where its first is one) and a row for each record every record gets its own copy.
    What else is done to it raises `Unmapped`, and the module is then mapped as a whole. The check of the
    model compares both ways with plain autograd.
    """

    def __init__(self, values: Tensor, module: nn.Module) -> None:
        self.values, self.module = values, module

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the parameter."""
        return self.values.shape[1:]

    @property
    def ndim(self) -> int:
        """Return the dimensions of the parameter."""
        return self.values.ndim - 1

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self.values, name)
        if name in _BOTH | _ALONE:
            return lambda *args, **kwargs: self._applied(
                name, getattr(torch.Tensor, name), (self, *args), kwargs
            )
        raise Unmapped(self.module, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        own = next((x for x in args if isinstance(x, Copies)), None)
        if own is None:
            own = next(x for x in (kwargs or {}).values() if isinstance(x, Copies))
            raise Unmapped(own.module, name)
        return own._applied(name.removeprefix("r") if name[1:] in _BOTH else name, func, args, kwargs or {})

    def _applied(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name not in _BOTH | _ALONE or any(isinstance(x, Tensor | Copies) for x in kwargs.values()):
            raise Unmapped(self.module, name)
        most = max(self._dimensions(x) for x in args)
        found = func(*(x._beside(most) if isinstance(x, Copies) else x for x in args), **kwargs)
        return found if most >= 0 else Copies(found, self.module)

    def _dimensions(self, other: Any) -> int:
        """Return the dimensions of a tensor with a row for each record; -1 for what all records share."""
        if not isinstance(other, Tensor) or other.ndim < self.ndim or other.ndim == 0:
            return -1
        if other.ndim == self.ndim:
            batch = self.shape[0] == 1 and len(other) == len(self.values)
            return other.ndim if batch else -1
        if len(other) != len(self.values):
            raise Unmapped(self.module, "an operation with a tensor that has no row for each record")
        return other.ndim

    def _beside(self, dimensions: int) -> Tensor:
        """Return the copies as they stand beside a tensor of so many dimensions, or alone."""
        if dimensions < 0:
            return self.values
        if dimensions == self.ndim:
            return self.values.squeeze(1)
        return self.values.view(len(self.values), *(1,) * (dimensions - self.values.ndim), *self.shape)

    def __neg__(self) -> "Copies":
        return Copies(-self.values, self.module)

    def __getitem__(self, key: Any) -> "Copies":
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in keys):
            raise Unmapped(self.module, "an index")
        return Copies(self.values[(slice(None), *keys)], self.module)

    def view(self, *shape: Any) -> "Copies":
        """Return the copies in another shape."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
        if not all(isinstance(size, int) for size in sizes):
            raise Unmapped(self.module, "view")
        return Copies(self.values.reshape(len(self.values), *sizes), self.module)

    reshape = view

    def expand(self, *sizes: Any) -> Tensor:
        """Return the copies along a dimension of one that grows to the number of records, or a new one."""
        wanted = self._sizes(sizes, "expand")
        if len(self.values) == 1:
            return self.values[0].expand(wanted)
        own = (1,) * (len(wanted) - self.ndim) + tuple(self.shape)
        return self._along(
            len(wanted), [d for d, size in enumerate(wanted) if size not in (-1, own[d])], wanted
        )

    def repeat(self, *times: Any) -> Tensor:
        """Return the copies as `expand` does, of a tensor that is there as often as there are records."""
        wanted = self._sizes(times, "repeat")
        if len(self.values) == 1:
            return self.values[0].repeat(wanted)
        return self._along(len(wanted), [d for d, count in enumerate(wanted) if count != 1], wanted)

    def _sizes(self, sizes: Any, what: str) -> tuple[int, ...]:
        """Return the sizes of the dimensions that there are, and of one more at most."""
        given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else tuple(sizes)
        if not all(isinstance(size, int) for size in given) or len(given) - self.ndim not in (0, 1):
            raise Unmapped(self.module, what)
        return given

    def _along(self, dimensions: int, grown: list[int], sizes: tuple[int, ...]) -> Tensor:
        """Return the copies along the one dimension that has ``grown``, from one to the number of records."""
        new = dimensions > self.ndim
        if len(grown) != 1 or sizes[grown[0]] != len(self.values):
            raise Unmapped(self.module, "an expansion to another number than that of records")
        at = grown[0]
        if (new and at != 0) or (not new and self.shape[at] != 1):
            raise Unmapped(self.module, "an expansion of what is not one")
        return (self.values if new else self.values.squeeze(at + 1)).movedim(0, at)

    def unsqueeze(self, dim: int) -> "Copies":
        """Return the copies with one more dimension."""
        return Copies(self.values.unsqueeze(dim + 1 if dim >= 0 else dim), self.module)


def _operator(name: str, turned: bool = False) -> Callable[..., Any]:
    """Return an operator of `Copies`."""
    function = getattr(torch, name)

    def operate(self: Copies, *other: Any) -> Any:
        return self._applied(name, function, (*other, self) if turned else (self, *other), {})

    return operate


for _sign, _name in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}.items():
    setattr(Copies, f"__{_sign}__", _operator(_name))
    setattr(Copies, f"__r{_sign}__", _operator(_name, turned=True))


def one_first(p: Tensor | None) -> bool:
    """Return whether a parameter has a first dimension of one, along which examples get copies."""
    return p is not None and p.ndim > 1 and len(p) == 1
