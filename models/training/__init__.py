"""What a training job computes and keeps: bytes per unit of the model, by arithmetic.

`shape` is the entry: parameters, saved activations and workspaces of each unit of a job. `tape`
follows the storages of one unit through its forward and backward, `tape_operators` says what each
operator of torch allocates and saves, and `tape_layers` writes down the layers of Hugging Face with
these operators. May import the modules of `models` and `traces`; never torch.
"""
