"""Measurement of machines: memory, speed, and calibration profiles.

`meter` and `tracker` read memory. `reference` times fixed work: the drift probe and the pace of a
clock. `driver` launches the synthetic launches of `shapes`, and `calibrate` writes their spans as
a profile. Imports engine, models, traces and runtime's machines.
"""
