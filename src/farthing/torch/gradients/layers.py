"""Define a rule per layer: its forward pass under a tape, and the terms of its per-example gradients.

A rule is called in place of the module's own forward, as ``rule(tape, module, own, *args)``. A module without
a rule is mapped: its parameters are copied once for each example, and torch.func.vmap runs the module's own
forward, so that the gradients of the copies are per-example gradients. `layer_rule` adds a rule for a class
of your own.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from farthing.errors import Unsupported
from farthing.torch.gradients.convolution import Turned, windows
from farthing.torch.gradients.copies import one_first
from farthing.torch.gradients.joint_terms import Blocks, SumTerm
from farthing.torch.gradients.normalisation import norm
from farthing.torch.gradients.outers import Lookup, Outer
from farthing.torch.gradients.recurrent import cell, recurrent
from farthing.torch.gradients.tape import Passes, Tape, leaves
from farthing.torch.gradients.tape_plan import Rule
from farthing.torch.gradients.terms import Factor, RowTerms, Term, summed


def linear(tape: Tape, module: nn.Linear, own: Any, input: Tensor) -> Tensor:
    """Run a linear layer, whose gradient is δ ⊗ a, summed over positions."""
    use = tape.use(module, module.weight, module.bias)
    return tape.project(input, module.weight, module.bias, tape.axes(use)[0][0])


def convolution(tape: Tape, module: Any, own: Any, input: Tensor) -> Tensor:
    """Run a convolution, whose gradient is δ ⊗ window, summed over windows."""
    use = tape.use(module, module.weight, module.bias)
    input = tape.multiplied(input)
    out: Tensor = own(input)
    axis = tape.axes(use)[0][0]
    tape.batch_first(module, axis)

    def then(delta: Tensor, seen: Tensor) -> None:
        if tape.trained(module.weight):
            tape.put(module.weight, lambda: windows(module, delta, seen, tape.examples, tape.factored))
        tape.put(module.bias, lambda: RowTerms(tape.joined(delta.flatten(2).sum(2, dtype=torch.float32))))

    return tape.watch(out, then, as_is=True, keep=(input,))


def transposed(
    tape: Tape, module: Any, own: Any, input: Tensor, output_size: list[int] | None = None
) -> Tensor:
    """Run a transposed convolution, whose gradient is input ⊗ window of δ, summed over windows."""
    use = tape.use(module, module.weight, module.bias)
    input = tape.multiplied(input)
    out: Tensor = own(input, output_size)
    tape.batch_first(module, tape.axes(use)[0][0])

    def then(delta: Tensor, seen: Tensor) -> None:
        if tape.trained(module.weight):
            tape.put(
                module.weight,
                lambda: windows(
                    Turned(module), seen, delta, tape.examples, tape.factored and module.groups == 1
                ),
            )
        tape.put(module.bias, lambda: RowTerms(tape.joined(delta.flatten(2).sum(2, dtype=torch.float32))))

    return tape.watch(out, then, as_is=True, keep=(input,))


def embedding(tape: Tape, module: nn.Embedding, own: Any, input: Tensor) -> Tensor:
    """Return rows of a table; the row at the padding index has no gradient."""
    use = tape.use(module, module.weight)
    out: Tensor = own(input)
    axis = tape.axes(use)[0][0]
    if axis is None:
        out = tape.spread(out)

    def then(delta: Tensor) -> None:
        ids, v = tape.grouped(input, axis, 0), tape.grouped(delta, axis or 0)
        if module.padding_idx is not None:
            v = v.masked_fill((ids == module.padding_idx)[..., None], 0.0)
        tape.put(module.weight, lambda: Lookup(ids, Factor(v), module.num_embeddings))

    return tape.watch(out, then, as_is=True)


def bag(
    tape: Tape,
    module: nn.EmbeddingBag,
    own: Any,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Any:
    """Return rows of a table, added up or averaged over the bag; a bag is a row, or begins at an offset."""
    if per_sample_weights is not None:
        return anything(tape, module, own, input, offsets, per_sample_weights)
    use = tape.use(module, module.weight)
    out: Tensor = own(input, offsets)
    if offsets is None:
        tape.batch_first(module, tape.axes(use)[0][0])
    elif len(out) != tape.rows:
        raise Unsupported(f"{tape.plan.names[module]} (EmbeddingBag) needs one bag a record")

    def then(delta: Tensor) -> None:
        rows, share = (input, torch.ones_like(input)) if offsets is None else _bags(module, input, offsets)
        share = share.float()
        if module.padding_idx is not None:
            share = share * (rows != module.padding_idx)
        if module.mode == "mean":
            share = share / share.sum(1, keepdim=True).clamp_min(1.0)
        ids, v = tape.grouped(rows, 0, 0), tape.grouped(share[..., None] * delta[:, None], 0)
        tape.put(module.weight, lambda: Lookup(ids, Factor(v), module.num_embeddings))

    return tape.watch(out, then)


def _bags(module: nn.EmbeddingBag, input: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return bags of different lengths as rows, filled up with zeros, and which places are not filling."""
    ends = (
        offsets[1:]
        if module.include_last_offset
        else torch.cat([offsets[1:], offsets.new_tensor([len(input)])])
    )
    starts = offsets[: len(ends)]
    places = torch.arange(max(1, int((ends - starts).max())), device=input.device)
    there = places < (ends - starts)[:, None]
    at = (starts[:, None] + places).clamp_max(max(len(input) - 1, 0))
    found = input[at] if len(input) else torch.zeros_like(at)
    return torch.where(there, found, 0), there


