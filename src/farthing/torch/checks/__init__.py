"""Check models before the first charge: examples stay apart, nothing is kept, ranks and optimisers agree."""
