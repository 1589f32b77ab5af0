"""The methods behind ``solver=``, by name and as objects that carry a method's settings.

>>> import farthing as ft
>>> model = ft.LogisticRegression(1.0, 1e-6, solver=ft.DPAGD(growth=0.2, clip_gradient=3.0))
>>> model.solver
DPAGD(clip_norm=3.0, growth=0.2)
>>> model.set_params(solver__growth=0.3).solver.growth
0.3

A setting is a keyword-only argument of the method's algorithm in `farthing.linear.methods`, and nothing else
is: names, defaults and types are read from its signature, by the objects here and by ``farthing train
--set``. An alias is the symbol of a paper; ``grid.count`` is a field of the setting ``grid``.

An object is a setting of an estimator like any other for scikit-learn: `clone`, ``get_params``,
``set_params`` and a grid over ``solver__growth`` work. It makes no promise of its own: the guarantee is that
of the fit, (ε, δ) of its budget, by the theorem that the algorithm cites. What a method refuses, it refuses
before anything is charged.
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
from farthing.linear.methods.adassp import adassp
from farthing.linear.methods.baselines import majority, nonprivate
from farthing.linear.methods.descent import descent
from farthing.linear.methods.dpagd import dpagd
from farthing.linear.methods.dpsgd import dpsgd, sgd_adv
from farthing.linear.methods.functional import functional
from farthing.linear.methods.leastsquares import least_squares
from farthing.linear.methods.perturbation import objective, output
from farthing.linear.methods.privgene import privgene
from farthing.linear.methods.regression import noisy_gradient
from farthing.linear.methods.sufficient import sufficient

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm and how it likes to spend: by a filter, or (None) by promising a plan."""

    algorithm: Any  # an `Algorithm`, but for `nonprivate`, which takes the table itself
    filter: Callable[[Budget], Filter] | None = GdpFilter
    private: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)  # the papers' symbols
    batches: Callable[[Budget], Filter] | None = None  # the filter, if another one, with a ``sampling_rate``
    rehearsed: bool = False  # whether the caller has tried it on made-up rows, so that `fit` need not

    @property
    def settings(self) -> Settings:
        """The names that can be set, with their defaults; fields of a setting as ``name.field``."""
        found: Settings = {}
        for name, default in _defaults(self.algorithm).items():
            found[name] = default
            if dataclasses.is_dataclass(default):
                found |= {f"{name}.{each.name}": getattr(default, each.name) for each in _fields(default)}
        return found

    def resolved(self, settings: Mapping[str, Any], name: str = "the method") -> Settings:
        """``settings`` by the algorithm's own names; a name that it does not have is refused."""
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
                raise InvalidValue(f"{name}: {given!r} sets {outer!r}, which was set before")
            found[outer] = value
        return found

    def parsed(self, texts: Iterable[str], name: str) -> Settings:
        """Settings of NAME=VALUE, each value read as the algorithm's annotation says."""
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
                raise InvalidValue(f"--set {given}={value}: {known!r} was set before")
            found[known] = _read(_annotation(self.algorithm, known), value, f"--set {given}")
        return found

    def with_(self, settings: Mapping[str, Any]) -> "Method":
        """The same method with other settings."""
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

CLASSIFIERS: dict[str, Method] = {
    "auto": Method(descent),
    "dpagd": Method(dpagd, ZcdpFilter, aliases=_DPAGD, batches=RdpFilter),
    "sgd-ma": Method(dpsgd, None, aliases=_DPSGD),
    "sgd-adv": Method(sgd_adv, None, aliases=_SGD_ADV),
    "objective": Method(objective, BasicFilter),
    "output": Method(output, None),
    "privgene": Method(privgene, ZcdpFilter),
    "majority": Method(majority),
    "nonprivate": Method(nonprivate, None, private=False),
}
REGRESSORS: dict[str, Method] = {
    "auto": Method(least_squares),
    "adassp": Method(adassp),
    "sufficient": Method(sufficient),
    "functional": Method(functional, BasicFilter),
    "gradient": Method(noisy_gradient),
}


def _parameters(algorithm: Any) -> list[inspect.Parameter]:
    kinds = inspect.signature(algorithm).parameters.values()
    return [parameter for parameter in kinds if parameter.kind is parameter.KEYWORD_ONLY]


def _defaults(algorithm: Any) -> Settings:
    return {parameter.name: parameter.default for parameter in _parameters(algorithm)}


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _annotation(algorithm: Any, name: str) -> Any:
    """What a setting, or the field of one, is declared to be."""
    outer, _, inner = name.partition(".")
    found = {parameter.name: parameter.annotation for parameter in _parameters(algorithm)}[outer]
    return {each.name: each.type for each in _fields(found)}[inner] if inner else found


