"""The front door: the command line (`cli`), configurations (`config`), runs built from them
(`wiring`) and many runs at once (`sweeps`). It alone imports both sim and runtime, and hydra. It
may import every other package; no other package imports it. torch is imported inside functions, so
that `tandem --help` and simulations start without it."""

__version__ = "0.1.0"
