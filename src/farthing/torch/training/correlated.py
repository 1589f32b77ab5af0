"""Batches whose noise is correlated: how many bands or buffers, and what the optimiser has to know of it.

The plan says over how many batches noise is correlated, from budget, number of records, sampling rate and
number of batches, all of them public (`farthing.accounting.correlated`). By bands, draws are cyclic: records
are divided into as many groups as there are bands, which take turns, and are sampled. By buffers, a group is
a batch, and every record is in one batch of each pass.

>>> from farthing.budget import Budget
>>> from farthing.ledger.ledger import Ledger
>>> plan = correlated_plan(Ledger(Budget(8.0, 1e-5)), 10_000, "auto", 0.01, None, 400)
>>> plan.bands, round(plan.noise_multiplier(0), 2)
(24, 0.94)
>>> plan = correlated_plan(Ledger(Budget(8.0, 1e-5)), 10_000, "auto", 0.01, None, 100)
>>> plan.bands, plan.buffers, round(plan.noise_multiplier(0), 2)
(100, 2, 0.6)
"""

from dataclasses import replace
from typing import Any

from farthing import validate
from farthing.accounting import correlated as choosing
from farthing.accounting.correlated import choose_buffers
from farthing.budget import Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.buffered import column_norm
from farthing.queries.correlated import spread
from farthing.torch.kernels.banded_noise import BandedTensorGaussian, BufferedTensorGaussian
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.training.plan import BatchKind, Noise, Plan, default_rate, default_steps

BUFFERS = 2  # more gain 1 % at most
MOST = 64  # bands that are tried: as many arrays of noise are kept, less one


def refuse_bands(bands: Any, adapt: Any, budgets: Any, mechanism: Any) -> None:
    """Refuse what has no theorem together with correlated noise, before anything is charged."""
    if bands == 1:
        return
    if isinstance(bands, bool) or not (bands in ("auto", "pass") or isinstance(bands, int)):
        raise InvalidValue(f'bands must be a number of batches, "pass" or "auto", got {bands!r}')
    if adapt is not None:
        raise Unsupported("correlated noise is one plan, fixed ahead: leave out adapt=, or bands=")
    if budgets is not None:
        raise Unsupported("no theorem prices correlated noise on draws of personal rates: leave out budgets=")
    if mechanism is not TensorGaussian:
        raise Unsupported(f"bands= is noise of its own: leave out mechanism={mechanism!r}")


def correlated_plan(
    ledger: Ledger,
    records: int,
    bands: int | str,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
) -> Plan:
    """Return the plan of a run with so many bands, with buffers ("pass"), or with the best of these."""
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
    if isinstance(bands, str):
        return _best(budget, records, rate, length, bands)
    count = validate.count(bands=bands)
    exponent = choosing.best_exponent(count, length)
    if noise_multiplier is not None:
        noise = validate.positive(noise_multiplier=noise_multiplier)
        return Plan(records, rate, (noise,), steps, True, count, exponent)
    noise = choosing.noise_multiplier(budget, rate, length, count)
    return Plan(records, rate, (noise,), length, True, count, exponent)


def _best(budget: Budget, records: int, rate: float, steps: int, bands: str) -> Plan:
    """Return the plan by buffers, or by bands where their running sums have less noise."""
    groups = max(1, round(1 / rate))
    passes = choose_buffers(budget, groups, steps, BUFFERS)
    if bands == "auto":
        best = choosing.choose_bands(budget, rate, steps, MOST)
        running = choosing.banded_prefix_noise(best.bands, best.exponent, steps)
        if best.noise_multiplier * running <= passes.running_noise:
            return Plan(records, rate, (best.noise_multiplier,), steps, True, best.bands, best.exponent)
    return Plan(records, 1 / groups, (passes.noise_multiplier,), steps, True, groups, buffers=BUFFERS)


def correlated_kind(kind: BatchKind, plan: Plan) -> BatchKind:
    """Return the kind of batch of a plan: with noise of its bands, where it has more than one."""
    if plan.bands == 1:
        return kind

    def mechanism(noise_multiplier: float) -> BandedTensorGaussian | BufferedTensorGaussian:
        if plan.buffers:
            return BufferedTensorGaussian(noise_multiplier, *_pairs(plan), plan.steps or 1, plan.bands)
        return BandedTensorGaussian(noise_multiplier, plan.bands, plan.exponent)

    return replace(kind, mechanism=mechanism, groups=plan.bands)


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
