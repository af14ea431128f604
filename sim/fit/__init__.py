"""Fits cost tables to recorded steps, and states the errors of a cost model over such steps.

May import engine.contract, models, traces and sim.cost; never torch.
"""
