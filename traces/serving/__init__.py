"""Requests to serve: how they are read, when they arrive, and how sessions order them.

`request` is the type that every layer knows. `sharegpt`, `rules` and `selection` make requests of
conversations, `lengths` of token counts, `published` with `recorded`, `mooncake` and `servegen` of
recorded traces. `arrivals` and `sessions` give them times. May import the modules of `traces`, and
of `traces.training` only `recipe.py`; no other package of ours.
"""
