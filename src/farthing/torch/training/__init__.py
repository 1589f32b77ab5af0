"""The training loop: records, batches, plans, schedules, optimisers, checkpoints and several processes."""
