"""Training inside another framework's loop: Lightning, and optimisers that are stepped elsewhere."""
