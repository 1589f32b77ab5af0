"""Parties who train together, each keeping its records and its own budget.

>>> import numpy as np
>>> import farthing as ft
>>> X, budget = np.ones((300, 2)), ft.Budget(1.0, 1e-6)
>>> crowd = ft.federated.Simulated.split(X, np.ones(300), records=100, budgets=budget)
>>> crowd.users, crowd.records.tolist()
(3, [100, 100, 100])
"""

from farthing.federated.draws import Indicators
from farthing.federated.people import personal
from farthing.federated.protocol import (
    Accountant,
    Answers,
    Ask,
    ClientAgent,
    Crowd,
    Exactly,
    Forecast,
    InTurn,
    Invitation,
    Parties,
    Passing,
    Reply,
    Terms,
    Trust,
    Weights,
)
from farthing.federated.simulated import Simulated

__all__ = [
    "Accountant",
    "Answers",
    "Ask",
    "ClientAgent",
    "Crowd",
    "Exactly",
    "Forecast",
    "InTurn",
    "Indicators",
    "Invitation",
    "Parties",
    "Passing",
    "Reply",
    "Simulated",
    "Terms",
    "Trust",
    "Weights",
    "personal",
]
