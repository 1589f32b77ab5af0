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

from farthing.bounds import ClipCoordinates, ClipNorm, ClipOuter, ClipValue
from farthing.budget import Adjacency, Budget, Guarantee, Observer, Unit
from farthing.errors import FarthingError
from farthing.facade import delta, epsilon, noise_for, steps_for
from farthing.ledger import Ledger
from farthing.mechanisms import Gaussian, Laplace, NoisyMax, SymmetricGaussian
from farthing.query import PerExample, Query, Rows, Run, Step, run, until_spent
from farthing.samplers import Everyone, FixedSize, OneRecord, Poisson

__version__ = "0.1.0"

__all__ = [
    "Adjacency",
    "Budget",
    "ClipCoordinates",
    "ClipNorm",
    "ClipOuter",
    "ClipValue",
    "Everyone",
    "FarthingError",
    "FixedSize",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Ledger",
    "NoisyMax",
    "Observer",
    "OneRecord",
    "PerExample",
    "Poisson",
    "Query",
    "Rows",
    "Run",
    "Step",
    "SymmetricGaussian",
    "Unit",
    "delta",
    "epsilon",
    "noise_for",
    "run",
    "steps_for",
    "until_spent",
]
