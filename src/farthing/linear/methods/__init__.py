"""Train linear models: one paper per file, each a generator of `farthing.queries.query.Step`."""
