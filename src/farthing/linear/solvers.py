"""Define the methods behind ``solver=``, by name and as objects that carry a method's settings.

>>> import farthing as ft
>>> model = ft.LogisticRegression(1.0, 1e-6, solver=ft.DPAGD(growth=0.2, clip_gradient=3.0))
>>> model.solver
DPAGD(clip_norm=3.0, growth=0.2)
>>> model.set_params(solver__growth=0.3).solver.growth
0.3

The settings are exactly the keyword-only arguments of the method's algorithm in `farthing.linear.methods`:
these objects and ``farthing train --set`` read names, defaults and types from its signature. An alias is the
symbol of a paper; ``grid.count`` is a field of the setting ``grid``.

For scikit-learn an object is a parameter of an estimator like any other: `clone`, ``get_params``,
``set_params`` and a grid over ``solver__growth`` work. The guarantee is that of the fit, (ε, δ) of its
budget, by the theorem that the algorithm cites. A method refuses invalid settings before anything is charged.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from sklearn.base import BaseEstimator

from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.linear.methods.baselines import majority, nonprivate
from farthing.linear.methods.descent import descent, generalised
from farthing.linear.methods.dpagd import dpagd
from farthing.linear.methods.dpsgd import dpsgd, sgd_adv
from farthing.linear.methods.functional import functional
from farthing.linear.methods.leastsquares import least_squares
from farthing.linear.methods.perturbation import objective, output
from farthing.linear.methods.privgene import privgene
from farthing.linear.methods.pure import pure
from farthing.linear.methods.regression import noisy_gradient
from farthing.linear.methods.sufficient import adassp, sufficient

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SolverMethod:
    """An algorithm and the way it spends its budget.

    Parameters
    ----------
    algorithm : callable
        A generator (ledger, problem) -> steps; its keyword-only arguments are its settings.
    filter : callable, optional
        A function from a budget to the privacy filter that it needs; None if it promises a plan.
    private : bool, default True
        False for a baseline that reads the table itself.
    aliases : mapping
        The symbols of papers, as further names of settings.
    batches : callable, optional
        The filter to use instead if ``sampling_rate`` is set.
    rehearsed : bool, default False
        Whether the caller has already tried it on made-up rows, so that `fit` does not.
    personal : {"weights", "rates"}, optional
        How records with personal budgets take part: all of them with weights, or in batches with personal
        sampling rates. None if the method does not support personal budgets.
    weighed : bool, default False
        Whether all of its queries are bounded for records with weights too (`farthing.data.weighted`).
    warm : bool, default False
        Whether it can begin at released weights (`Problem.begin`).
    """

    algorithm: Any
    filter: Callable[[Budget], Filter] | None = GdpFilter
    private: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)
    batches: Callable[[Budget], Filter] | None = None
    rehearsed: bool = False
    personal: Literal["weights", "rates"] | None = None
    weighed: bool = False
    warm: bool = False

    @property
    def settings(self) -> Settings:
        """Return the names of settings with their defaults; fields of a setting as ``name.field``."""
        found: Settings = {}
        for name, default in _defaults(self.algorithm).items():
            found[name] = default
            if dataclasses.is_dataclass(default):
                found |= {f"{name}.{each.name}": getattr(default, each.name) for each in _fields(default)}
        return found

    def resolved(self, settings: Mapping[str, Any], name: str = "the method") -> Settings:
        """Return ``settings`` by the algorithm's own names; refuse unknown names."""
        found: Settings = {}
        defaults = self.settings
        for given, value in settings.items():
            known = self.aliases.get(given, given)
            if known not in defaults:
                raise InvalidValue(f"{name} has no setting {given!r}: {_offer(defaults)}")
            outer, _, inner = known.partition(".")
            if inner:
                whole: Any = found.get(outer, defaults[outer])
                value = replace(whole, **{inner: value})
            elif outer in found:
                raise InvalidValue(f"{name}: {given!r} sets {outer!r} a second time")
            found[outer] = value
        return found

    def parsed(self, texts: Iterable[str], name: str) -> Settings:
        """Return settings from NAME=VALUE texts, converted by the algorithm's annotations."""
        found: Settings = {}
        names = [each for each, default in self.settings.items() if not dataclasses.is_dataclass(default)]
        for text in texts:
            given, equals, value = text.partition("=")
            known = self.aliases.get(given, given)
            if not equals:
                raise InvalidValue(f"--set must be NAME=VALUE, got {text!r}")
            if known not in names:
                raise InvalidValue(f"--method {name} has no setting {given!r}: {_offer(names)}")
            if known in found:
                raise InvalidValue(f"--set {given}={value}: {known!r} is set twice")
            found[known] = _read(_annotation(self.algorithm, known), value, f"--set {given}")
        return found

    def with_(self, settings: Mapping[str, Any]) -> "SolverMethod":
        """Return the method with other settings."""
        chosen = self.resolved(settings)
        if not chosen:
            return self
        rule = self.batches if self.batches and chosen.get("sampling_rate") is not None else self.filter
        return replace(self, algorithm=partial(self.algorithm, **chosen), filter=rule)


