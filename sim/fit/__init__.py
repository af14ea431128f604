"""Fits cost tables to recorded steps, and states the errors of a cost model over such steps.

May import engine.contract, engine.results.plan_log, models, traces and sim.cost; never torch.
"""
