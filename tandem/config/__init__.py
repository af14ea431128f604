"""Configurations: composed by Hydra (`compose.py`) and kept as plain values (`composed_config.py`),
refused where a user's yaml oversteps (`outside.py`), checked key by key (`check.py`, `slo.py`), and
followed to classes (`build.py`), also under names of earlier versions (`renamed.py`). A module here
may import models, analysis and conf, and of `tandem.cli` only `errors.py`: it knows no backend and
no run."""