def _offer(names: Iterable[str]) -> str:
    return f"it has {', '.join(sorted(names)) or 'none'}"


_DPAGD = {  # Lee & Kifer 2018, Algorithm 2, its public code and its Figure 1
    "gamma": "growth",
    "C_grad": "clip_norm",
    "clip_gradient": "clip_norm",
    "C_obj": "objective_clip",
    "clip_objective": "objective_clip",
    "steps": "splits",
    "m": "grid.count",
    "alpha_max": "grid.longest",
    "tau": "grid.period",
    "reg_coeff": "penalty",
}
_SGD_ADV = {"C": "clip_norm", "q": "sampling_rate", "eta": "step", "T": "steps"}
_DPSGD = {
    "sigma": "noise_multiplier",
    "C": "clip_norm",
    "q": "sampling_rate",
    "eta": "step",
}  # Abadi et al. 2016

CLASSIFIERS: dict[str, SolverMethod] = {
    "auto": SolverMethod(descent, personal="weights", weighed=True, warm=True),
    "dpagd": SolverMethod(dpagd, ZcdpFilter, aliases=_DPAGD, batches=RdpFilter),
    "sgd-ma": SolverMethod(dpsgd, None, aliases=_DPSGD, personal="rates", weighed=True, warm=True),
    "sgd-adv": SolverMethod(sgd_adv, None, aliases=_SGD_ADV),
    "objective": SolverMethod(objective, BasicFilter),
    "output": SolverMethod(output, None),
    "pure": SolverMethod(pure, BasicFilter),
    "privgene": SolverMethod(privgene, ZcdpFilter),
    "majority": SolverMethod(majority),
    "nonprivate": SolverMethod(nonprivate, None, private=False),
}
REGRESSORS: dict[str, SolverMethod] = {
    "auto": SolverMethod(least_squares, personal="weights", weighed=True),
    "adassp": SolverMethod(adassp),
    "sufficient": SolverMethod(sufficient, personal="weights", weighed=True),
    "functional": SolverMethod(functional, BasicFilter),
    "gradient": SolverMethod(noisy_gradient, personal="weights", weighed=True),
}
PURE = "pure", "functional"  # the choices of "auto" if delta is 0
GENERALISED: dict[str, SolverMethod] = {  # for regression losses other than squares
    "auto": SolverMethod(generalised, personal="weights", weighed=True, warm=True),
    "nonprivate": CLASSIFIERS["nonprivate"],
}


def _parameters(algorithm: Any) -> list[inspect.Parameter]:
    kinds = inspect.signature(algorithm).parameters.values()
    return [parameter for parameter in kinds if parameter.kind is parameter.KEYWORD_ONLY]


def _defaults(algorithm: Any) -> Settings:
    return {parameter.name: parameter.default for parameter in _parameters(algorithm)}


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _annotation(algorithm: Any, name: str) -> Any:
    """Return the annotation of a setting, or of a field of one."""
    outer, _, inner = name.partition(".")
    found = {parameter.name: parameter.annotation for parameter in _parameters(algorithm)}[outer]
    return {each.name: each.type for each in _fields(found)}[inner] if inner else found


