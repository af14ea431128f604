"""Many runs at once: the points of a grid (`grid.py`), what identifies the result of a point
(`point.py`), and where points run: in processes (`workers.py`), on Ray or Slurm (`engines.py`). A
module here may import traces, analysis, `tandem.config` and `tandem.wiring`, and of `tandem.cli`
only `errors.py`, `catalog.py` and the set-up of warnings in `__main__.py`."""
