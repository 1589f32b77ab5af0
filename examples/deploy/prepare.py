"""Write the folders that compose.yaml mounts: `python examples/deploy/prepare.py [--host NAME] [--port N]`.

Each folder holds all that its machine needs, and nothing of another's: the coordinator has its keys and the
parties' public keys; a party has its keys, the coordinator's certificate and public key, its policy and its
records (here a third of the embedded Adult data each). In earnest every machine makes its own keys, and only
the public files are sent (docs/parties.md).
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np

from farthing.data import load_adult
from farthing.deploy import keys
from farthing.errors import FarthingError

PARTIES = ("north", "east", "west")
HERE = Path(__file__).parent

RUN = """run = "demo"
dataset = "adult"
listen = "0.0.0.0:{port}"
keys = "keys/coordinator"
folder = "run"
schema = "adult"
test = "adult"
metrics = "127.0.0.1:9100"

[method]
name = "sgd2"
rounds = 40

[parties]
"""
POLICY = """dataset = "adult"
records = "records.npz"
size = {size}
ledger = "{name}.ledger"
socket = "guard.sock"
key = "keys/{name}/guard.key"
coordinators = ["{coordinator}"]

[budget]
epsilon = 1.0
delta = 1e-6

[limits]
noise = 2.0
clip = 3.0
rounds = 1000
draws = ["all"]
width = 108
"""
PARTY = """coordinator = "{host}:{port}"
authority = "ca.pem"
node = "keys/{name}/node.key"
policy = "policy.toml"
folder = "state"
metrics = "127.0.0.1:9101"
"""


def main(folder: Path = HERE, host: str = "coordinator", port: int = 9092) -> None:
    """Write all four folders; refuse where one of them has keys already."""
    adult, server = load_adult(), folder / "coordinator"
    size, run = len(adult.X_train) // len(PARTIES), RUN.format(port=port)
    keys.make(server / "keys", [], [host], coordinator=True)
    coordinator = (server / "keys" / "coordinator" / "public.toml").read_text().split('"')[1]
    for place, name in enumerate(PARTIES):
        home, rows = folder / name, slice(place * size, (place + 1) * size)
        keys.make(home / "keys", [name], [], coordinator=False)
        shutil.copy(server / "keys" / "coordinator" / "ca.pem", home / "ca.pem")
        np.savez(home / "records.npz", X=adult.X_train[rows], y=adult.y_train[rows] * 1.0)
        (home / "policy.toml").write_text(POLICY.format(name=name, size=size, coordinator=coordinator))
        (home / "party.toml").write_text(PARTY.format(name=name, host=host, port=port))
        shutil.copy(home / "keys" / name / "public.toml", server / f"{name}.toml")
        run += f'{name} = "{name}.toml"\n'
    (server / "run.toml").write_text(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--host", default="coordinator", help="the name under which parties reach it")
    parser.add_argument("--port", type=int, default=9092)
    parser.add_argument("--folder", type=Path, default=HERE)
    try:
        main(**vars(parser.parse_args()))
    except (FarthingError, OSError) as error:
        sys.exit(f"{error}. Nothing was written over: give another --folder, or remove these folders")
