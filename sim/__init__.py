"""Time by model: replays whose durations come from a cost model on a simulated clock.

`executor` is the engine's Executor over SimPy; cost/ predicts durations, devices/ describes
hardware, fit/ fits cost tables to recorded steps, foreign/ reads cost tables of other projects.
May import engine.contract, engine.results.plan_log, models and traces; never torch, nor the loop
whose executor it is.
"""
