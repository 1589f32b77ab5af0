"""List the accountants: the privacy curve of each for equal steps, and for federated rounds.

One step is Gaussian noise of ``noise_multiplier`` times the bound C of one contribution, on all records or on
a sample. If no theorem covers a combination, `Accountant.curve` raises `Unsupported` and names an accountant
that does. A new accountant is a function and a row of `Accountant`.

>>> plan = EqualSteps(noise_multiplier=4.0, sampling_rate=0.01, steps=10_000)
>>> round(Accountant.MOMENTS.curve(plan).epsilon(1e-5), 4)
1.2586
>>> Accountant.GDP.curve(plan)
Traceback (most recent call last):
    ...
farthing.errors.Unsupported: gdp has no theorem for sampled steps (rate 0.01): use pld or rdp, or rate 1
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from farthing import validate
from farthing.budget import Adjacency, Budget, Observer
from farthing.errors import Unsupported
from farthing.queries.events import Event, FixedSizeEvent, GaussianEvent, PoissonEvent, RepeatedEvent

if TYPE_CHECKING:
    from farthing.accounting.rounds import Noise, Rounds
    from farthing.queries.samplers import Sampler

_TIGHT = "Zhu, Dong & Wang 2022, Thm. 10 (dominating pairs compose), certified inversion"
_CONVERSION = "conversion: Canonne, Kamath & Steinke 2020, Prop. 12"
_UP = 1 + 1e-15


@dataclass(frozen=True, slots=True)
class EqualSteps:
    """``steps`` equal steps. With ``records``, a fixed-size sample of rate · records, rounded up."""

    noise_multiplier: float
    sampling_rate: float
    steps: int
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    records: int | None = None

    def __post_init__(self) -> None:
        validate.positive(noise_multiplier=self.noise_multiplier)
        validate.rate(sampling_rate=self.sampling_rate)
        validate.count(steps=self.steps)
        if self.records is not None:
            validate.count(records=self.records)

    @property
    def size(self) -> int | None:
        """The number of records of a fixed-size sample; None for a Poisson sample."""
        if self.records is None:
            return None
        return max(1, min(self.records, math.ceil(self.sampling_rate * self.records * (1 - 1e-12))))

    @property
    def drawn(self) -> float:
        """The probability that a record is in the sample."""
        if self.size is None or self.records is None:
            return self.sampling_rate
        return self.size / self.records

    @property
    def step(self) -> Event:
        """The event of one step."""
        noise = GaussianEvent(self.noise_multiplier)
        if self.size is None or self.records is None:
            return PoissonEvent(self.sampling_rate, noise)
        return FixedSizeEvent(self.size, self.records, noise)

    @property
    def event(self) -> RepeatedEvent:
        """The event of all steps."""
        return RepeatedEvent(self.step, self.steps)

    @property
    def noise(self) -> float:
        """The standard deviation over the sensitivity of the sum of one step.

        The sensitivity is 2C under replace-one. It is also 2C for a sample of fixed size under add-remove (a
        new record displaces another), and then under zero-out unless all records are drawn.
        """
        fixed = self.records is not None
        twice = self.adjacency is Adjacency.REPLACE_ONE or (
            fixed and (self.adjacency is Adjacency.ADD_REMOVE or self.drawn < 1)
        )
        return self.noise_multiplier / 2 if twice else self.noise_multiplier

    def __str__(self) -> str:
        draw = "on everybody" if self.drawn == 1 else f"on Poisson samples of rate {self.sampling_rate:g}"
        if self.size is not None:
            draw = f"on {self.size} of {self.records} records"
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        return f"{steps} with noise multiplier {self.noise_multiplier:g} {draw}"


@dataclass(frozen=True, slots=True)
class PrivacyCurve:
    """The privacy curve of a plan by one accountant: ε at a δ, δ at an ε, and the theorem."""

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]
    theorem: str
    observer: Observer = Observer.ANYONE
    note: str = ""
    proven: Callable[[float], bool] = lambda delta: True  # at this δ; only a published curve may not be


def _pld(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import pld

    return PrivacyCurve(
        lambda delta: pld.epsilon(plan.event, delta, plan.adjacency),
        lambda epsilon: pld.delta(plan.event, epsilon, plan.adjacency),
        _TIGHT,
    )


def _rdp(plan: EqualSteps) -> PrivacyCurve:
    import numpy as np

    from farthing.accounting import pairs, rdp, transform

    fixed, orders = plan.records is not None, rdp.ORDERS
    if plan.drawn == 1:
        each, theorem = rdp.gaussian(plan.noise, orders), "Mironov 2017, Prop. 7"
    elif not fixed and plan.adjacency is not Adjacency.REPLACE_ONE:
        each, theorem = (
            rdp.poisson_gaussian(plan.noise_multiplier, plan.sampling_rate, orders),
            "Mironov, Talwar & Zhang 2019",
        )
    elif fixed and plan.adjacency is not Adjacency.ADD_REMOVE:
        orders = rdp.WHOLE_ORDERS
        each = rdp.without_replacement_gaussian(plan.noise, plan.drawn, orders)
        theorem = "Wang, Balle & Kasiviswanathan 2019, Thm. 9"
    else:
        ways = pairs.of_event(plan.step, plan.adjacency)
        moments = [max(transform.log_moment(way, float(order) - 1) for way in ways) for order in orders]
        each = np.array(moments) / (orders - 1) * _UP
        theorem = "Rényi divergence of the dominating pair (Zhu, Dong & Wang 2022, Thm. 10)"
    with np.errstate(over="ignore"):
        total = plan.steps * each
    return PrivacyCurve(
        lambda delta: rdp.epsilon(total, orders, delta)[0],
        lambda epsilon: rdp.delta(total, orders, epsilon),
        f"{theorem}; {_CONVERSION}",
    )


def _zcdp(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import zcdp

    _refuse_sampled(plan, "zcdp")
    rho = plan.steps * zcdp.rho_of_gaussian(plan.noise) * _UP
    known = math.isfinite(rho)
    return PrivacyCurve(
        lambda delta: zcdp.epsilon(rho, delta) if known else math.inf,
        lambda epsilon: zcdp.delta(rho, epsilon) if known else 1.0,
        f"Bun & Steinke 2016, Prop. 1.6; {_CONVERSION}",
    )


def _gdp(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import gaussian

    _refuse_sampled(plan, "gdp")
    mu = math.sqrt(plan.steps) / plan.noise * _UP
    known = math.isfinite(mu)
    return PrivacyCurve(
        lambda delta: gaussian.epsilon(mu, delta) if known else math.inf,
        lambda epsilon: gaussian.delta(mu, epsilon) if known else 1.0,
        "Dong, Roth & Su 2022, Cor. 3.3; conversion: Balle & Wang 2018, Thm. 8",
    )


def _moments(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import moments

    fixed = plan.records is not None
    if plan.drawn < 1 and (fixed or plan.adjacency is Adjacency.REPLACE_ONE):
        raise _no_theorem("moments", plan, "use pld or rdp")
    return PrivacyCurve(
        lambda delta: moments.epsilon(plan.noise, plan.drawn, plan.steps, delta)[0],
        lambda epsilon: moments.delta(plan.noise, plan.drawn, plan.steps, epsilon),
        "Abadi et al. 2016, Thm. 2",
    )


def _advanced(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import composition

    _refuse_unamplified(plan, "advanced")

    def epsilon(delta: float) -> float:
        return composition.advanced_sampled(plan.noise, plan.drawn, plan.steps, delta)

    theorem = "Dwork & Roth 2014, Thm. 3.20"
    if plan.drawn < 1:
        which = "Thm. 8" if plan.records is None else "Thm. 9"
        theorem += f", after amplification: Balle, Barthe & Gaboardi 2018, {which}"
    return PrivacyCurve(epsilon, lambda most: _least_delta(epsilon, most), theorem)


def _strong(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import composition

    _refuse_unamplified(plan, "strong")

    def published(delta: float) -> tuple[float, bool]:
        return composition.strong_as_published(plan.noise, plan.drawn, plan.steps, delta)

    def epsilon(delta: float) -> float:
        return published(delta)[0]

    return PrivacyCurve(
        epsilon,
        lambda most: _least_delta(epsilon, most),
        "none: the strong-composition curve as Abadi et al. 2016, Figure 2, plot it",
        note="as published: its amplified epsilon is below the true one, and its Gaussian needs epsilon < 1",
        proven=lambda delta: published(delta)[1],
    )


def _sampling(plan: EqualSteps) -> PrivacyCurve:
    from farthing.accounting import sampling

    if plan.adjacency is Adjacency.ADD_REMOVE:
        raise Unsupported(
            f"sampling has no theorem under {plan.adjacency}, because its observer sees who was "
            "drawn: use replace-one or zero-out, or pld where draws stay secret"
        )
    # Given the draw, which its observer sees, no record is displaced: only replacing moves a sum by 2C.
    noise = replace(plan, records=None).noise
    return PrivacyCurve(
        lambda delta: sampling.epsilon(noise, plan.drawn, plan.steps, delta),
        lambda epsilon: sampling.delta(noise, plan.drawn, plan.steps, epsilon),
        "Cheng, Liu, Wang & Lu 2020, Thm. 1",
        Observer.COORDINATOR,
    )


def _adadp(plan: EqualSteps) -> PrivacyCurve:
    import numpy as np

    from farthing.accounting import rdp

    other = Adjacency.REPLACE_ONE if plan.records is None else Adjacency.ADD_REMOVE
    if plan.drawn < 1 and plan.adjacency is other:
        raise _no_theorem("adadp", plan, "use pld or rdp")
    orders = np.arange(2.0, 65.0)  # the orders of the paper
    with np.errstate(over="ignore"):
        total = plan.steps * rdp.adadp_theorem_1(plan.noise, plan.drawn, orders)
    return PrivacyCurve(
        lambda delta: rdp.classic_epsilon(total, orders, delta)[0],
        lambda epsilon: rdp.classic_delta(total, orders, epsilon),
        "Xu, Shi, Liu, Zhao & Chen 2020, Thm. 1; conversion: Mironov 2017, Prop. 3",
    )


def _no_theorem(accountant: str, plan: EqualSteps, instead: str) -> Unsupported:
    draw = "Poisson samples" if plan.records is None else "samples of a fixed size"
    return Unsupported(f"{accountant} has no theorem for {draw} under {plan.adjacency}: {instead}")


def _refuse_sampled(plan: EqualSteps, accountant: str) -> None:
    if plan.drawn < 1:
        raise Unsupported(
            f"{accountant} has no theorem for sampled steps (rate {plan.drawn:g}): use pld or rdp, or rate 1"
        )


def _refuse_unamplified(plan: EqualSteps, accountant: str) -> None:
    """Refuse amplification except for Poisson under add-remove and for fixed size under replace-one.

    Zero-out is a case of both: of the first for sums, where contributing zero equals not being drawn, and of
    the second because a record that contributes zero is a record.
    """
    other = Adjacency.REPLACE_ONE if plan.records is None else Adjacency.ADD_REMOVE
    if plan.drawn < 1 and plan.adjacency is other:
        right = Adjacency.ADD_REMOVE if plan.records is None else Adjacency.REPLACE_ONE
        raise _no_theorem(accountant, plan, f"they amplify under {right} only, so use that or pld")


def _least_delta(epsilon: Callable[[float], float], most: float) -> float:
    """Return the least δ found with epsilon(δ) <= ``most``, checked; 1 if there is none."""
    from farthing.accounting.gaussian import safe_root

    validate.non_negative(epsilon=most)

    def excess(log_delta: float) -> float:
        return epsilon(math.exp(log_delta)) - most

    low, high = math.log(1e-300), math.log(0.999999)
    if excess(high) > 0:
        return 1.0
    return math.exp(low if excess(low) <= 0 else safe_root(excess, high, low)) * _UP


def _rounds(name: str) -> "tuple[Noise, Rounds]":
    """Return two functions of `rounds`, imported when they are called: they need numpy and scipy."""

    def noise(count: int, budget: Budget, sampler: "Sampler") -> float:
        from farthing.accounting import rounds

        found: float = getattr(rounds, name)(count, budget, sampler)
        return found

    def counted(noise_multiplier: float, planned: int, budget: Budget, sampler: "Sampler") -> int:
        from farthing.accounting import rounds

        by = getattr(rounds, f"{name}_rounds", None) or rounds.planned_rounds(getattr(rounds, name))
        return by(noise_multiplier, planned, budget, sampler)

    return noise, counted


class Accountant(StrEnum):
    """The accountants, one row each: how the privacy of many steps is added up.

    Attributes
    ----------
    theorem : str
        The theorem of its figures.

    Notes
    -----
    A row is a name, a theorem, a curve of equal steps (`curve`), and two functions for federated rounds: the
    least noise for a number of rounds (`noise`), and the most rounds with a noise (`rounds`). An entry is
    None if the accountant does not offer it, and using it raises `Unsupported`.

    Examples
    --------
    >>> Accountant.GDP.theorem
    'Dong, Roth & Su 2022, Cor. 3.3'
    >>> [str(row) for row in Accountant.of_rounds()]
    ['advanced', 'sampling', 'basic', 'amplified', 'tight']
    """

    PLD = "pld", _TIGHT, _pld
    RDP = "rdp", f"Mironov 2017, Prop. 1; {_CONVERSION}", _rdp
    ZCDP = "zcdp", f"Bun & Steinke 2016, Prop. 1.6; {_CONVERSION}", _zcdp
    GDP = "gdp", "Dong, Roth & Su 2022, Cor. 3.3", _gdp
    MOMENTS = "moments", "Abadi et al. 2016, Thm. 2", _moments
    ADVANCED = (
        "advanced",
        "Dwork & Roth 2014, Thm. 3.20: advanced composition",
        _advanced,
        _rounds("advanced"),
    )
    STRONG = "strong", "none: the strong-composition curve as Abadi et al. 2016, Figure 2, plot it", _strong
    SAMPLING = (
        "sampling",
        "Cheng et al. 2020, Thm. 1: Gaussian sampling composition",
        _sampling,
        _rounds("sampled"),
    )
    ADADP = "adadp", "Xu, Shi, Liu, Zhao & Chen 2020, Thm. 1", _adadp
    BASIC = "basic", "Dwork & Roth 2014, Thm. 3.16: basic composition", None, _rounds("basic")
    AMPLIFIED = (
        "amplified",
        "Dwork & Roth 2014, Thm. 3.20, of rounds amplified by Balle et al. 2018, Thm. 8 and 9",
        None,
        _rounds("amplified"),
    )
    TIGHT = "tight", _TIGHT, None, _rounds("tight")  # pld, under its name in invitations

    theorem: str
    _curve: Callable[[EqualSteps], PrivacyCurve] | None
    _by_rounds: "tuple[Noise, Rounds] | None"

    def __new__(
        cls,
        name: str,
        theorem: str,
        curve: Callable[[EqualSteps], PrivacyCurve] | None,
        by_rounds: "tuple[Noise, Rounds] | None" = None,
    ) -> Self:
        """Make one row."""
        row = str.__new__(cls, name)
        row._value_, row.theorem, row._curve, row._by_rounds = name, theorem, curve, by_rounds
        return row

    @classmethod
    def of_steps(cls) -> "list[Accountant]":
        """Return the accountants that have a curve of equal steps."""
        return [row for row in cls if row._curve is not None]

    @classmethod
    def of_rounds(cls) -> "list[Accountant]":
        """Return the accountants that choose noise for federated rounds."""
        return [row for row in cls if row._by_rounds is not None]

    def curve(self, plan: EqualSteps) -> PrivacyCurve:
        """Return this accountant's curve of a plan; raise `Unsupported` if no theorem covers it."""
        if self._curve is None:
            raise Unsupported(f"{self} has no curve of equal steps: use one of {', '.join(self.of_steps())}")
        return self._curve(plan)

    def noise(self, rounds: int, budget: Budget, sampler: "Sampler") -> float:
        """Return the least noise, over the clipping norm, with which this many rounds fit the budget."""
        return self._pair[0](rounds, budget, sampler)

    def rounds(self, noise: float, planned: int, budget: Budget, sampler: "Sampler") -> int:
        """Return how many rounds with this noise fit the budget; at most ``planned`` if T is fixed."""
        return self._pair[1](noise, planned, budget, sampler)

    @property
    def _pair(self) -> "tuple[Noise, Rounds]":
        if self._by_rounds is None:
            raise Unsupported(f"{self} does not count rounds: use one of {', '.join(self.of_rounds())}")
        return self._by_rounds
