"""Bound what a party may upload about a network, and say how noisy it is: for gradients, steps and updates.

An upload after k local private steps is expected · (w_k - w), where each step moves by lr times a noisy mean
gradient and pulls back by lr · μ times the way already gone. With G the longest noisy sum of one round
(`farthing.deploy.roster.longest`), |w_k - w| is at most lr G / expected · Σ_{j<k} (1 + lr μ)^j, and rounding
to float32 after every step adds no more than k 2^-23 of the weights. Its noise has the variance of k answers,
times lr².

>>> round(geometric(2.0, 3), 1)
7.0
"""

import math

import numpy as np

from farthing.deploy.messages.forms import Question
from farthing.deploy.messages.networks import NetworkAsk, NetworkKind
from farthing.deploy.messages.signed import Fields
from farthing.deploy.roster import longest
from farthing.federated.terms import Terms

_ROUNDED = 2.0**-23


def steps_of(question: Question, said: Fields) -> float:
    """Return the factor on the variance of one answer: lr² for each local step that was taken."""
    asked = question.contribution
    if not isinstance(asked, NetworkAsk) or asked.kind is not NetworkKind.STEPS:
        return 1.0
    return asked.lr**2 * said.whole("taken", 1, asked.steps)


def longest_upload(question: Question, body: bytes, terms: Terms, records: int) -> float:
    """Return the norm that no honest upload exceeds but with a probability of 1e-12 for each answer."""
    asked, size = question.contribution, math.prod(question.shape)
    one = longest(terms, records, size)
    if not isinstance(asked, NetworkAsk) or asked.kind is not NetworkKind.STEPS:
        return one
    moved = asked.lr * one * geometric(1 + asked.lr * asked.proximal, asked.steps)
    rounding = asked.steps * _ROUNDED * (float(np.linalg.norm(question.weights(body))) + moved)
    return moved + terms.expected * rounding


def geometric(ratio: float, terms: int) -> float:
    """Return 1 + ratio + ... of so many terms; infinity where that is too large."""
    try:
        return float(terms) if ratio == 1.0 else (ratio**terms - 1) / (ratio - 1)
    except OverflowError:
        return math.inf