def attention(
    tape: Tape,
    module: nn.MultiheadAttention,
    own: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run nn.MultiheadAttention in plain steps, with four projections that record their terms."""
    own_weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    tape.use(module, module.in_proj_weight, module.in_proj_bias, *own_weights)
    tape.use(module, module.out_proj.weight, module.out_proj.bias)
    if query.ndim != 3:
        raise Unsupported(f"{tape.plan.names[module]} (MultiheadAttention) needs examples in a batch")
    same = query is key is value
    if not module.batch_first:
        query, key, value = (side.transpose(0, 1) for side in (query, key, value))
    weights, biases = module.in_proj_weight, module.in_proj_bias
    if weights is not None and same:
        q, k, v = tape.project(query, weights, biases, 0).chunk(3, -1)
    else:
        parts = own_weights if weights is None else weights.chunk(3)
        q, k, v = _projections(tape, module, (query, key, value), parts)
    heads, mask = module.num_heads, _mask(module, key_padding_mask, attn_mask, is_causal, query, key)
    q, k, v = (torch.unflatten(side, 2, (heads, -1)).transpose(1, 2) for side in (q, k, v))
    drop, found = module.dropout if module.training else 0.0, None
    if need_weights:
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        found = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), drop)
        out = found @ v
        found = found.mean(1) if average_attn_weights else found
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
    out = out.transpose(1, 2).flatten(2)
    last = module.out_proj
    out = tape.project(out, last.weight, last.bias, 0)
    return (out if module.batch_first else out.transpose(0, 1)), found


def _projections(
    tape: Tape, module: nn.MultiheadAttention, sides: tuple[Tensor, ...], parts: tuple[Tensor, ...]
) -> list[Tensor]:
    """Return query, key and value each by its own third of the weights."""
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    deltas: dict[int, Tensor] = {}
    given = [tuple(x.detach() for x in sides)]  # let go with the last gradient, and not with all of the graph
    outs = [F.linear(x, weight, bias) for x, weight, bias in zip(sides, parts, biases, strict=True)]
    shapes = [out.shape for out in outs]

    def then(n: int, delta: Tensor) -> None:
        deltas[n] = delta
        if len(deltas) == len(shapes):
            end()

    def end() -> None:
        if not given:
            return
        seen = given.pop()
        found = [deltas.pop(n) if n in deltas else x.new_zeros(shapes[n]).float() for n, x in enumerate(seen)]
        us = [Factor(tape.grouped(delta, 0)) for delta in found]
        outers: list[Term] = [
            Outer(u, Factor(tape.grouped(x, 0).float())) for u, x in zip(us, seen, strict=True)
        ]
        if module.in_proj_weight is not None:
            tape.put(module.in_proj_weight, lambda: Blocks(outers))
        for p, outer in zip(parts, outers, strict=True):
            tape.put(p, partial(_same, outer))
        tape.put(module.in_proj_bias, lambda: Blocks([summed(u) for u in us]))

    tape.finally_(end)
    return [tape.watch(out, partial(then, n)) for n, out in enumerate(outs)]


def _same(term: Term) -> Term:
    return term


def _mask(
    module: nn.MultiheadAttention,
    padding: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
) -> Tensor | None:
    """Return the mask that is added to scores (examples, heads, queries, keys)."""
    found = None
    if mask is not None:
        found = _added(mask, query.dtype)
        if found.ndim == 3:
            found = found.view(-1, module.num_heads, *found.shape[1:])
    if padding is not None:
        blank = _added(padding, query.dtype)[:, None, None, :]
        found = blank if found is None else found + blank
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def anything(tape: Tape, module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module that has no rule: by vmap, with its parameters copied once for each example."""
    use = tape.use(module)
    inner, outer = (list(axes) for axes in tape.axes(use))
    names = dict(module.named_parameters())
    copies = {name: tape.copies(p, tuple(p.shape)) for name, p in names.items() if tape.trained(p)}
    split = [
        x if axis is None else torch.unflatten(x, axis, (tape.rows, -1))
        for x, axis in zip(leaves((args, kwargs)), inner, strict=True)
    ]

    def forward(weights: dict[str, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        with _without(module), _Lookups():
            again, more = _filled((args, kwargs), iter(tensors))
            found = functional_call(module, weights, again, more)
        shape.append(found)
        return tuple(leaves(found))

    shape: list[Any] = []
    back = tuple(axis or 0 for axis in outer)
    full = torch.autocast(tape.plan.anchor.device.type, enabled=False)
    with nullcontext() if tape.plan.mixed else full:
        if not tape.plan.mixed:  # vmap cannot cast for some layers what autocast would
            split = [x.float() if x.dtype in _NARROW else x for x in split]
        outs = vmap(forward, (0, *inner), back, randomness="different")(copies, *split)
    joined = (
        out if axis is None else out.flatten(axis, axis + 1) for out, axis in zip(outs, outer, strict=True)
    )
    return _filled(shape[0], joined)


_NARROW = torch.float16, torch.bfloat16


class _Lookups(TorchFunctionMode):
    """A mode in which nothing is learnt at the padding index of a table, in whichever lane of vmap.

    With a table in every lane, torch knows that index in the first lane only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is not F.embedding or given.get("padding_idx") is None:
            return func(*args, **given)
        ids, table = args
        padding = given.pop("padding_idx") % table.shape[0]
        found = func(ids, table, **given)
        return torch.where((ids == padding)[..., None], found.detach(), found)


@contextmanager
def _without(module: nn.Module) -> Iterator[None]:
    """Give the module its own forward back, for a while; what its hooks set meanwhile is dropped."""
    before = dict(module.__dict__)
    del module.__dict__["forward"]
    try:
        yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(before)


def _filled(value: Any, tensors: Any) -> Any:
    """Return a structure like ``value`` with other tensors in it."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: _filled(part, tensors) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_filled(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.ConvTranspose1d: transposed,
    nn.ConvTranspose2d: transposed,
    nn.ConvTranspose3d: transposed,
    nn.Embedding: embedding,
    nn.EmbeddingBag: bag,
    nn.LayerNorm: norm,
    nn.RMSNorm: norm,
    nn.GroupNorm: norm,
    nn.InstanceNorm1d: norm,
    nn.InstanceNorm2d: norm,
    nn.InstanceNorm3d: norm,
    nn.MultiheadAttention: attention,
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNNCell: cell,
    nn.LSTMCell: cell,
    nn.GRUCell: cell,
}
_BUILT_IN = frozenset(RULES.values())


def layer_rule(kind: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Return a decorator that makes a function the rule of a class of modules.

    A class without a rule is mapped by vmap, which is slower; a rule changes the time of a step and never
    its privacy: every model is compared with plain autograd on made-up examples before the first batch.

    Parameters
    ----------
    kind : type
        A class of modules. A subclass with a forward of its own has no rule from it.

    Returns
    -------
    callable
        The decorator. The rule is called as ``rule(tape, module, own, *args)`` in place of the module's
        forward, which is ``own``. It notes a use of its parameters (``tape.use(module, *parameters)``),
        computes the output without them requiring gradients, and hands a `Term` a parameter to ``tape.put``
        when the output's gradient comes (``tape.watch(out, then)``).

    Examples
    --------
    >>> class Shift(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.by = nn.Parameter(torch.zeros(3))
    ...
    ...     def forward(self, x):
    ...         return x + self.by
    >>> @layer_rule(Shift)
    ... def shift(tape, module, own, x):
    ...     tape.use(module, module.by)
    ...     return tape.watch(own(x), lambda delta: tape.put(module.by, lambda: Rows(delta)))
    >>> rule_of(Shift()) is shift
    True
    """

    def put(rule: Rule) -> Rule:
        RULES[kind] = rule
        return rule

    return put


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule of a module that runs its class's own forward; None where it has none."""
    if hasattr(module, "parametrizations") or module._forward_pre_hooks:
        return None
    if any(p is not None and p.is_complex() for p in module._parameters.values()):
        return None
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return None
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return None
    kinds = (kind for kind in type(module).__mro__ if kind in RULES)
    return next((RULES[kind] for kind in kinds if type(module).forward is kind.forward), None)


def rules_of(
    model: nn.Module, mapped: Collection[nn.Module] = (), free: Collection[nn.Module] = ()
) -> tuple[dict[nn.Module, Rule], list[tuple[nn.Module, str]]]:
    """Return a rule for every module with trainable parameters, and parameters that examples get copies of.

    A module that holds parameters beside other modules (a class token, learnt positions, a scale) is left as
    it is: examples get copies along a first dimension of one, or of their own (`copies.Copies`). Those that
    are ``mapped`` are mapped as a whole if they have others than the former; those that are ``free`` go
    without a built-in rule, as others use their parameters too. A rule that was added by `layer_rule` is
    never left out, so that one that is wrong is refused. What stands in an nn.ParameterDict or
    nn.ParameterList is held by the module around it.
    """
    rules: dict[nn.Module, Rule] = {}
    spread: list[tuple[nn.Module, str]] = []
    covered: set[nn.Module] = set()
    for module in model.modules():
        own = [name for name, p in module._parameters.items() if p is not None and p.requires_grad]
        below = any(map(_trains, module.children()))
        boxed = any(isinstance(child, _BOXES) and _trains(child) for child in module.children())
        whole = isinstance(module, nn.MultiheadAttention) or hasattr(module, "parametrizations")
        if module in covered or not (own or boxed or (below and whole)):
            continue
        rule = None if boxed else rule_of(module)
        if rule in _BUILT_IN and module in free and _plain(module):
            rule = None
        spreads = all(one_first(module, name) for name in own)
        follows = (below or _plain(module)) and own and not boxed
        if rule is None and follows and (spreads or module not in mapped):
            spread += [(module, name) for name in own]
            continue
        rules[module] = anything if rule is None else rule
        covered.update(module.modules())
    return rules, spread


_BOXES = nn.ParameterDict, nn.ParameterList


def _plain(module: nn.Module) -> bool:
    """Return whether a module without others in it reads its parameters as its attributes, as they are."""
    complex_ = any(p is not None and p.is_complex() for p in module._parameters.values())
    odd = isinstance(module, nn.MultiheadAttention | nn.RNNBase | nn.EmbeddingBag | torch.jit.ScriptModule)
    return not (complex_ or odd or module._forward_pre_hooks or hasattr(module, "parametrizations"))


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def most_positions(passes: Passes, batch: tuple[Any, Any]) -> int:
    """Return over how many positions the longest product goes that is not made of rows; 0: there is none."""
    found: dict[int, tuple[int, int]] = {}

    def put(slot: int, term: Term) -> None:
        parts = term.terms if isinstance(term, SumTerm | Blocks) else [term]
        for part in parts:
            kept = not isinstance(term, SumTerm) and part.positions > 1
            if isinstance(part, Outer) and not (kept and part.bytes <= part.made_of()):
                found[slot] = part.positions * part.size, part.positions

    try:
        passes.run(*batch, None, put)
    except Exception:
        if passes.plan.holders:
            raise
        return 0  # what is wrong is said by the checks that follow, in their own words
    return max(found.values(), default=(0, 0))[1]
