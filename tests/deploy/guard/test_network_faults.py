"""Guards over a network as real processes, killed and starved: nothing is charged or answered twice."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import farthing
from farthing.deploy.messages.signed import Reason
from farthing.deploy.messages.transport import call
from farthing.federated.terms import Invitation

pytestmark = pytest.mark.slow

TERMS = Invitation(1.0, rounds=20)
STEPS = {"kind": "steps", "steps": 3, "lr": 0.5, "proximal": 0.0}


@pytest.fixture
def asked(installed, torch_nursery, village):
    """A party with a network, whose guard is a process."""
    found = installed().settle(1)
    found.house = village.houses["p0"]
    found.house.nursery = torch_nursery
    return found


def ask(asked, number, **more):
    return call(asked.house.socket, asked.question(number, invitation=TERMS, **more), seconds=60)


# Where the guard dies in the second of three local steps: what comes of the question, and what was charged.
PLACES = {
    "before-charge": ("answered", 1),
    "after-charge": ("lost", 2),
    "before-store": ("lost", 2),
    "after-store": ("answered", 2),
    "before-log": ("answered", 3),
    "after-log": ("answered", 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_guard_killed_among_its_local_steps_goes_on_with_them_or_says_that_they_are_lost(
    place, asked, told, books
):
    house = asked.house.start(place, 2)
    with pytest.raises(OSError, match=r"guard|reset|Broken"):
        ask(asked, 1, lies=STEPS)
    assert house.process.gone(60)
    comes, charged = PLACES[place]
    assert books(house)[1] == charged
    house.start()
    again = told(ask(asked, 1, lies=STEPS), house)
    if comes == "lost":
        assert again is Reason.LOST
        assert books(house) == (0, 2)
    else:
        assert (again["taken"], books(house)) == (3, (3, 3))
        assert told(ask(asked, 1, lies=STEPS), house)["body"] == again["body"]
    assert told(ask(asked, 2), house)["left"] == 20 - books(house)[1]
    assert books(house, verify=place == "after-charge")[1] == (3 if comes == "lost" else 4)


def test_a_full_disk_releases_no_answer_about_a_network(asked, told, books):
    house = asked.house.start()
    ask(asked, 1)
    hard = resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE)[1]
    grown = max(path.stat().st_size for path in house.folder.iterdir() if path.is_file())
    for number, room in enumerate((0, 4096, grown, grown + 2048), 2):
        resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE, (room, hard))
        reply = told(ask(asked, number, lies=STEPS), house)
        assert reply in (Reason.LOCKED, Reason.LOST) or reply["round"] == number
        books(house)
    resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert told(ask(asked, 10), house)["round"] == 10
    logged, charged = books(house, verify=True)
    assert 2 <= logged <= charged <= 14


COORDINATOR = """
import os, signal, sys
from pathlib import Path
import numpy as np
from farthing.deploy import factories
from farthing.deploy.checkpoint import Checkpoint
from farthing.deploy.coordinator import Remote
from farthing.deploy.messages.signed import Signer
from farthing.deploy.messages.transport import UnixSockets
from farthing.federated.rounds import LocalSteps
from farthing.federated.terms import Invitation
from farthing.torch.training.network import Network

folder, number, out, module, *names = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
add = Checkpoint.add

def dying(self, *arguments):
    global number
    number -= 1
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, *arguments)

Checkpoint.add = dying
wanted = f"{module}:make_model", f"{module}:loss"
make, loss = (factories.found(name, folder / "models") for name in wanted)
network = Network(make(), loss, name="small", source=factories.source_hash(wanted, folder / "models"))
sockets = UnixSockets({name: folder / name / "s" for name in names})
enrolled = {name: Signer.load(folder / name / "key").public for name in names}
key = Signer.load(folder / "coordinator")
clients = Remote(sockets, key, enrolled, run="run-1", dataset="d", checkpoint=folder / "run", seconds=60)
clients.invite(Invitation(1.0, rounds=20))
w = network.start()
for asked in (network.gradient, LocalSteps(network.gradient, 2, 0.5), network.gradient):
    w = np.float32(w - 0.1 * clients.ask(asked, w).mean).astype(float)
np.save(out, w)
"""


def test_a_killed_coordinator_of_a_network_goes_on_and_nothing_is_charged_again(
    installed, torch_nursery, village, tmp_path
):
    asked = installed().settle(2)
    village.coordinator.save(village.folder / "coordinator")
    for house in village.houses.values():
        house.nursery = torch_nursery
        house.start()
    source = Path(farthing.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}

    def coordinate(number, out):
        command = [
            sys.executable,
            "-c",
            COORDINATOR,
            str(village.folder),
            str(number),
            str(out),
            asked.module,
        ]
        return subprocess.run([*command, *village.houses], env=environment, timeout=300).returncode

    assert (
        coordinate(4, tmp_path / "none.npy") < 0
    )  # hello, invite, round 1; killed before round 2 is recorded
    assert set(village.check().values()) == {(3, 3)}
    village.houses["p1"].start()  # the guard was killed, too
    assert coordinate(0, tmp_path / "w.npy") == 0
    assert not (tmp_path / "none.npy").exists()
    assert np.isfinite(np.load(tmp_path / "w.npy")).all()
    assert set(village.check(verify="p1").values()) == {(4, 4)}
    assert coordinate(0, tmp_path / "again.npy") == 0  # everything is read from the checkpoint
    np.testing.assert_array_equal(np.load(tmp_path / "again.npy"), np.load(tmp_path / "w.npy"))
    assert set(village.check().values()) == {(4, 4)}
