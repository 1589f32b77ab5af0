"""Weights in shards: the same steps as whole ones, checkpoints that survive a rank, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.noise.lattice import SeededStream
from farthing.torch.training.sharding import _whole, like, packed, sharded, unpacked

LOSS = nn.CrossEntropyLoss(reduction="none")
SHARDED = """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    OPTIONS = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 6}

    def in_shards():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def whole(model):
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()

    def adam(model):
        return torch.optim.Adam(model.parameters(), 0.05)
"""


def alone():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=made)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), stream=SeededStream(7), block=1)
    adam = torch.optim.Adam(model.parameters(), 0.05)
    how = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 6, "optimizer": adam}
    ft.run(ft.torch.train(model, LOSS, (x, (x[:, 0] > 0).long()), ledger, **how))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_whole_weights_are_no_shards():
    model, value = nn.Linear(2, 1), torch.ones(1, 2)
    assert not sharded(model)
    assert like(model.weight, value) is value
    state = {"a": [torch.ones(2), 3], "b": {"c": "text"}}
    assert unpacked(packed(state), None) == state


def test_a_checkpoint_counts_when_all_ranks_have_written(tmp_path):
    for name in ("5/0-of-2.pt", "5/1-of-2.pt", "10/0-of-2.pt", "7/0-of-1.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert _whole(tmp_path, 2) == [5]
    assert _whole(tmp_path, 1) == [7]


@pytest.mark.slow
def test_shards_take_the_steps_of_whole_weights_and_a_killed_rank_is_resumed(two, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    journal, saved = tmp_path / "run.ledger", tmp_path / "shards"
    begun = f"""
    def book():
        if rank:
            return None
        return ft.Ledger(BUDGET, journal={str(journal)!r}, block=1)
    SAVED = {str(saved)!r}
    """
    found, codes, errors = two(
        first,
        SHARDED
        + begun
        + """
    model = in_shards()
    steps = list(ft.torch.train(model, LOSS, (x, y), ledger(), optimizer=adam(model), **OPTIONS))
    local = model[0].weight.to_local().shape
    told(weights=whole(model), receipts=[len(step.receipts) for step in steps], local=local)

    refused = []
    for how in ({"average": 0.9}, {"optimizer": ft.torch.AdaDP(model, lr=0.1)}):
        try:
            ft.torch.train(model, LOSS, (x, y), ledger(), **OPTIONS, **how)
        except Unsupported as error:
            refused.append(str(error))
    told(refused=refused)

    wrapped = nn.parallel.DistributedDataParallel(network())
    ft.run(ft.torch.train(wrapped, LOSS, (x, y), ledger(), **OPTIONS))
    plain = network()
    ft.run(ft.torch.train(plain, LOSS, (x, y), ledger(), **OPTIONS))
    told(ddp=flat(wrapped.module) == flat(plain))

    model = in_shards()
    training = ft.torch.train(model, LOSS, (x, y), book(), optimizer=adam(model), **OPTIONS)
    try:
        for step in training:
            model(x[:7])  # a forward in between, on all ranks
            ft.torch.save(SAVED, training)
            dist.barrier()
            if step.t == 3:
                told(t=step.t, weights=whole(model))
                dist.barrier()
                if rank == 0:
                    os.kill(os.getpid(), 9)  # the one that has the ledger
    except NotReleased as error:
        told(error=str(error), t=training.t)
    """,
    )
    assert codes == [-9, 0], errors
    assert "a rank is gone" in found[1][4]["error"]
    assert found[1][4]["t"] == 3
    expected = alone()
    for rank in range(2):
        assert torch.allclose(torch.tensor(found[rank][0]["weights"]), expected, atol=1e-5)
        assert "copy of the weights" in found[rank][1]["refused"][0]
        assert "AdaDP needs whole weights" in found[rank][1]["refused"][1]
        assert found[rank][2]["ddp"]
    assert [row[0]["receipts"] for row in found] == [[1] * 6, [0] * 6]
    assert [row[0]["local"] for row in found] == [[3, 4], [2, 4]]
    weights = found[0][3]["weights"]

    (saved / "9").mkdir()
    (saved / "9" / "0-of-2.pt").write_bytes(b"")  # a crash while they wrote
    found, codes, errors = two(
        second,
        SHARDED
        + begun.replace("ft.Ledger(BUDGET, journal=", "ft.Ledger.open(").replace(", block=1", "")
        + """
    model = in_shards()
    training = ft.torch.train(model, LOSS, (x, y), book(), optimizer=adam(model))
    ft.torch.restore(SAVED, training)
    told(t=training.t, weights=whole(model))
    steps = [step.t for step in training]
    told(steps=steps, share=training.ledger.share if rank == 0 else None)
    dist.barrier()
    """,
    )
    assert codes == [0, 0], errors
    for rank in range(2):
        assert found[rank][0]["t"] == 3
        assert found[rank][0]["weights"] == weights
        assert found[rank][1]["steps"][0] == 4
        assert len(found[rank][1]["steps"]) in (
            2,
            3,
        )  # the batch at hand is forfeited, or was not charged yet
    assert found[0][1]["share"] == pytest.approx(1.0)
    assert json.dumps(found[0][1]["steps"]) == json.dumps(found[1][1]["steps"])
    assert Path(saved, "3").exists()
