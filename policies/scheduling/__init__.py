"""Schedulings: which slices the next step computes, and in which order.

One file per named scheduling; `order` holds what they share. They may import engine.contract
and, in `recorded`, which plays back a plan log, engine.results.plan_log; never memory policies.
"""
