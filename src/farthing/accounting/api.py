"""Answer questions before a run: ε or δ of a plan, noise for a budget, steps for a budget.

All of them use tight accounting (`accounting.pld`); the other accountants are in `farthing.accounting`.
"""

from collections.abc import Callable

from farthing import validate
from farthing.accounting import calibrate, pld
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.samplers import Everyone, HasEvent


def epsilon(
    step: Event | HasEvent, *, steps: int = 1, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> float:
    """Return the certified ε of ``steps`` equal steps at ``delta``.

    Parameters
    ----------
    step : Event, Mechanism
        One step: a mechanism, or the result of ``sampler.amplify(mechanism)``. Noise is relative to the bound
        of one contribution.
    steps : int, default 1
        The number of steps.
    delta : float
        δ, above 0 and below 1.
    adjacency : Adjacency or str, default "add-remove"
        The relation between neighbouring data sets.

    Returns
    -------
    float
        An upper bound on ε, tight to about seven digits.

    Notes
    -----
    Dominating pairs compose (Zhu, Dong & Wang 2022, Thm. 10); their transform is inverted with certified
    errors.

    Examples
    --------
    >>> import farthing as ft
    >>> round(ft.epsilon(ft.Poisson(0.01).amplify(ft.Gaussian(1.1)), steps=421, delta=1e-5), 4)
    0.9994
    """
    return pld.epsilon(_repeated(step, steps), delta, validate.choice(Adjacency, adjacency=adjacency))


def delta(
    step: Event | HasEvent, *, steps: int = 1, epsilon: float, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> float:
    """Return the certified δ of ``steps`` equal steps at ``epsilon``.

    Parameters
    ----------
    step : Event, Mechanism
        One step: a mechanism, or the result of ``sampler.amplify(mechanism)``.
    steps : int, default 1
        The number of steps.
    epsilon : float
        ε, at least 0.
    adjacency : Adjacency or str, default "add-remove"
        The relation between neighbouring data sets.

    Returns
    -------
    float
        An upper bound on δ.

    Notes
    -----
    Zhu, Dong & Wang 2022, Thm. 10, as in `epsilon`.

    Examples
    --------
    >>> import farthing as ft
    >>> f"{ft.delta(ft.Gaussian(4.0), steps=10, epsilon=3.0):.2e}"
    '5.75e-05'
    """
    return pld.delta(_repeated(step, steps), epsilon, validate.choice(Adjacency, adjacency=adjacency))


def noise_for(step: Callable[[float], Event | HasEvent], budget: Budget, *, steps: int = 1) -> float:
    """Return the least noise σ for which ``steps`` equal steps fit a budget.

    Parameters
    ----------
    step : callable
        A function from σ to one step (a mechanism, or the result of ``sampler.amplify(mechanism)``); its
        price must decrease as σ grows.
    budget : Budget
        The budget, with its adjacency.
    steps : int, default 1
        The number of steps.

    Returns
    -------
    float
        σ, rounded to the side where the budget holds.

    Raises
    ------
    InvalidValue
        If no noise up to 1e9 fits.

    Examples
    --------
    >>> import farthing as ft
    >>> sampler = ft.Poisson(0.01)
    >>> noise = ft.noise_for(lambda s: sampler.amplify(ft.Gaussian(s)), ft.Budget(1.0, 1e-5), steps=10_000)
    >>> round(noise, 4)
    3.8128
    """
    if not callable(step):
        raise InvalidValue(f"step must be a function of σ, such as lambda s: ft.Gaussian(s), got {step!r}")
    return calibrate.noise(lambda sigma: _repeated(step(sigma), steps), _budget(budget))


def steps_for(step: Event | HasEvent, budget: Budget) -> int:
    """Return the number of steps that fit a budget.

    Parameters
    ----------
    step : Event, Mechanism
        One step: a mechanism, or the result of ``sampler.amplify(mechanism)``.
    budget : Budget
        The budget, with its adjacency.

    Returns
    -------
    int
        The largest number of steps by tight accounting; 0 if not even one fits.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.steps_for(ft.Poisson(0.01).amplify(ft.Gaussian(1.1)), ft.Budget(1.0, 1e-5))
    421
    """
    return calibrate.steps(Everyone().amplify(step), _budget(budget))


def _budget(budget: Budget) -> Budget:
    if not isinstance(budget, Budget):
        raise InvalidValue(f"budget must be ft.Budget(epsilon, delta), got {budget!r}")
    return budget


def _repeated(step: Event | HasEvent, steps: int) -> RepeatedEvent:
    return RepeatedEvent(Everyone().amplify(step), validate.count(steps=steps))
