"""Hardware in numbers: one device, a group of devices, and room for KV pages.

May import engine.contract and models; never torch, and nothing else of sim.
"""
