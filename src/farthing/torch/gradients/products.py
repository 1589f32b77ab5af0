"""Follow products of records with weights that a module uses by itself: their terms are those of layers.

A product is made once, with the weight that all records share, and what its gradients are made of is noted
(`multiplied`). A function here returns None where it does not know the product.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from farthing.torch.gradients.convolution import windows
from farthing.torch.gradients.copies import Copies
from farthing.torch.gradients.joint_terms import Blocks
from farthing.torch.gradients.outers import Lookup, Outer
from farthing.torch.gradients.terms import Factor, Term, summed

_BLOCKS = 16  # consecutive parts of a weight, at most, with a term each


def multiplied(
    tape: Any,
    weight: Copies,
    given: tuple[Tensor, ...],
    apply: Callable[..., Tensor],
    term: Callable[..., Term],
) -> Tensor:
    """Return ``apply(*given, weight)``, and note ``term(delta, *given)``, the gradients of the weight."""
    given = tuple(tape.multiplied(x) for x in given)
    out = apply(*given, weight.one)
    for own in weight.own:
        tape.used(own.p)

    def then(delta: Tensor, *seen: Tensor) -> None:
        if any(x.is_floating_point() and x.dtype is not delta.dtype for x in seen):
            delta, seen = delta.float(), tuple(x.float() if x.is_floating_point() else x for x in seen)
        weight.put(lambda: term(delta, *seen))

    found: Tensor = tape.watch(out, then, as_is=weight.raw, keep=given)
    return found


def _rows(tape: Any, x: Any, least: int) -> bool:
    """Return whether something is a tensor with a row for each record, of so many dimensions at least."""
    return id(x) in tape.rowed and x.ndim >= least


def _outer(tape: Any, weight: Copies, u: Tensor, v: Tensor) -> Outer:
    """Return Σ u ⊗ v over positions, of a weight that is perhaps transposed."""
    left, right = (Factor(tape.grouped(side, 0)) for side in (u, v))
    return Outer(right, left) if weight.turned else Outer(left, right)


def linear(tape: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """x Wᵀ + b."""
    if not isinstance(weight, Copies) or not _rows(tape, x, 2) or weight.ndim != 2:
        return None
    found = multiplied(tape, weight, (x,), F.linear, lambda d, x: _outer(tape, weight, d, x))
    return _shifted(tape, found, bias)


def _shifted(tape: Any, out: Tensor, bias: Any) -> Any:
    """Return a product plus a bias of its last dimension, in the precision of the product."""
    if not isinstance(bias, Copies) or bias.ndim != 1:
        return out if bias is None else out + bias

    def term(delta: Tensor) -> Term:
        return summed(Factor(tape.grouped(delta, 0)))

    return multiplied(tape, bias, (), lambda b: out + b.to(out.dtype), term)


def addmm(tape: Any, bias: Any, x: Any, weight: Any) -> Any:
    """X W + b, of rows x."""
    found = matmul(tape, x, weight)
    return None if found is None else _shifted(tape, found, bias)


def matmul(tape: Any, a: Any, b: Any) -> Any:
    """x W, or W x of matrices x."""
    if isinstance(b, Copies) and _rows(tape, a, 2) and b.ndim == 2:
        return multiplied(tape, b, (a,), torch.matmul, lambda d, x: _outer(tape, b, x, d))
    if isinstance(a, Copies) and _rows(tape, b, 3) and a.ndim == 2:
        return multiplied(
            tape, a, (b,), lambda x, w: torch.matmul(w, x), lambda d, x: _outer(tape, a, d.mT, x.mT)
        )
    return None


def bilinear(tape: Any, x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
    """xᵀ W y + b."""
    if not isinstance(weight, Copies) or not (_rows(tape, x, 2) and _rows(tape, y, 2)):
        return None

    def term(delta: Tensor, x: Tensor, y: Tensor) -> Term:
        pairs = (x[..., :, None] * y[..., None, :]).flatten(-2)
        return Outer(Factor(tape.grouped(delta, 0)), Factor(tape.grouped(pairs, 0)))

    found: Any = multiplied(tape, weight, (x, y), F.bilinear, term)
    return found if bias is None else found + bias


def embedding(
    tape: Any,
    ids: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Return rows of a table: those at the padding index learn nothing."""
    plain = isinstance(weight, Copies) and max_norm is None and not scale_grad_by_freq
    if not plain or not _rows(tape, ids, 1) or weight.ndim != 2 or weight.turned:
        return None
    padding = None if padding_idx is None else padding_idx % len(weight)

    def term(delta: Tensor) -> Term:
        places, v = tape.grouped(ids, 0, 0), tape.grouped(delta, 0)
        if padding is not None:
            v = v.masked_fill((places == padding)[..., None], 0.0)
        return Lookup(places, Factor(v), len(weight.one))

    return multiplied(tape, weight, (), lambda w: F.embedding(ids, w), term)


