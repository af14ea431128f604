"""The real work of training: a model's units forward and backward, and the updates of its chunks.

`machine` carries launches out by a `trainer` per job. `store` holds the memory of regions as the
plan places it; `model_states`, `activations` and `saved` lay a job's tensors into it. Imports
engine.contract, models, traces.training, runtime.serving (the model and its arenas) and
runtime.executors.machine.
"""
