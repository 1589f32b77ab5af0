"""Define rules for recurrent layers, with their steps written out so that every gate's gradient is seen.

The gates of a step are x W_ihᵀ + h W_hhᵀ plus biases. The gradient of the projected input is that of the
gates, at all steps at once; together with the inputs and the hidden states before each step it makes the
terms of all four parameters. (A GRU's candidate multiplies its hidden part by the reset gate, and so is its
gradient.)

Autograd spends a node on every operation of every step. Here all steps of a layer are one node: what the
backward pass needs besides the next step's gradient is made for all steps at once, and a step is then a
handful of operations in memory that is there. Hidden weights get no gradient: terms come from that of the
projected input.

In reduced precision on a GPU, cuDNN runs the steps of LSTMs and GRUs. It is given the projected input and an
identity matrix as the input projection, so its gradient of the input is the gradient of the gates.

Sequences of a PackedSequence are padded, and a step changes only the states of sequences that have not ended,
so an example's outputs and gradient do not depend on the lengths of the others. A padded step has a gradient
of zero. The output is packed like the input.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from farthing.errors import Unsupported
from farthing.torch.gradients.outers import Outer
from farthing.torch.gradients.tape import Tape
from farthing.torch.gradients.terms import Factor, summed
from farthing.torch.kernels import steps
from farthing.torch.kernels.totals import coarse


def _hidden(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(h, weight.t(), out=out)
    return torch.addmm(bias, h, weight.t(), out=out)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Return all states and the last cell for the gates' input x (steps, records, 4 · width)."""
        count, records, width = len(x), len(h), h.shape[1]
        gates, cells = torch.empty_like(x), x.new_empty(count + 1, records, width)
        tanhs, states = torch.empty_like(cells[1:]), torch.empty_like(cells[1:])
        cells[0] = c
        for t in range(count):
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
    def forward(ctx: Any, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, reset: Any) -> Any:
        """Return all states for x (steps, records, 3 · width).

        The backward pass hands the list ``reset`` the states before each step, and what reset gates leave of
        the candidates' gradients.
        """
        count, records, width = len(x), len(h), h.shape[1]
        gates, inner = torch.empty_like(x), torch.empty_like(x[0])
        hidden = x.new_empty(count, records, width)
        states = x.new_empty(count + 1, records, width)
        states[0] = h
        for t in range(count):
            inner = _hidden(states[t], weight, bias, inner)
            hidden[t] = inner[:, 2 * width :]
            now = gates[t]
            torch.add(x[t, :, : 2 * width], inner[:, : 2 * width], out=now[:, : 2 * width]).sigmoid_()
            r, z, n = now.split(width, 1)
            torch.addcmul(x[t, :, 2 * width :], r, inner[:, 2 * width :], out=n).tanh_()
            torch.lerp(n, states[t], z, out=states[t + 1])
        ctx.save_for_backward(gates, hidden, states, weight)
        ctx.reset = reset
        return states[1:].clone()

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> Any:
        gates, hidden, states, weight = ctx.saved_tensors
        width = states.shape[2]
        r, z, n = gates.split(width, 2)
        candidate, update = (1 - z) * (1 - n * n), (states[:-1] - n) * z * (1 - z)
        reset = hidden * r * (1 - r)
        scaled = torch.empty_like(hidden)
        found, inner = torch.empty_like(gates), torch.empty_like(gates[0])
        h, back = torch.zeros_like(states[0]), torch.empty_like(states[0])
        for t in reversed(range(len(found))):
            h += deltas[t]
            now = found[t]
            torch.mul(candidate[t], h, out=now[:, 2 * width :])
            torch.mul(update[t], h, out=now[:, width : 2 * width])
            torch.mul(reset[t], now[:, 2 * width :], out=now[:, :width])
            torch.mul(now[:, 2 * width :], r[t], out=scaled[t])
            inner[:, : 2 * width], inner[:, 2 * width :] = now[:, : 2 * width], scaled[t]
            torch.mm(inner, weight, out=back)
            torch.addcmul(back, h, z[t], out=h)
        ctx.reset += states[:-1].transpose(0, 1), scaled.transpose(0, 1)
        return found, h, None, None, None


