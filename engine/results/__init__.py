"""The tables of a run: their schema, the recorder of facts, the tables made of them, plan logs.

One schema serves simulation and measurement. May import contract and traces.
"""
