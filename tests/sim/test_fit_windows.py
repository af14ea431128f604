"""Tables of windows, fitted to one set of co-serving replays, price the launches of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.fit.errors import errors_of
from sim.fit.fit_tables import fit_observed
from sim.fit.recorded_shapes import Windowed
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.profile import FITTED, HELD_OUT, _replayed
from tandem.wiring.run_spec import run_spec_of

WORDS = ["model=micro_llama", "device=cpu", "arrival=poisson", "limit=24", "backend=sim"]
WORDS += ["training=finetune", "training.sequence_tokens=256", "training.data.mean_tokens=96"]


MODES = ("policy=coserve", "planner.modes=[recompute,keep]")
CASES = {  # settings of what is fitted, and of what is priced
    "coserve": (("policy=coserve",), ("policy=coserve",)),
    "slo": (("policy=coserve_slo",), ("policy=coserve_slo",)),
    # One layer computes again, one does not: fitted to launches of one, judged on those of both.
    "modes": (MODES, (*MODES, "scheduling.backward_layers=2")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fitted", "priced"), CASES.values(), ids=CASES)
def test_windows_of_unseen_replays_are_priced(
    fitted: tuple[str, ...], priced: tuple[str, ...], tmp_path: Path
) -> None:
    point = composed([*WORDS, *fitted])
    for name, words, seeds in ((FITTED, fitted, (1, 2, 3)), (HELD_OUT, priced, (11,))):
        for seed in seeds:
            rate = 4 * seed % 11 + 4
            config = composed([*WORDS, *words, f"seed={seed}", f"arrival.rate={rate}"])
            run_experiment(config, tmp_path / f"{name}-{seed}")
    setting = run_spec_of(point)
    spec, page = setting.spec, setting.page
    seen, unseen = [_replayed(tmp_path, name, spec) for name in (FITTED, HELD_OUT)]
    assert len([shape for shape, _ in unseen if isinstance(shape, Windowed)]) > 20
    frame = errors_of(fit_observed(seen, spec, page, "a test"), unseen)
    # Simulated durations have no noise: what is left is interpolation between nodes that lie a
    # fourth of a doubling apart, 0.9 % of a part that grows as the square of tokens.
    for group in ("window forward", "window forward beside requests", "window backward"):
        assert frame.loc[group, "mape"] < 0.01, group
        assert abs(frame.loc[group, "total"]) < 0.002, group
    assert frame.loc["update compute", "mape"] < 1e-3