def lstm(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states of an LSTM, one a step, and its last cell; x is (records, steps, 4 · width)."""
    states, last = _Lstm.apply(x.transpose(0, 1).contiguous(), h, c, weight, bias)  # type: ignore[no-untyped-call]
    return states.transpose(0, 1), last


def gru(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, reset: list[Tensor]) -> Tensor:
    """Return the states of a GRU; x is (records, steps, 3 · width); see `_Gru` for ``reset``."""
    states: Tensor = _Gru.apply(x.transpose(0, 1).contiguous(), h, weight, bias, reset)  # type: ignore[no-untyped-call]
    return states.transpose(0, 1)


def _by_library(gates: Tensor, module: nn.RNNBase) -> bool:
    """Return whether cuDNN goes through the steps: not where the identity would take full float32."""
    plain = isinstance(module, nn.LSTM | nn.GRU) and not module.proj_size and gates.is_cuda
    return plain and (gates.dtype is not torch.float32 or coarse(gates.device))


def library(
    tape: Tape, module: nn.RNNBase, suffix: str, gates: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the states of an LSTM or a GRU, and its last cell; gates are (records, steps, gates · width)."""
    _, w_hh, _, b_hh, _ = _weights(module, suffix)
    helper = tape.plan.helpers.get((module, suffix, gates.dtype))
    if helper is None:
        helper = tape.plan.helpers[module, suffix, gates.dtype] = _helper(module, gates)
    with torch.autocast(gates.device.type, enabled=False):
        with torch.no_grad():
            for name, given in (("weight_hh_l0", w_hh), ("bias_hh_l0", b_hh)):
                if given is not None:
                    helper.get_parameter(name).copy_(given)
        start = h.to(gates.dtype)[None].contiguous()
        if c is None:
            out: Tensor = helper(gates, start)[0]
            return out, None
        out, (_, last) = helper(gates, (start, c.to(gates.dtype)[None].contiguous()))
        return out, last[0]


def _helper(module: nn.RNNBase, gates: Tensor) -> nn.Module:
    """Return a layer that takes projected inputs as they are."""
    kind, size = nn.LSTM if isinstance(module, nn.LSTM) else nn.GRU, gates.shape[2]
    made = kind(size, module.hidden_size, batch_first=True, device="meta", dtype=gates.dtype)
    made = made.to_empty(device=gates.device).requires_grad_(False)  # without drawing random numbers
    for name, p in made.named_parameters():
        p.copy_(torch.eye(size)) if name == "weight_ih_l0" else p.zero_()
    return made


def _lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, hidden: Tensor, h: Tensor) -> Tensor:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    candidate = (xn + reset * hn).tanh()
    return candidate + update * (h - candidate)


def _weights(module: nn.RNNBase, suffix: str) -> list[Tensor | None]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return [getattr(module, f"{name}_{suffix}", None) for name in names]


