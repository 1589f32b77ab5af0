"""A federated method is one record: a new one runs simulated, deployed and from the command line."""

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farthing.cli import main as cli
from farthing.cli.demo_parties import set_up
from farthing.data.tables import Features
from farthing.deploy.guard import server
from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages.signed import Signer
from farthing.deploy.messages.transport import InProcess
from farthing.deploy.serve import RunFile, RunProgress, coordinate
from farthing.errors import InvalidValue
from farthing.federated import METHODS, Invitation, Method, Option
from farthing.federated.jobs import Job, simulate
from farthing.federated.methods import table
from farthing.linear.losses import LinearGradient
from farthing.queries.query import Step, until_spent

PARTIES = ("a", "b")


# --- a new method, in one record


@until_spent
def sign_descent(clients: Any, problem: Any, *, rounds: int = 3, shrink: float = 1.0) -> Any:
    """Steps by the sign of the noisy mean gradient."""
    features = Features(problem.width)
    clients.invite(Invitation(1.0, rounds=rounds))
    gradient, w = LinearGradient(problem.loss, features), problem.zeros(features.size)
    for t in itertools.count(1):
        w = w - 0.01 * shrink**t * np.sign(clients.ask(gradient, w).mean)
        yield Step(t, features.unfold(w))


SHRINK = Option(name="shrink", help="The factor by which steps shrink.")
SIGNS = Method(
    name="signs",
    algorithm=sign_descent,
    summary="steps by signs",
    rounds="`--rounds`, 3",
    options=(table.ROUNDS, SHRINK),
)


# --- runs everywhere


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return set_up(tmp_path, PARTIES, port=9092, records=40, method='name = "sgd2"', epsilon=4.0)


def deployed(plan: RunFile) -> dict[str, Any]:
    """The report of a coordinator whose guards are functions of this process."""
    home = plan.folder.parent
    guards = {name: server.opened(Policy.load(home / name / "policy.toml")) for name in PARTIES}
    plan.folder.mkdir()
    try:
        transport = InProcess({name: guard.answer for name, guard in guards.items()})
        return coordinate(
            plan, transport, Signer.load(plan.keys / "coordinator.key"), None, RunProgress(plan)
        )
    finally:
        for guard in guards.values():
            guard.close()


def test_a_new_method_runs_simulated_and_deployed(run_file: Path) -> None:
    plan = RunFile.load(run_file)
    job = replace(plan.job, method=SIGNS, options={"rounds": 4, "shrink": 0.5})
    told = simulate(replace(job, table="adult", epsilon="1", delta=1e-6, clients=50))
    assert (told["method"], told["rounds"], told["alive"]) == ("signs", 4, 0)
    report = deployed(replace(plan, job=job))
    assert (report["method"], report["rounds"]) == ("signs", 4)
    with np.load(plan.model) as model:
        assert set(np.round(np.abs(model["coef"]) / 0.01 * 16).ravel()) <= {1, 3, 5, 7, 9, 11, 13, 15}


def test_a_method_in_the_table_is_a_word_of_the_command_and_of_a_runs_file(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "signs", SIGNS)
    command = [
        "simulate",
        "adult",
        "--clients",
        "50",
        "--epsilon",
        "1",
        "--delta",
        "1e-6",
        "--method",
        "signs",
    ]
    assert cli.main([*command, "--rounds", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["method"], told["rounds"]) == ("signs", 5)
    run_file.write_text(run_file.read_text().replace('name = "sgd2"', 'name = "signs"\nshrink = 0.5'))
    assert RunFile.load(run_file).job.options == {"shrink": 0.5}


def test_what_a_record_does_not_list_is_refused(run_file: Path) -> None:
    job = replace(RunFile.load(run_file).job, table="adult", epsilon="1", delta=1e-6, method=SIGNS)
    with pytest.raises(InvalidValue, match="--lr must be left out with --method signs"):
        simulate(replace(job, options={"lr": 1.0}))
    with pytest.raises(InvalidValue, match=r"--trust must be one of .'local'. with --method signs"):
        simulate(replace(job, trust="trusted"))


# --- the table itself


def test_an_option_has_one_type_everywhere() -> None:
    for method in METHODS.values():
        for option in method.options:
            assert option.kind is table.every_option()[option.name][0].kind, (method.name, option.name)


@pytest.mark.parametrize("method", list(METHODS.values()), ids=list(METHODS))
def test_every_option_reaches_an_argument_of_its_algorithm(method: Method) -> None:
    values = {
        "draw": "all",
        "accountant": "tight",
        "weights": "plain",
        "rounds": 2,
        "published_noise": True,
        "server": "yogi",
        "local_steps": 2,
    }
    for name in method.names:
        with pytest.raises(
            (AttributeError, InvalidValue)
        ):  # nobody is asked; a wrong argument is a TypeError
            next(method.algorithm(object(), object(), **method.arguments({name: values.get(name, 0.5)})))


def test_the_page_shows_the_records_as_they_are() -> None:
    root = Path(__file__).parents[2]
    path = root / "tools" / "federated_methods.py"
    spec = importlib.util.spec_from_file_location("federated_methods", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.drawn(page), "run: python tools/federated_methods.py"


def test_a_job_takes_a_record_or_its_name() -> None:
    job = Job(table="adult", schema=None, clients=1, method="addp")  # type: ignore[arg-type]
    assert job.record is METHODS["addp"] is replace(job, method=METHODS["addp"]).record
