"""Every experiment in its small mode, by the command that a reader would type."""

import csv
import math
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


def reproduce(*arguments):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "experiments", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "FARTHING_DATA": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )


def small(name, folder):
    """The rows of an experiment's small mode, after a look at its files."""
    done = reproduce(name, "--small", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    text = (folder / f"{name}.md").read_text(encoding="utf-8")
    assert rows
    assert text.startswith("# ")
    assert "| --- |" in text
    assert "nan" not in text
    for row in rows:
        for key, cell in row.items():
            try:
                row[key] = float(cell)
            except ValueError:
                continue
            assert math.isfinite(row[key]), row
    if find_spec("matplotlib"):
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert svg.startswith("<?xml")
        assert "nan" not in svg
        assert len(svg) < 60_000
    return rows


def by(rows, *keys, value):
    return {tuple(row[key] for key in keys): row[value] for row in rows}


def test_names_are_listed_and_others_refused():
    listed = reproduce()
    assert listed.returncode == 0
    assert "moments-accountant" in listed.stdout
    refused = reproduce("../moments-accountant")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("experiments: there is no '../moments-accountant'; one of: ")
    assert refused.stderr.count("\n") == 1


def test_missing_data_are_one_sentence(tmp_path):
    refused = reproduce("linear-regression", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert "none of its data is there" in refused.stderr
    refused = reproduce("moments-accountant", "--draw", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert "cannot run here" in refused.stderr
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    refused = reproduce("moments-accountant", "--small", "--out", str(tmp_path / "file" / "inside"))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("moments-accountant", "--folds", "2"), "it has no folds; leave --folds out"),
        (("addp-figure-3", "--repeats", "2"), "it has no repeats; leave --repeats out"),
        (("linear-regression", "--folds", "2"), "it has no folds; leave --folds out"),
        (("dpagd-comparison", "--folds", "6"), "6 is more than the 5 folds that there are"),
        (("dpagd-comparison", "--repeats", "0"), "'0' is not a whole number from 1"),
    ],
)
def test_folds_and_repeats_that_there_are_not_are_refused(tmp_path, arguments, sentence):
    refused = reproduce(*arguments, "--small", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_repeat_shuffles_anew_and_each_record_is_tested_once_in_it():
    code = (
        "from experiments.frame import Size; from experiments.datasets import folds\n"
        "found = [(fold, sorted(test)) for fold, _, test in folds(50, Size(repeats=2), 5)]\n"
        "assert [fold for fold, _ in found] == list(range(10))\n"
        "for half in (found[:5], found[5:]):\n"
        "    assert sorted(row for _, test in half for row in test) == list(range(50))\n"
        "assert found[0][1] != found[5][1]\n"
        "assert [fold for fold, _, _ in folds(50, Size(folds=2, repeats=2), 5)] == [0, 1, 5, 6]\n"
        "assert len(list(folds(50, Size(small=True), 5))) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_moments_accountant_is_repeated_to_the_byte(tmp_path):
    found = by(small("moments-accountant", tmp_path), "question", "epochs", "method", value="value")
    assert round(found["ε", 100, "strong"], 2) == 9.34
    assert round(found["ε", 100, "moments"], 2) == 1.26
    for epochs in (1, 100, 400):
        order = [found["ε", epochs, method] for method in ("tight", "Rényi", "moments", "strong")]
        assert order == sorted(order)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    small("moments-accountant", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_addp_figure_3(tmp_path):
    rows = small("addp-figure-3", tmp_path)
    for row in rows:
        # what is certified counts in its own rounding: where the theorem says 0, some 1e-13
        assert row["tight"] <= row["sampling"] * (1 + 1e-9) + 1e-12
    plain = [row for row in rows if row["question"] == "δ at ε', plain"]
    assert plain
    assert all(row["sampling"] < row["advanced"] for row in plain)


@pytest.mark.slow
def test_addp_figures_1_2(tmp_path):
    rows = small("addp-figures-1-2", tmp_path)
    accuracy, objective = (by(rows, "method", value=key) for key in ("accuracy", "objective"))
    assert max(accuracy, key=accuracy.get) == ("non-private",)
    assert min(objective, key=objective.get) == ("non-private",)
    assert accuracy["together, distributed",] > accuracy["A-DDP, Poisson 1/100 (C)",] + 3
    rounds = by([row for row in rows if "A-DDP" in row["method"]], "method", value="rounds")
    assert rounds.pop(("A-DDP as printed (one record, C) ✗",)) == 38_746  # its check comes a round late
    assert set(rounds.values()) == {38_745}


def test_addp_as_printed_claims_half_of_what_it_costs_before_an_observer_of_the_draws():
    from experiments.published_addp import really, sized
    from scipy.special import ndtr
    from scipy.stats import binom

    def delta(moved, epsilon):  # Theorem 1
        i = np.arange(1, 1500)
        mu = moved * np.sqrt(i) / noise
        tails = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
        return float(binom.pmf(i, rounds, 0.01) @ tails)

    noise, rounds = sized(0.5, 1e-8)
    assert delta(1, 0.5) > 1e-8  # the round with which it is exceeded was uploaded
    seen, secret = really(0.5, 1e-8)
    assert delta(2, seen) == pytest.approx(1e-8, rel=1e-4)
    assert secret < 0.5 < 1 < seen


@pytest.mark.slow
def test_dpagd_comparison(tmp_path):
    rows = small("dpagd-comparison", tmp_path)
    for model in ("logistic regression", "SVM"):
        mine = [row for row in rows if row["model"] == model]
        accuracy = by(mine, "method", "ε", value="accuracy")
        best, guess = accuracy["non-private", ""], accuracy["majority", ""]
        assert best > guess + 5
        for name in ("DP-AGD", "auto", "SGD-MA", "ObjPert"):
            assert guess + 4 < accuracy[name, 1.6] < best + 1
        assert accuracy["DP-AGD", 0.4] > accuracy["DP-AGD, as published", 0.4] + 2
        objective = by(mine, "method", "ε", value="objective")
        # 0.52 and 0.62; both are 0.70 where a failed search repeats itself instead of buying a gradient again
        assert objective["DP-AGD, as published", 1.6] < 0.66
        assert min(objective.values()) == objective["non-private", ""]


@pytest.mark.slow
def test_dpagd_parameters(tmp_path):
    rows = small("dpagd-parameters", tmp_path)
    found = {
        name: [row["accuracy"] for row in rows if row["version"] == name]
        for name in ("as published", "library")
    }
    assert len(found["as published"]) == len(found["library"]) == 4
    assert min(found["library"]) > max(found["as published"])


@pytest.mark.slow
def test_dpagd_adapting(tmp_path):
    rows = small("dpagd-adapting", tmp_path)
    assert len(rows) == 5
    for row in rows:
        assert row["accuracy"] > 80
        assert row["gradients"] > row["again"] >= 0


@pytest.mark.slow
def test_linear_regression(tmp_path):
    rows = small("linear-regression", tmp_path)
    levels = by([row for row in rows if row["ε"] == ""], "method", value="J")
    best, nothing = levels["least squares, not private",], levels["the mean alone",]
    assert best < nothing
    for row in rows:
        assert row["J"] > 0.99 * best
        if row["ε"] == 1.6 or row["method"] == "auto":
            assert row["J"] < nothing


@pytest.mark.slow
def test_sgd1_and_sgd2_have_the_digits_of_their_verdict(tmp_path):
    rows = small("sgd1-sgd2", tmp_path)
    first = by([row for row in rows if row["claim"] == "SGD1"], "n", "observer", value="ε")
    found = [round(first[n, "coordinator"], 3) for n in (50, 200)]
    assert found == [0.320, 0.605]
    assert [round(first[n, "anyone"], 4) for n in (50, 200)] == [0.0374, 0.0368]
    second = by([row for row in rows if row["claim"] == "SGD2"], "T", "claimed", "method", value="σ")
    assert round(second[100, 1, "least noise"], 2) == 42.25
    assert round(second[100, 1, "noise of the proof"]) == 227
    risks = [row for row in rows if row["claim"].startswith("risk")]
    assert len(risks) == 9 + 8
    assert all(row["excess"] > -1e-9 for row in risks)  # of the mean of what was run, over the least there is
    learnt = by([row for row in risks if row["claim"] == "risk of SGD2"], "method", value="excess")
    assert learnt["least σ",] < learnt["θ₀",]


def test_the_bounds_on_excess_risk_are_those_of_the_text():
    from experiments import excess_risk as r

    n, m, T, sigma, L, convexity, diameter = 1000, 10, 200, 50.0, 2.0, 1.0, 2.0
    assert r.theorem_4(n, m, T, sigma) * n == pytest.approx(
        8 * m * 7 * (sigma**2 + n**2 * L**2) / (n * convexity * T)  # (11)
    )
    log = math.log(1.25 * n**2 / 1e-10)
    found = [n * r.theorem_2(case, n, 0.5, 1e-10) for case in (r.LIPSCHITZ, r.STRONG)]
    assert found[0] == pytest.approx(1.0 * diameter * log**2 * math.sqrt(7) / 0.5)  # (9)
    assert found[1] == pytest.approx(L**2 * log**3 * 7 / (n * convexity * 0.5**2))  # (10)
    assert r.trivial(r.STRONG) == L * diameter
    first = r.from_n(r.STRONG, 0.9)
    assert r.theorem_2(r.STRONG, first, 0.9, 1 / (2 * first**3)) < L * diameter
    assert r.theorem_2(r.STRONG, first // 2, 0.9, 1 / (2 * (first // 2) ** 3)) > L * diameter


@pytest.mark.parametrize("convexity", [0.0, 0.05, 1.0])
def test_excess_risk_is_measured_from_the_minimum_over_the_ball(convexity):
    from experiments import excess_risk as r

    X, y = r.problem_of(300)
    z = r.rows_of(X)
    assert np.linalg.norm(z, axis=1).max() <= 1 + 1e-12  # so that the loss is 1-Lipschitz
    best = r.minimum(z, y, convexity)
    assert np.linalg.norm(best) <= r.RADIUS + 1e-9
    gradient = z.T @ (1 / (1 + np.exp(-z @ best)) - y) / 300 + convexity * best
    if convexity == 1.0:
        assert np.linalg.norm(gradient) < 1e-8
    else:  # on the sphere, where the loss falls outwards only
        assert np.linalg.norm(best) == pytest.approx(r.RADIUS)
        assert gradient @ best == pytest.approx(-np.linalg.norm(gradient), rel=1e-6)
    random = np.random.default_rng(3).normal(size=(200, 7))
    inside = random / np.maximum(1.0, np.linalg.norm(random, axis=1))[:, None]
    assert all(r.risk(theta, z, y, convexity) > r.risk(best, z, y, convexity) for theta in inside)


def test_test_functions_have_their_minima_and_gradients():
    code = (
        "import numpy as np; from experiments.surfaces import SURFACES\n"
        "random = np.random.default_rng(0)\n"
        "for name, surface in SURFACES.items():\n"
        "    points = np.array(surface.minima[0]) + random.normal(size=(500, 2))\n"
        "    slopes, h = [], 1e-6\n"
        "    for step in ((h, 0.0), (0.0, h)):\n"
        "        ends = [surface.value(*(points + sign * np.array(step)).T) for sign in (1, -1)]\n"
        "        slopes.append((ends[0] - ends[1]) / (2 * h))\n"
        "    found = surface.gradient(points)\n"
        "    assert np.allclose(found.T, slopes, rtol=1e-4, atol=1e-4 * np.abs(found).max()), name\n"
        "    for minimum in surface.minima:\n"
        "        # no wider than what rounded coordinates of minima leave\n"
        "        near = np.array(minimum) + random.uniform(-0.2, 0.2, size=(500, 2))\n"
        "        assert surface.value(*minimum) <= surface.value(*near.T).min() + 1e-6, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_made_up_images_are_called_so(tmp_path):
    code = (
        "import sys; from pathlib import Path; from experiments import frame\n"
        "class Shown:\n"
        "    def tables(self, rows):\n"
        "        return [frame.Grid('MNIST and CIFAR-10', ['data'], [[row['data']] for row in rows])]\n"
        "    def draw(self, rows):\n"
        "        figure, axes = frame.canvas(1, 1)\n"
        "        axes[0, 0].set(title='CIFAR-10, not CIFAR-100')\n"
        "        return figure\n"
        "rows = [{'data': 'MNIST', 'x': 1}]\n"
        "for small in (True, False):\n"
        "    frame.write('a', 'MNIST', rows, Shown(), Path(sys.argv[1]) / str(small), frame.Size(small))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    for small in (True, False):
        files = {path.suffix: path.read_text() for path in (tmp_path / str(small)).iterdir()}
        for suffix in (".md", ".svg"):
            for name in re.findall(r".{0,20}(?:MNIST|CIFAR-10\b)", files.get(suffix, "")):
                assert ("made-up images (not" in name) == small, name
        assert ("made up" in files[".csv"]) == small


def test_the_makefile_installs_what_an_experiment_needs():
    made = (ROOT / "Makefile").read_text()
    left_out, patterns = re.search(r"filter-out ([^,]*),\$\(filter ([^,]*),\$\(NAME\)", made).groups()
    for name in frame_names():
        source = (ROOT / "experiments" / f"{name.replace('-', '_')}.py").read_text()
        deep = bool(
            re.search(r"^import torch|experiments\.(deep|pictures|adadp\w*|mnist_recipe)\b", source, re.M)
        )
        found = any(fnmatch(name, pattern.replace("%", "*")) for pattern in patterns.split())
        assert deep == (found and name not in left_out.split()), name


def frame_names():
    return [line.split()[0] for line in reproduce().stdout.splitlines()]


def test_menu_shares(tmp_path):
    rows = small("menu-shares", tmp_path)
    assert all(0.97 < row["share"] <= 1 for row in rows)
    assert all(row["rényi"] < row["share"] for row in rows)


@pytest.mark.slow
def test_tuning_cost(tmp_path):
    rows = small("tuning-cost", tmp_path)
    factors = {row["runs"]: row["factor"] for row in rows if row["kind"] == "price" and row["mean"] == 10.0}
    assert 1 < factors["logarithmic"] < factors["geometric"] < factors["Poisson"] < factors["composed"]
    assert {row["way"] for row in rows if row["kind"] == "use"} >= {"default", "best of 10 expected runs"}


def test_personal_budgets(tmp_path):
    rows = small("personal-budgets", tmp_path)
    found = {(row["solver"], row["way"]): row["accuracy"] for row in rows}
    for solver, way in (("auto", "personal weights"), ("sgd-ma", "personal rates")):
        everybody = found[solver, "all at 1 (not agreed to)"]
        assert found[solver, "all at 0.05"] <= found[solver, way] <= everybody
