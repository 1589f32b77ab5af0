"""Train over federated clients and parties that keep their records, each with its own budget.

>>> import numpy as np
>>> import farthing as ft
>>> X, budget = np.ones((300, 2)), ft.Budget(1.0, 1e-6)
>>> clients = ft.federated.Simulated.split(X, np.ones(300), records=100, budgets=budget)
>>> len(clients), clients.records.tolist()
(3, [100, 100, 100])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farthing.accounting.accountants import Accountant
    from farthing.federated.budgets import personal
    from farthing.federated.draws import Indicators
    from farthing.federated.evaluation import Evaluated, Evaluation, evaluate_clients
    from farthing.federated.methods.networks import dp_fedavg, fedavg, fedsgd
    from farthing.federated.methods.server import ServerOptimizer
    from farthing.federated.methods.table import METHODS, Method, Option
    from farthing.federated.protocol import (
        Answers,
        Ask,
        ClientAgent,
        Clients,
        Parties,
        Reply,
        SequentialClients,
    )
    from farthing.federated.rounds import Forecast, LocalSteps
    from farthing.federated.simulated import Simulated
    from farthing.federated.terms import Exactly, InTurn, Invitation, Terms, Trust, Weights

__all__ = [
    "METHODS",
    "Accountant",
    "Answers",
    "Ask",
    "ClientAgent",
    "Clients",
    "Evaluated",
    "Evaluation",
    "Exactly",
    "Forecast",
    "InTurn",
    "Indicators",
    "Invitation",
    "LocalSteps",
    "Method",
    "Option",
    "Parties",
    "Reply",
    "SequentialClients",
    "ServerOptimizer",
    "Simulated",
    "Terms",
    "Trust",
    "Weights",
    "dp_fedavg",
    "evaluate_clients",
    "fedavg",
    "fedsgd",
    "personal",
]

# Names are imported on first use: the command line reads the table of methods without numpy.
_HOMES = {
    "budgets": ("personal",),
    "draws": ("Indicators",),
    "evaluation": ("Evaluated", "Evaluation", "evaluate_clients"),
    "rounds": ("Forecast", "LocalSteps"),
    "methods.networks": ("dp_fedavg", "fedavg", "fedsgd"),
    "methods.server": ("ServerOptimizer",),
    "methods.table": ("METHODS", "Method", "Option"),
    "protocol": (
        "Answers",
        "Ask",
        "ClientAgent",
        "Clients",
        "Parties",
        "SequentialClients",
        "Reply",
    ),
    "simulated": ("Simulated",),
    "terms": ("Accountant", "Exactly", "InTurn", "Invitation", "Terms", "Trust", "Weights"),
}
_HOME = {name: f"farthing.federated.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
