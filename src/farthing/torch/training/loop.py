"""Train a model until its budget is spent: DP-SGD with any optimiser of torch.

Abadi et al. 2016, Algorithm 1, by answers of the ledger: a Poisson batch is drawn, every example's gradient
is bounded, one noise vector is added to their sum, and the sum is divided by the *expected* batch size. The
released gradient becomes the parameters' ``grad``; from there on everything is post-processing: optimiser,
schedule of learning rates, weight averages, checkpoints, evaluation on public data. There is no number of
steps to choose: batches are promised ahead, counted by tight accounting, and the loop ends with the last.

One step passes these modules, in this order:

1. `farthing.torch.training.loop` asks for a batch, a `Query` with a bound of `schedules` and noise of `plan`;
2. `farthing.ledger.ledger` charges it, draws who is in the batch and calls the contribution: `randomness`,
   which hides torch's generators, around `gradients.bookkeeping.Gradient` (of several ranks each a part);
3. `training.records` reads the batch in physical batches, of datasets by `collating`;
4. `gradients.bookkeeping` sums each: by `mlp` (plain stacks on a CPU), a recorded graph (`graphs`, GPUs), by
   a `tape` with the rules of `layers`, which give `terms`, or by `isolation`, example by example;
5. the rule of the bound (`gradients.clipping`) turns norms into factors, and `kernels.totals` adds up;
6. `kernels.noise` adds the noise, and the loop hands the released gradient to the optimiser.

Guarantee: that of the promised plan (`ledger.guarantee`), under the ledger's adjacency, for a record, or with
``users`` for a person with all records, against anyone who sees every release and not who is in a batch.

>>> from torch import nn
>>> model = nn.Linear(3, 2)
>>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
>>> training = train(model, nn.CrossEntropyLoss(reduction="none"), data, epsilon=1.0, delta=1e-5, steps=5)
>>> [step.left for step in training]
[4, 3, 2, 1, 0]
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.budget import Drawn
from farthing.errors import BudgetSpent, InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import Bound
from farthing.queries.query import Query, Receipt
from farthing.torch.checks import overlap
from farthing.torch.checks.selfcheck import materialise, refuse_other_kinds
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.plain import Plain, TrainedWeights, settle
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.training import checkpoint, correlated, distributed, personal, sharding
from farthing.torch.training.adapting import Rule
from farthing.torch.training.course import (
    BatchTerms,
    Course,
    Deviations,
    Filtered,
    Promised,
    ReleasedSum,
    chosen_plan,
    in_order,
    mean_of,
    truncated,
)
from farthing.torch.training.optim import Scheduler, UpdateParts, chosen, joined_for, parts_of, rehearsed
from farthing.torch.training.plan import (
    BatchKind,
    Noise,
    Plan,
    checked,
    examples_of,
    promised_on,
    refuse_nan,
)
from farthing.torch.training.randomness import OwnRandomness, apart, one_by_one
from farthing.torch.training.schedules import Average, Bounds, Clip
from farthing.torch.training.watching import ProgressLine, TrainingStep

CLIP, PHYSICAL = 1.0, 512
_LOOK = 16  # how often weights on another device are looked at for NaN: a look waits for the device


def train(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    dataset: Any,
    ledger: Ledger | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    sampling_rate: float | None = None,
    clip_norm: Clip | None = None,
    noise_multiplier: Noise | None = None,
    steps: int | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    records: int | None = None,
    users: Any = None,
    records_per_user: int | None = None,
    augment: Callable[[Any], Any] | None = None,
    views: int = 1,
    physical_batch_size: int | None = None,
    autocast: torch.dtype | None = None,
    memory: str = "balanced",
    example: tuple[Any, Any] | None = None,
    route: str = "auto",
    mechanism: Callable[[float], TensorGaussian] = TensorGaussian,
    accumulate: int = 1,
    average: float | None = None,
    callbacks: Iterable[Callable[[TrainingStep], object]] = (),
    progress: bool = False,
    adapt: Rule | None = None,
    bands: int | str = 1,
    sampling: str | None = None,
    max_batch_size: int | None = None,
    budgets: Any = None,
    group: distributed.Group | None = None,
) -> "Training":
    """Return a run that trains a model by noisy batches until its budget is spent; iterate over it.

    Model, loss and data are checked, and the batches promised, before this returns; nothing is charged until
    the first step is asked for. All arguments but ``dataset`` and ``users`` are public.

    Parameters
    ----------
    model : nn.Module
        The model, on its device; parameters that do not require gradients stay as they are.
    loss : callable
        ``loss(outputs, targets)`` returns one value a record (``reduction="none"``).
    dataset : Examples or Dataset or tuple of tensors
        The private records: tensors (inputs…, targets), or a map-style dataset of such tuples.
    ledger : Ledger, optional
        The ledger that pays. None: one in memory for ``epsilon`` and ``delta``.
    epsilon, delta : float, optional
        The budget where no ledger is given; both or neither.
    sampling_rate : float, optional
        An example's chance to be in a batch, in (0, 1]. None: so that the noise multiplier is about 2, and
        1,024 examples are in a batch at least.
    clip_norm : float or Bound or AdaptiveClip or sequence or callable, optional
        The bound on one example's gradient: a norm, a bound such as `ClipLayers` or any `ClipRule`, a
        `Quantile`, or for a schedule one of these a batch, or a function of t = 1, 2, …. None: norm 1.
    noise_multiplier : float or sequence or callable, optional
        Standard deviation of the noise over the clipping norm: a number, or for a schedule one a batch, or a
        function of t = 1, 2, …, which needs ``steps``. None: what makes ``steps`` batches spend the budget.
    steps : int, optional
        Number of batches. None: 800 √ε, from 200 to 3,000, or with a ``noise_multiplier`` as many as fit.
    optimizer : torch.optim.Optimizer or sequence of them, optional
        An optimiser of all trained parameters, or several that share them. None: SGD with momentum, or
        `DPAdam` for models with embeddings, attention or normalisation, with a rule of public numbers for the
        learning rate.
    scheduler : lr_scheduler or sequence of them, optional
        A schedule of the optimiser's learning rate, or several; its ``step()`` is called after every update.
    records : int, optional
        The public number of examples, where the size of the data is itself private. None: the true one.
    users : sequence, optional
        Whose record each is; the guarantee is then one a person.
    records_per_user : int, optional
        How many records of a person count at most; needed with ``users``.
    augment : callable, optional
        Maps a batch of inputs to another view of it, example by example, with torch's random numbers.
    views : int, default 1
        How many augmented views of an example are averaged before its gradient is clipped.
    physical_batch_size : int, optional
        Rows that go through the model at once; a memory setting without influence on the result. None: 512.
    autocast : torch.dtype, optional
        The dtype of mixed precision. None: full precision. Norms and sums stay in float32.
    memory : {"balanced", "speed", "space"}, default "balanced"
        Memory of about an ordinary step, more or less; without influence on the result but for rounding.
    example : tuple, optional
        Public (inputs, targets) to check the model on, of the records' shape. None: that of most first ones.
    route : {"auto", "fast", "vmap", "loop"}, default "auto"
        How each example's gradient is made. "fast": by book-keeping, for about one ordinary step; a model
        that it cannot follow is refused. "auto": such a model goes by "vmap", or if that cannot run it by
        "loop", and a line of the log says so. "vmap" is for models that you do not know: examples cannot
        meet, whatever the model does (`farthing.torch.gradients.isolation`). "loop": one after the other.
    mechanism : callable, default Gaussian
        From a noise multiplier to a mechanism.
    accumulate : int, default 1
        Batches that make one update; each is charged.
    average : float, optional
        Decay of a moving average of the weights, in (0, 1), kept in `Training.averaged`. None: no average.
    callbacks : iterable of callable, default ()
        Each is called with every `TrainingStep`: `to_tensorboard`, `to_wandb`, or any function.
    progress : bool, default False
        Whether a line on stderr shows batches done and left, clipping norm and noise multiplier.
    adapt : callable, optional
        ``adapt(step)`` returns a `Change` of noise multiplier, sampling rate or clipping norm for the batches
        to come, or None: `Plateau`, `Stages`, `NoiseGate` or any function of the public `TrainingStep`. The
        ledger needs a filter for such prices: ``Ledger(budget, filter=ft.Menu(...))``.
    bands : int, "pass" or "auto", default 1
        Over how many batches later noise cancels earlier noise in part (`farthing.BandedGaussian`). "pass":
        over all, each example in one batch a pass (`farthing.BufferedGaussian`). "auto": the best of these.
    sampling : {"poisson", "balanced"}, optional
        "poisson": each example by itself (by `farthing.Cyclic` with bands). "balanced": each in one batch of
        every pass, in a secret turn (`farthing.Balanced`). None: Poisson, or for "auto" bands the better one.
    max_batch_size : int, optional
        The most examples of a batch (`farthing.TruncatedPoisson`, `TruncatedCyclic`; needs ``records``, or a
        public number of them). Every batch has as many rows, of which those not needed weigh nothing.
    budgets : array of float, optional
        An ε for each record, public, with ``delta`` or a ledger of such levels (`ft.PersonalBudgets`); a
        person's is the smallest of the records that count. Each is sampled as often as its ε allows.
    group : torch.distributed.ProcessGroup, optional
        The ranks that train together. None: torch's default group, if there is one. Every rank calls
        ``train`` alike, and rank 0's ledger counts.

    Returns
    -------
    Training
        The run: an iterator of `TrainingStep`.

    Raises
    ------
    Unsupported
        A model, loss, optimiser or dataset that cannot be trained privately; the message names it.
    InvalidValue
        An argument that makes no sense, or data that do not fit the model.
    BudgetSpent, PromiseBroken
        A ledger without room for the plan.

    Notes
    -----
    Guarantee: that of ``ledger.guarantee``, under its adjacency and for its unit, against anyone who sees
    every released gradient and not who is in a batch. Sampled Gaussian batches are counted by tight
    accounting (`farthing.accounting`); what is not given is chosen by the rules of
    `farthing.torch.training.plan`, from public numbers.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
    >>> loss = nn.CrossEntropyLoss(reduction="none")
    >>> for step in train(model, loss, data, epsilon=1.0, delta=1e-5, steps=3, sampling_rate=0.1):
    ...     print(step.t, step.left, step.expected_batch_size)
    1 2 400.0
    2 1 400.0
    3 0 400.0
    """
    refuse_other_kinds(model)
    settle(model.modules())
    device = next(model.parameters()).device
    examples = examples_of(dataset, users, records_per_user, augment, views, device, example)
    with apart(device):
        materialise(model, examples.made_up()[0])
    how = {"autocast": autocast, "example": example, "route": route, "memory": memory}
    rows = PHYSICAL if physical_batch_size is None else physical_batch_size
    gradient = Gradient(model, loss, physical_batch_size=rows, **how)  # type: ignore[arg-type]
    count = validate.count(records=records) if records is not None else len(examples)
    values = personal.values_of(budgets, examples, records, adapt)
    correlated.refuse_bands(bands, adapt, budgets, mechanism)
    correlated.refuse_sampling(sampling, max_batch_size, bands, adapt, budgets, noise_multiplier)
    bounds = Bounds(CLIP if clip_norm is None else clip_norm, gradient.layout)
    refuse_nan(model)
    taking, following = joined_for(model, optimizer, scheduler)
    parts = UpdateParts(
        taking,
        following,
        None if average is None else validate.probability(average=average),
        validate.count(accumulate=accumulate),
        tuple(callbacks),
        ProgressLine() if progress else None,
    )
    if examples.augment is not None:
        one_by_one(examples.augment, examples.made_up()[0], device)
    with apart(device):
        examples = checked(gradient, examples, example, count)
    kind = BatchKind(OwnRandomness.of(gradient, examples, device), gradient.layout, mechanism)
    kind, held = truncated(kind, examples, count, max_batch_size)
    overlap.remember(examples.data)
    together = distributed.ranks(device, group)
    sharding.refuse_shards(model, parts_of(taking), average, 1 if together is None else together.size)
    if together is not None:
        distributed.same_records(together, examples)
        if together.rank > 0:
            plan, place = distributed.agree(together, model, None, 0)
            ask = distributed.Follower(held, together)
            return Training(model, kind, ask, plan, place, bounds, parts, None, None)
    ledger, people = personal.opened(values, ledger, epsilon, delta, examples.unit)
    door = ledger.over(held if people is None else people.over(examples))
    terms = sampling_rate, noise_multiplier, steps
    plan, kind = chosen_plan(ledger, people, kind, count, terms, adapt, bands, sampling)
    plan, place = promised_on(door, kind, bounds, plan) if plan.promised else (plan, 0)
    asks: distributed.Asks = distributed.Alone(door)
    gradient.expected_batch_size = plan.expected_batch_size if people is None and adapt is None else None
    if together is not None:
        distributed.agree(together, model, plan, place)
        asks = distributed.Leader(door, together)
    training = Training(model, kind, asks, plan, place, bounds, parts, ledger, adapt)
    if taking is not None and following is not None:
        rehearsed(taking, following, -(-max(training.steps - place, 1) // parts.accumulate))
    return training


class Training(Drawn):
    """A run that is checked and promised; iterating it asks for batches, one `TrainingStep` per update.

    Made by `train`. Stopping early, or an interruption, costs no more than the batches that were asked for.

    Attributes
    ----------
    model : nn.Module
        The model, trained in place.
    optimizer : torch.optim.Optimizer
        The optimiser, given or chosen.
    plan : Plan
        Sampling rate, noise multipliers and number of batches.
    ledger : Ledger or None
        The ledger that pays; None on every rank but rank 0.
    steps : int
        Batches in the plan; where nothing is promised, those so far and those that fit on the present terms.
    t : int
        Updates so far.
    averaged : nn.Module
        The model with averaged weights, where ``train`` was given ``average``.

    Examples
    --------
    >>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
    >>> loss = nn.CrossEntropyLoss(reduction="none")
    >>> training = train(nn.Linear(3, 2), loss, data, epsilon=1.0, delta=1e-5, steps=4)
    >>> next(training).t, training.steps, training.t, len(training)
    (1, 4, 1, 4)
    """

    __reduce__ = checkpoint.uncopied

    def __init__(
        self,
        model: nn.Module,
        kind: BatchKind,
        asks: distributed.Asks,
        plan: Plan,
        place: int,
        bounds: Bounds,
        parts: UpdateParts,
        ledger: Ledger | None,
        rule: Rule | None,
    ) -> None:
        self.model, self.plan, self.ledger, self.t = model, plan, ledger, 0
        self._kind, self._layout, self._asks = kind, kind.layout, asks
        self._course: Course = (
            Promised(plan, place) if plan.promised else Filtered(plan, asks, kind, ledger, rule)
        )
        self._bounds, self._parts, self._plain = bounds, parts, Plain(model)
        self._weights = TrainedWeights(model)
        self._trained = self._weights.each
        bounds.covers(self.steps)
        first = bounds.at(1, plan.noise_multiplier(0), plan.expected_batch_size).norm()
        length = replace(plan, steps=self.steps)
        self.optimizer = parts.optimizer or chosen(model, correlated.walking(length), first)
        self._falling = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._average = None if parts.average is None else Average(model, parts.average)
        self._last: tuple[Bound, BatchTerms, Query] | None = None
        self._deviations = Deviations(kind.layout, self._trained[0].device, correlated.deviation(length))
        self._held, self._steps = list[ReleasedSum](), self._run()  # for the next update

    def __iter__(self) -> Iterator[TrainingStep]:
        return self

    def __next__(self) -> TrainingStep:
        try:
            return next(self._steps)
        except BaseException as error:
            if not isinstance(error, StopIteration):  # an interruption, for instance: the next call goes on
                self._steps = self._run()
            raise

    def __len__(self) -> int:
        """Return the number of updates, those that lie behind included; known where batches are promised."""
        if not self.plan.promised:
            raise TypeError("a Training has no len() if no batches are promised: use `steps`")
        return self.t + -(-self._course.left // self._parts.accumulate)

    def __repr__(self) -> str:
        """Return the run in public numbers."""
        size, noise = self.plan.expected_batch_size, self.plan.noise_multiplier(0)
        spends = "" if self.ledger is None else f", {self.ledger.budget}"
        return (
            f"<Training of {type(self.model).__name__} ({self._layout.size:,} weights): "
            f"{self.t} updates made, {self._course.left:,} batches left of {self.steps:,}, expected batch "
            f"size {size:,.0f}, noise multiplier {noise:.3g}, clipping norm "
            f"{self._bounds.at(1, noise, size).norm():.3g}, {type(self.optimizer).__name__}{spends}>"
        )

    @property
    def steps(self) -> int:
        """Return the number of batches in the plan, or what is known of it."""
        return self._course.steps

    @property
    def averaged(self) -> nn.Module:
        """Return the model with averaged weights."""
        if self._average is None:
            raise InvalidValue("weights are averaged only if train is given average=, a decay such as 0.999")
        return self._average.model

    def _run(self) -> Iterator[TrainingStep]:
        course, device = self._course, self._trained[0].device
        waited: tuple[Receipt, ...] = ()
        for terms in course:
            query = self._query(course.place, terms)
            self.optimizer.zero_grad(set_to_none=True)
            self._weights.refuse_changes()
            self._kind.contribution.look_again(self.t)
            if device.type == "cpu" or course.place % _LOOK == 1:
                refuse_nan(self.model)
            try:
                value, receipts = self._asks.ask(query)
            except BudgetSpent:
                course.refused()
                continue
            course.released()
            if value is None:  # nobody was drawn: this turn's noise is left out
                waited += receipts
                continue
            released = torch.as_tensor(value, dtype=torch.float32, device=device)
            gradient = self._bounds.learn(query.bound, released, terms.expected_batch_size)
            self._held.append(ReleasedSum(gradient, query.bound, terms, (*waited, *receipts)))
            del value, released, gradient  # or they would lie beside those of the next batch
            waited = ()
            if len(self._held) == self._parts.accumulate:
                yield self._update()
        if self._held:
            yield self._update()
        if not self.t:  # updates before a checkpoint count as well
            raise BudgetSpent(
                f"no batch of {self.steps} is left: the ledger was spent before this training made a step"
                if self.plan.promised
                else f"not one batch on these terms fits: {self.plan}"
            )

    def _query(self, place: int, terms: BatchTerms) -> Query:
        """Return the query of this batch: the last one where nothing changed, so that it is priced once."""
        bound = self._bounds.at(place, terms.noise_multiplier, terms.expected_batch_size)
        last = self._last
        if last is None or last[0] is not bound or last[1] != terms:
            query = self._kind.query(terms.sampling_rate, bound, terms.noise_multiplier)
            self._last = last = bound, terms, query
        return last[2]

    def _update(self) -> TrainingStep:
        """Take one step of the optimiser on the mean of the released gradients."""
        held, self._held = self._held, []
        self.t += 1
        parts, course = self._parts, self._course
        mean = mean_of(held)
        for parameter, view in zip(self._trained, self._layout.views(mean), strict=True):
            parameter.grad = sharding.like(parameter, view.to(parameter.dtype))
        if expect := getattr(self.optimizer, "expect", None):  # DP-Adam's, which takes the noise off
            expect(in_order(self._deviations.of(held), self._trained, self.optimizer.param_groups))
        if parts.optimizer is None:
            for group, full in zip(self.optimizer.param_groups, self._falling, strict=True):
                group["lr"] = full * (1 - course.progress)
        self.optimizer.step()
        self._plain.refresh()
        if parts.scheduler is not None:
            parts.scheduler.step()
        if self._average is not None:
            self._average.update(self.model, self.t)
        step = TrainingStep(
            self.t,
            self.model,
            tuple(itertools.chain(*(one.receipts for one in held))),
            held[-1].terms.expected_batch_size,
            held[-1].bound.norm(),
            held[-1].terms.noise_multiplier,
            course.share,
            course.left,
            torch.linalg.vector_norm(mean),
            self._deviations.norm(held, len(mean)),
        )
        for callback in parts.callbacks:
            callback(step)
        self._bounds = course.learn(step, self._bounds)
        if parts.line is not None:
            parts.line.show(step, self.steps)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser, schedule, averages, clip and step number: all but the spend."""
        scheduler = self._parts.scheduler
        return {
            "t": self.t,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "averaged": self._average.model.state_dict() if self._average is not None else None,
            "clip": self._bounds.state_dict(),
            "terms": self._course.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, with what the ledger has left."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._parts.scheduler is not None and state["scheduler"] is not None:
            self._parts.scheduler.load_state_dict(state["scheduler"])
        if self._average is not None:
            self._average.model.load_state_dict(state["averaged"] or state["model"])
        self._bounds = self._course.load_state_dict(state.get("terms"), self._bounds)
        self._bounds.load_state_dict(state["clip"])
        self.t = int(state["t"])
