"""The demonstration ``make demo-parties``: three parties and a coordinator, each in processes of its own.

All files are made in a new folder: keys, records (a third of the embedded Adult data each), policies, and the
run's file. Then ``farthing join`` runs three times and ``farthing serve`` once, as on four machines: first
for a linear model of the table and then, if PyTorch is installed, for a small network that all have
installed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from farthing.cli.main import main as farthing
from farthing.data.adult import ADULT, load_adult
from farthing.deploy import keys as keyring
from farthing.deploy.factories import source_hash
from farthing.deploy.processes import Child

PARTIES = ("north", "east", "west")
TABLE = 'name = "sgd2"\nrounds = 25'
NETWORK = 'name = "fedsgd"\nrounds = 20\nsampling_rate = 0.1\nlr = 2.0'
MODELS = '''"""A model that coordinator and parties install: only its name, its hash and weights are sent."""

import torch
from torch import nn


def make_model():
    torch.manual_seed(0)  # the same first weights every time
    return nn.Sequential(nn.Linear({width}, 16), nn.Tanh(), nn.Linear(16, 2))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
'''
# Ends when its standard input closes, that is, with the demonstration, however that ends.
_RUN = """
import sys
from farthing.deploy.processes import end_with_parent
end_with_parent()
from farthing.cli.main import main
sys.exit(main())
"""


def set_up(
    folder: Path,
    parties: Sequence[str] = PARTIES,
    *,
    port: int,
    method: str = 'name = "sgd2"\nrounds = 40',
    epsilon: float = 1.0,
    records: int | None = None,
    limits: str = 'noise = 0.5\nclip = 3.0\nrounds = 1000\ndraws = ["all", "exactly:1", "poisson:0.1"]',
    settings: str = "",
    network: bool = False,
) -> Path:
    """Write keys, settings and ``records`` records for each party; return the run's file.

    With ``network`` they train one that all have installed, in place of a linear model.
    """
    adult = load_adult()
    asked, model = f"width = {ADULT.width}\n", 'schema = "adult"\ntest = "adult"\n'
    if network:
        asked, model = _install(folder / "models", ADULT.width)
        np.savez(folder / "test.npz", X=adult.X_test[:4000], y=adult.y_test[:4000])
    modules = 'modules = "../models"\n' if network else ""
    each = len(adult.X_train) // len(parties) if records is None else records
    keyring.make(folder / "keys", parties, ["localhost"], coordinator=True)
    asks = (folder / "keys" / "coordinator" / "public.toml").read_text().split('"')[1]
    for place, name in enumerate(parties):
        home, rows = folder / name, slice(place * each, (place + 1) * each)
        home.mkdir()
        np.savez(home / "records.npz", X=adult.X_train[rows], y=adult.y_train[rows] * 1.0)
        (home / "policy.toml").write_text(
            f'dataset = "adult"\nrecords = "records.npz"\nsize = {each}\nledger = "{name}.ledger"\n'
            f'socket = "guard.sock"\nkey = "../keys/{name}/guard.key"\ncoordinators = ["{asks}"]\n{modules}\n'
            f"[budget]\nepsilon = {epsilon}\ndelta = 1e-6\n\n"
            f"[limits]\n{limits}\n{asked}"
        )
        (home / "party.toml").write_text(
            f'coordinator = "localhost:{port}"\nauthority = "../keys/coordinator/ca.pem"\n'
            f'node = "../keys/{name}/node.key"\npolicy = "policy.toml"\nfolder = "state"\n'
        )
    run = folder / "run.toml"
    cards = "".join(f'{name} = "keys/{name}/public.toml"\n' for name in parties)
    run.write_text(
        f'run = "demo"\ndataset = "adult"\nlisten = "127.0.0.1:{port}"\nkeys = "keys/coordinator"\n'
        f'folder = "run"\n{settings}\n'
        f"{model}\n[method]\n{method}\n\n[parties]\n{cards}"
    )
    return run


def _install(folder: Path, width: int) -> tuple[str, str]:
    """Write a module with a model; return what policies and the run's file say about it."""
    folder.mkdir()
    (folder / "adult_network.py").write_text(MODELS.format(width=width))
    names = "adult_network:make_model", "adult_network:loss"
    lines = f'factory = "{names[0]}"\nloss = "{names[1]}"\n'
    source = source_hash(names, folder)
    limits = f'\n[models.small]\n{lines}hash = "{source}"\nweights = 4000\nsteps = 5\n'
    inputs = f"\n[inputs]\nshape = [{width}]\nclasses = 2\n"
    run = f'test = "test.npz"\n\n[model]\nname = "small"\n{lines}modules = "models"\n'
    return limits + inputs, run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=int, default=0)
    parser.add_argument("--port", type=int, default=9092)
    options = parser.parse_args(arguments)
    folder, began = Path(tempfile.mkdtemp(prefix="farthing-demo-")), time.monotonic()
    code = _trained(folder / "table", options, {"method": TABLE})
    if find_spec("torch") is None:
        print("\nno network was trained: that needs PyTorch, pip install torch", flush=True)
    else:
        code = max(code, _trained(folder / "network", options, {"network": True, "method": NETWORK}))
    print(f"\n{time.monotonic() - began:.0f} s in all; {folder} may be deleted", flush=True)
    return code


def _trained(folder: Path, options: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Set up parties and a coordinator, let them train, and verify every party's ledger."""
    folder.mkdir()
    run = set_up(folder, port=options.port, **settings)
    print(f"\nin {folder}: keys, policies and records of {', '.join(PARTIES)}", flush=True)
    homes = [folder / name for name in PARTIES]
    joined = [
        Child([sys.executable, "-c", _RUN, "join", str(home / "party.toml")], home / "join.log")
        for home in homes
    ]
    try:
        for child in joined:
            child.start()
        command = [sys.executable, "-c", _RUN, "serve", str(run), "--page", str(options.page)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as serving:
            code = serving.wait()
    finally:
        for child in joined:
            child.stop()
    for name, home in zip(PARTIES, homes, strict=True):
        print(f"\nwhat {name}'s own ledger says", flush=True)
        code = max(code, farthing(["ledger", "verify", str(home / f"{name}.ledger")]))
    return code


if __name__ == "__main__":
    sys.exit(main())
