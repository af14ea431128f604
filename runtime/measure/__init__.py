"""Measurement of machines: memory, speed, and calibration profiles.

`meter` and `tracker` read memory. `reference` times fixed work: the drift probe and the pace of a
clock. `driver` launches the synthetic launches of `shapes`, and `calibrate` writes their spans as
a profile. `unit_profile` measures the units of a model that trains, alone. May import
engine.contract, models, traces, runtime.serving, runtime.training, of
`runtime.executors` only `machine.py` (the protocol) and, in `calibrate`, engine.results.
"""
