"""What holds for all tests.

Property tests try the same examples every time and have no deadline: a busy machine is no failure. Set
FARTHING_EXPLORE=1 to try new ones. Without PyTorch, Triton, Lightning or Flower the modules that need
them are left out.
"""

import os
from importlib.util import find_spec

from hypothesis import settings

EXPLORE = bool(os.environ.get("FARTHING_EXPLORE"))
settings.register_profile(
    "house", deadline=None, derandomize=not EXPLORE, max_examples=200 if EXPLORE else 50
)
settings.load_profile("house")

_ROOMS = {
    "torch": [
        "src/farthing/torch/*.py",
        "tests/torch/*.py",
        "src/farthing/federated/methods/networks.py",  # its examples train one
    ],
    "triton": [
        "src/farthing/torch/kernels/gradient_tiles.py",
        "src/farthing/torch/kernels/lattice_noise.py",
        "src/farthing/torch/kernels/grams.py",
        "src/farthing/torch/kernels/layer_sums.py",
        "tests/torch/kernels/kernel_cases.py",
    ],
    "transformers": ["src/farthing/torch/integrations/huggingface.py"],
    "lightning": ["src/farthing/torch/integrations/lightning.py"],
    "flwr": ["src/farthing/deploy/flower/*.py", "tests/deploy/flower/*.py"],
}
collect_ignore_glob = [glob for name, globs in _ROOMS.items() if find_spec(name) is None for glob in globs]
