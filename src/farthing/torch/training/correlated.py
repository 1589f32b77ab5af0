"""Train with correlated noise, balanced draws or truncated batches.

The plan says over how many batches noise is correlated, from budget, number of records, sampling rate and
number of batches, all of them public (`farthing.accounting.correlated`). By bands, draws are cyclic: records
are divided into as many groups as there are bands, which take turns, and are sampled. By buffers, a group is
a batch, and every record is in one batch of each pass. Balanced draws (`farthing.Balanced`) put every record
into one batch of each pass, in a secret turn; with bands, in one of the turns of its group.

>>> from farthing.budget import Budget
>>> from farthing.ledger.ledger import Ledger
>>> plan = correlated_plan(Ledger(Budget(8.0, 1e-5)), 10_000, "auto", 0.01, None, 400)
>>> plan.bands, plan.bins, round(plan.noise_multiplier(0), 2)
(25, 4, 0.83)
>>> plan = correlated_plan(Ledger(Budget(8.0, 1e-5)), 10_000, "auto", 0.01, None, 100, "poisson")
>>> plan.bands, plan.buffers, round(plan.noise_multiplier(0), 2)
(100, 2, 0.6)
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from farthing import validate
from farthing.accounting import correlated as choosing
from farthing.accounting.correlated import InGroups, choose_buffers
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.buffered import column_norm
from farthing.queries.correlated import Balanced, Cyclic, spread
from farthing.queries.samplers import Sampler, TruncatedPoisson
from farthing.queries.truncation import TruncatedCyclic
from farthing.torch.kernels.banded_noise import BandedTensorGaussian, BufferedTensorGaussian
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.training.plan import BatchKind, Noise, Plan, default_rate, default_steps

SAMPLINGS = ("poisson", "balanced")
BUFFERS = 2  # more gain 1 % at most
MOST = 64  # bands that are tried: as many arrays of noise are kept, less one
_TRIED = 3  # numbers of bands on balanced draws, whose noise takes a second to find


def refuse_sampling(
    sampling: Any, max_batch_size: Any, bands: Any, adapt: Any, budgets: Any, noise_multiplier: Any
) -> None:
    """Refuse draws that have no theorem together with something else, before anything is charged."""
    if sampling is not None and sampling not in SAMPLINGS:
        raise InvalidValue(f"sampling must be one of {', '.join(SAMPLINGS)} or None, got {sampling!r}")
    if max_batch_size is not None:
        validate.count(max_batch_size=max_batch_size)
        if sampling == "balanced":
            raise Unsupported(
                "no theorem prices truncated batches of balanced draws (farthing.queries.truncation says "
                'why): leave out max_batch_size=, or sampling="balanced"'
            )
        if budgets is not None:
            raise Unsupported("no theorem prices truncated batches of personal rates: leave out budgets=")
    if sampling != "balanced":
        return
    if adapt is not None:
        raise Unsupported("balanced draws are one plan, fixed ahead: leave out adapt=, or sampling=")
    if budgets is not None:
        raise Unsupported("no theorem prices balanced draws of personal rates: leave out budgets=")
    if bands == "pass":
        raise Unsupported('bands="pass" draws in a fixed order: leave out sampling=, or give other bands')
    if noise_multiplier is not None and not isinstance(noise_multiplier, int | float):
        raise Unsupported("balanced draws have one noise_multiplier for all batches: give a number")


def refuse_menu(ledger: Ledger, bands: Any, sampling: Any) -> None:
    """Refuse a menu, which is asked batch by batch, for batches that are priced as one plan."""
    if bands != 1 or sampling == "balanced":
        raise Unsupported(
            f"correlated noise and balanced draws are one plan, and the {ledger.filter.name} filter prices "
            "batch by batch: leave out bands= and sampling=, or open a ledger without filter="
        )


def refuse_bands(bands: Any, adapt: Any, budgets: Any, mechanism: Any) -> None:
    """Refuse what has no theorem together with correlated noise, before anything is charged."""
    if bands == 1:
        return
    if isinstance(bands, bool) or not (bands in ("auto", "pass") or isinstance(bands, int)):
        raise InvalidValue(f'bands must be a number of batches, "pass" or "auto", got {bands!r}')
    if adapt is not None:
        raise Unsupported("correlated noise is one plan, fixed ahead: leave out adapt=, or bands=")
    if budgets is not None and bands == "pass":
        raise Unsupported('bands="pass" draws everybody once a pass, whatever budgets say: leave out one')
    if mechanism is not TensorGaussian:
        raise Unsupported(f"bands= is noise of its own: leave out mechanism={mechanism!r}")


def correlated_plan(
    ledger: Ledger,
    records: int,
    bands: int | str,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
    sampling: str | None = None,
    draws: InGroups = Cyclic,
) -> Plan:
    """Return the plan of a run with so many bands, with buffers ("pass"), or with the best of these.

    ``sampling``: "poisson" or "balanced" draws; None for either, where bands are chosen. ``draws`` are those
    of groups that take turns.
    """
    budget = ledger.budget
    if isinstance(bands, str) and noise_multiplier is not None:
        raise InvalidValue(
            f'bands="{bands}" finds the noise_multiplier: leave it out, or give a number of bands'
        )
    if noise_multiplier is not None and not isinstance(noise_multiplier, int | float):
        raise Unsupported("correlated noise has one noise_multiplier for all batches: give a number")
    length = default_steps(budget) if steps is None else validate.count(steps=steps)
    rate = default_rate(budget, records, length) if sampling_rate is None else sampling_rate
    validate.rate(sampling_rate=rate)
    if sampling == "balanced":
        turns = max(1, round(1 / rate))
        length = length if steps is not None else max(1, round(length / turns)) * turns  # whole passes
        if isinstance(bands, str):
            return _balanced(budget, records, turns, length)
        return _balanced_bands(ledger, records, turns, bands, noise_multiplier, steps, length)
    if isinstance(bands, str):
        return _best(budget, records, rate, length, bands, sampling, draws)
    count = validate.count(bands=bands)
    exponent = choosing.best_exponent(count, length)
    if noise_multiplier is not None:
        noise = validate.positive(noise_multiplier=noise_multiplier)
        return Plan(records, rate, (noise,), steps, True, count, exponent)
    noise = choosing.noise_multiplier(budget, rate, length, count, draws=draws)
    return Plan(records, rate, (noise,), length, True, count, exponent)


def _balanced(budget: Budget, records: int, turns: int, steps: int) -> Plan:
    """Return the plan of balanced draws with as many bands as leave the least noise in running sums."""
    near = choosing.choose_bands(budget, 1 / turns, steps, MOST).bands
    found = choosing.best_balanced(budget, turns, steps, _divisors(turns, steps, near))
    terms = (found.noise_multiplier,), steps, True, found.sampler.groups, found.exponent
    return Plan(records, found.sampler.sampling_rate, *terms, bins=found.sampler.bins)


def _balanced_bands(
    ledger: Ledger,
    records: int,
    turns: int,
    bands: int,
    noise_multiplier: float | None,
    steps: int | None,
    length: int,
) -> Plan:
    """Return the plan of balanced draws with so many bands."""
    if validate.count(bands=bands) > turns:
        raise InvalidValue(f"a pass of {turns} batches has at most as many bands, got {bands}")
    sampler, exponent = Balanced(round(turns / bands), bands), choosing.best_exponent(bands, length)
    if noise_multiplier is None:
        noise, steps = choosing.balanced_noise(ledger.budget, sampler, length), length
    else:
        noise = validate.positive(noise_multiplier=noise_multiplier)
    terms = (noise,), steps, True, bands, exponent
    return Plan(records, sampler.sampling_rate, *terms, bins=sampler.bins)


def _divisors(turns: int, steps: int, near: int) -> list[int]:
    """Return the numbers of groups that divide a pass, those nearest to ``near`` in proportion."""
    most = min(turns, steps, MOST)
    every = (groups for groups in range(1, most + 1) if turns % groups == 0)
    return sorted(every, key=lambda groups: abs(math.log(groups / near)))[:_TRIED]


def _best(
    budget: Budget,
    records: int,
    rate: float,
    steps: int,
    bands: str,
    sampling: str | None,
    draws: InGroups,
) -> Plan:
    """Return the plan by buffers, or by bands where their running sums have less noise."""
    groups = max(1, round(1 / rate))
    passes, whole = choose_buffers(budget, groups, steps, BUFFERS), draws(1 / groups, groups)
    if bands == "auto":
        best = choosing.choose_bands(budget, rate, steps, MOST, draws)
        running = best.noise_multiplier * choosing.banded_prefix_noise(best.bands, best.exponent, steps)
        if (
            sampling is None
            and draws is Cyclic
            and budget.adjacency is not Adjacency.REPLACE_ONE
            and groups > 1
        ):
            plan = _balanced(budget, records, groups, steps)
            least = plan.noise_multiplier(0) * choosing.banded_prefix_noise(plan.bands, plan.exponent, steps)
            if least < min(running, passes.running_noise):
                return plan
        if running <= passes.running_noise or getattr(whole, "cuts", False):
            return Plan(records, rate, (best.noise_multiplier,), steps, True, best.bands, best.exponent)
    if isinstance(whole, TruncatedCyclic) and whole.cuts:
        raise Unsupported(
            f'bands="pass" has every record in one batch of each pass, of {whole.within_group.of} at most: '
            f"give max_batch_size={whole.within_group.of}, or a number of bands"
        )
    return Plan(records, 1 / groups, (passes.noise_multiplier,), steps, True, groups, buffers=BUFFERS)


def draws_in_groups(kind: BatchKind) -> InGroups:
    """Return the draws of groups that take turns, of a largest size if batches have one."""
    like = kind.sampler(1.0)
    if not isinstance(like, TruncatedPoisson):
        return Cyclic
    return partial(TruncatedCyclic, max_batch_size=like.max_batch_size, of=like.of)


def correlated_kind(kind: BatchKind, plan: Plan) -> BatchKind:
    """Return the kind of batch of a plan: with its draws, and with noise of its bands, if more than one."""

    draws = draws_in_groups(kind)

    def sampler(rate: float) -> Sampler:
        return Balanced(plan.bins, plan.bands) if plan.bins else draws(rate, plan.bands)

    if plan.bands == 1:
        return replace(kind, sampler=sampler) if plan.bins else kind

    def mechanism(noise_multiplier: float) -> BandedTensorGaussian | BufferedTensorGaussian:
        if plan.buffers:
            return BufferedTensorGaussian(noise_multiplier, *_pairs(plan), plan.steps or 1, plan.bands)
        return BandedTensorGaussian(noise_multiplier, plan.bands, plan.exponent)

    return replace(kind, mechanism=mechanism, sampler=sampler)


def _pairs(plan: Plan) -> choosing.Pairs:
    return choosing.best_pairs(plan.buffers, plan.steps or 1, plan.bands)


def deviation(plan: Plan) -> float:
    """Return the standard deviation of the noise of one batch, over that of independent noise."""
    steps = plan.steps or 1
    if plan.bands == 1:
        return 1.0
    if plan.buffers:
        return column_norm(*_pairs(plan), steps, plan.bands) * choosing.buffered_row_noise(
            *_pairs(plan), steps
        )
    return spread(plan.bands, plan.exponent) * choosing.banded_row_noise(plan.bands, plan.exponent, steps)


def walking(plan: Plan) -> Plan:
    """Return the plan of independent noise whose running sums have as much noise, for the learning rate."""
    if plan.bands == 1:
        return plan
    steps = plan.steps or 1
    if plan.buffers:
        running = choosing.buffered_prefix_noise(*_pairs(plan), steps, plan.bands)
    else:
        running = choosing.banded_prefix_noise(plan.bands, plan.exponent, steps)
    gain = running / choosing.banded_prefix_noise(1, 0.5, steps)
    return replace(plan, noise_multipliers=tuple(noise * gain for noise in plan.noise_multipliers))
