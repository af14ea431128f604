"""The benchmark of training on a GPU, run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.gpu import gpu_training


@pytest.mark.slow
def test_rates_are_of_all_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a policy and of the plain loop count every microbatch."""
    monkeypatch.setattr(gpu_training, "LINK_BYTES", 1 << 20)
    out = tmp_path / "rows.csv"
    tiny = "--backend cpu --device cpu --model micro_llama --budget 40000000 --host 100000000"
    shape = "--sequences 2 --tokens 16 --steps 3 --policies zero_offload --words"
    gpu_training.main([*f"{tiny} --out {out} {shape}".split(), "training.microbatches=3"])
    rows = pd.read_csv(out)
    assert list(rows["system"]) == ["zero_offload", "plain loop"]
    for row in rows.itertuples():
        assert row.tokens_per_s * row.step_s == pytest.approx(2 * 16 * 3)
