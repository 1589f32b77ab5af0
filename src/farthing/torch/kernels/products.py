"""Matrix products in the order in which a CPU is quick: its libraries want the wide side of a result inside.

A result with a few columns leaves vector registers half empty; its transpose does not. Both give the same
sums, to rounding.
"""

import torch
from torch import Tensor

from farthing.torch.kernels import totals

_NARROW = 16  # columns that fill a vector register
_SHORT = 64  # columns of a gradient that is better made the other way round


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = x Wᵀ + b, for float32 matrices on a CPU.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    >>> affine(x, weight, torch.ones(2), torch.empty(1, 2))
    tensor([[12., 18.]])
    """
    if 1 < len(weight) < _NARROW and x.shape[1] > 4 * _NARROW:
        out.copy_(torch.mm(weight, x.t()).t())
        return out if bias is None else out.add_(bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def add_product(
    u: Tensor, v: Tensor, out: Tensor, *, empty: bool = False, examples: int | None = None
) -> None:
    """out += uᵀ v, or out = uᵀ v where it is ``empty``; rounded as `farthing.torch.kernels.totals` says.

    A row of both is an example's term, or one of several where there are fewer ``examples`` than rows.

    >>> out = torch.empty(2, 1)
    >>> add_product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), out, empty=True)
    >>> out
    tensor([[3.],
            [6.]])
    """
    examples = len(u) if examples is None else examples
    if out.device.type == "cpu" and out.shape[1] <= _SHORT and len(out) >= 4 * out.shape[1]:
        found = totals.product(v, u, examples).t()
        out.copy_(found) if empty else out.add_(found)
    elif empty:
        totals.product(u, v, examples, out)
    else:
        out.add_(totals.product(u, v, examples))


def scaled_squares(u: Tensor, v: Tensor, inverse: Tensor) -> Tensor:
    """Σ_ij inverse_ij u_bi² v_bj² of every row b: squared norms of u ⊗ v, its coordinates weighted.

    Squares are rounded up by 2⁻¹⁰⁰: tiny factors beside huge ones count, and no product is denormal.

    >>> one = torch.tensor([[2.0]])
    >>> scaled_squares(one, torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.5]]))
    tensor([22.])
    """
    tiny = torch.full((), 2.0**-100, device=u.device)
    u, v = torch.addcmul(tiny, u, u), torch.addcmul(tiny, v, v)
    if len(inverse) <= inverse.shape[1]:  # the smaller side is what a product leaves
        return (torch.mm(inverse, v.t()).t() * u).sum(1)
    return (torch.mm(u, inverse) * v).sum(1)
