"""Queries to private records: events, samplers, bounds and mechanisms, and the price that follows.

A `query` is a sampler, a contribution, a bound and a mechanism. Its privacy event (`events`) is derived from
those four parts, so that what ran is what is charged.
"""
