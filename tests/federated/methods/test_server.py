"""The server's optimisers against the formulas of Reddi et al. 2021, coordinate by coordinate."""

import math

import numpy as np
import pytest

from farthing.errors import InvalidValue
from farthing.federated.methods.server import ServerOptimizer

UPDATES = [np.array([0.5, -2.0]), np.array([-0.25, 1.0]), np.array([0.0, 3.0])]


def by_hand(rule, variance):
    """Algorithm 2 for one coordinate at a time, in plain Python."""
    w, m, v = [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]
    for update in UPDATES:
        for i, d in enumerate(update.tolist()):
            if rule == "sgd":
                w[i] += 0.1 * d
                continue
            if rule == "momentum":
                m[i] = 0.9 * m[i] + d
                w[i] += 0.1 * m[i]
                continue
            m[i] = 0.9 * m[i] + (1 - 0.9) * d
            square = max(d * d - variance, 0.0)
            if rule == "adam":
                v[i] = 0.99 * v[i] + (1 - 0.99) * square
            else:
                sign = (v[i] > square) - (v[i] < square)
                v[i] = v[i] - (1 - 0.99) * square * sign
            w[i] += 0.1 * m[i] / (math.sqrt(v[i]) + 1e-3)
    return w


@pytest.mark.parametrize("variance", [0.0, 0.3])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "yogi"])
def test_every_rule_follows_its_formula(rule, variance):
    server, w = ServerOptimizer(rule, lr=lambda t: 0.1), np.ones(2)
    for update in UPDATES:
        w = server.step(w, update, variance)
    np.testing.assert_allclose(w, by_hand(rule, variance), rtol=1e-12)


def test_values_that_make_no_sense_are_refused():
    for wrong in ({"rule": "rmsprop"}, {"lr": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"tau": 0.0}):
        with pytest.raises(InvalidValue):
            ServerOptimizer(**wrong)
    with pytest.raises(InvalidValue, match="lr"):
        ServerOptimizer(lr=lambda t: -1.0).step(np.zeros(1), np.zeros(1))