def _read(annotation: Any, text: str, name: str) -> Any:
    """A value of this type, as it is typed."""
    kinds = _alternatives(annotation)
    for kind in kinds:
        read = kind if kind in (int, float) else _TEXTS.get(kind, {kind: kind}).__getitem__
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    raise InvalidValue(f"{name} must be {' or '.join(_WORDS.get(k, repr(k)) for k in kinds)}, got {text!r}")


def _alternatives(annotation: Any) -> list[Any]:
    """The types of a union, and the texts of a literal, one by one."""
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
    """A method with its settings, for ``solver=``; the classes below are its kinds."""

    _plain: ClassVar[Method]

    def __init_subclass__(cls, known: Method, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._plain, cls.__init__ = known, _constructor(cls, known)  # type: ignore[method-assign]
        cls.__doc__ = f"{cls.__doc__}\n\n    {inspect.getdoc(known.algorithm)}\n"

    @property
    def method(self) -> Method:
        """The method with these settings."""
        return self._plain.with_(self.get_params(deep=False))


def _constructor(cls: type[Solver], known: Method) -> Callable[..., None]:
    """``__init__`` with the algorithm's keyword arguments, which is where scikit-learn looks for them."""

    def __init__(self: Solver, **settings: Any) -> None:
        defaults = _defaults(known.algorithm)
        for name, value in (defaults | known.resolved(settings, cls.__name__)).items():
            setattr(self, name, value)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    settable = _parameters(known.algorithm)
    __init__.__signature__ = inspect.Signature([itself, *settable])  # type: ignore[attr-defined]
    return __init__


class Descent(Solver, known=CLASSIFIERS["auto"]):
    """``"auto"`` of the classifiers: `farthing.linear.methods.descent`; (ε, δ)-DP as Gaussian answers are."""


class DPAGD(Solver, known=CLASSIFIERS["dpagd"]):
    """``"dpagd"``, Lee & Kifer 2018: `farthing.linear.methods.dpagd`; (ε, δ)-DP by a zCDP or Rényi filter."""


class DPSGD(Solver, known=CLASSIFIERS["sgd-ma"]):
    """``"sgd-ma"``, Abadi et al. 2016: `farthing.linear.methods.dpsgd`; (ε, δ)-DP of a promised plan."""


class SGDAdv(Solver, known=CLASSIFIERS["sgd-adv"]):
    """``"sgd-adv"``, noise by advanced composition: `farthing.linear.methods.dpsgd`; (ε, δ)-DP of its
    plan."""


class ObjectivePerturbation(Solver, known=CLASSIFIERS["objective"]):
    """``"objective"``, Kifer et al. 2012: `farthing.linear.methods.perturbation`; (ε, δ)-DP by its
    theorem."""


class OutputPerturbation(Solver, known=CLASSIFIERS["output"]):
    """``"output"``, Chaudhuri et al. 2011: `farthing.linear.methods.perturbation`; one Gaussian answer."""


class PrivGene(Solver, known=CLASSIFIERS["privgene"]):
    """``"privgene"``, Zhang et al. 2013: `farthing.linear.methods.privgene`; exponential mechanisms, zCDP."""


class Majority(Solver, known=CLASSIFIERS["majority"]):
    """``"majority"``, the most frequent class: `farthing.linear.methods.baselines`; an exponential
    mechanism."""


class NonPrivate(Solver, known=CLASSIFIERS["nonprivate"]):
    """``"nonprivate"``, L-BFGS on the records themselves: **no privacy of any kind**."""


class LeastSquares(Solver, known=REGRESSORS["auto"]):
    """``"auto"`` of the regression: `farthing.linear.methods.leastsquares`; (ε, δ)-DP as Gaussian answers
    are."""


class AdaSSP(Solver, known=REGRESSORS["adassp"]):
    """``"adassp"``, Wang 2018: `farthing.linear.methods.adassp`; three Gaussian answers."""


class SufficientStatistics(Solver, known=REGRESSORS["sufficient"]):
    """``"sufficient"``, noisy second moments: `farthing.linear.methods.sufficient`; one Gaussian answer."""


class FunctionalMechanism(Solver, known=REGRESSORS["functional"]):
    """``"functional"``, Zhang et al. 2012: `farthing.linear.methods.functional`; ε-DP, one Laplace answer."""


class NoisyGradient(Solver, known=REGRESSORS["gradient"]):
    """``"gradient"``, Bassily et al. 2014, `farthing.linear.methods.regression`, in ``steps`` answers."""
