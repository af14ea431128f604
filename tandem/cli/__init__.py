"""The command line: one file per verb, each with `main(words)`, found through VERBS of
`__main__.py`. Beside them lie what all verbs share: `errors.py`, the two ways in which a command
ends badly, and `terminal.py`, figures and progress bars as text. A verb may import traces, engine,
policies, sim, analysis, the modules of tandem, tandem.config, tandem.wiring, tandem.sweeps and
tandem.fidelity; never runtime, which wiring alone imports. `config`, `sweeps`, `wiring` and
`fidelity` import of this folder only `errors.py`, `terminal.py`, `catalog.py`, the replay of
`compare.py` and the set-up of warnings."""

from __future__ import annotations


def main() -> int:
    """Runs the command `tandem` with the words of the process; returns its exit status."""
    from tandem.cli.__main__ import main

    return main()
