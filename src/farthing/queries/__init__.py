"""Define queries to private records: samplers, contributions, bounds, mechanisms, and the price of a query.

A `query` is a sampler, a contribution, a bound and a mechanism. Its privacy event (`events`) is derived from
those four parts, so that what ran is what is charged.
"""
