"""Every symbol of A-DDP, SGD1 and SGD2, set by the command and by a run's file."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from farthing.cli import main as cli
from farthing.cli.demo_parties import set_up
from farthing.deploy import serve
from farthing.errors import InvalidValue
from farthing.federated import jobs
from farthing.federated.methods import addp, sgd1, sgd2

ROWS, USERS = 600, 6


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command on a table where those over 50 are rich: its code, its output and its errors."""
    table, schema = tmp_path / "people.csv", tmp_path / "schema.json"
    rows = [f"{37 * row % 100},{('no', 'yes')[37 * row % 100 > 50]}" for row in range(ROWS)]
    table.write_text("\n".join(["age,rich", *rows]) + "\n")
    columns = [{"name": "age", "low": 0, "high": 100}]
    schema.write_text(json.dumps({"columns": columns, "target": {"name": "rich", "values": ["no", "yes"]}}))

    def run(*arguments: object, epsilon: float = 0.5, delta: float = 1e-5) -> tuple[int, str, str]:
        budget = ["--epsilon", epsilon, "--delta", delta]
        given = ["simulate", table, "--schema", schema, "--clients", USERS, *budget, *arguments]
        code = cli.main([str(each) for each in given])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def told(simulate: Any) -> Any:
    """The object that the command prints."""

    def run(*arguments: object, **budget: float) -> dict[str, Any]:
        code, out, err = simulate(*arguments, "--json", **budget)
        assert (code, err) == (0, "")
        fields: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
        return fields

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which a method was called, the last time."""
    seen: dict[str, Any] = {}

    def recorder(method: Any) -> Any:
        def recorded(*clients: Any, **options: Any) -> Any:
            seen.clear()
            seen.update(options)
            return itertools.islice(method(*clients, **options), 5)

        return recorded

    for module, names in (
        (addp, ("addp", "sgd_adv", "sgd_maj", "sgd_pass")),
        (sgd1, ("sgd1",)),
        (sgd2, ("sgd2",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, recorder(getattr(module, name)))
    return seen


def delta_of(mu: float, epsilon: float) -> float:
    """Equation (4) of A-DDP, with Δ/σ = μ."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


def analytic(epsilon: float, delta: float) -> float:
    """σ/Δ by the analytic Gaussian mechanism, solved here."""
    found: float = brentq(lambda sigma: delta_of(1 / sigma, epsilon) - delta, 1e-2, 1e5, xtol=1e-12)
    return found


SYMBOLS = [
    ("addp", ("--lr", 0.3), "lr", 0.3),
    ("addp", ("--weights", "plain"), "weights", "plain"),
    ("addp", ("--clip", 2), "clip_norm", 2.0),
    ("addp", ("--noise-multiplier", 40), "noise_multiplier", 40.0),
    ("sgd-adv", ("--lr", 0.3), "lr", 0.3),
    ("sgd-maj", ("--lr", 0.3), "lr", 0.3),
    ("sgd-pass", ("--lr", 0.3), "lr", 0.3),
    ("sgd2", ("--radius", 4), "radius", 4.0),
    ("sgd2", ("--convexity", 0.5), "convexity", 0.5),
    ("sgd2", ("--clip", 0.7), "lipschitz", 0.7),
    ("sgd2", ("--rounds", 7), "rounds", 7),
    ("sgd2", ("--noise-multiplier", 300), "noise_multiplier", 300.0),
    ("sgd2", ("--weights", "precision"), "weights", "precision"),
    ("sgd1", ("--radius", 4), "radius", 4.0),
    ("sgd1", ("--convexity", 0.5), "convexity", 0.5),
    ("sgd1", ("--clip", 0.7), "lipschitz", 0.7),
    ("sgd1", ("--noise-multiplier", 300), "noise_multiplier", 300.0),
]


