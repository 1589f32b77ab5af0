"""Checkpoints: weights, optimiser and step come back, the spend does not; kill -9 at any moment."""

import io
import os
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import dp_accounting as dp
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.ledger.verifier import verify
from farthing.noise.lattice import SeededStream
from farthing.torch.training.checkpoint import restore, save
from farthing.torch.training.loop import train
from farthing.torch.training.schedules import Quantile

BUDGET = ft.Budget(2.0, 1e-5)
LOSS = nn.CrossEntropyLoss(reduction="none")


def data():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=made)
    return x, (x[:, 0] > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def begun(ledger, model=None, **options):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    options = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 12} | options
    return train(model, LOSS, data(), ledger, optimizer=optimizer, scheduler=scheduler, **options)


def test_what_comes_back_is_all_that_matters_for_the_next_step(tmp_path):
    training = begun(ft.Ledger(BUDGET, stream=SeededStream(1)), average=0.9, clip_norm=Quantile(start=0.5))
    for step in training:
        if step.t == 5:
            break
    save(tmp_path / "a.pt", training)
    saved = training.state_dict()
    saved = torch.load(_written(saved), weights_only=True)  # a deep copy, before training goes on
    list(training)
    other = begun(ft.Ledger(BUDGET, stream=SeededStream(2)), average=0.9, clip_norm=Quantile())
    restore(tmp_path / "a.pt", other)
    found = other.state_dict()
    assert _same(saved, found)
    assert other.t == 5
    assert next(other).t == 6


def _written(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_an_older_checkpoint_takes_the_weights_back_and_not_the_spend(tmp_path):
    ledger = ft.Ledger(BUDGET, block=1)
    training = begun(ledger)
    next(training)
    save(tmp_path / "a.pt", training)
    for _ in range(7):
        next(training)
    assert ledger.share == pytest.approx(8 / 12)
    again = begun(ledger)
    restore(tmp_path / "a.pt", again)
    assert ledger.share == pytest.approx(8 / 12)
    steps = list(again)
    assert [step.t for step in steps] == [2, 3, 4, 5]  # four batches were left, whatever the weights remember
    assert ledger.share == 1.0


def test_a_run_without_a_word_about_noise_goes_on_with_its_plan(tmp_path):
    path = tmp_path / "a.ledger"
    with ft.Ledger(BUDGET, journal=path) as ledger:
        first = train(network(), LOSS, data(), ledger, steps=20)
        next(first)
    with ft.Ledger.open(path) as ledger:
        second = train(network(), LOSS, data(), ledger)
        assert second.plan == first.plan
        assert len(list(second)) == 19


def test_the_file_holds_no_objects(tmp_path):
    training = begun(ft.Ledger(BUDGET))
    save(tmp_path / "a.pt", training)
    torch.load(tmp_path / "a.pt", weights_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_state_of_objects_is_refused_and_the_old_file_stays(tmp_path):
    training = begun(ft.Ledger(BUDGET))
    save(tmp_path / "a.pt", training)
    before = (tmp_path / "a.pt").read_bytes()
    training._parts.scheduler.odd = nn.Linear(1, 1)
    with pytest.raises(InvalidValue, match=r"'scheduler'\]\['odd'\] holds a Linear"):
        save(tmp_path / "a.pt", training)
    assert (tmp_path / "a.pt").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save(tmp_path / "a.pt", begun(ft.Ledger(BUDGET)))
    wide = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(InvalidValue, match="of another model"):
        restore(tmp_path / "a.pt", begun(ft.Ledger(BUDGET), wide))


class Evil:
    def __reduce__(self):
        return os.system, ("echo ran > ran",)


def test_a_file_that_would_run_code_or_is_none_of_ours_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = begun(ft.Ledger(BUDGET))
    torch.save({"farthing": 1, "state": Evil()}, "evil.pt")
    torch.save({"state": {}}, "other.pt")
    Path("noise.pt").write_bytes(b"not a checkpoint")
    Path("empty.pt").write_bytes(b"")
    for name in ("evil.pt", "other.pt", "noise.pt", "empty.pt"):
        with pytest.raises(InvalidValue, match="not a checkpoint of farthing"):
            restore(name, training)
    assert not Path("ran").exists()
    with pytest.raises(InvalidValue, match="no checkpoint at"):
        restore("nowhere.pt", training)


RUN = """
    import os, sys
    import torch
    from torch import nn
    import farthing as ft

    journal, checkpoint, world = sys.argv[1:]
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    model = nn.Linear(4, 2)
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), journal=journal, block=3)
    training = ft.torch.train(
        model, nn.CrossEntropyLoss(reduction="none"), (x, (x[:, 0] > 0).long()), ledger,
        sampling_rate=0.1, noise_multiplier=3.0, steps=60,
    )
    if os.path.exists(checkpoint):
        ft.torch.restore(checkpoint, training)
    out = os.open(world, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while sys.stdin.read(1) and (step := next(training, None)) is not None:
        receipt = step.receipts[0]
        os.write(out, f"{receipt.seq} {receipt.ticket} {step.t}\\n".encode())  # what has left the house
        if step.t % 5 == 0:
            ft.torch.save(checkpoint, training)
    ledger.close()
    print("done", flush=True)
"""


def start(tmp_path):
    source = Path(ft.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    files = [str(tmp_path / name) for name in ("a.ledger", "a.pt", "world")]
    command = [sys.executable, "-c", textwrap.dedent(RUN), *files]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_killed_and_resumed_runs_spend_what_the_oracles_say(tmp_path):
    world = tmp_path / "world"
    seen = 0
    for steps in (8, 16):  # a step a letter; it is killed somewhere in the step after these
        with start(tmp_path) as process:
            process.stdin.write("." * steps)
            process.stdin.flush()
            while not world.exists() or len(world.read_text().splitlines()) < seen + steps:
                assert process.poll() is None, "the run ended before it was killed"
                time.sleep(0.01)
            process.stdin.write(".")
            process.stdin.flush()
            time.sleep(0.002)
            process.kill()
        seen = len(world.read_text().splitlines())
    with start(tmp_path) as process:
        output, _ = process.communicate("." * 61, timeout=300)
    assert output.strip() == "done"

    released = [line.split() for line in world.read_text().splitlines()]
    assert len({(seq, ticket) for seq, ticket, _ in released}) == len(released)  # no charge was used twice
    assert len(released) <= 60
    steps = [int(t) for _, _, t in released]
    assert any(b <= a for a, b in pairwise(steps))  # weights did go back

    with ft.Ledger.open(tmp_path / "a.ledger") as ledger:
        export = io.StringIO()
        ledger.journal.export(export)
        verdict = verify(export.getvalue().splitlines())
        assert verdict.code == 0
        assert list(verdict.charged.values()) == [60]
        oracle = PLDAccountant()
        oracle.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(3.0)), 60)
        assert ledger.spent.epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)
        assert verdict.spent[0] <= ledger.spent.epsilon <= verdict.spent[1] * 1.001
