"""Serving and training at once on one device.

A policy of this folder divides time and memory between a serving and a training policy, which it
is given. It may import engine.contract and policies.training.
"""
