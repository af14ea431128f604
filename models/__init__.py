"""What is computed: decoder-only models as numbers, without a tensor.

`spec` holds the sizes of a model; `hf_config` reads them from a config.json and `by_size` makes
them of a width and a depth. `parameters` names the weights, `operators` counts the FLOPs and bytes
of a forward launch, and `workspace` counts its temporary memory. `training/` does so for a training
job. The package may import `traces` and the standard library; never torch.
"""
