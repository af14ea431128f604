"""Executors: they run launches on the lanes of a machine and report their spans.

`machine` is the protocol of all machines; `joined_machines` makes one machine of several.
`lockstep` keeps a virtual clock, `wall` and `cuda` a real one over `streams` and `clock`.
May import engine.contract, runtime.serving, runtime.training and runtime.measure.
"""
