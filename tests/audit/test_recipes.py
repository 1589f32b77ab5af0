"""The attacks that decided what the library may promise, run again: ten thousand runs a world, in seconds."""

import numpy as np
import pytest

import farthing as ft
from farthing.audit import as_published, statistics, transcripts
from farthing.audit.steps import canary_pair
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipValue
from farthing.queries.mechanisms import NoisyMax

CLAIM = ft.Budget(0.235, 1e-5)  # what tight accounting says of q=.1, σ=8, T=30


def frozen_coordinate(mechanism, claim, seed=0):
    return ft.audit_mechanism(
        mechanism, canary_pair(), claim, as_published.WeightMoved(2), threshold=0.5, stream=SeededStream(seed)
    )


@pytest.mark.parametrize("learning", [True, False], ids=["AdaDP", "AdaN"])
def test_adadp_and_adan_as_published_are_broken(learning):
    step = 0.002 if learning else 0.1
    verdict = frozen_coordinate(
        as_published.PublishedAdaDP(learning=learning, step=step), ft.Budget(0.689, 1e-5)
    )
    assert verdict.broken
    assert verdict.eps_lower > 7
    assert verdict.trials == 10_000


def test_dpopt_as_published_is_broken():
    assert frozen_coordinate(as_published.PublishedDpOpt(), ft.Budget(0.689, 1e-5)).eps_lower > 5


@pytest.mark.parametrize("floor", [1e-4, 1e-3])
def test_a_floor_does_not_help(floor):
    mechanism = as_published.PublishedAdaDP(floor=floor)
    verdict = ft.audit_mechanism(
        mechanism, canary_pair(), ft.Budget(0.689, 1e-5), as_published.FarthestMove(2), stream=SeededStream(1)
    )
    assert verdict.broken


@pytest.mark.parametrize("noise_adapts", [True, False], ids=["AdaDP", "AdaL"])
def test_the_sound_versions_stand(noise_adapts):
    def weights(name):
        statistic = getattr(as_published, name)(2)
        return lambda outputs: statistic(outputs[:, :, 0])

    sums = [
        lambda outputs: outputs[:, :, 1, 2].mean(axis=1),
        lambda outputs: statistics.largest(outputs[:, :, 1, 2]),
        lambda outputs: statistics.level(outputs[:, :, 1, 2]),
    ]
    verdict = ft.audit_mechanism(
        transcripts.SoundAdaDP(noise_adapts=noise_adapts),
        canary_pair(),
        CLAIM,
        [weights("WeightMoved"), weights("FarthestMove"), *sums],
        stream=SeededStream(2),
    )
    assert not verdict.broken
    assert ft.epsilon(ft.Poisson(0.1).amplify(ft.Gaussian(8.0)), steps=30, delta=1e-5) == pytest.approx(
        0.235, abs=1e-3
    )


TIES = np.zeros(21), np.append(0.0, np.ones(20))  # the added record costs 0 at one candidate, C at the others


@pytest.mark.parametrize(("epsilon", "shown"), [(0.1, 0.9), (0.5, 2.0)])
def test_the_exponential_noisy_min_is_broken(epsilon, shown):
    mechanism = as_published.ExponentialNoisyMin(epsilon)
    verdict = ft.audit_mechanism(
        mechanism, TIES, ft.Budget(epsilon, 0.0), trials=40_000, stream=SeededStream(3)
    )
    assert verdict.eps_lower > shown


@pytest.mark.parametrize("kind", ["gumbel", "laplace"])
def test_our_noisy_max_stands_on_the_same_pair(kind):
    bound, mechanism = ClipValue(-1.0, 0.0), NoisyMax(2.0, kind)
    claim = ft.Budget(0.5, 0.0)
    assert mechanism.event(bound, claim.adjacency, False).epsilon == 0.5

    def choose(costs, runs, stream):
        return np.array([mechanism.release(-costs, bound, stream) for _ in range(runs)])

    verdict = ft.audit_mechanism(choose, TIES, claim, trials=8000, stream=SeededStream(4))
    assert not verdict.broken


def test_dividing_by_the_realised_lot_is_caught():
    verdict = ft.audit_mechanism(
        as_published.RealisedBatch(),
        (3, 4),
        ft.Budget(0.1, 1e-5),
        [statistics.spread, statistics.level],
        stream=SeededStream(5),
    )
    assert verdict.eps_lower > 3


def test_float_noise_is_caught_and_lattice_noise_is_not():
    claim = ft.Budget(1.0, 1e-5)
    float_noise = as_published.PublishedFloatGaussian(noise=4.0)
    verdict = ft.audit_mechanism(
        float_noise, (0.0, 1.0), claim, statistics.lowest_bit, stream=SeededStream(6)
    )
    assert verdict.eps_lower > 3

    def lattice(data, runs, stream):
        mechanism = ft.Gaussian(4.0)
        return np.concatenate(
            [mechanism.release(np.array([data]), ft.ClipNorm(1.0), stream) for _ in range(runs)]
        )

    verdict = ft.audit_mechanism(
        lattice, (0.0, 1.0), claim, statistics.lowest_bit, trials=4000, stream=SeededStream(6)
    )
    assert verdict.eps_lower == 0


FLOAT_PAIRS = [(0.0, 1.0), (-0.5, 0.5), (3.7, 4.7)]


@pytest.mark.parametrize("pair", FLOAT_PAIRS)
@pytest.mark.parametrize("entries", [1, 20])
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_float_noise_is_refuted_by_default(pair, entries, kind):
    rng = np.random.default_rng(7)

    def float_noise(data, runs, stream):
        noisy = kind(4.0) * rng.standard_normal((runs, entries), dtype=kind)
        noisy[:, 0] += kind(data)
        return noisy

    verdict = ft.audit_mechanism(float_noise, pair, ft.Budget(1.3, 1e-5), stream=SeededStream(6))
    assert verdict.eps_lower > 2
    assert "bit" in verdict.attack


@pytest.mark.parametrize("pair", FLOAT_PAIRS)
@pytest.mark.parametrize("entries", [1, 20])
def test_lattice_noise_stands_by_default(pair, entries):
    def lattice(data, runs, stream):
        sums = np.zeros((runs, entries))
        sums[:, 0] = data
        return ft.Gaussian(4.0).release(sums.ravel(), ft.ClipNorm(1.0), stream).reshape(runs, entries)

    claim = ft.Budget(ft.epsilon(ft.Gaussian(4.0), delta=1e-5), 1e-5)
    verdict = ft.audit_mechanism(lattice, pair, claim, stream=SeededStream(6))
    assert not verdict.broken


def test_more_entries_than_runs_are_projected_in_little_memory():
    def noisy(data, runs, stream):
        sums = np.zeros((runs, 20_000))
        sums[:, :100] = data
        return ft.Gaussian(1.0).release(sums.ravel(), ft.ClipNorm(1.0), stream).reshape(sums.shape)

    verdict = ft.audit_mechanism(noisy, (0.0, 3.0), ft.Budget(1.0, 1e-5), trials=100, stream=SeededStream(6))
    assert verdict.broken
