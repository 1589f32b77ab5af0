"""Parties who train together, each keeping its records and its own budget."""

from farthing.crowd.protocol import (
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
    Reply,
    Terms,
    Trust,
    Weights,
)

__all__ = [
    "Accountant",
    "Answers",
    "Ask",
    "ClientAgent",
    "Crowd",
    "Exactly",
    "Forecast",
    "InTurn",
    "Invitation",
    "Parties",
    "Reply",
    "Terms",
    "Trust",
    "Weights",
]
