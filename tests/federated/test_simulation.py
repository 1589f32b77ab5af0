"""Simulated clients from the command line: input, refusals and output."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farthing.accounting import gaussian
from farthing.budget import Adjacency, Unit
from farthing.cli import main as cli
from farthing.cli import simulate_command
from farthing.cli.ledger_output import nested
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.errors import InvalidValue, Unsupported
from farthing.federated import Simulated, Trust, jobs
from farthing.federated.jobs import METHODS, Job, Reached, epsilons, simulate
from farthing.federated.methods.federated_descent import ROUNDS

SCHEMA = Schema(
    (Numeric("age", 0, 100), Categorical("sex", ("Female", "Male"))), Categorical("rich", ("no", "yes"))
)
COLOURS = Schema((Numeric("age", 0, 100),), Categorical("colour", ("red", "green", "blue")))
HOURS = Schema((Numeric("age", 0, 100),), Numeric("hours", 0, 60))
PRIVATE = [name for name, kind in METHODS.items() if kind.private and name != "sgd1"]
KEYS = {
    *("method", "clients", "records", "features", "rounds", "stopped", "alive", "left", "guarantee", "trust"),
    *("smallest_epsilon", "noise", "clip_norm", "noise_multiplier", "groups"),
}


def write_table(path: Path, rows: int) -> str:
    """Those over 50 are rich; ages are dealt out so that every user has all of them."""
    lines = ["age,sex,rich,colour,hours"]
    for row in range(rows):
        age = 37 * row % 100
        colour = ("red", "green", "blue")[age // 34]
        lines.append(f"{age},{('Female', 'Male')[row % 2]},{('no', 'yes')[age > 50]},{colour},{0.6 * age}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(
        table=write_table(tmp_path / "people.csv", 600), schema=SCHEMA, clients=6, epsilon="50", delta=1e-5
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["simulate", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def command(job: Job, tmp_path: Path) -> tuple[str, ...]:
    schema = tmp_path / "schema.json"
    schema.write_text(SCHEMA.to_json())
    return (job.table, "--schema", str(schema), "--delta", "1e-5", "--epsilon", "50")


# --- what is simulated


@pytest.mark.parametrize("method", [name for name in PRIVATE if name != "dp-fedavg"])  # which takes users
def test_every_method_spends_its_budgets_and_says_what_holds(job: Job, method: str) -> None:
    clients = 6 if method == "fedavg" else 60  # A-DDP's rounds grow with records a user
    told = simulate(replace(job, method=method, clients=clients))
    assert nested(told).keys() == KEYS
    assert (told["epsilon"], told["delta"], told["unit"]) == (50.0, 1e-5, "record")
    assert (told["observer"], told["trust"]) == ("server", "local")
    assert (told["alive"], told["left"], told["records"]) == (0, 0.0, 600)
    assert told["adjacency"] == ("zero-out" if method == "sgd-pass" else "add-remove")
    assert "interrupted" not in told["stopped"]


def test_noise_is_that_of_the_budget(job: Job) -> None:
    told = simulate(replace(job, epsilon="1"))
    assert told["rounds"] == ROUNDS
    assert told["noise_multiplier"] == pytest.approx(np.sqrt(ROUNDS) * gaussian.noise(1.0, 1e-5), rel=1e-9)
    replaced = simulate(replace(job, epsilon="1", adjacency=Adjacency.REPLACE_ONE))
    assert replaced["noise_multiplier"] == pytest.approx(2 * told["noise_multiplier"], rel=1e-9)


@pytest.mark.parametrize(
    ("trust", "observer"), [("local", "server"), ("distributed", "aggregate"), ("trusted", "anyone")]
)
@pytest.mark.parametrize("noise", ["sum", "each"])
def test_the_observer_follows_from_trust(job: Job, trust: str, observer: str, noise: str) -> None:
    told = simulate(replace(job, trust=trust, noise=noise))
    assert (told["observer"], told["trust"], told["noise"]) == (observer, trust, noise)


@pytest.mark.parametrize("method", ["addp", "sgd2", "federated-descent"])
@pytest.mark.parametrize("unit", ["record", "party"])
def test_sums_need_less_noise_than_each_upload(job: Job, method: str, unit: str) -> None:
    rounds = None if method == "federated-descent" else 20
    options = {"addp": {"accountant": "tight", "rounds": 20}, "sgd2": {"rounds": 20}}.get(method, {})
    given = replace(job, method=method, options=options, unit=Unit(unit), clients=60, epsilon="5")
    told = {trust: simulate(replace(given, trust=trust)) for trust in Trust}
    assert {one["unit"] for one in told.values()} == {unit}
    assert {one["rounds"] for one in told.values()} == {rounds or ROUNDS}
    assert [one["observer"] for one in told.values()] == ["server", "aggregate", "anyone"]
    sigma = [one["noise_multiplier"] for one in told.values()]  # shares make up what one upload has
    assert sigma == pytest.approx([sigma[0]] * 3)


def test_a_whole_user_is_hidden_by_more_noise(job: Job) -> None:
    record, user = (simulate(replace(job, unit=unit)) for unit in (Unit.RECORD, Unit.USER))
    assert user["noise_multiplier"] == pytest.approx(
        100 * record["noise_multiplier"]
    )  # as many records as it has
    with pytest.raises(Unsupported, match="Poisson draw"):
        simulate(replace(job, unit=Unit.USER, method="addp", options={"draw": "poisson:0.1"}))


def test_too_few_survivors_end_a_run(job: Job) -> None:
    given = replace(
        job, method="sgd2", epsilon="1,4", options={"rounds": 5}, trust="distributed", survivors=6
    )
    told = simulate(given)
    assert (told["rounds"], told["alive"]) == (5, 3)
    assert told["stopped"] == "3 clients are too few to make up the noise of another round"


def test_sgd1_takes_the_square_of_its_records(job: Job) -> None:
    told = simulate(replace(job, method="sgd1", records=5))
    assert (told["records"], told["rounds"], told["stopped"]) == (30, 900, "all rounds were taken")
    assert (told["observer"], told["accountant"]) == ("server", "tight")
    with pytest.raises(InvalidValue, match=r"at most 1000 in all"):
        simulate(replace(job, method="sgd1", clients=600, table=write_table(Path(job.table), 1200)))


def test_accountants_of_addp_differ_in_rounds_and_noise(job: Job) -> None:
    by = {
        name: simulate(
            replace(job, clients=60, method="addp", epsilon="1", options={"accountant": name, "rounds": 20})
        )
        for name in ("advanced", "sampling", "tight")
    }
    assert by["advanced"]["rounds"] == by["tight"]["rounds"] == 20 < by["sampling"]["rounds"]
    assert (
        by["tight"]["noise_multiplier"]
        < by["advanced"]["noise_multiplier"]
        == by["sampling"]["noise_multiplier"]
    )
    assert [told["accountant"] for told in by.values()] == list(by)


def test_draws(job: Job) -> None:
    tight = {"accountant": "tight", "rounds": 300}
    of = {
        draw: simulate(replace(job, method="addp", epsilon="1", options={**tight, "draw": draw}))
        for draw in ("one", "10", "all", "poisson:0.01")
    }
    noise = {draw: told["noise_multiplier"] for draw, told in of.items()}
    assert noise["poisson:0.01"] < noise["one"] < noise["10"]
    assert noise["all"] == pytest.approx(np.sqrt(300) * gaussian.noise(1.0, 1e-5), rel=1e-9)


def test_users_leave_one_after_the_other_and_the_largest_budget_is_told(job: Job) -> None:
    seen: list[Reached] = []
    told = simulate(
        replace(job, method="sgd2", epsilon="0.5,2", options={"rounds": 30}, records=50),
        watch=lambda now: seen.append(now),
    )
    assert (told["epsilon"], told["records"], told["rounds"]) == (2.0, 300, 30)
    assert seen[0] == Reached(1, 6, 6, pytest.approx(29 / 30))


def test_test_tables_are_measured_outside_of_the_guarantee(job: Job, tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    told = simulate(replace(job, test=test, epsilon="100"))["test"]
    assert told["accuracy"] > 0.8 > told["guessing"] > 0.5
    assert 0 < told["log_loss"] < -np.log(told["guessing"])
    assert "the guarantee does not cover" in told["note"]
    with pytest.raises(InvalidValue, match="another table"):
        simulate(replace(job, test=job.table))


def test_three_labels(job: Job, tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    for noise in ("sum", "each"):
        told = simulate(replace(job, schema=COLOURS, epsilon="200", test=test, noise=noise))
        assert told["test"]["accuracy"] > told["test"]["guessing"]


def test_without_privacy_nothing_is_promised(job: Job, tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    told = simulate(replace(job, method="nonprivate", epsilon=None, delta=None, test=test))
    assert told["epsilon"] is None
    assert "nothing is promised" in told["note"]
    assert told["test"]["accuracy"] > 0.9


# --- interruptions


def test_an_interruption_ends_with_what_was_reached(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SHOWN", 0.0)

    def impatient(now: Reached) -> None:
        if now.rounds == 7:
            raise KeyboardInterrupt

    told = simulate(job, impatient)
    assert (told["rounds"], told["alive"], told["stopped"]) == (7, 6, "interrupted")
    assert told["left"] == pytest.approx(1 - 7 / ROUNDS)
    assert told["epsilon"] == 50.0


def test_an_interruption_before_the_first_round_reaches_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("farthing.federated.methods.federated_descent.federated_descent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(job)


def test_an_interrupted_command_prints_what_was_reached_and_ends_with_130(
    run: Any, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jobs.steps

    def interrupted(*arguments: Any) -> Any:
        for step in first(*arguments):
            yield step
            if step.t == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "steps", interrupted)
    code, out, err = run(*command, "--clients", "6", "--json")
    assert (code, err) == (130, "farthing: interrupted: these are the results so far\n")
    told = json.loads(out)
    assert (told["rounds"], told["stopped"]) == (3, "interrupted")


def test_progress_is_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with simulate_command.shown(quiet=True) as watch:
        assert watch is None
    assert terminal.getvalue() == ""
    with simulate_command.shown(quiet=False) as watch:
        assert watch is not None
        watch(Reached(1234, 5, 6, 0.25))
    assert "round 1,234" in terminal.getvalue()
    assert "5 of 6 clients, 25% of budgets left" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with simulate_command.shown(quiet=False) as watch:
        assert watch is None


# --- budgets


def test_budgets_from_numbers_lists_and_columns(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("user,eps\na,0.5\nb,2\nc,1e-1\n")
    assert epsilons("0.5", 3).tolist() == [0.5, 0.5, 0.5]
    assert epsilons("0.5,2", 3).tolist() == [0.5, 2.0, 0.5]
    assert epsilons(f"{file}:eps", 3).tolist() == [0.5, 2.0, 0.1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "--epsilon must be a finite number > 0, got 0.0"),
        ("-1", "got -1.0"),
        ("nan", "got nan"),
        ("inf", "got inf"),
        ("1,nan,2", "--epsilon of client 1 .* got nan"),
        ("1,-2", "--epsilon of client 1 .* got -2.0"),
        ("1,,2", "--epsilon of client 1 must be a number"),
        ("", "must be a number, numbers with commas, or FILE:COLUMN, got ''"),
        ("many", "or FILE:COLUMN, got 'many'"),
        ("1,1,1,1,1,1,1", "may hold one budget per client, got 7 for 6"),
        ("nowhere.csv:eps", "'nowhere.csv' cannot be read"),
        ("{}:name", "no column 'name'"),
        ("{}:few", "has 2 for 6"),
    ],
)
def test_bad_budgets(job: Job, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("few\n1\n2\n")
    with pytest.raises(InvalidValue, match=message):
        simulate(replace(job, epsilon=text.format(file)))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("-1", "epsilon of client 4 .* got .*-1.0"),
        ("nan", "epsilon of client 4 .* nan"),
        ("x", "client 4 .* 'x'"),
    ],
)
def test_a_bad_cell_names_its_user(job: Job, tmp_path: Path, cell: str, message: str) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("\n".join(["eps", "1", "1", "1", "1", cell, "1"]))
    with pytest.raises(InvalidValue, match=message):
        simulate(replace(job, epsilon=f"{file}:eps"))


# --- other input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, "--clients must be a whole number"),
        ({"clients": 601}, "--clients must be at most the number of records, 600, got 601"),
        ({"records": 0}, "--records-per-client must be a whole number"),
        ({"records": 101}, "6 clients with 101 records each need 606 records"),
        ({"delta": 0.0}, "--delta"),
        ({"delta": 1.0}, "--delta"),
        ({"delta": None}, "needs --epsilon and --delta"),
        ({"method": "magic"}, "--method must be one of .*'federated-descent', 'addp'.* got 'magic'"),
        ({"options": {"clip": 2.0}}, "--clip must be left out with --method federated-descent"),
        ({"options": {"rounds": 2}}, "--rounds must be left out with --method federated-descent"),
        ({"method": "addp", "options": {"clip": 0.0}}, "--clip must be a finite number > 0, got 0.0"),
        ({"method": "addp", "options": {"clip": float("nan")}}, "--clip .* got nan"),
        ({"method": "addp", "options": {"rounds": 0}}, "--rounds must be a whole number"),
        ({"method": "sgd-adv", "trust": "trusted"}, "--trust must be one of .'local'. with --method sgd-adv"),
        ({"trust": "nobody"}, "--trust must be one of .* got 'nobody'"),
        (
            {"options": {"accountant": "sampling"}},
            "--accountant must be left out with --method federated-descent",
        ),
        (
            {"method": "addp", "options": {"accountant": "guess"}},
            "--accountant must be one of .* got 'guess'",
        ),
        ({"options": {"draw": "one"}}, "--draw must be left out with --method federated-descent"),
        (
            {"method": "addp", "options": {"draw": "some"}},
            "--draw must be one, a whole number, all, or poisson:P",
        ),
        ({"method": "addp", "options": {"draw": "poisson:2"}}, "the rate of --draw must be"),
        ({"method": "addp", "options": {"draw": "0"}}, "--draw must be a whole number"),
        ({"noise": "none"}, "--noise must be one of"),
        ({"survivors": 3}, "--survivors is for --trust distributed only"),
        ({"trust": "distributed", "survivors": 7}, "--survivors must be at most the number of clients, 6"),
        ({"schema": HOURS}, "target 'hours' is a number"),
        ({"table": "nowhere.csv"}, "'nowhere.csv' cannot be read"),
    ],
)
def test_wrong_input_is_one_sentence(job: Job, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        simulate(replace(job, **change))


def test_passes_need_records_that_keep_their_places(job: Job) -> None:
    with pytest.raises(Unsupported, match="use zero-out or replace-one"):
        simulate(replace(job, method="sgd-pass", adjacency=Adjacency.ADD_REMOVE))


# --- the command


def test_json_is_one_object_and_nothing_else(run: Any, command: tuple[str, ...]) -> None:
    code, out, err = run(*command, "--clients", 6, "--records-per-client", 90, "--trust", "trusted", "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    fields = json.loads(out, parse_constant=pytest.fail)
    assert fields.keys() == {"format"} | KEYS
    assert (fields["clients"], fields["records"], fields["guarantee"]["observer"]) == (6, 540, "anyone")


def test_the_text_says_what_holds_and_for_whom(run: Any, command: tuple[str, ...], tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    code, out, err = run(
        *command, "--clients", 6, "--method", "sgd-adv", "--draw", "poisson:0.01", "--test", test
    )
    assert (code, err) == (0, "")
    assert "(50, 1e-05)-DP, add-remove, per record, against server, by amplified" in out
    assert "for each client" in out
    assert "does not cover these figures" in out
    code, out, err = run(*command[:5], "--clients", 6, "--epsilon", "5,9", "--trust", "distributed")
    assert code == 0
    assert "this is the weakest, the strongest has epsilon 5" in out
    assert "in any sum over 6 honest clients" in out


def test_exit_codes(run: Any, command: tuple[str, ...]) -> None:
    code, out, err = run(*command, "--clients", 0)
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = run(command[0], "--clients", 6, "--epsilon", 1, "--delta", 1e-5)
    assert (code, out) == (2, "")
    assert "--schema" in err
    code, out, err = run(*command, "--clients", "six")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = run(*command, "--clients", 6, "--method", "nonprivate", "--rounds", 20)
    assert (code, out) == (2, "")
    assert "--epsilon must be left out with --method nonprivate, which guarantees nothing" in err
    code, out, err = run(*command[:3], "--clients", 6, "--method", "nonprivate", "--rounds", 20)
    assert code == 1
    assert "no guarantee" in err
    assert "nothing is promised" in out


def test_people_are_told_in_groups(job: Job) -> None:
    told = simulate(replace(job, epsilon="25,50"))["groups"]
    assert [(group["epsilon"], group["clients"]) for group in told] == [(25.0, 3), (50.0, 3)]
    assert all(group["done"] == group["rounds"] > 0 for group in told)


def test_many_kinds_of_people_are_told_in_few_lines(tmp_path: Path) -> None:
    table = write_table(tmp_path / "people.csv", 600)
    given = ",".join(str(40 + user / 100) for user in range(300))
    told = simulate(Job(table=table, schema=SCHEMA, clients=300, epsilon=given, delta=1e-5))["groups"]
    assert len(told) < 20
    assert sum(group["clients"] for group in told) == 300
    assert all(group["done"] <= group["rounds"] for group in told)


def test_budgets_that_are_none_are_named() -> None:
    with pytest.raises(
        InvalidValue, match=r"budgets must be ft\.Budget\(epsilon, delta\), or one a client, got 1"
    ):
        Simulated.split(np.zeros((4, 2)), np.zeros(4), clients=2, budgets=1.0)  # type: ignore[arg-type]


def test_far_too_many_clients_are_refused_before_each_gets_a_budget(job: Job) -> None:
    with pytest.raises(InvalidValue, match="at most the number of records, 600, got"):
        simulate(replace(job, clients=2**61))
