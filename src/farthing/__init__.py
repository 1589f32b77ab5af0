"""farthing: differentially private training with adaptive budgets.

Give it a privacy budget, not a number of steps.

>>> import farthing as ft
>>> budget = ft.Budget(epsilon=1.0, delta=1e-5)
>>> step = ft.Poisson(0.01).amplify(ft.Gaussian(1.1))
>>> ft.steps_for(step, budget)
421
>>> round(ft.epsilon(step, steps=421, delta=1e-5), 4)
0.9994
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farthing import audit, federated, torch
    from farthing.accounting.api import delta, epsilon, noise_for, steps_for
    from farthing.accounting.correlated import choose_balanced, choose_bands, choose_buffers
    from farthing.accounting.menu import Menu
    from farthing.accounting.personal import PersonalBudgets
    from farthing.audit.auditing import audit_mechanism
    from farthing.budget import Adjacency, Budget, Guarantee, Observer, Unit
    from farthing.errors import (
        BudgetSpent,
        FarthingError,
        InvalidValue,
        LedgerLocked,
        NotPrivate,
        NotReleased,
        OutOfMemory,
        PromiseBroken,
        Unsupported,
    )
    from farthing.ledger.ledger import Ledger
    from farthing.ledger.tuning import best_of
    from farthing.linear.additive.estimators import (
        AdditiveClassifier,
        AdditiveRegressor,
        GradientBoostingClassifier,
        GradientBoostingRegressor,
    )
    from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression
    from farthing.linear.preprocessing import PCA, PrivateBinner, PrivateScaler
    from farthing.linear.regressors import HuberRegressor, PoissonRegressor, QuantileRegressor
    from farthing.linear.solvers import (
        DPAGD,
        DPSGD,
        AdaSSP,
        Descent,
        FunctionalMechanism,
        LeastSquares,
        Majority,
        NoisyGradient,
        NonPrivate,
        ObjectivePerturbation,
        OutputPerturbation,
        PrivGene,
        PureObjective,
        SGDAdv,
        SufficientStatistics,
    )
    from farthing.linear.tuning import tune
    from farthing.queries.arrivals import Arrivals
    from farthing.queries.bounds import ClipCoordinates, ClipNorm, ClipOuter, ClipValue
    from farthing.queries.buffered import BufferedGaussian
    from farthing.queries.correlated import Balanced, BandedGaussian, Cyclic
    from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax, SymmetricGaussian
    from farthing.queries.query import PerExample, Query, Rows, Run, Step, run, until_spent
    from farthing.queries.samplers import Everyone, FixedSize, OneRecord, Poisson, TruncatedPoisson
    from farthing.queries.truncation import TruncatedCyclic
    from farthing.statistics import Statistic, bounds, count, histogram, mean, quantiles

__version__ = "0.1.0"

__all__ = [
    "DPAGD",
    "DPSGD",
    "PCA",
    "AdaSSP",
    "AdditiveClassifier",
    "AdditiveRegressor",
    "Adjacency",
    "Arrivals",
    "Balanced",
    "BandedGaussian",
    "Budget",
    "BudgetSpent",
    "BufferedGaussian",
    "ClipCoordinates",
    "ClipNorm",
    "ClipOuter",
    "ClipValue",
    "Cyclic",
    "Descent",
    "Everyone",
    "FarthingError",
    "FixedSize",
    "FunctionalMechanism",
    "Gaussian",
    "GradientBoostingClassifier",
    "GradientBoostingRegressor",
    "Guarantee",
    "HuberRegressor",
    "InvalidValue",
    "Laplace",
    "LeastSquares",
    "Ledger",
    "LedgerLocked",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "Majority",
    "Menu",
    "NoisyGradient",
    "NoisyMax",
    "NonPrivate",
    "NotPrivate",
    "NotReleased",
    "ObjectivePerturbation",
    "Observer",
    "OneRecord",
    "OutOfMemory",
    "OutputPerturbation",
    "PerExample",
    "PersonalBudgets",
    "Poisson",
    "PoissonRegressor",
    "PrivGene",
    "PrivateBinner",
    "PrivateScaler",
    "PromiseBroken",
    "PureObjective",
    "QuantileRegressor",
    "Query",
    "Rows",
    "Run",
    "SGDAdv",
    "Statistic",
    "Step",
    "SufficientStatistics",
    "SymmetricGaussian",
    "TruncatedCyclic",
    "TruncatedPoisson",
    "Unit",
    "Unsupported",
    "audit",
    "audit_mechanism",
    "best_of",
    "bounds",
    "choose_balanced",
    "choose_bands",
    "choose_buffers",
    "count",
    "delta",
    "epsilon",
    "federated",
    "histogram",
    "mean",
    "noise_for",
    "quantiles",
    "run",
    "steps_for",
    "torch",
    "tune",
    "until_spent",
]

# Names are looked up when they are used: `farthing --help` need not wait for numpy and scipy.
_HOMES = {
    "audit.auditing": ("audit_mechanism",),
    "queries.bounds": ("ClipCoordinates", "ClipNorm", "ClipOuter", "ClipValue"),
    "budget": ("Adjacency", "Budget", "Guarantee", "Observer", "Unit"),
    "errors": (
        "BudgetSpent",
        "FarthingError",
        "InvalidValue",
        "LedgerLocked",
        "NotPrivate",
        "NotReleased",
        "OutOfMemory",
        "PromiseBroken",
        "Unsupported",
    ),
    "linear.additive.estimators": (
        "AdditiveClassifier",
        "AdditiveRegressor",
        "GradientBoostingClassifier",
        "GradientBoostingRegressor",
    ),
    "linear.estimators": ("LinearRegression", "LinearSVC", "LogisticRegression"),
    "linear.preprocessing": ("PCA", "PrivateBinner", "PrivateScaler"),
    "linear.regressors": ("HuberRegressor", "PoissonRegressor", "QuantileRegressor"),
    "accounting.correlated": ("choose_balanced", "choose_bands", "choose_buffers"),
    "accounting.menu": ("Menu",),
    "accounting.personal": ("PersonalBudgets",),
    "accounting.api": ("delta", "epsilon", "noise_for", "steps_for"),
    "ledger.ledger": ("Ledger",),
    "ledger.tuning": ("best_of",),
    "linear.tuning": ("tune",),
    "queries.mechanisms": ("Gaussian", "Laplace", "NoisyMax", "SymmetricGaussian"),
    "queries.query": ("PerExample", "Query", "Rows", "Run", "Step", "run", "until_spent"),
    "queries.buffered": ("BufferedGaussian",),
    "queries.correlated": ("Balanced", "BandedGaussian", "Cyclic"),
    "statistics": ("Statistic", "bounds", "count", "histogram", "mean", "quantiles"),
    "queries.samplers": ("Everyone", "FixedSize", "OneRecord", "Poisson", "TruncatedPoisson"),
    "queries.truncation": ("TruncatedCyclic",),
    "queries.arrivals": ("Arrivals",),
    "linear.solvers": (
        "AdaSSP",
        "DPAGD",
        "DPSGD",
        "Descent",
        "FunctionalMechanism",
        "LeastSquares",
        "Majority",
        "NoisyGradient",
        "NonPrivate",
        "ObjectivePerturbation",
        "OutputPerturbation",
        "PrivGene",
        "PureObjective",
        "SGDAdv",
        "SufficientStatistics",
    ),
}
_HOME = {name: f"farthing.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("audit", "federated", "torch"):
        return import_module(f"farthing.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
