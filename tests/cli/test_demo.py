"""`make demo` on a trace of one's own, and the profile that it keeps from run to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tandem import demo
from tandem.config.compose import composed
from tandem.wiring import profile
from tandem.wiring.run_spec import run_spec_of

SAMPLES = Path(__file__).resolve().parents[2] / "traces" / "samples"
SETTINGS = ["experiment=demo"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trace_arguments(*words: str) -> list[str]:
    return demo._trace(demo._parser().parse_args(words))


def test_a_trace_of_ones_own_is_imported_accounted_for_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((SAMPLES / "sharegpt_sample.json").read_text(encoding="utf-8"))[:12]
    (tmp_path / "my chats.json").write_text(json.dumps([*rows, {"conversations": 7}]))
    given = ["--trace", "my chats.json", "--tokenizer", str(SAMPLES / "tokenizer")]
    words = trace_arguments(*given)
    told = capsys.readouterr().err
    assert "demo: rows read 13 = kept" in told and "dropped" in told
    setting = run_spec_of(composed([*SETTINGS, *words]))
    kept = len(setting.requests)
    assert f"limit={kept}" in words and 3 < kept < 13, "no more than there are"
    assert trace_arguments(*given, "--limit", "3")[-1] == "limit=3"


def test_how_much_is_replayed_and_what_makes_no_sense() -> None:
    assert trace_arguments() == [f"limit={demo.REQUESTS}"]
    assert trace_arguments("--short") == [f"limit={demo.SHORT}"]
    assert demo.main(["--tokenizer", "x"]) == 2


def test_a_profile_is_kept_and_measured_again_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def calibrate(point: Any, folder: Path) -> pd.DataFrame:
        folder.mkdir(parents=True)
        if len(made) == 2:
            raise KeyboardInterrupt
        (folder / profile.COST).write_text(str(len(made)))
        made.append(folder)
        totals = (0.01, 0.2)
        index = [f"{profile.AGAIN}all launches"]
        return pd.DataFrame({"total": [totals[len(made) - 1]]}, index=index)

    def stamp(form: str) -> str:
        return f"time-{len(list(Path().rglob('demo-*')))}"

    monkeypatch.setattr(profile, "calibrate", calibrate)
    monkeypatch.setattr("time.strftime", stamp)
    kept = demo._profile(SETTINGS, is_new=False)
    assert demo._profile(SETTINGS, is_new=False) == kept and len(made) == 1
    told = capsys.readouterr().err
    assert "is off by +1.0% in all" in told and "speed changes" not in told
    assert demo._profile(SETTINGS, is_new=True) == kept and len(made) == 2
    told = capsys.readouterr().err
    assert "is off by +20.0% in all" in told and "the machine's speed changes" in told
    assert (kept / profile.COST).read_text() == "1"
    [before] = kept.parent.glob("*-before")
    assert (before / profile.COST).read_text() == "0", "what was measured before stays"
    with pytest.raises(KeyboardInterrupt):
        demo._profile(SETTINGS, is_new=True)
    assert (kept / profile.COST).read_text() == "1", "one that is interrupted changes nothing"