@pytest.mark.parametrize(("method", "flags", "argument", "value"), SYMBOLS)
def test_a_flag_reaches_its_argument(
    told: Any, asked: dict[str, Any], method: str, flags: tuple[object, ...], argument: str, value: Any
) -> None:
    few = ("--records-per-client", 3) if method == "sgd1" else ("--records-per-client", 20)
    told("--method", method, *flags, *few, epsilon=5, delta=1e-3)
    assert asked[argument] == value


@pytest.mark.parametrize("method", ["sgd1", "sgd2"])
def test_a_learning_rate_of_sgd1_and_sgd2_is_the_same_in_every_iteration(
    told: Any, asked: dict[str, Any], method: str
) -> None:
    told("--method", method, "--lr", 0.3, "--records-per-client", 3, epsilon=5, delta=1e-3)
    assert [asked["lr"](t) for t in (1, 2, 900)] == [0.3] * 3


@pytest.mark.parametrize(("draw", "moved"), [("one", 2), ("poisson:0.01", 1)])
def test_epsilon_iter_and_delta_iter_choose_the_noise_of_a_round(told: Any, draw: str, moved: int) -> None:
    flags = ("--epsilon-iter", 0.2, "--delta-iter", 1e-6, "--draw", draw)
    found = told("--method", "addp", *flags, epsilon=1)
    assert found["noise_multiplier"] == pytest.approx(moved * analytic(0.2, 1e-6), rel=1e-9)
    holds = found["guarantee"]
    assert (holds["epsilon"], holds["accountant"]) == (1.0, "sampling")  # the budget is what holds


def test_a_weaker_round_buys_more_rounds(told: Any) -> None:
    few, many = (
        told("--method", "addp", "--epsilon-iter", each, "--delta-iter", 1e-6, epsilon=1)
        for each in (0.4, 0.2)
    )
    assert few["rounds"] < many["rounds"]


def test_published_noise_of_sgd1_and_before_whom_it_holds(told: Any, simulate: Any) -> None:
    n, delta = 30, 1e-6
    flags = ("--method", "sgd1", "--published-noise", "--records-per-client", 5, "--adjacency", "replace-one")
    found = told(*flags, delta=delta)
    assert found["noise_multiplier"] == pytest.approx(
        4 * math.log(1.25 * n**2 / delta) / 0.5, rel=1e-12
    )  # (3), over nL
    really = {one["observer"]: one["epsilon"] for one in found["holds"]}
    assert 0 < really["anyone"] < really["server"] < really["coordinator"] < 0.5
    code, out, _ = simulate(*flags, delta=delta)
    assert code == 0
    assert "as published, which gives" in out
    assert f"epsilon {really['coordinator']:.4g} against coordinator, replace-one: knows every draw" in out
    assert "holds" not in told(*flags[:2], *flags[3:], delta=delta)


