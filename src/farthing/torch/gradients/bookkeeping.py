"""Sum bounded per-example gradients of a model at about the cost of one ordinary gradient.

`Gradient` is a contribution for `farthing.queries.query.Query`: the model holds its (public) weights,
``loss`` gives one value a record, and `Gradient.bounded_sum` returns one flat float32 tensor, where `Layout`
says which parameter lies where.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import FarthingError, InvalidValue, OutOfMemory, Unsupported
from farthing.torch.checks import leftovers, selfcheck
from farthing.torch.checks.independence import Mixed
from farthing.torch.checks.leftovers import Wall
from farthing.torch.checks.probe import Source, devices, plan_of, refuse_equal
from farthing.torch.checks.selfcheck import both_passes, refuse_known, verify, verify_again, verify_isolated
from farthing.torch.gradients import clipping, isolation, tape
from farthing.torch.gradients.allowance import allowance, at_once
from farthing.torch.gradients.clipping import Automatic, ClipRule
from farthing.torch.gradients.graphs import HUGE, Graphs, Live, weakly
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.joint_terms import SmallRows
from farthing.torch.gradients.layers import most_positions, rules_of
from farthing.torch.gradients.layout import Layout, Sketch
from farthing.torch.gradients.mlp import Stack
from farthing.torch.gradients.plain import Makeup, Plain, TrainedWeights, bare, of_torch, without_cudnn
from farthing.torch.gradients.tape import Passes, one_thread, record_losses, ungrouped
from farthing.torch.gradients.tape_plan import TapePlan
from farthing.torch.gradients.terms import Route, RowTerms, Term
from farthing.torch.gradients.ways import Memory, Ways
from farthing.torch.kernels import blocks, totals
from farthing.torch.kernels.positions import fused
from farthing.torch.kernels.totals import exact

_HELD = 3 * 2**23  # numbers that layers take and give, for all rows of a batch on a CPU
_KEPT = 2**26  # numbers in the rows that isolation keeps at once: a quarter of a gigabyte
_FEW = 32  # rows that a batch may have in any case
_SMALL = 2**12  # numbers of a parameter that is measured and summed with other such ones

ROUTES = ("auto", "fast", *Route, *Isolation)
log = logging.getLogger("farthing.torch")


class Gradient:
    """A contribution: the gradients of ``loss(model(inputs), targets)``, one per example, bounded and summed.

    For a `farthing.Query`; `train` makes one by itself. The model holds its public weights, and the sum is
    one flat float32 tensor, in which `Layout` says where each parameter lies. The first batch is preceded by
    a check of the model on made-up inputs.

    Parameters
    ----------
    model : nn.Module
        The model, on its device.
    loss : callable
        ``loss(outputs, targets)`` returns one value a record (``reduction="none"``).
    physical_batch_size : int, optional
        Rows that go through the model at once. None: all of a batch, or on a CPU as many as fit its cache.
    autocast : torch.dtype, optional
        The dtype of mixed precision. None: full precision. Norms and sums stay in float32.
    route : str, default "fast"
        "fast" for book-keeping, by the fastest way for its shapes, or one of its ways to norms "rows",
        "again" and "gram" (`farthing.torch.gradients.terms`). "vmap" and "loop" keep examples from meeting by
        construction (`farthing.torch.gradients.isolation`), slower and in full precision: in a lane of vmap
        each, or one after the other. "auto": "fast", and what that cannot follow by "vmap" or "loop".
    example : tuple, optional
        Public (inputs, targets) for the check. None: made-up ones.
    memory : {"balanced", "speed", "space"}, default "balanced"
        How much memory is given for time. Per-example gradients are kept where that is quicker and a step
        stays near the peak of an ordinary one ("balanced", by `farthing.torch.gradients.allowance`), wherever
        it is quicker ("speed"), or where they take no more than what they are made of ("space").
    expected_batch_size : float, optional
        The public number of examples to expect in a batch. On a CPU batches of tensors are then summed in
        secret blocks, in float32 (`farthing.torch.kernels.blocks`), which is quicker than float64.

    Raises
    ------
    Unsupported
        From the first sum on: a model in which examples do not stay apart, or that cannot be followed.

    Examples
    --------
    >>> from farthing.queries.bounds import ClipNorm
    >>> from farthing.torch.training.records import Examples
    >>> gradient = Gradient(nn.Linear(2, 1), lambda out, y: (out.squeeze(1) - y).square())
    >>> examples = Examples((torch.ones(4, 2), torch.full((4,), 100.0)))
    >>> total = gradient.bounded_sum(examples.take(slice(None)), None, ClipNorm(1.0))
    >>> round(float(total.norm()), 4)
    4.0
    """

    honours = clipping.KINDS

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        *,
        physical_batch_size: int | None = None,
        autocast: torch.dtype | None = None,
        route: str = "fast",
        example: tuple[Any, Any] | None = None,
        memory: str = "balanced",
        expected_batch_size: float | None = None,
    ) -> None:
        model = bare(model)
        self.model, self.loss, self.autocast = model, loss, selfcheck.autocast_dtype(autocast)
        self.plain = Plain(model)
        if physical_batch_size is not None:
            validate.count(physical_batch_size=physical_batch_size)
        self.physical_batch_size = physical_batch_size
        self.layout, self.weights = Layout.of(model), TrainedWeights(model)
        if route not in ROUTES:
            raise InvalidValue(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
        self.isolation = Isolation(route) if route in tuple(Isolation) else None
        self._route = Route(route) if route in tuple(Route) else None
        self._falls_back = route == "auto"
        self._memory = validate.choice(Memory, memory=memory)
        if expected_batch_size is not None:
            validate.positive(expected_batch_size=expected_batch_size)
        self.expected_batch_size = expected_batch_size
        self._positions = 0  # of the longest product that is not made of rows
        self._ways = Ways(self._memory, self._route)
        self._places: dict[tuple[int, ...], Tensor] = {}  # of small parameters' coordinates in a sum
        self._graphs = Graphs(model, weakly(self._add), self.layout.size)
        self._graphs.wanted &= not self.plain.sharded  # gathered weights lie elsewhere every time
        if example is not None:
            refuse_equal(example)
        self._example = example
        self._first = next(p for p in model.parameters() if p.requires_grad)
        self._passes: Passes | None = None
        self._source: Source | None = None  # of the made-up examples that it was checked on
        self._stack: Stack | None = None
        self.checked = Makeup(None)
        self._wall: Wall | None = None
        self._last: tuple[Any, ClipRule] | None = None  # the last bound that was found to fit, and its rule
        ends = (*self.layout.offsets[1:], self.layout.size)
        self._spans = [slice(a, b) for a, b in zip(self.layout.offsets, ends, strict=True)]

    def bounded_sum(self, batch: Any, w: Any, bound: Any) -> Tensor:
        """Return the flat sum of bounded gradients; ``w`` is not used, the model holds its weights."""
        try:
            wall, full = self._wall or nullcontext(), totals.exact_on_cpu(self._first.device)
            with self.plain.running(), wall, full, totals.among(len(batch)):
                return self._summed(batch, bound)
        except torch.OutOfMemoryError:  # how much was asked for would tell how many were drawn
            if self.isolation is Isolation.LOOP:  # where an example's values may decide it: that one fails
                raise
            rows = f"physical_batch_size={self.physical_batch_size} rows: give a smaller number"
            raise OutOfMemory(f"there is no memory for a batch of {rows}") from None

    def _onto(self, parts: int = 0) -> int:
        """Return how many parts of all, or of so many, are added in float32 where their sum lies; 1: none."""
        plain, expected = self._stack is None and self.isolation is None, self.expected_batch_size
        several = (parts or self._ways.allowance.parts) > 1
        small = several and expected is not None and blocks.adds_up(expected)
        return blocks.ONTO if plain and (self.layout.size >= HUGE if self._first.is_cuda else small) else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a gradient, one number a trained weight."""
        return (self.layout.size,)

    def zero(self, records: Any, w: Any, bound: Any) -> Tensor:
        """Return the sum over no examples; refuses a bound that does not fit the model."""
        return self._empty(self._rule(bound)).zero_()

    def _rule(self, bound: Any) -> ClipRule:
        """Return the clip rule of a bound, the same one for the same bound."""
        if self._last is None or bound is not self._last[0]:
            self._last = bound, clipping.checked(bound, self.layout.size, self.layout.offsets)
        return self._last[1]

    def _empty(self, rule: ClipRule) -> Tensor:
        return torch.empty(self.layout.size + rule.extra, device=self._first.device, dtype=torch.float32)

    def _summed(self, batch: Any, bound: Any) -> Tensor:
        rule, parts = self._rule(bound), totals.Parts()
        total: Tensor | None = None
        if not self.checked.holds(self.model, self.loss):
            made_up = getattr(batch, "made_up", lambda: next(batch.physical_batches(1)))
            self._checked_publicly(*made_up())  # of which an empty batch has one, too
        few, onto = self._onto(), 0
        few, in_place = few if self._blocks(batch) else totals.parts_in_place(len(batch)), few > 1
        for (inputs, targets, weights), context in self._parts(batch):
            onto = onto + 1 if in_place and total is not None and onto + 1 < few else 0
            if total is not None and not onto:
                parts.put(total)
            with context, totals.in_place(in_place):
                total = self._sum_of(inputs, targets, weights, rule, total, onto > 0)
        return self._empty(rule).zero_() if total is None else parts.whole(total)

    def _sum_of(
        self, inputs: Any, targets: Any, weights: Any, rule: ClipRule, room: Tensor | None, onto: bool = False
    ) -> Tensor:
        """Return the sum of one part: by a stack, by a graph, or in ``room``, ``onto`` what is there."""
        stack = self._stack
        if stack is not None and stack.fits(inputs, weights, rule):
            total = self._empty(rule) if room is None else room
            if stack.add(inputs, targets, self._losses, rule, total, True, weights):
                return total
        elif self.isolation is None:
            found = self._graphs.sum(inputs, targets, weights, rule, room if onto else None)
            if found is not None:
                return found
        if self.isolation is None:
            live = Live.of(rule, self.layout.size, self._first.device)
            return self._add(
                inputs, targets, weights, rule, live, room if onto or room is None else room.zero_()
            )
        rows = self.rows(inputs, targets, weights)
        present = None if weights is None else (weights > 0).view(len(weights), -1).any(1)
        return clipping.plain_sum(rows, rule, present)

    def _parts(self, batch: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the parts of a batch, each with the context in which its sums are made."""
        count, onto = self._blocks(batch), self._onto()
        if not count:
            for part in batch.physical_batches(self._evenly(getattr(batch, "largest", len(batch)))):
                yield part, nullcontext()
            return
        assert self.expected_batch_size is not None
        most = (self._evenly(len(batch)) or len(batch)) // batch.examples.width
        if count == 1 and 0 < len(batch) <= most:  # one block, in any order
            for part in batch.physical_batches():
                yield part, blocks.blocked((len(batch),), self.expected_batch_size, count, onto)
            return
        (places, sizes), start = blocks.drawn_blocks(len(batch), count), 0
        for members in blocks.together(sizes, most):
            here, start = places[start : start + sum(members)], start + sum(members)
            for part in batch.take(here).physical_batches():
                yield part, blocks.blocked(tuple(members), self.expected_batch_size, count, onto)

    def _blocks(self, batch: Any) -> int:
        """Return the number of blocks; 0 where sums are not made in blocks: no record decides."""
        tensors = getattr(getattr(batch, "examples", None), "tensors", None)
        other = self._first.device.type != "cpu" or self._positions == 0 or self.autocast is not None
        if other or self.expected_batch_size is None or tensors is None or totals.shared(len(batch)):
            return 0
        return blocks.block_count(self.expected_batch_size, self._positions, self.most_rows(), self._onto())

    def _evenly(self, examples: int) -> int | None:
        """Return the rows of a part, so that all parts are about as long: each has a cost of its own."""
        most = self.most_rows()
        even = self._first.device.type == "cpu" or self._ways.allowance.parts > 1
        if most is None or self.isolation is not None or not even:
            return most
        rows = -(-examples // max(1, round(examples / most)))
        return max(1, rows if self.physical_batch_size is None else min(rows, self.physical_batch_size))

    def most_rows(self) -> int | None:
        """Return how many rows may go through the model at once, a public number; None for any number."""
        if self.isolation is not None:
            most = max(1, _KEPT // self.layout.size)
            return most if self.physical_batch_size is None else min(most, self.physical_batch_size)
        if self._passes is None or self._stack is not None:
            return self.physical_batch_size
        expected = at_once(self.expected_batch_size, self.physical_batch_size)
        limits = [self.physical_batch_size, self._ways.allowance.rows(expected)]
        if self._first.device.type == "cpu":
            held = _HELD // 16 if self._memory is Memory.SPACE else _HELD
            limits.append(max(_FEW, held // max(1, self._passes.plan.held)))
        return min((rows for rows in limits if rows is not None), default=None)

    def _checked_publicly(self, inputs: Any, targets: Any, weights: Tensor | None) -> None:
        """Run `check`, and mark its errors as public: it uses only shapes, so they depend on no record."""
        try:
            self.check(inputs, targets, weights)
        except Exception as error:
            error.public = True  # type: ignore[attr-defined]
            raise

    def check(self, inputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Make sure that examples stay apart in the model; see `farthing.torch.checks.selfcheck`.

        Only shapes and dtypes of what is given are used. Runs by itself with the first batch.
        """
        if not self.plain.sharded:  # while weights are gathered the model holds others
            self.weights.refuse_changes()
        refuse_known(self.model)
        if self._example is not None:
            source = Source(*self._example, public=True)
        elif weights is not None and weights.ndim == 2:
            source = Source(ungrouped(inputs), ungrouped(targets))
        else:
            source = Source(inputs, targets)
        self._source = source.blank()
        with self.plain.running():
            self._admitted(source)

    def look_again(self) -> None:
        """Check the model anew where its gradients at its present weights are not those of single examples.

        Of a router that began with zeros, say, tokens go to other experts as soon as its weights have moved.
        """
        source, passes, device = self._source, self._passes, self._first.device
        if source is None or passes is None or all(map(of_torch, self.model.modules())):
            return
        sketch = Sketch(self.layout.sizes)
        with self.plain.running(), one_thread(device), exact(device), without_cudnn(self.model):
            try:
                verify_again(self.model, self.loss, source, partial(passes.rows, sketch=sketch), sketch)
            except FarthingError:
                self._admitted(source)

    def _admitted(self, source: Source) -> None:
        try:
            self._checked_by(source)
        except Unsupported as error:
            if not self._falls_back or self.isolation is not None:
                raise
            self._fall_back(source, error)

    def _fall_back(self, source: Source, error: Unsupported) -> None:
        """Take the first way in isolation on which the model runs and means the same; say so.

        Where examples were seen to meet there is none, but for copies that book-keeping makes of a parameter.
        """
        if isinstance(error, Mixed) and not rules_of(self.model)[1]:
            raise error
        for how in Isolation:
            self.isolation = how
            try:
                self._checked_by(source, alike=True)
            except FarthingError:
                continue
            rows = self.most_rows() or 1
            log.warning(isolation.told(how, error, rows, self.layout.size))
            return
        self.isolation = None
        raise error

    def _checked_by(self, source: Source, alike: bool = False) -> None:
        device, passes = self._first.device, None
        with Wall(self.model, self.loss, everything=True) as wall:
            with one_thread(device), exact(device), without_cudnn(self.model):
                if self.isolation is None:
                    plan = self._verified(source)
                    passes = Passes(self.model, self.loss, self.layout, plan, self.autocast)
                    selfcheck.settle_autocast(passes, source)
                    self._graphs.wanted &= not plan.checkpoints  # they look at states of random numbers
                else:
                    kept = self._leftovers(self.rows, source)
                    verify_isolated(self.isolation, self.model, self.loss, source, self.rows, kept, alike)
            self._passes, self.checked = passes, Makeup(self.model, self.loss)
            if passes is not None and self._memory is Memory.BALANCED:
                given = at_once(self.expected_batch_size, self.physical_batch_size) or _FEW
                self._ways.allowance = allowance(passes, source, given, fused(device), self._onto(2) > 1)
            self._stack = self._stacked(source)
            if passes is not None:
                passes.plan.checking = False  # what follows is of private examples, and settles nothing
            wall.accept()
        self._wall = Wall(self.model, self.loss)

    def _verified(self, source: Source) -> TapePlan:
        """Return a plan that gives the right gradients, if need be by mapping what holds parameters."""
        whole, free, again = set[nn.Module](), set[nn.Module](), True
        while True:
            plan = plan_of(self.model, source, whole, again, free)
            passes = Passes(self.model, self.loss, self.layout, plan)  # in full precision
            try:
                with torch.random.fork_rng(devices(self.model)):
                    made_up = source.batch(plan.telling(tape.leaves((source.inputs,))))
                    self._positions = most_positions(passes, made_up)
                sketch = Sketch(self.layout.sizes)
                rows = partial(passes.rows, sketch=sketch)
                size = int(at_once(self.expected_batch_size, self.physical_batch_size) or 0)
                kept = self._leftovers(rows, source)
                verify(self.model, self.loss, source, rows, kept, sketch, size, self.autocast)
            except Exception as error:
                if plan.checkpoints and again:  # parts that do not come out the same again are kept
                    again = False
                    continue
                if not plan.otherwise(error, whole, free):
                    selfcheck.refuse_unfollowed(error)
                continue
            return plan

    def _leftovers(self, rows: Callable[..., Tensor], source: Source) -> Callable[[], None]:
        """Return a check of what the model or the loss keeps of examples."""
        what, how = (self.model, self.loss), (self.isolation is not None, len(self._spans))
        return partial(leftovers.refuse, *what, partial(both_passes, *what, rows, source, *how))

    def _stacked(self, source: Source) -> Stack | None:
        """Return the model as a plain stack, if it is one and gives the same on made-up examples."""
        stack = Stack.of(self.model, self.layout.sizes)
        if stack is None or self.isolation or self._route is not None or self.autocast is not None:
            return None
        inputs, targets = source.batch(4)

        def by_tape(rule: ClipRule) -> Tensor:
            live = Live.of(rule, self.layout.size, self._first.device)
            return self._add(inputs, targets, None, rule, live, None)

        return stack if stack.agrees(inputs, targets, self._losses, Automatic(), by_tape) else None

    def rows(self, inputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return every example's gradient, unbounded: for checks on made-up examples."""
        if self.isolation is None:
            assert self._passes is not None
            with self.plain.running():
                return self._passes.rows(inputs, targets, weights)
        given = *tape.mapped((inputs, targets), torch.clone), weights
        with self.plain.running(), without_cudnn(self.model):
            return isolation.per_example(self.isolation, self.model, self.loss, self.layout.names, *given)

    def _losses(self, outputs: Any, targets: Any, rows: int) -> Tensor:
        return record_losses(self.loss, outputs, targets, rows)

    def _add(
        self,
        inputs: Any,
        targets: Any,
        weights: Tensor | None,
        rule: ClipRule,
        live: Live,
        total: Tensor | None,
        own: bool = False,
    ) -> Tensor:
        """Add the bounded gradients of one batch to total; of the rule's numbers those in ``live`` count.

        ``own``: the batch lies in buffers of our own, in which an example that is not finite may be blanked.
        Without a total there is one after the backward pass, when the model holds nothing any more.
        """
        terms, norms, small = dict[int, Term](), dict[int, Tensor](), dict[int, RowTerms]()
        spans, (clip, scale) = self._spans, live
        inverse = None if scale is None else scale.reciprocal()
        clamps = rule.by_coordinate
        joins = not clamps and inverse is None and not rule.by_layer and self._first.device.type != "cuda"
        assert self._passes is not None

        def put(slot: int, term: Term) -> None:
            if joins and isinstance(term, RowTerms) and term.size <= _SMALL:
                small[slot] = term  # a call for each would take longer than their numbers do
                return
            terms[slot] = term
            if clamps:
                norms[slot] = term.largest()
                return
            self._ways.prepare(slot, term, scaled=inverse is not None)
            if inverse is None:
                norms[slot] = term.norms()
            else:
                with exact(term.device):
                    norms[slot] = term.scaled_norms(inverse[spans[slot]])

        factored = not clamps and inverse is None and fused(self._first.device)
        self._passes.run(inputs, targets, weights, put, factored)
        total = self._empty(rule).zero_() if total is None else total
        if small:
            joint = next(iter(small))
            terms[joint] = SmallRows(list(small.values()), self._coordinates(tuple(small)), total)
            norms[joint] = terms[joint].norms()
        if not terms:
            return total
        slots = list(terms)
        stacked = torch.stack([norms[slot] for slot in slots])
        whole: Tensor = torch.linalg.vector_norm(stacked, dim=0)
        good, present = whole.isfinite(), None
        if weights is not None:
            present = (weights > 0).view(len(weights), -1).any(1)
            good &= present
        factors: list[Tensor] = []
        if not clamps:
            starts = [spans[slot].start for slot in slots]
            factors = rule.parameter_factors(stacked, whole, starts, clip)
        if rule.extra:
            total[-rule.extra :] += rule.extras(whole, present, clip)
        capturing = total.is_cuda and torch.cuda.is_current_stream_capturing()
        some_bad = own or capturing or not bool(good.all())  # a graph cannot ask: it always looks
        distinct = {id(factor): totals.without_denormal(factor) for factor in factors}
        if some_bad:
            distinct = {key: torch.where(good, factor, 0.0) for key, factor in distinct.items()}
        factors = [distinct[id(factor)] for factor in factors]
        for n, slot in enumerate(slots):
            term = terms.pop(slot)
            if some_bad:
                term.own = own
                term.only(good)
            if clamps:
                assert scale is not None
                term.add_clamped(scale[spans[slot]], total[spans[slot]])
            else:
                with nullcontext() if inverse is None else exact(term.device):
                    term.add(factors[n], total[spans[slot]])
        return total

    def _coordinates(self, slots: tuple[int, ...]) -> Tensor:
        """Return the places of these parameters' coordinates in a sum, one after the other."""
        if slots not in self._places:
            spans = (self._spans[slot] for slot in slots)
            self._places[slots] = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        return self._places[slots]
