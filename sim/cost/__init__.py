"""Cost models: the seam (`contract`), a profile's tables (`tables`), the roofline (`roofline`).

Training launches have shapes (`training_launch`) and operators (`training_operators`) of their own.
`piecewise` holds the interpolated tables, `scaled` costs with other durations. May import
engine.contract, models, traces and sim.devices; never torch.
"""
