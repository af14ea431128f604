"""The tables of a run: their schema, the recorder that fills them, and the log of plans.

One schema serves simulation and measurement. May import contract and traces.
"""
