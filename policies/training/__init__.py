"""Training: the order of its tasks, and memory policies that offload states and activations.

One file per named policy. `cycle` knows the launches of a step; `eviction`, `occupancy` and
`residency` bring what a launch uses to its tier; `streaming` is shared by policies that prefetch in
the order of use; `out_of_memory` holds the errors and their remedies. They may import
engine.contract and traces.
"""
