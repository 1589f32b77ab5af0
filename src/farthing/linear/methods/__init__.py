"""Training algorithms of linear models, one paper a file: generators of `farthing.queries.query.Step`."""
