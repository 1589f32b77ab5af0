"""Batches whose noise is correlated: how many bands, and what the optimiser has to know of it.

The plan says over how many batches noise is correlated (`farthing.accounting.bands`), from budget, number of
records, sampling rate and number of batches, all of them public. Its draws are cyclic: records are divided
into as many groups as there are bands, which take turns.

>>> from farthing.budget import Budget
>>> from farthing.ledger.ledger import Ledger
>>> plan = correlated_plan(Ledger(Budget(8.0, 1e-5)), 10_000, "auto", 0.01, None, 400)
>>> plan.bands, round(plan.noise_multiplier(0), 2)
(24, 0.94)
"""

from dataclasses import replace
from typing import Any

from farthing import validate
from farthing.accounting import bands as choosing
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.correlated import spread
from farthing.torch.kernels.banded_noise import BandedTensorGaussian
from farthing.torch.kernels.noise import Gaussian
from farthing.torch.training.plan import BatchKind, Noise, Plan, default_rate, default_steps

MOST = 64  # bands that are tried: as many arrays of noise are kept, less one


def refuse_bands(bands: Any, adapt: Any, budgets: Any, mechanism: Any) -> None:
    """Refuse what has no theorem together with correlated noise, before anything is charged."""
    if bands == 1:
        return
    if isinstance(bands, bool) or not (bands == "auto" or isinstance(bands, int)):
        raise InvalidValue(f'bands must be a number of batches or "auto", got {bands!r}')
    if adapt is not None:
        raise Unsupported("correlated noise is one plan, fixed ahead: leave out adapt=, or bands=")
    if budgets is not None:
        raise Unsupported("no theorem prices correlated noise on draws of personal rates: leave out budgets=")
    if mechanism is not Gaussian:
        raise Unsupported(f"bands= is noise of its own: leave out mechanism={mechanism!r}")


def correlated_plan(
    ledger: Ledger,
    records: int,
    bands: int | str,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
) -> Plan:
    """Return the plan of a run with so many bands, or with the best number of them ("auto")."""
    budget = ledger.budget
    if bands == "auto" and noise_multiplier is not None:
        raise InvalidValue('bands="auto" finds the noise_multiplier as well: leave it out, or give a number')
    if noise_multiplier is not None and not isinstance(noise_multiplier, int | float):
        raise Unsupported("correlated noise has one noise_multiplier for all batches: give a number")
    length = default_steps(budget) if steps is None else validate.count(steps=steps)
    rate = default_rate(budget, records, length) if sampling_rate is None else sampling_rate
    validate.rate(sampling_rate=rate)
    if bands == "auto":
        best = choosing.choose_bands(budget, rate, length, MOST)
        return Plan(records, rate, (best.noise_multiplier,), length, True, best.bands, best.exponent)
    count = validate.count(bands=bands)
    exponent = choosing.best_exponent(count, length)
    if noise_multiplier is not None:
        noise = validate.positive(noise_multiplier=noise_multiplier)
        return Plan(records, rate, (noise,), steps, True, count, exponent)
    noise = choosing.noise_multiplier(budget, rate, length, count)
    return Plan(records, rate, (noise,), length, True, count, exponent)


def correlated_kind(kind: BatchKind, plan: Plan) -> BatchKind:
    """Return the kind of batch of a plan: with noise of its bands, where it has more than one."""
    if plan.bands == 1:
        return kind

    def mechanism(noise_multiplier: float) -> BandedTensorGaussian:
        return BandedTensorGaussian(noise_multiplier, plan.bands, plan.exponent)

    return replace(kind, mechanism=mechanism, groups=plan.bands)


def deviation(plan: Plan) -> float:
    """Return the standard deviation of the noise of one batch, over that of independent noise."""
    if plan.bands == 1:
        return 1.0
    return spread(plan.bands, plan.exponent) * choosing.row_noise(plan.bands, plan.exponent, plan.steps or 1)


def walking(plan: Plan) -> Plan:
    """Return the plan of independent noise whose running sums have as much noise, for the learning rate."""
    if plan.bands == 1:
        return plan
    steps = plan.steps or 1
    gain = choosing.prefix_noise(plan.bands, plan.exponent, steps) / choosing.prefix_noise(1, 0.5, steps)
    return replace(plan, noise_multipliers=tuple(noise * gain for noise in plan.noise_multipliers))
