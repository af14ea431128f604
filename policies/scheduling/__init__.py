"""Schedulings: which slices the next step computes, and in which order.

One file per named scheduling; `order` holds what they share. They may import engine.contract, and
never memory policies. `recorded` plays back a plan log and may also import engine.results.plan_log.
"""
