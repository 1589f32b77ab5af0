"""Linear models: scikit-learn estimators, their losses, and model selection that is paid for.

`methods` holds the training algorithms, one paper a file. `solvers` describes their settings to the
estimators and to the command line.
"""

from farthing.linear.losses import logistic, multinomial, squared
from farthing.linear.problem import Problem

__all__ = ["Problem", "logistic", "multinomial", "squared"]
