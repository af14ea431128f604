"""The real work of finetuning beside serving: windows of a sample forward and back.

`machine` carries launches out, those that serve and finetune at once included, by a `finetuner` per
job. `model` is the model of a job over the weights that are served, `products` says what its
layers keep, `recording` keeps it as a window runs, and `backward` differentiates a layer from it.
May import engine.contract, models, traces, runtime.serving and runtime.training, and of
`runtime.executors` only `machine.py`.
"""