def _sweep(
    tape: Tape, module: nn.RNNBase, suffix: str, x: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run one layer in one direction over x (records, steps, width): outputs, last state, last cell."""
    w_ih, w_hh, b_ih, b_hh, w_hr = _weights(module, suffix)
    assert w_ih is not None
    assert w_hh is not None
    first, kept, resets = h.detach(), list[Tensor](), list[Tensor]()

    def then(delta: Tensor) -> None:
        u = hidden = Factor(tape.grouped(delta, 0))
        states = kept[0].float()
        if len(kept) < 2:  # outputs only
            states = torch.cat([first.float()[:, None], states[:, :-1]], 1)
        if isinstance(module, nn.GRU):
            r, z, n = delta.chunk(3, -1)
            if resets:  # of all steps at once, from the states that cuDNN found
                assert w_hh is not None
                width = module.hidden_size
                into = F.linear(states, w_hh[:width], None if b_hh is None else b_hh[:width])
                kept.append(n * torch.sigmoid(resets[0].float() + into))
            hidden = Factor(tape.grouped(torch.cat([r, z, kept.pop().float()], -1), 0))
        tape.put(w_ih, lambda: Outer(u, Factor(tape.grouped(x.detach(), 0).float())))
        tape.put(b_ih, lambda: summed(u))
        tape.put(w_hh, lambda: Outer(hidden, Factor(tape.grouped(states, 0))))
        tape.put(b_hh, lambda: summed(hidden))

    weights = steps.LayerWeights(w_ih, w_hh, b_ih, b_hh)
    if isinstance(module, nn.LSTM) and w_hr is None and steps.fits(x, weights):
        out, c = steps.Lstm.apply(tape.plan.anchor, x, h, c, weights, then)  # type: ignore[no-untyped-call]
        tape.note(out, x, steps=x.shape[1])
        kept.append(out.detach())
        return out, out[:, -1], c
    gates = tape.watch(F.linear(x, w_ih, b_ih), then)
    tape.note(x, steps=x.shape[1])
    kind = gates.dtype
    if _by_library(gates, module):
        if isinstance(module, nn.GRU):
            resets.append(gates.detach()[..., : module.hidden_size])
        out, c = library(tape, module, suffix, gates, h, c)
        kept.append(out.detach())
        return out, out[:, -1], c
    if isinstance(module, nn.LSTM) and w_hr is None:
        assert c is not None
        out, c = lstm(gates, h.to(kind), c.to(kind), *_cast(kind, w_hh, b_hh))
        kept.append(out.detach())
        return out, out[:, -1], c
    if isinstance(module, nn.GRU):
        out = gru(gates, h.to(kind), *_cast(kind, w_hh, b_hh), kept)
        return out, out[:, -1], None
    outs = []
    for step in gates.unbind(1):
        hidden = F.linear(h, w_hh, b_hh)
        if isinstance(module, nn.LSTM):
            assert c is not None
            assert w_hr is not None
            h, c = _lstm(step + hidden, c)
            h = tape.project(h, w_hr, None, 0)
        else:
            h = (step + hidden).relu() if module.mode == "RNN_RELU" else (step + hidden).tanh()
        outs.append(h)
    kept.append(torch.stack(outs, 1).detach())
    return torch.stack(outs, 1), h, c


def _cast(kind: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(kind), None if bias is None else bias.to(kind)


def recurrent(tape: Tape, module: nn.RNNBase, own: Any, input: Any, hx: Any = None) -> Any:
    """Run nn.RNN, nn.LSTM or nn.GRU: several layers, both directions, dropout between layers."""
    if isinstance(input, PackedSequence):
        return packed(tape, module, input, hx)
    if input.ndim != 3:
        raise Unsupported(
            f"{tape.plan.names[module]} ({type(module).__name__}) needs a batch of three dimensions"
        )
    x = input if module.batch_first else input.transpose(0, 1)
    ways = 2 if module.bidirectional else 1
    lstm = isinstance(module, nn.LSTM)
    width = module.proj_size or module.hidden_size
    if hx is None:
        h0 = x.new_zeros(module.num_layers * ways, len(x), width)
        c0 = x.new_zeros(module.num_layers * ways, len(x), module.hidden_size)
    else:
        h0, c0 = hx if lstm else (hx, hx)
    names = [f"l{n}{end}" for n in range(module.num_layers) for end in ("", "_reverse")[:ways]]
    tape.use(module, *(p for name in names for p in _weights(module, name)[:4]))
    if lstm and module.proj_size:
        for _ in range(x.shape[1]):
            tape.use(module, *(_weights(module, name)[4] for name in names))
    last, cells = [], []
    for n in range(module.num_layers):
        outs = []
        for way in range(ways):
            place = n * ways + way
            seen = x.flip(1) if way else x
            out, h, c = _sweep(tape, module, names[place], seen, h0[place], c0[place] if lstm else None)
            outs.append(out.flip(1) if way else out)
            last.append(h)
            cells.append(c)
        x = outs[0] if ways == 1 else torch.cat(outs, -1)
        if n + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    found = x if module.batch_first else x.transpose(0, 1)
    h = torch.stack(last)
    return (found, (h, torch.stack([c for c in cells if c is not None]))) if lstm else (found, h)


def cell(tape: Tape, module: nn.RNNCellBase, own: Any, input: Tensor, hx: Any = None) -> Any:
    """Run one step of nn.RNNCell, nn.LSTMCell or nn.GRUCell."""
    tape.use(module, module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    if input.ndim != 2:
        raise Unsupported(f"{tape.plan.names[module]} ({type(module).__name__}) needs examples in a batch")
    lstm = isinstance(module, nn.LSTMCell)
    if hx is None:
        zeros = input.new_zeros(len(input), module.hidden_size)
        hx = (zeros, zeros) if lstm else zeros
    h = hx[0] if lstm else hx
    x = tape.project(input, module.weight_ih, module.bias_ih, 0)
    hidden = tape.project(h, module.weight_hh, module.bias_hh, 0)
    if lstm:
        return _lstm(x + hidden, hx[1])
    if isinstance(module, nn.GRUCell):
        return _gru(x, hidden, h)
    return (x + hidden).relu() if module.nonlinearity == "relu" else (x + hidden).tanh()


def packed(tape: Tape, module: nn.RNNBase, input: PackedSequence, hx: Any) -> Any:
    """Run nn.RNN, nn.LSTM or nn.GRU on packed sequences: several layers, both directions, dropout."""
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
            out, h, c = _packed_sweep(tape, module, names[place], seen, runs, h0[place], c0[place])
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


def _packed_sweep(
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
