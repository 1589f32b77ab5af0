"""Measure how much of ε an audit shows, ours beside jax-privacy's, on the same scores in one run.

    python -m benchmarks.audit [--runs 100000] [--repeats 15]

DP-SGD for logistic regression, N = 1000, d = 20, q = 0.1, T = 100, δ = 1e-5, tight ε = 1, 2, 4, 8:

* *per step*: ``runs`` runs a world with a canary in a coordinate of its own, at 99 % confidence. Ours judges
  the steps one by one; jax-privacy has no such audit, so it gets the runs' sums of log-likelihood ratios of
  the same steps: by Gaussian DP ("gdp"), and by Clopper-Pearson with its default and with a split ("pairs").
  Ours on those sums is printed as well.
* *one run*: a thousand canaries at 95 % confidence, the median over ``repeats`` runs. jax-privacy is asked by
  f-DP and by (ε, δ), by its default, by a split and with 50, 100 or 200 guesses fixed ahead. The way with the
  largest median counts, which is more than a user could have known to take.

A fraction above 1 is not a bound: it exceeds what tight accounting proves.

jax-privacy is left out where it is not installed (pip install jax-privacy).
"""

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farthing as ft
from farthing.audit import GaussianCurve, SampledCurve, canaries_of, judge, one_run, statistics
from farthing.audit.steps import CanaryStep, canary_table, per_step, train_once
from farthing.data.tables import Features, Table
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise.lattice import Stream

Array = NDArray[np.float64]

RECORDS, WIDTH, RATE, STEPS, DELTA, CANARIES = 1000, 20, 0.1, 100, 1e-5, 1000


def question(epsilon: float, width: int, clip: float) -> ft.Query:
    """Return a step of DP-SGD, 100 of which cost ε."""
    sampler = ft.Poisson(RATE)
    noise = ft.noise_for(lambda s: sampler.amplify(ft.Gaussian(s)), ft.Budget(epsilon, DELTA), steps=STEPS)
    gradient = LinearGradient(logistic, Features(width, intercept=0.0))
    return ft.Query(sampler, gradient, ft.ClipNorm(clip), ft.Gaussian(noise * (1 + 1e-9)))


def peer() -> Any:
    """Return jax-privacy's auditing module, or None."""
    try:
        return import_module("jax_privacy.auditing")
    except ImportError:
        return None


def steps(epsilon: float, runs: int, theirs: Any) -> dict[str, float]:
    """Return the fractions of ε that steps show, and seconds."""
    x = np.zeros((1, WIDTH))
    x[0, -1] = 1.0
    asked, claim = question(epsilon, WIDTH, 0.5), ft.Budget(epsilon, DELTA)
    step = CanaryStep(asked, Table(x, np.ones(1)), np.zeros(WIDTH))
    start = time.perf_counter()
    worlds = [step(present, runs * STEPS, Stream()) for present in (False, True)]
    verdict = per_step(
        step,
        claim,
        STEPS,
        runs * STEPS,
        stream=Stream(),
        worlds=lambda present, trials, stream: worlds[present],
    )
    found = {"ours, steps": verdict.eps_lower / epsilon, "seconds": time.perf_counter() - start}
    sigma = asked.mechanism.noise_multiplier  # type: ignore[attr-defined]
    ratios = [np.log1p(RATE * np.expm1((world / 0.5 - 0.5) / sigma**2)) for world in worlds]
    sums = [ratio.reshape(runs, STEPS).sum(axis=1) for ratio in ratios]
    named = [("sums", statistics.value)]
    plain = judge(sums[0], sums[1], claim, named, 0.99, curve=GaussianCurve())
    found["ours, sums"] = plain.eps_lower / epsilon
    if theirs is not None:
        auditor = theirs.CanaryScoreAuditor(sums[1], sums[0])
        start = time.perf_counter()
        split = theirs.Split(seed=0)
        pairs = [
            auditor.epsilon_clopper_pearson(0.01, DELTA, one_sided=False),
            auditor.epsilon_clopper_pearson(0.01, DELTA, one_sided=False, threshold_strategy=split),
        ]
        found["jax-privacy, gdp"] = auditor.epsilon_from_gdp(0.01, DELTA) / epsilon
        found["jax-privacy, pairs"] = max(pairs) / epsilon
        found["its seconds"] = time.perf_counter() - start
    return found


def once(epsilon: float, repeats: int, theirs: Any) -> dict[str, float]:
    """Return medians of the fractions of ε that one run shows, and the seconds of one."""
    asked, claim = question(epsilon, WIDTH + CANARIES, 0.25), ft.Budget(epsilon, DELTA)
    ours, others, seconds, their_seconds = [], [], [], []
    for _ in range(repeats):
        came = canaries_of(CANARIES)
        start = time.perf_counter()
        ledger = ft.Ledger(claim)
        ledger.promise(asked, STEPS)
        scores = train_once(ledger.over(canary_table(RECORDS, WIDTH, came)), asked, CANARIES, STEPS, RECORDS)
        verdict = one_run(scores, came, claim, curve=SampledCurve(RATE, STEPS))
        seconds.append(time.perf_counter() - start)
        ours.append(verdict.eps_lower / epsilon)
        if theirs is not None:
            start = time.perf_counter()
            others.append([shown / epsilon for shown in _their_once(theirs, scores, came)])
            their_seconds.append(time.perf_counter() - start)
    found = {"ours": float(np.median(ours)), "seconds": float(np.median(seconds))}
    if theirs is not None:
        found["jax-privacy"] = float(np.max(np.median(others, axis=0)))
        found["its seconds"] = float(np.median(their_seconds))
    return found


def _their_once(theirs: Any, scores: Array, came: NDArray[np.bool_]) -> list[float]:
    auditor = theirs.CanaryScoreAuditor(scores[came], scores[~came])
    ordered = np.sort(scores)
    ways = [theirs.Bonferroni(), theirs.Split(seed=0)]
    ways += [theirs.Explicit(float(ordered[-guesses])) for guesses in (50, 100, 200)]
    shown = []
    for way in ways:
        shown.append(float(auditor.epsilon_one_run(0.05, DELTA, threshold_strategy=way)))
        shown.append(float(auditor.epsilon_one_run_fdp(0.05, DELTA, threshold_strategy=way)))
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args([] if argv is None else argv)
    theirs = peer()
    if theirs is None:
        print("jax-privacy is not installed: ours alone")
    for name, measure, size in (
        (f"per step, {options.runs} runs of {STEPS} steps a world, 99 %", steps, options.runs),
        (f"one run, {CANARIES} canaries, 95 %, median of {options.repeats}", once, options.repeats),
    ):
        print(name)
        for epsilon in (1.0, 2.0, 4.0, 8.0):
            found = measure(epsilon, size, theirs)
            shown = ", ".join(
                f"{key} {value:.1f}" if "seconds" in key else f"{key} {value:.3f}"
                for key, value in found.items()
            )
            print(f"  ε = {epsilon:g}: {shown}", flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
