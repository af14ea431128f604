"""One run from its configuration: its parts without a backend (`run_spec.py`), its memory
(`budget.py`), requests (`workload.py`), training (`training.py`) and costs (`cost.py`), then its
backend (`backends.py`, `machines.py`, `openai.py`), its folder (`folder.py`) and the run itself
(`experiment.py`); and profiles, which are made of many runs (`profile.py`). A module here may
import every package, `tandem.config`, `tandem.compiled` (which form a run has) and
`tandem.__version__`, and of `tandem.cli` only `errors.py` and `terminal.py`."""