def _read(annotation: Any, text: str, name: str) -> Any:
    """Return a text as a value of this type."""
    kinds = _alternatives(annotation)
    for kind in kinds:
        read = kind if kind in (int, float) else _TEXTS.get(kind, {kind: kind}).__getitem__
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    raise InvalidValue(f"{name} must be {' or '.join(_WORDS.get(k, repr(k)) for k in kinds)}, got {text!r}")


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union and the values of a literal as a flat list."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _alternatives(part)]
    return list(typing.get_args(annotation)) if origin is Literal else [annotation]


_TEXTS: dict[Any, dict[str, Any]] = {
    bool: {"true": True, "false": False, "True": True, "False": False},
    types.NoneType: {"none": None, "None": None},
}
_WORDS = {float: "a number", int: "a whole number", bool: "true or false", types.NoneType: "none"}


class Solver(BaseEstimator):  # type: ignore[misc]
    """A method with its settings, for ``solver=`` of an estimator; the base of the classes below."""

    _plain: ClassVar[SolverMethod]

    def __init_subclass__(cls, known: SolverMethod, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._plain, cls.__init__ = known, _constructor(cls, known)  # type: ignore[method-assign]
        # insert the algorithm's parameters between the first line of a class docstring and its notes
        first, _, notes = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
        _, _, parameters = (inspect.getdoc(known.algorithm) or "").partition("\n\n")
        cls.__doc__ = "\n\n".join(part for part in (first, parameters, notes) if part)

    @property
    def method(self) -> SolverMethod:
        """Return the method with these settings."""
        return self._plain.with_(self.get_params(deep=False))


def _constructor(cls: type[Solver], known: SolverMethod) -> Callable[..., None]:
    """Return an ``__init__`` with the algorithm's keyword arguments, where scikit-learn looks for them."""

    def __init__(self: Solver, **settings: Any) -> None:
        defaults = _defaults(known.algorithm)
        for name, value in (defaults | known.resolved(settings, cls.__name__)).items():
            setattr(self, name, value)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    settable = _parameters(known.algorithm)
    __init__.__signature__ = inspect.Signature([itself, *settable])  # type: ignore[attr-defined]
    return __init__


class Descent(Solver, known=CLASSIFIERS["auto"]):
    """The default of the classifiers, ``"auto"``: descent in privately standardised features.

    Notes
    -----
    `farthing.linear.methods.descent`; Gaussian answers, by the ledger's GDP filter, under every adjacency.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.Descent()).solver
    Descent()
    """


class DPAGD(Solver, known=CLASSIFIERS["dpagd"]):
    """DP-AGD of Lee & Kifer 2018, ``"dpagd"``: a noisy line search sets the price of each gradient.

    Notes
    -----
    `farthing.linear.methods.dpagd`; a zCDP filter, or on batches a Rényi filter, under every adjacency
    (batches: not replace-one). The papers' names (``gamma``, ``C_grad``, ...) are accepted too.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.DPAGD(growth=0.2)).solver
    DPAGD(growth=0.2)
    """


class DPSGD(Solver, known=CLASSIFIERS["sgd-ma"]):
    """DP-SGD of Abadi et al. 2016, ``"sgd-ma"``, until the budget is spent.

    Notes
    -----
    `farthing.linear.methods.dpsgd`; a promised plan of subsampled Gaussian answers, priced by tight
    accounting, against an observer who does not see the draws.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.DPSGD(momentum=0.5)).solver
    DPSGD(momentum=0.5)
    """


class SGDAdv(Solver, known=CLASSIFIERS["sgd-adv"]):
    """SGD with the noise of advanced composition, ``"sgd-adv"``: a baseline.

    Notes
    -----
    `farthing.linear.methods.dpsgd`; charged for the plan that ran, which costs less than advanced
    composition.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.SGDAdv(steps=100)).solver
    SGDAdv(steps=100)
    """


class ObjectivePerturbation(Solver, known=CLASSIFIERS["objective"]):
    """Objective perturbation of Kifer et al. 2012, ``"objective"``: noise inside a convex problem.

    Notes
    -----
    `farthing.linear.methods.perturbation`; (ε, δ)-DP by its theorem, under a basic filter.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.ObjectivePerturbation(penalty=10.0)).solver
    ObjectivePerturbation(penalty=10.0)
    """


class OutputPerturbation(Solver, known=CLASSIFIERS["output"]):
    """Output perturbation of Chaudhuri et al. 2011, ``"output"``: noise on the minimiser.

    Notes
    -----
    `farthing.linear.methods.perturbation`; one promised Gaussian answer.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.OutputPerturbation(penalty=10.0)).solver
    OutputPerturbation(penalty=10.0)
    """


class PureObjective(Solver, known=CLASSIFIERS["pure"]):
    """Objective perturbation of Chaudhuri et al. 2011 with Laplace noise, ``"pure"``: ε-DP without a δ.

    Notes
    -----
    `farthing.linear.methods.pure`; one answer, under a basic filter. ``"auto"`` where delta is 0.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 0.0, solver=ft.PureObjective(penalty=10.0)).solver
    PureObjective(penalty=10.0)
    """


class PrivGene(Solver, known=CLASSIFIERS["privgene"]):
    """PrivGene of Zhang et al. 2013, ``"privgene"``: a genetic algorithm with private selection.

    Notes
    -----
    `farthing.linear.methods.privgene`; exponential mechanisms, by a zCDP filter.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.PrivGene(parents=3)).solver
    PrivGene(parents=3)
    """


class Majority(Solver, known=CLASSIFIERS["majority"]):
    """The most frequent class, ``"majority"``: a baseline.

    Notes
    -----
    `farthing.linear.methods.baselines`; one exponential mechanism.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.Majority()).solver
    Majority()
    """


class NonPrivate(Solver, known=CLASSIFIERS["nonprivate"]):
    """L-BFGS on the records themselves, ``"nonprivate"``: a baseline with **no privacy of any kind**.

    Notes
    -----
    `farthing.linear.methods.baselines`; ``privacy_`` of such a fit has an infinite ε.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LogisticRegression(1.0, 1e-6, solver=ft.NonPrivate(penalty=0.1)).solver
    NonPrivate(penalty=0.1)
    """


class LeastSquares(Solver, known=REGRESSORS["auto"]):
    """The default of the regression, ``"auto"``: clipped steps in a privately whitened space.

    Notes
    -----
    `farthing.linear.methods.leastsquares`; Gaussian answers, by the ledger's GDP filter, under every
    adjacency.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LinearRegression(1.0, 1e-6, solver=ft.LeastSquares(steps=5)).solver
    LeastSquares(steps=5)
    """


class AdaSSP(Solver, known=REGRESSORS["adassp"]):
    """AdaSSP of Wang 2018, ``"adassp"``: noisy second moments with an adaptive penalty.

    Notes
    -----
    `farthing.linear.methods.sufficient`; three Gaussian answers.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LinearRegression(1.0, 1e-6, solver=ft.AdaSSP(failure=0.01)).solver
    AdaSSP(failure=0.01)
    """


class SufficientStatistics(Solver, known=REGRESSORS["sufficient"]):
    """Least squares from noisy second moments, ``"sufficient"``.

    Notes
    -----
    `farthing.linear.methods.sufficient`; one Gaussian answer.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LinearRegression(1.0, 1e-6, solver=ft.SufficientStatistics()).solver
    SufficientStatistics()
    """


class FunctionalMechanism(Solver, known=REGRESSORS["functional"]):
    """The functional mechanism of Zhang et al. 2012, ``"functional"``: noise on the coefficients of the loss.

    Notes
    -----
    `farthing.linear.methods.functional`; ε-DP, one Laplace answer, under a basic filter.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LinearRegression(1.0, 1e-6, solver=ft.FunctionalMechanism(triangle=True)).solver
    FunctionalMechanism(triangle=True)
    """


class NoisyGradient(Solver, known=REGRESSORS["gradient"]):
    """Noisy gradient descent after Bassily et al. 2014, ``"gradient"``: a baseline.

    Notes
    -----
    `farthing.linear.methods.regression`; ``steps`` Gaussian answers.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.LinearRegression(1.0, 1e-6, solver=ft.NoisyGradient(steps=20)).solver
    NoisyGradient(steps=20)
    """
