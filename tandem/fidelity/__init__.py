"""How far predictions are from measurements, measured: calibration, judged runs and predictions in
turns (`protocol.py`). A module here may import analysis, `tandem.config` and `tandem.wiring`, of
`tandem.sweeps` only `point.py` for the hash of a point, and of `tandem.cli` only `errors.py` and
`compare.py`, whose replay it uses."""
