"""Checks before the first charge: examples stay apart, nothing is left behind, ranks and optimisers agree."""
