"""Without PyTorch, its room is left out: nothing there can be imported."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["src/farthing/torch/*.py", "tests/torch/*.py"]
