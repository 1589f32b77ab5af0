"""The steps of an LSTM or a GRU over a sequence, forward and backward, without autograd's cost a step.

Autograd spends a node on every operation of every step. Here all steps of a layer are one node: what the
backward pass needs besides the next step's gradient is made for all steps at once, and a step is then a
handful of operations in memory that is there. Hidden weights get no gradient: terms come from that of the
projected input (`farthing.torch.gradients.recurrent`).
"""

from typing import Any

import torch
from torch import Tensor


def _hidden(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(h, weight.t(), out=out)
    return torch.addmm(bias, h, weight.t(), out=out)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """x (steps, records, 4 · width): the gates' input; returns all states and the last cell."""
        steps, records, width = len(x), len(h), h.shape[1]
        gates, cells = torch.empty_like(x), x.new_empty(steps + 1, records, width)
        tanhs, states = torch.empty_like(cells[1:]), torch.empty_like(cells[1:])
        cells[0] = c
        for t in range(steps):
            now = _hidden(h, weight, bias, gates[t]).add_(x[t])
            now[:, : 2 * width].sigmoid_()
            now[:, 2 * width : 3 * width].tanh_()
            now[:, 3 * width :].sigmoid_()
            i, f, g, o = now.split(width, 1)
            torch.addcmul(torch.mul(f, cells[t], out=cells[t + 1]), i, g, out=cells[t + 1])
            h = torch.mul(o, torch.tanh(cells[t + 1], out=tanhs[t]), out=states[t])
        ctx.save_for_backward(gates, cells, tanhs, weight)
        return states, cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, deltas: Tensor, last: Tensor) -> Any:
        gates, cells, tanhs, weight = ctx.saved_tensors
        width = tanhs.shape[2]
        i, f, g, o = gates.split(width, 2)
        slopes = torch.cat([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], 2)
        out, through = tanhs * o * (1 - o), o * (1 - tanhs * tanhs)
        found = torch.empty_like(gates)
        h, c = torch.zeros_like(last), last.clone()
        for t in reversed(range(len(found))):
            h += deltas[t]
            c.addcmul_(h, through[t])
            now = found[t]
            torch.mul(
                slopes[t].unflatten(1, (3, width)),
                c[:, None],
                out=now[:, : 3 * width].unflatten(1, (3, width)),
            )
            torch.mul(out[t], h, out=now[:, 3 * width :])
            c *= f[t]
            torch.mm(now, weight, out=h)
        return found, h, c, None, None


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """x (steps, records, 3 · width); returns all states and the reset gates."""
        steps, records, width = len(x), len(h), h.shape[1]
        gates, hidden = torch.empty_like(x), torch.empty_like(x)
        states = x.new_empty(steps + 1, records, width)
        states[0] = h
        for t in range(steps):
            inner = _hidden(states[t], weight, bias, hidden[t])
            now = gates[t]
            torch.add(x[t, :, : 2 * width], inner[:, : 2 * width], out=now[:, : 2 * width]).sigmoid_()
            r, z, n = now.split(width, 1)
            torch.addcmul(x[t, :, 2 * width :], r, inner[:, 2 * width :], out=n).tanh_()
            torch.lerp(n, states[t], z, out=states[t + 1])
        ctx.save_for_backward(gates, hidden, states, weight)
        resets = gates[..., :width].clone()
        ctx.mark_non_differentiable(resets)
        return states[1:].clone(), resets

    @staticmethod
    def backward(ctx: Any, deltas: Tensor, _: Tensor) -> Any:
        gates, hidden, states, weight = ctx.saved_tensors
        width = states.shape[2]
        r, z, n = gates.split(width, 2)
        candidate, update = (1 - z) * (1 - n * n), (states[:-1] - n) * z * (1 - z)
        reset = hidden[..., 2 * width :] * r * (1 - r)
        found, inner = torch.empty_like(gates), torch.empty_like(gates[0])
        h, back = torch.zeros_like(states[0]), torch.empty_like(states[0])
        for t in reversed(range(len(found))):
            h += deltas[t]
            now = found[t]
            torch.mul(candidate[t], h, out=now[:, 2 * width :])
            torch.mul(update[t], h, out=now[:, width : 2 * width])
            torch.mul(reset[t], now[:, 2 * width :], out=now[:, :width])
            inner.copy_(now)
            inner[:, 2 * width :] *= r[t]
            torch.mm(inner, weight, out=back)
            torch.addcmul(back, h, z[t], out=h)
        return found, h, None, None


def lstm(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states of an LSTM, one a step, and its last cell; x is (records, steps, 4 · width)."""
    states, last = _Lstm.apply(x.transpose(0, 1).contiguous(), h, c, weight, bias)  # type: ignore[no-untyped-call]
    return states.transpose(0, 1), last


def gru(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states of a GRU, and its reset gates; x is (records, steps, 3 · width)."""
    states, resets = _Gru.apply(x.transpose(0, 1).contiguous(), h, weight, bias)  # type: ignore[no-untyped-call]
    return states.transpose(0, 1), resets.transpose(0, 1)