def looked_up(tape: Any, table: Any, key: Any) -> Any:
    """Return rows of a table, written with brackets."""
    if isinstance(key, Tensor) and key.dtype in (torch.int64, torch.int32):
        return embedding(tape, key, table)
    return None


def convolution(sides: int) -> Callable[..., Any]:
    """Return what follows convolutions over so many dimensions."""
    apply = getattr(F, f"conv{sides}d")

    def each(value: Any) -> tuple[int, ...]:
        return (value,) * sides if isinstance(value, int) else tuple(value)

    def convolved(
        tape: Any,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not isinstance(weight, Copies) or not _rows(tape, x, sides + 2) or isinstance(padding, str):
            return None
        stride, padding, dilation = each(stride), each(padding), each(dilation)
        layer = SimpleNamespace(
            weight=weight.one, kernel_size=tuple(weight.shape[2:]), stride=stride, padding=padding,
            dilation=dilation, groups=groups, in_channels=x.shape[1], out_channels=weight.shape[0],
            padding_mode="zeros",
            _reversed_padding_repeated_twice=[side for side in reversed(padding) for _ in range(2)],
        )  # fmt: skip
        found: Any = multiplied(
            tape,
            weight,
            (x,),
            lambda x, w: apply(x, w, None, stride, padding, dilation, groups),
            lambda d, x: windows(layer, d, x, tape.examples, tape.factored and weight.raw),
        )
        return found if bias is None else found + bias.view(-1, *(1,) * sides)

    return convolved


def einsum(tape: Any, equation: str, *operands: Any) -> Any:
    """Return a product in Einstein's notation, of records with one weight."""
    parts, _, out = equation.replace(" ", "").partition("->")
    sides = parts.split(",")
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(sides) != 2 or len(operands) != 2 or "." in equation or not out:
        return None
    if isinstance(operands[0], Copies):
        operands, sides = operands[::-1], sides[::-1]
    (x, weight), (a, w) = operands, sides
    if not isinstance(weight, Copies) or not _rows(tape, x, 2) or weight.turned:
        return None
    repeated = any(len(set(side)) < len(side) for side in (a, w, out))
    if repeated or a[0] != out[0] or a[0] in w or not set(a) <= {*w, *out} or not set(w) <= {*a, *out}:
        return None
    cut = _cut(w, a, out, tuple(weight.shape))
    if cut is None:
        return None

    def term(delta: Tensor, x: Tensor) -> Term:
        lead, rest = w[:cut], w[cut:]
        inner, outer = [c for c in rest if c in a], [c for c in rest if c not in a]
        places = [c for c in a[1:] if c in out and c not in w]
        x = x.permute([a.index(c) for c in (*(c for c in lead if c in a), a[0], *places, *inner)])
        delta = delta.permute(
            [out.index(c) for c in (*(c for c in lead if c in out), out[0], *places, *outer)]
        )
        blocks = []
        for at in _places([weight.shape[n] for n in range(cut)]):
            own = dict(zip(lead, at, strict=True))
            seen = x[tuple(own[c] for c in lead if c in a)].flatten(1 + len(places))
            told = delta[tuple(own[c] for c in lead if c in out)].flatten(1 + len(places))
            told, seen = (side.reshape(len(side), *side.shape[1:]) for side in (told, seen))
            if not inner:
                seen = seen.unsqueeze(-1) if seen.ndim == 1 + len(places) else seen
            sides = (told, seen) if not inner or not outer or rest[0] in outer else (seen, told)
            u, v = (Factor(tape.grouped(side.contiguous(), 0)) for side in sides)
            blocks.append(Outer(u, v))
        return blocks[0] if len(blocks) == 1 else Blocks(list(blocks))

    return multiplied(tape, weight, (x,), lambda x, one: torch.einsum(f"{a},{w}->{out}", x, one), term)


def _places(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return all indexes of an array of these sizes, the last one first."""
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*before, n) for before in found for n in range(size)]
    return found


def _cut(w: str, a: str, out: str, shape: tuple[int, ...]) -> int | None:
    """Return after which index of a weight those of its input and of its output lie apart."""
    blocks = 1
    for cut in range(len(w) - 1):
        rest = w[cut:]
        kinds = [(c in a, c in out) for c in rest]
        turns = sum(kinds[n] != kinds[n + 1] for n in range(len(kinds) - 1))
        if (True, True) not in kinds and turns == 1:
            return cut
        blocks *= shape[cut]
        if blocks > _BLOCKS:
            return None
    return None


PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "addmm": addmm,
    "bmm": matmul,
    "bilinear": bilinear,
    "embedding": embedding,
    "getitem": looked_up,
    "einsum": einsum,
    **{f"conv{sides}d": convolution(sides) for sides in (1, 2, 3)},
}
