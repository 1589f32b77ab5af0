"""Train networks: records, batches, plans, schedules, optimisers, checkpoints and several processes."""
