"""What can be asked of private records, and what follows for its price.

A `query` is a sampler, a contribution, a bound and a mechanism. Its privacy event (`events`) is derived from
those four parts, so that what ran is what is charged.
"""
