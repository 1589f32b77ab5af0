"""Train weights that are sharded over several ranks (`fully_shard`), and save checkpoints of them.

Between two batches every rank holds its shard of the weights and of the optimiser's state. While a batch is
summed, each rank has the whole weights (`farthing.torch.gradients.plain` gathers them), takes its part of the
examples and clips each by its *whole* gradient: a norm never stops at the edge of a shard. The sums meet on
rank 0, which adds the noise, once, and tells the released sum to all; of that every rank keeps its shard. So
the guarantee is that of `farthing.torch.training.distributed`.

A checkpoint of shards is a folder: ``t/rank-of-ranks.pt`` holds a rank's shards at update t, as plain
tensors. It is complete if all its ranks have written theirs; `newest` takes the last complete one. A crash
while they write therefore loses the checkpoint in progress, not the one before it.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farthing.errors import InvalidValue, NotReleased, Unsupported

_MARK = "a shard"
_KEPT = 2  # whole checkpoints that are kept


def is_shard(value: Any) -> bool:
    """Return whether a value is a shard: none is where nobody imported their module, which takes a second."""
    shards = sys.modules.get("torch.distributed.tensor")
    return shards is not None and isinstance(value, shards.DTensor)


def sharded(model: nn.Module) -> bool:
    """Return whether weights of a model lie in shards."""
    return any(map(is_shard, model.parameters()))


def like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor as its parameter is held: whole, or this rank's shard of it."""
    if not is_shard(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    held: Any = parameter
    found: Tensor = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
    return found


def refuse_shards(model: nn.Module, optimizers: Sequence[Any], average: float | None, ranks: int) -> None:
    """Refuse, before anything is charged, options that do not work with shards."""
    if not sharded(model):
        return
    held: list[Any] = [p for p in model.parameters() if is_shard(p)]
    if any(p.device_mesh.size() != ranks for p in held):
        raise Unsupported(
            f"the model is sharded over other ranks than the {ranks} that train together: call train on "
            "every rank of the mesh, after init_process_group, with group= for a part of them"
        )
    if average is not None:
        raise Unsupported("average= needs a copy of the weights, which shards have not: leave it out")
    for optimizer in optimizers:
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.") and kind.__name__ != "DPAdam":
            raise Unsupported(
                f"{kind.__name__} needs whole weights, and these lie in shards: use an optimizer of torch, "
                "or DPAdam"
            )


def finite(model: nn.Module) -> bool:
    """Return whether all shards of all ranks are finite: the same answer on every rank."""
    weights: list[Any] = list(model.parameters())
    held = [p.to_local() if is_shard(p) else p for p in weights]
    return bool(_least(mesh_of(model), int(all(bool(torch.isfinite(one).all()) for one in held))))


def _least(mesh: Any, number: int) -> int:
    """Return the smallest of the ranks' numbers, at every rank of a mesh."""
    found = torch.tensor(number, device=mesh.device_type)
    try:
        for group in mesh.get_all_groups():
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        raise NotReleased(f"a rank is gone; nothing was charged for this step: {error}") from None
    return int(found)


def packed(value: Any) -> Any:
    """Return a state with a plain tensor, and its place in the whole, for each shard."""
    if is_shard(value):
        from torch.distributed.tensor import Shard

        dims = [place.dim if isinstance(place, Shard) else -1 for place in value.placements]
        shape, stride = list(value.shape), list(value.stride())
        return {_MARK: value.to_local().detach(), "dims": dims, "shape": shape, "stride": stride}
    if isinstance(value, dict):
        return {key: packed(part) for key, part in value.items()}
    return [packed(part) for part in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any, mesh: Any) -> Any:
    """Return the state that was packed, with its shards on ``mesh``."""
    if isinstance(value, dict) and _MARK in value:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        places = [Replicate() if dim < 0 else Shard(dim) for dim in value["dims"]]
        local = value[_MARK].to(mesh.device_type)
        shape, stride = torch.Size(value["shape"]), tuple(value["stride"])
        return DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)
    if isinstance(value, dict):
        return {key: unpacked(part, mesh) for key, part in value.items()}
    return [unpacked(part, mesh) for part in value] if isinstance(value, list) else value


def mesh_of(model: nn.Module) -> Any:
    """Return the mesh of ranks that a model's shards lie on."""
    held: list[Any] = list(model.parameters())
    return next(p.device_mesh for p in held if is_shard(p))


def save_shards(
    path: Any, state: dict[str, Any], mesh: Any, write: Callable[[Path, dict[str, Any]], None]
) -> None:
    """Write this rank's shards of a state; every rank calls it, at the same update."""
    rank, ranks = _place(mesh)
    folder = Path(path) / str(int(state["t"]))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / _name(rank, ranks), packed(state))
    if rank == 0:
        for old in _whole(Path(path), ranks)[:-_KEPT]:
            with contextlib.suppress(OSError):
                shutil.rmtree(Path(path) / str(old))


def newest(path: Any, mesh: Any) -> Path:
    """Return this rank's file of the newest checkpoint that is whole: the same one on every rank."""
    rank, ranks = _place(mesh)
    t = _least(mesh, (_whole(Path(path), ranks) or [-1])[-1])
    if t < 0:
        others = sorted({name.name for name in Path(path).glob("*/*-of-*.pt")})[:3]
        seen = f", files there are {', '.join(others)}" if others else ""
        raise InvalidValue(f"there is no whole checkpoint of {ranks} ranks at {os.fspath(path)!r}{seen}")
    return Path(path) / str(t) / _name(rank, ranks)


def _place(mesh: Any) -> tuple[int, int]:
    """Return the number of this rank among those of a mesh, and how many they are."""
    return mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()


def _whole(path: Path, ranks: int) -> list[int]:
    """Return the updates at which all ranks have written their shards."""
    names = [_name(rank, ranks) for rank in range(ranks)]
    steps = [int(folder.name) for folder in path.glob("*") if folder.name.isdigit()]
    return sorted(t for t in steps if all((path / str(t) / name).exists() for name in names))


def _name(rank: int, ranks: int) -> str:
    return f"{rank}-of-{ranks}.pt"
