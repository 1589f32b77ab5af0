"""Without PyTorch, its room is left out: nothing there can be imported. So are its kernels without Triton."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["src/farthing/torch/*.py", "tests/torch/*.py"]
_TRITON = ["src/farthing/torch/kernels.py", "src/farthing/torch/sums.py", "tests/torch/kernel_cases.py"]
collect_ignore = [] if find_spec("triton") else _TRITON
