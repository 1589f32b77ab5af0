"""What a run trains: networks that a run's file names, over guards in this process."""

import json
import sys

import numpy as np
import pytest

from farthing.cli.demo_parties import set_up
from farthing.cli.main import main
from farthing.deploy.guard import server
from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages.signed import Signer
from farthing.deploy.messages.transport import InProcess
from farthing.deploy.run_file import RunFile
from farthing.deploy.serve import RunProgress, coordinate
from farthing.errors import InvalidValue

torch = pytest.importorskip("torch")

NAMES = ("a", "b")
FEDSGD = 'name = "fedsgd"\nrounds = 4\nsampling_rate = 0.1\nlr = 0.5'


@pytest.fixture
def served(tmp_path):
    """A run of a network; and what its guards are, in this process."""
    opened = []

    def start(method=FEDSGD, edit=lambda text: text, party=lambda text: text):
        path = set_up(tmp_path, NAMES, port=9092, method=method, records=60, epsilon=4.0, network=True)
        path.write_text(edit(path.read_text()))
        plan = RunFile.load(path)
        test = plan.learner.read(plan.test)
        doors = {}
        for name in NAMES:
            policy = tmp_path / name / "policy.toml"
            policy.write_text(party(policy.read_text()))
            opened.append(server.opened(Policy.load(policy)))
            doors[name] = opened[-1].answer
        plan.folder.mkdir()
        board = RunProgress(plan)
        signer = Signer.load(plan.keys / "coordinator.key")
        return plan, board, coordinate(plan, InProcess(doors), signer, test, board)

    yield start
    for guard in opened:
        guard.close()
    sys.path[:] = [place for place in sys.path if not place.startswith(str(tmp_path))]
    sys.modules.pop("adult_network", None)


def test_a_run_s_file_trains_a_network_over_guards(served, tmp_path):
    plan, board, report = served()
    assert (report["method"], report["rounds"], report["weights"]) == ("fedsgd", 4, 1778)
    assert report["stopped"] == "no party is left that can afford another round"
    assert 0 < report["test"]["accuracy"] < 1
    assert len(board.view().accuracy) == 4
    with np.load(plan.model, allow_pickle=False) as held:
        assert json.loads(held["_report"].tobytes()) == report
        weights = {name: torch.from_numpy(held[name]) for name in held.files if name != "_report"}
    model = torch.nn.Sequential(torch.nn.Linear(108, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model.load_state_dict(weights)
    assert main(["ledger", "verify", str(tmp_path / "b" / "b.ledger")]) == 0


def test_noise_that_is_correlated_over_rounds_runs_from_a_file(served, tmp_path):
    def party(text):
        return text.replace('"poisson:0.1"]', '"poisson:0.1", "cyclic:0.1:2"]\nbands = 2')

    _, _, report = served(f"{FEDSGD}\nbands = 2", party=party)
    assert (report["rounds"], report["parties"][0]["state"]) == (4, "spent")
    verdict = main(["ledger", "verify", str(tmp_path / "a" / "a.ledger")])
    assert verdict == 0


@pytest.mark.slow
def test_local_steps_and_whole_updates_run_from_a_file_as_well(served):
    _, _, report = served('name = "fedavg"\nrounds = 2\nlocal_steps = 2\nlocal_lr = 0.2')
    assert report["rounds"] == 2


@pytest.mark.slow
def test_a_party_is_protected_as_a_whole(served, tmp_path):
    def party(text):
        return text.replace("delta = 1e-6", 'delta = 1e-6\nunit = "party"').replace("size = 60", "size = 1")

    _, _, report = served('name = "dp-fedavg"\nrounds = 3\nlocal_steps = 2\nlocal_lr = 0.2', party=party)
    assert (report["rounds"], report["parties"][0]["budget"]["unit"]) == (3, "party")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('name = "fedsgd"', 'name = "sgd2"'), r"method\.name must be one of"),
        (("make_model", "nothing"), "has no 'nothing'"),
        (('name = "small"', 'name = "a b"'), "model must be up to 64"),
        (("[model]", 'schema = "adult"\n[model]'), "not both"),
        (("[model]", f"wait = {10**400}\n[model]"), "at most 64 bits"),
        (('modules = "models"', ""), "there is no module 'adult_network'"),
        (('loss = "adult_network:loss"', ""), "loss must be a text"),
    ],
)
def test_a_run_s_file_that_does_not_fit_is_an_error(change, message, served):
    with pytest.raises(InvalidValue, match=message):
        served(edit=lambda text: text.replace(*change))


def test_test_data_must_fit_the_model(served, tmp_path):
    def bad(X, y):
        def edit(text):
            np.savez(tmp_path / "test.npz", X=X, y=y)
            return text

        return edit

    with pytest.raises(InvalidValue, match="does not run on test"):
        served(edit=bad(np.zeros((3, 5)), np.zeros(3, dtype=int)))
