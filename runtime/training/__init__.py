"""The real work of training: a model's units forward and backward, and the updates of its chunks.

`machine` carries launches out by a `trainer` per job. `store` holds the memory of regions as the
plan places it; `model_states`, `activations` and `saved` lay a job's tensors into it. `checkpoint`
writes its states and reads them again. May import engine.contract, models, traces.training,
traces.files, runtime.executors.machine, and of `runtime.serving` only `model.py` and `kv.py` (its
arenas).
"""