def test_published_noise_of_sgd2_takes_t_rounds_and_says_what_they_cost(told: Any) -> None:
    T, delta = 20, 1e-5
    found = told("--method", "sgd2", "--published-noise", "--rounds", T, epsilon=1, delta=delta)
    each = 1 / math.sqrt(T * math.log(1 / delta))
    assert found["noise_multiplier"] == pytest.approx(
        math.sqrt(2 * math.log(1.25 * T / delta)) / each, rel=1e-12
    )
    assert found["rounds"] == T
    assert found["alive"] == USERS  # their budgets would allow more
    (really,) = found["holds"]
    assert delta_of(math.sqrt(T) / found["noise_multiplier"], really["epsilon"]) == pytest.approx(
        delta, rel=1e-6
    )
    assert really["epsilon"] < 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("addp", "--lr", 0), "--lr must be a finite number > 0, got 0.0"),
        (("addp", "--lr", "nan"), "--lr must be a finite number > 0, got nan"),
        (("addp", "--lr", "fast"), "must be a number, got 'fast'"),
        (
            ("addp", "--weights", "fair"),
            "--weights must be one of 'precision', 'plain', 'records', got 'fair'",
        ),
        (
            ("addp", "--weights", "plain", "--trust", "trusted"),
            "--weights must be left out with --trust trusted",
        ),
        (("addp", "--epsilon-iter", 0.1), "--epsilon-iter and --delta-iter go together"),
        (("addp", "--delta-iter", 1e-6), "--epsilon-iter and --delta-iter go together"),
        (("addp", "--epsilon-iter", -1, "--delta-iter", 1e-6), "--epsilon-iter must be a finite number > 0"),
        (("addp", "--epsilon-iter", 1, "--delta-iter", 1), "--delta-iter must be a number strictly between"),
        (
            ("addp", "--epsilon-iter", 1, "--delta-iter", 1e-6, "--noise-multiplier", 5),
            "give one of --epsilon-iter and --noise-multiplier: each sets the noise",
        ),
        (("addp", "--radius", 2), "--radius must be left out with --method addp"),
        (("addp", "--published-noise"), "--published-noise must be left out with --method addp"),
        (
            ("sgd2", "--epsilon-iter", 1, "--delta-iter", 1e-6),
            "--epsilon-iter must be left out with --method sgd2",
        ),
        (("sgd2", "--radius", 0), "--radius must be a finite number > 0, got 0.0"),
        (("sgd2", "--convexity", -1), "--convexity must be a finite number > 0, got -1.0"),
        (
            ("sgd2", "--lr", 1, "--weights", "plain"),
            "lr applies to a plain sum, the weights are 'plain': use 'records'",
        ),
        (("sgd1", "--noise-multiplier", 0), "--noise-multiplier must be a finite number > 0"),
        (
            ("sgd1", "--noise-multiplier", 9, "--published-noise"),
            "give one of --noise-multiplier and --published-noise",
        ),
        (("sgd1", "--rounds", 9), "--rounds must be left out with --method sgd1"),
        (("federated-descent", "--lr", 0.1), "--lr must be left out with --method federated-descent"),
        (("sgd-adv", "--weights", "plain"), "--weights must be left out with --method sgd-adv"),
    ],
)
def test_a_wrong_symbol_is_one_sentence_and_code_2(
    simulate: Any, arguments: tuple[object, ...], message: str
) -> None:
    code, out, err = simulate("--method", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_published_noise_beyond_its_text_is_refused(simulate: Any) -> None:
    few = ("--records-per-client", 5)
    code, out, err = simulate("--method", "sgd1", "--published-noise", *few, epsilon=2, delta=1e-6)
    assert (code, out) == (2, "")
    assert "epsilon must be below 1 for SGD1's noise, got 2.0" in err
    code, out, err = simulate("--method", "sgd1", "--published-noise", *few, delta=1e-3)
    assert (code, out) == (2, "")
    assert "delta must be below 1/n³" in err
    code, out, err = simulate("--method", "sgd2", "--published-noise", "--rounds", 4, epsilon=50)
    assert (code, out) == (2, "")
    assert "epsilon must be below 6.786 for SGD2's noise, got 50.0" in err


def test_noise_that_no_budget_affords_is_code_3(simulate: Any) -> None:
    code, out, err = simulate("--method", "addp", "--noise-multiplier", 0.1, "--draw", "all")
    assert (code, out) == (3, "")
    assert "not even one round fits" in err


# --- a run's file


def plan_of(folder: Path, method: str) -> serve.RunFile:
    return serve.RunFile.load(set_up(folder, ("a", "b"), port=9092, records=5, method=method))


def test_a_runs_file_has_the_same_symbols(tmp_path: Path) -> None:
    text = 'name = "addp"\nlr = 0.3\nweights = "plain"\nepsilon_iter = 0.2\ndelta_iter = 1e-6\nclip = 2'
    options = plan_of(tmp_path / "one", text).job.options
    assert options == {"lr": 0.3, "weights": "plain", "epsilon_iter": 0.2, "delta_iter": 1e-6, "clip": 2.0}
    text = 'name = "sgd2"\nradius = 4\nconvexity = 0.5\npublished_noise = true\nrounds = 7'
    options = plan_of(tmp_path / "two", text).job.options
    assert options == {"radius": 4.0, "convexity": 0.5, "published_noise": True, "rounds": 7}
    job = plan_of(tmp_path / "three", 'name = "addp"\nnoise_multiplier = 40').job
    assert job.options == {"noise_multiplier": 40.0}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ('name = "addp"\nepsilon_iter = 0.2', "epsilon_iter and delta_iter go together"),
        ('name = "addp"\nlr = -1', "method.lr must be a positive number, got -1"),
        (
            'name = "addp"\nweights = "fair"',
            "weights must be one of 'precision', 'plain', 'records', got 'fair'",
        ),
        ('name = "addp"\npublished_noise = true', "published_noise must be left out with method addp"),
        ('name = "sgd2"\npublished_noise = 1', "method.published_noise must be true or false, got 1"),
    ],
)
def test_a_wrong_symbol_in_a_runs_file_is_one_sentence(tmp_path: Path, method: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as raised:
        plan_of(tmp_path, method)
    assert "--" not in str(raised.value).removeprefix(str(tmp_path))


def test_a_rate_moves_weights_as_the_text_says() -> None:
    """A-DDP's line 17 with one round and no noise to speak of: w = -α grad/n."""
    from farthing.budget import Budget
    from farthing.data.adult import load_adult
    from farthing.federated.simulated import Simulated
    from farthing.linear.losses import logistic
    from farthing.linear.problem import Problem

    x = np.linspace(-1, 1, 40)[:, None]
    y = 1.0 * (x[:, 0] > 0.2)
    clients = Simulated.split(x, y, clients=4, budgets=Budget(1e4, 1e-3))
    schema = load_adult().schema
    given = jobs.Job(
        table="",
        schema=schema,
        clients=4,
        method="addp",
        options={"lr": 0.5, "weights": "plain", "draw": "all", "clip": 1.5, "noise_multiplier": 0.02},
    )
    step = next(jobs.steps(given, clients, Problem(logistic, 40, 1, unit=False)))
    gradient = np.column_stack([x, np.ones(40)]).T @ (0.5 - y) / 40
    np.testing.assert_allclose(np.append(*step.w), -0.5 * gradient, atol=0.02)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedsgd", ("--trust", "distributed", "--server", "yogi", "--sampling-rate", 0.5)),
        ("fedavg", ("--local-steps", 2, "--local-lr", 0.3, "--proximal", 0.1)),
        ("dp-fedavg", ("--unit", "user", "--local-steps", 2)),
    ],
)
def test_a_small_network_is_trained_on_a_table(told: Any, method: str, more: tuple[Any, ...]) -> None:
    pytest.importorskip("torch")
    found = told("--method", method, "--rounds", 3, *more)
    assert (found["method"], found["rounds"], found["alive"]) == (method, 3, 0)
    assert found["guarantee"]["unit"] == ("user" if method == "dp-fedavg" else "record")


def test_without_pytorch_a_network_is_refused_by_name(simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "find_spec", lambda name: None)
    code, out, err = simulate("--method", "fedsgd")
    assert (code, out) == (2, "")
    assert "--method fedsgd needs PyTorch: pip install torch" in err


def test_whose_turns_sgd1_took_is_not_told(told: Any) -> None:
    """The guarantee against anyone assumes secret turns: all clients are said to take equally many."""
    few = ("--method", "sgd1", "--records-per-client", 3, "--adjacency", "replace-one")
    found = told(*few, "--noise-multiplier", 300, epsilon=3.0)
    assert found["groups"] == [
        {"epsilon": 3.0, "clients": USERS, "rounds": found["groups"][0]["rounds"], "done": 54}
    ]
    assert found["groups"][0]["done"] * USERS == (3 * USERS) ** 2
