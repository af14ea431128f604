"""Planners: how the states of a training job are laid out before its first step.

One file per named planner; `placement` holds what they share. They may import engine.contract,
models, traces and, for errors and shares of memory, policies.training.
"""
