"""Hydra groups: one folder per group, one yaml per choice, whose first comment `tandem list`
prints. `config.yaml` holds the defaults and names every setting. It is a package so that pkg://conf
finds the files when installed; it holds no code and imports nothing."""
