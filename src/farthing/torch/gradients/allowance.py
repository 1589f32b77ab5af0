"""Which per-example gradients are kept, and in how many parts a batch is summed: by bytes, from shapes alone.

A backward pass visits the uses of layers from the last to the first. After each use it frees the use's
memory, but keeps its per-example gradients ("rows"), or the factors of these, until all norms are known. An
ordinary step keeps neither. At a given use an ordinary step holds the inputs and outputs of this use and of
those before it (of those in a part with a checkpoint only while that is computed again), and the gradients in
progress, about one and a half times the inputs and outputs of this use; the largest of these sums is its
peak. `planned` keeps rows that take more memory than their factors, the cheapest first, as long as a private
step stays within a tenth above that peak at every use. A batch is summed in parts if even the factors do not
fit (on a GPU also if rows do not fit whose keeping would be faster), provided that a part is still enough
work. Of a model with checkpoints less work is enough: whoever computes parts again gives time for memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farthing.torch.checks.probe import Source, devices
from farthing.torch.gradients.holdings import HeldBytes
from farthing.torch.gradients.joint_terms import Blocks
from farthing.torch.gradients.tape import Passes, Tape
from farthing.torch.gradients.tape_plan import running
from farthing.torch.gradients.terms import Term

_MORE = 1.1  # of the peak of an ordinary step
_FLOW = 1.5  # gradients on their way through a layer, over what it takes and gives
_PARTS = 4  # of a batch, at most
_MUCH = {"cpu": 2**19, "cuda": 2**22}  # bytes of a use, on average, of a part that is much work
_GIVEN = 8  # times less of a model with checkpoints


class TermBytes(NamedTuple):
    """A parameter's rows, what they are made of, and rows up to which keeping them is quickest, in bytes."""

    key: Any
    use: int
    rows: int
    made: int
    worth: int

    @property
    def least(self) -> int:
        """Return what is kept at least."""
        return min(self.rows, self.made or self.rows)


@dataclass(frozen=True)
class KeptRows:
    """The parameters whose rows are kept, and the number of parts of a batch."""

    kept: frozenset[Any] = frozenset()
    parts: int = 1

    def rows(self, expected: float | None) -> int | None:
        """Return how many examples a part has at most, where so many are expected; None for any number."""
        return None if expected is None or self.parts == 1 else math.ceil(expected / self.parts)


def at_once(expected: float | None, most: int | None) -> float | None:
    """Return how many examples to expect at once in a model that is given at most so many; None: unknown."""
    return expected if expected is None or most is None else min(expected, most)


def planned(
    uses: list[HeldBytes], terms: list[TermBytes], examples: float, sums: int, device: str
) -> KeptRows:
    """Return what a batch of so many examples may keep, by the bytes of one, and of ``sums`` of parts.

    >>> layers, rows = [HeldBytes(100, 100)] * 4, [TermBytes(n, n, 120, 100, 400) for n in range(4)]
    >>> planned(layers, rows, 10, 0, "cpu")
    KeptRows(kept=frozenset({0, 2, 3}), parts=1)
    >>> planned(layers, rows, 100_000, 0, "cuda")
    KeptRows(kept=frozenset({0, 1, 2, 3}), parts=2)
    """
    held = list(accumulate(use.own for use in uses))
    ordinary = [before + use.again + _FLOW * use.size for before, use in zip(held, uses, strict=True)]
    limit = _MORE * max(ordinary, default=0.0)
    least = _after(terms, [term.least for term in terms], len(uses))
    private = [one + more for one, more in zip(ordinary, least, strict=True)]
    wanted = [term for term in terms if term.least < term.rows <= term.worth]
    best, over = KeptRows(), math.inf
    for parts in range(1, _most_parts(uses, examples, device) + 1):
        room = limit * parts - (sums * parts / examples if parts > 1 else 0.0)
        found = _kept(private, wanted, room)
        more = max(0.0, max(private, default=0.0) - room) / parts
        if device != "cpu" and len(found) < len(wanted):  # there making rows twice is the slower way
            more += limit
        if more < over:
            best, over = KeptRows(found, parts), more
        if not more:
            break
    return best


def _most_parts(uses: list[HeldBytes], examples: float, device: str) -> int:
    """Return in how many parts a batch may be summed, so that each is enough work."""
    work = examples * sum(max(use.own, use.size if use.again else 0) for use in uses)
    much = _MUCH.get(device, _MUCH["cuda"]) / (_GIVEN if any(use.again for use in uses) else 1)
    return max(1, min(_PARTS, int(work / max(1, sum(use.steps for use in uses)) / much), int(examples)))


def _after(terms: Iterable[TermBytes], sizes: Iterable[float], uses: int) -> list[float]:
    """Return for every use the bytes that are kept of those after it."""
    found = [0.0] * (uses + 1)
    for term, size in zip(terms, sizes, strict=True):
        found[term.use] += size
    return list(accumulate(reversed(found)))[::-1][1 : uses + 1]


def _kept(private: list[float], wanted: list[TermBytes], limit: float) -> frozenset[Any]:
    """Return the terms whose rows fit, the cheapest first; what is kept of a use counts at all before it."""
    there, found = list(private), set[Any]()
    for term in sorted(wanted, key=lambda term: (term.rows - term.least, -term.use)):
        more = term.rows - term.least
        if max(there[: term.use], default=0.0) + more <= limit or term.use == 0:
            there[: term.use] = [size + more for size in there[: term.use]]
            found.add(term.key)
    return frozenset(found)


def allowance(
    passes: Passes, source: Source, expected: float, factored: bool, in_place: bool = False
) -> KeptRows:
    """Return what to keep in batches of ``expected`` examples, by a pass of a made-up batch of two.

    ``in_place``: sums of parts are made one on top of the other. An ordinary step has no sum yet while all
    activations are there, so that one counts in any case.
    """
    seen, uses, terms = list[Tape](), list[HeldBytes](), list[TermBytes]()
    given = dict[int, Any]()  # the memory of the terms' factors

    def begin(tape: Tape) -> None:
        seen.append(tape)
        model = passes.model
        uses.extend(tape.holdings.held([*model.parameters(), *model.buffers()]))

    def put(slot: int, term: Term) -> None:
        parts: dict[Any, Term] = {slot: term}
        if isinstance(term, Blocks):
            parts = {(slot, n): part for n, part in enumerate(term.terms)}
        for key, part in parts.items():
            worth, made = part.worth(expected) * part.examples, part.made_of()
            for factor in part.factors():  # some layers take the same input, which is held once
                storage = factor.untyped_storage()
                made -= factor.nbytes if id(storage) in given else 0
                given[id(storage)] = storage
            use = seen[0].since.get(slot, seen[0].at)
            terms.append(TermBytes(key, use, part.bytes, made, int(worth)))

    saved = torch.autograd.graph.saved_tensors_hooks(_noted, lambda tensor: tensor)
    with torch.random.fork_rng(devices(passes.model)), saved:
        examples = passes.run(*source.batch(2), None, put, factored, begin)
    device = passes.plan.anchor.device.type
    sums = (4 if in_place else 12) * passes.layout.size
    return planned(uses, terms, expected / examples, sums, device)


def _noted(tensor: Tensor) -> Tensor:
    tape = running()
    return tensor if tape is None else tape.holdings.save(tensor)
