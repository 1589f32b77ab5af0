"""Recurrent layers on a PackedSequence: sequences of different lengths, each run over its own steps only.

The sequences are padded, and a step changes the state of those alone that still run: an example's outputs and
gradient are those of its own sequence, however long the others are. What comes back is packed as what came
in. Terms are those of `farthing.torch.gradients.recurrent`; a padded step has a gradient of zero.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from farthing.torch.gradients.tape import Tape
from farthing.torch.gradients.terms import Factor, Outer, summed


def packed(tape: Tape, module: nn.RNNBase, input: PackedSequence, hx: Any) -> Any:
    """nn.RNN, nn.LSTM, nn.GRU on packed sequences: several layers, both directions, dropout in between."""
    x, lengths = pad_packed_sequence(input, batch_first=True)
    there = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
    ways = 2 if module.bidirectional else 1
    lstm = isinstance(module, nn.LSTM)
    if hx is None:
        h0 = x.new_zeros(module.num_layers * ways, len(x), module.proj_size or module.hidden_size)
        c0 = x.new_zeros(module.num_layers * ways, len(x), module.hidden_size)
    else:
        h0, c0 = hx if lstm else (hx, hx)
    names = [f"l{n}{end}" for n in range(module.num_layers) for end in ("", "_reverse")[:ways]]
    tape.use(module, *(p for name in names for p in _weights(module, name)[:4]))
    for _ in range(x.shape[1] if lstm and module.proj_size else 0):
        tape.use(module, *(_weights(module, name)[4] for name in names))
    last, cells = [], []
    for n in range(module.num_layers):
        outs = []
        for way in range(ways):
            place = n * ways + way
            seen, runs = (x.flip(1), there.flip(1)) if way else (x, there)
            out, h, c = _sweep(tape, module, names[place], seen, runs, h0[place], c0[place])
            outs.append(out.flip(1) if way else out)
            last.append(h)
            cells.append(c)
        x = outs[0] if ways == 1 else torch.cat(outs, -1)
        if n + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    found, hidden = _packed_as(x, lengths, input), torch.stack(last)
    return (found, (hidden, torch.stack(cells))) if lstm else (found, hidden)


def _packed_as(x: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    if like.sorted_indices is not None:
        x, lengths = x[like.sorted_indices], lengths[like.sorted_indices.cpu()]
    data = pack_padded_sequence(x, lengths, batch_first=True).data
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _weights(module: nn.RNNBase, suffix: str) -> list[Tensor | None]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return [getattr(module, f"{name}_{suffix}", None) for name in names]


def _sweep(
    tape: Tape, module: nn.RNNBase, suffix: str, x: Tensor, there: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer in one direction over x (records, steps, width), each record where it is ``there``."""
    w_ih, w_hh, b_ih, b_hh, w_hr = _weights(module, suffix)
    assert w_ih is not None
    assert w_hh is not None
    before: list[Tensor] = []
    resets: list[Tensor] = []

    def then(delta: Tensor) -> None:
        u = hidden = Factor(tape.grouped(delta, 0))
        if resets:
            r, z, n = delta.chunk(3, -1)
            hidden = Factor(tape.grouped(torch.cat([r, z, n * torch.stack(resets, 1).float()], -1), 0))
        states = torch.stack(before, 1).float()
        tape.put(w_ih, lambda: Outer(u, Factor(tape.grouped(x.detach(), 0).float())))
        tape.put(b_ih, lambda: summed(u))
        tape.put(w_hh, lambda: Outer(hidden, Factor(tape.grouped(states, 0))))
        tape.put(b_hh, lambda: summed(hidden))

    gates, outs = tape.watch(F.linear(x, w_ih, b_ih), then), []
    for step, runs in zip(gates.unbind(1), there.unbind(1), strict=True):
        before.append(h.detach())
        new, cell, reset = _step(module, step, F.linear(h, w_hh, b_hh), h, c)
        if reset is not None:
            resets.append(reset.detach())
        if w_hr is not None:
            new = tape.project(new, w_hr, None, 0)
        h, c = torch.where(runs[:, None], new, h), torch.where(runs[:, None], cell, c)
        outs.append(h)
    return torch.stack(outs, 1), h, c


def _step(
    module: nn.RNNBase, x: Tensor, hidden: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the next state and cell, and a GRU's reset gate."""
    match module:
        case nn.LSTM():
            i, f, g, o = (x + hidden).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c, None
        case nn.GRU():
            (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
            reset, update = (xr + hr).sigmoid(), (xz + hz).sigmoid()
            candidate = (xn + reset * hn).tanh()
            return candidate + update * (h - candidate), c, reset
    both = x + hidden
    return (both.relu() if module.mode == "RNN_RELU" else both.tanh()), c, None
