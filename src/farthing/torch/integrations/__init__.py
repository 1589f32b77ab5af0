"""Train in another framework's loop: Lightning, Hugging Face, and optimisers that are stepped elsewhere."""
