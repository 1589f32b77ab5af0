"""DP-SGD, AdaDP and DP-AGD of torch against their pseudocode: batches and noise are scripted.

A reference is the paper's lines in plain numpy, one example after the other, for a linear model under half
the squared error, whose gradients are (w·x - y) x.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.accounting.filters import RdpFilter
from farthing.audit import as_published
from farthing.linear.methods.dpagd import Lengths
from farthing.noise.lattice import SeededStream
from farthing.queries.mechanisms import NoisyMax
from farthing.queries.samplers import Poisson
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.methods.adadp import AdaDP, AdaL, AdaN
from farthing.torch.methods.dpagd import dpagd
from farthing.torch.methods.dpopt import DpOpt
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

RNG = np.random.default_rng(6)
RECORDS, RATE = 40, 0.3
X = (RNG.normal(size=(RECORDS, 3)) * [1.0, 0.5, 0.2]).astype(np.float32)
Y = (X @ [1.5, -1.0, 0.5] + 0.1 * RNG.normal(size=RECORDS)).astype(np.float32)
BATCHES = [np.flatnonzero(row < RATE) for row in RNG.random((12, RECORDS))]
BATCHES[2] = np.empty(0, np.int64)  # an empty batch is answered like any other
NORMALS = RNG.normal(size=(12, 3))


def half_square(outputs, targets):
    return (outputs[:, 0] - targets) ** 2 / 2


def linear(weights=(0.2, -0.1, 0.3)):
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def weights_of(model):
    return model.weight.detach().double().numpy().ravel().copy()


@pytest.fixture
def seen(monkeypatch):
    """Scripts the batches; a mechanism with scripted noise, and what it was asked for."""
    drawn, asked = iter(BATCHES), []

    def draw(self, records, stream, turn=0):
        assert (self.sampling_rate, records) == (RATE, RECORDS)
        return next(drawn)

    class Scripted(TensorGaussian):
        def release(self, total, bound, stream, turn=0):
            scale = np.asarray(bound.scale, dtype=np.float64) * np.ones(3)
            asked.append(SimpleNamespace(noise=self.noise_multiplier, bound=bound, scale=scale))
            added = self.noise_multiplier * bound.norm() * scale * NORMALS[len(asked) - 1]
            return total + torch.from_numpy(added).float()

    monkeypatch.setattr(Poisson, "draw", draw)
    return SimpleNamespace(asked=asked, mechanism=Scripted)


def trained(model, seen, **options):
    ledger = ft.Ledger(ft.Budget(40.0, 1e-5), stream=SeededStream(0))
    data = torch.from_numpy(X), torch.from_numpy(Y)
    training = train(
        model, half_square, data, ledger, sampling_rate=RATE, mechanism=seen.mechanism, **options
    )
    return [(step, weights_of(model)) for step in training]


def test_train_is_dpsgds_algorithm_1_batch_by_batch(seen):
    """DP-SGD, all lines, with clip, noise and η that depend on t: clip, one noise a batch, 1/L, descent.

    L is the expected batch: the third one is empty.
    """
    clips, noises = [0.5, 0.4, 0.3, 0.6, 0.2, 0.5], [1.0, 1.0, 2.0, 2.0, 1.5, 1.5]
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    theta = weights_of(model)
    path = trained(
        model, seen, clip_norm=clips, noise_multiplier=noises, steps=6, optimizer=optimizer, scheduler=falling
    )
    assert [ask.noise for ask in seen.asked] == noises
    for t, (step, found) in enumerate(path):
        total = np.zeros(3)
        for place in BATCHES[t]:
            g = (theta @ X[place] - Y[place]) * X[place]
            total += g / max(1.0, np.linalg.norm(g) / clips[t])
        total += noises[t] * clips[t] * NORMALS[t]
        theta = theta - 0.5 / (t + 1) * total / (RATE * RECORDS)
        np.testing.assert_allclose(found, theta, atol=1e-5)
        assert step.left == 5 - t


def bound_of(state, step, shape, settings):
    """Lines 7 to 9 and 12 of AdaDP on released values: None for the global clip, or (s, clip of g / s)."""
    root = root_of(state, step, settings)
    if root is None:
        return None
    if shape == "box":
        return np.minimum(settings.factor * root, settings.clip_norm), None
    if shape == "dpopt":  # Σ g² s² is least at this price for s² ∝ 1/|g|
        scale = 1 / np.sqrt(root)
        scale = scale / math.sqrt(np.mean(scale**2))
        return scale, settings.clip_norm * math.sqrt(np.mean(1 / scale**2))
    return np.sqrt(root / root.mean()), settings.clip_norm * root.mean() / math.sqrt(np.mean(root**2))


def root_of(state, step, settings):
    """√E' of every coordinate, between floor and ceiling; None while E' does not stand out of the noise.

    E' and the noise in it are corrected for their youth; E' stands out of the noise if its mean lies above
    three deviations of the mean of so many squares of noise.
    """
    if step == 0:
        return None
    young = 1 - settings.memory**step
    signal, clutter = state.signal / young, state.clutter / young
    batches = min(step, (1 + settings.memory) / (1 - settings.memory))
    level, edge = signal.mean(), 3 * clutter * math.sqrt(2 / (batches * 3))
    if level <= edge:
        return None
    part = max(0.0, 1 - 2 * clutter**2 / batches / signal.var())
    pooled = np.maximum(level + part * (signal - level), 0.0)
    return np.sqrt(np.clip(pooled, settings.floor**2 * level, settings.ceiling**2 * level))


@pytest.mark.parametrize("shape", ["box", "ellipsoid"])
@pytest.mark.parametrize("period", [1, 2])
def test_adadp_is_its_lines_on_released_values(seen, shape, period):
    """AdaDP, lines 1-26, where 7, 9, 12 and 23 read released values in place of raw gradients.

    Line 7 asks whether E' stands out of its noise; 9 and 10 are the box |g_i| <= s_i with noise √m s_i (12,
    13), or the ellipsoid |g/s| <= C'; 16 and 18 are DP-SGD's; 23 takes the noise's variance off.
    """
    settings = SimpleNamespace(memory=0.8, floor=0.3, ceiling=2.0, factor=1.3, clip_norm=0.9)
    model, noise, batch = linear(), 0.4, RATE * RECORDS
    theta = weights_of(model)
    given = {name: value for name, value in vars(settings).items() if name != "factor" or shape == "box"}
    method = AdaDP(model, 0.05, **given, rate_memory=0.7, estimate="coordinate", shape=shape,
                   period=period, eps=1e-6)  # fmt: skip
    path = trained(model, seen, clip_norm=method.bound, noise_multiplier=noise, steps=10, optimizer=method)
    state = SimpleNamespace(signal=np.zeros(3), clutter=0.0, square=np.zeros(3))
    branches, bound = [], None
    for t, (_, found) in enumerate(path):  # 2
        if t % period == 0:
            bound = bound_of(state, t, shape, settings)  # 7, 9
        total = np.zeros(3)
        for place in BATCHES[t]:  # 3, 4
            g = (theta @ X[place] - Y[place]) * X[place]  # 5
            if bound is None:
                total += g / max(1.0, np.linalg.norm(g) / settings.clip_norm)  # 16
            elif shape == "box":
                total += np.clip(g, -bound[0], bound[0])  # 10
            else:
                total += g / max(1.0, np.linalg.norm(g / bound[0]) / bound[1])
        if bound is None:
            deviation = np.full(3, noise * settings.clip_norm)  # 18
        else:
            deviation = noise * bound[0] * (math.sqrt(3) if shape == "box" else bound[1])  # 12
        ask = seen.asked[t]
        np.testing.assert_allclose(noise * ask.bound.norm() * ask.scale, deviation, rtol=1e-4)
        released = (total + deviation * NORMALS[t]) / batch  # 13, 18
        state.square = 0.7 * state.square + 0.3 * released**2  # 22
        state.signal = 0.8 * state.signal + 0.2 * (released**2 - (deviation / batch) ** 2)  # 23
        state.clutter = 0.8 * state.clutter + 0.2 * np.mean((deviation / batch) ** 2)
        theta = theta - 0.05 * released / np.sqrt(state.square + 1e-6)  # 25, 26
        np.testing.assert_allclose(found, theta, atol=1e-4)
        branches.append(bound is not None)
    assert branches[0] is False  # the first batch has the global clip
    assert sum(branches) >= 3  # and later ones the local one


def test_adal_is_dpsgd_with_the_rate_of_lines_22_to_26(seen):
    """AdaL: lines 16 and 18 in every round, E of released gradients [22], steps divided by its root [25]."""
    model, noise, clip = linear(), 0.4, 0.9
    theta, square = weights_of(model), np.zeros(3)
    method = AdaL(model, 0.05, clip_norm=clip, rate_memory=0.7, eps=1e-6)
    path = trained(model, seen, clip_norm=method.bound, noise_multiplier=noise, steps=12, optimizer=method)
    for t, (_, found) in enumerate(path):
        assert seen.asked[t].bound.norm() * seen.asked[t].scale == pytest.approx(np.full(3, clip))
        released = noisy_mean(theta, BATCHES[t], clip, noise * clip * NORMALS[t])
        square = 0.7 * square + 0.3 * released**2
        theta = theta - 0.05 * released / np.sqrt(square + 1e-6)
        np.testing.assert_allclose(found, theta, atol=1e-4)


def noisy_mean(theta, batch, clip, noise, scale=1.0):
    """The noisy mean of a batch whose gradients are divided by max(1, |g / s| / clip)."""
    total = np.zeros(3)
    for place in batch:
        g = (theta @ X[place] - Y[place]) * X[place]
        total += g / max(1.0, np.linalg.norm(g / scale) / clip)
    return (total + noise) / (RATE * RECORDS)


@pytest.mark.parametrize("shape", ["ellipsoid", "dpopt"])
def test_adan_and_dpopt_take_plain_steps_under_noise_of_their_shape(seen, shape):
    """AdaN: AdaDP without lines 22 and 25. DpOpt: the same estimate, and noise where gradients are small.

    Its price Σ (Δ_i/σ_i)² is that of the global clip at the same noise multiplier, in every round.
    """
    settings = SimpleNamespace(memory=0.8, floor=0.1, ceiling=10.0, clip_norm=0.9)
    made = {"ellipsoid": AdaN, "dpopt": DpOpt}[shape]
    model, noise, batch = linear(), 0.4, RATE * RECORDS
    theta = weights_of(model)
    method = made(model, 0.3, clip_norm=0.9, memory=0.8, estimate="coordinate")  # a shape for ten batches
    path = trained(model, seen, clip_norm=method.bound, noise_multiplier=noise, steps=12, optimizer=method)
    state, shaped, bound = SimpleNamespace(signal=np.zeros(3), clutter=0.0), 0, None
    for t, (_, found) in enumerate(path):
        if t % 10 == 0:
            bound = bound_of(state, t, shape, settings)
        scale, clip = (np.ones(3), 0.9) if bound is None else bound
        deviation = noise * scale * clip
        ask = seen.asked[t]
        np.testing.assert_allclose(noise * ask.bound.norm() * ask.scale, deviation, rtol=1e-4)
        released = noisy_mean(theta, BATCHES[t], clip, deviation * NORMALS[t], scale)
        state.signal = 0.8 * state.signal + 0.2 * (released**2 - (deviation / batch) ** 2)
        state.clutter = 0.8 * state.clutter + 0.2 * np.mean((deviation / batch) ** 2)
        theta = theta - 0.3 * released
        np.testing.assert_allclose(found, theta, atol=1e-4)
        shaped += bound is not None and np.ptp(scale) > 0.1
    assert 0 < shaped < len(path)  # the first shape is that of DP-SGD, a later one is not


@pytest.mark.parametrize("learning", [True, False])
def test_adadp_as_published_is_its_lines_as_printed(monkeypatch, learning):
    """AdaDP, lines 1-26 as printed, raw gradients in 7, 9, 12 and 23 included: what the audit attacks."""
    x, steps = np.array([[1.0, 0.0, 0.3], [0.0, 1.0, -0.4], [0.5, 0.5, 0.0]]), 6
    came = np.random.default_rng(3).integers(0, 9, size=(steps, 3))
    batches, noises = iter(came), iter(NORMALS)
    data = SimpleNamespace(
        x=x,
        counts=np.array([30, 20, 5]),
        batches=lambda rate, runs, stream: next(batches)[None].astype(float),
        gradients=lambda w: (w @ x.T - 1.0)[:, :, None] * x,
    )
    monkeypatch.setattr(as_published, "normal", lambda stream, shape: next(noises)[None])
    method = as_published.PublishedAdaDP(
        steps=steps, noise=0.7, clip=0.5, gate=1e-3, step=0.5, learning=learning
    )
    (path,) = method(data, 1, SeededStream(0))
    theta, square, raw, batch, gates = np.zeros(3), np.zeros(3), np.zeros(3), 0.1 * 50, []
    np.testing.assert_array_equal(path[0], theta)  # 1
    for t in range(steps):  # 2
        gates.append(bool(np.var(np.sqrt(raw)) > 1e-3))  # 7
        s = 1.2 * np.sqrt(raw)  # 9
        total, plain = np.zeros(3), np.zeros(3)
        for row, count in zip(x, came[t], strict=True):  # 3, 4
            g = (theta @ row - 1.0) * row  # 5
            local = np.minimum(np.maximum(g, -s), s)  # 10
            total += count * (local if gates[-1] else g / max(1.0, np.linalg.norm(g) / 0.5))  # 16
            plain += count * g
        sigma = 1.2 * 0.7 * np.sqrt(3 * raw) if gates[-1] else np.full(3, 0.5 * 0.7)  # 12, 18
        noisy = total + sigma * NORMALS[t]  # 13, 18
        square = 0.9 * square + 0.1 * noisy**2  # 22
        raw = 0.9 * raw + 0.1 * (plain / batch) ** 2  # 23
        move = noisy / np.sqrt(square + 1e-8) if learning else noisy  # 25
        theta = theta - 0.5 / batch * move  # 26
        np.testing.assert_allclose(path[t + 1], theta, atol=1e-12)
    assert set(gates) == {True, False}


def test_dpagd_of_a_model_on_batches_is_algorithm_2_on_the_examples_that_were_drawn(monkeypatch):
    """DP-AGD, lines 4-22 of later rounds too, each answer on a batch of its own, with momentum and a penalty.

    Where no step helps (15), momentum is dropped before GradAvg (16-19, 25-29); the third batch is empty.
    """
    some, taken, asked = np.random.default_rng(2), [], []
    normals, races = some.normal(size=(200, 3)), some.gumbel(size=(200, 5))

    def draw(self, records, stream, turn=0):
        rows = np.empty(0, np.int64)
        if len(taken) != 2:
            rows = np.flatnonzero(some.random(records) < self.sampling_rate)
        taken.append(rows)
        return rows

    def release(self, total, bound, stream, turn=0):
        asked.append(("gradient", self.noise_multiplier))
        return (
            total + self.noise_multiplier * bound.norm() * torch.from_numpy(normals[len(asked) - 1]).float()
        )

    def choose(self, total, bound, stream, turn=0):
        noisy = total + self.noise_multiplier * bound.norm() * races[len(asked)]
        asked.append(("choice", int(np.argmax(noisy))))
        return asked[-1][1]

    monkeypatch.setattr(Poisson, "draw", draw)
    monkeypatch.setattr(TensorGaussian, "release", release)
    monkeypatch.setattr(NoisyMax, "release", choose)
    model, start = linear(), weights_of(linear())
    ledger = ft.Ledger(ft.Budget(30.0, 1e-5), filter=RdpFilter, stream=SeededStream(0))
    data = Examples((torch.from_numpy(X), torch.from_numpy(Y)))
    options = {"search": 0.4, "growth": 0.5, "clip_norm": 0.5, "objective_clip": 1.5, "momentum": 0.5}
    run = dpagd(ledger, model, half_square, data, **options, grid=Lengths(4, longest=0.8), sampling_rate=RATE,
                penalty=0.3, records=RECORDS, noise_multiplier=1.2)  # fmt: skip
    path = [weights_of(model) for _ in run]
    shrinks, price, turn = 0.3 * RECORDS * RATE, 1 / (2 * 1.2**2), iter(range(200))
    rho_nmax, w, memory, chosen, again = 0.4 / 0.6 * price, start, np.zeros(3), [], 0

    def gradient(rho):  # 5, 6, 26
        t = next(turn)
        rows = [(w @ X[place] - Y[place]) * X[place] for place in taken[t]]
        total = sum((g / max(1.0, np.linalg.norm(g) / 0.5) for g in rows), np.zeros(3))
        assert asked[t] == ("gradient", pytest.approx(1 / math.sqrt(2 * rho), rel=1e-5))
        return total + 0.5 / math.sqrt(2 * rho) * normals[t]

    def choice(points):  # 10-12
        t = next(turn)
        losses = [np.minimum((X[taken[t]] @ p - Y[taken[t]]) ** 2 / 2, 1.5).sum() for p in points]
        scores = np.array([-a - shrinks / 2 * p @ p for a, p in zip(losses, points, strict=True)])
        found = int(np.argmax(scores + 1.5 / math.sqrt(8 * rho_nmax) * races[t]))
        assert asked[t] == ("choice", found)
        return found

    for found in path:
        known, i = gradient(price), 0  # 4-7
        longest = Lengths(4, longest=0.8).after(chosen)
        while i == 0:  # 9
            direction = known + memory + shrinks * w
            unit = direction / np.linalg.norm(direction)  # 8
            i = choice([w - step * unit for step in longest])
            if i == 0 and memory.any():
                memory = np.zeros(3)
            elif i == 0:  # 15-19
                again += 1
                second = gradient(0.5 * price)
                known = (known + 0.5 * second) / 1.5  # 27
                price *= 1.5
        w, memory = w - longest[i] * unit, 0.5 * direction  # 14
        chosen.append(longest[i])
        np.testing.assert_allclose(found, w, atol=1e-5)
    assert len(path) > 5
    assert again > 1
    assert ledger.share <= 1
