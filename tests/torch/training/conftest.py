"""Two processes that train together, over the loopback of this machine."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import farthing as ft

PRELUDE = """
    import json, os, sys
    from datetime import timedelta
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    import farthing as ft
    from farthing.errors import *
    from farthing.noise.lattice import SeededStream

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    made = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=made)
    y = (x[:, 0] > 0).long()
    LOSS = nn.CrossEntropyLoss(reduction="none")
    BUDGET = ft.Budget(2.0, 1e-5)

    def network():
        torch.manual_seed(rank)  # different weights: rank 0's are taken
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def flat(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    def ledger(seed=7):
        return ft.Ledger(BUDGET, stream=SeededStream(seed), block=1) if rank == 0 else None

    def told(**found):
        print(json.dumps(found), flush=True)
"""


def run_two(tmp_path, script):
    """Runs it as ranks 0 and 1; what each of them told, and how it ended."""
    source = Path(ft.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    # left without teardown: gloo's threads may abort a process that ends while they run
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(script) + "\nsys.stdout.flush()\nos._exit(0)\n"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)], env=environment, text=True, **pipes
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    found = [[json.loads(line) for line in out.splitlines()] for out, _ in ended]
    return found, [process.returncode for process in started], [error for _, error in ended]


@pytest.fixture
def two():
    """``two(folder, script)`` runs a script as ranks 0 and 1."""
    return run_two
