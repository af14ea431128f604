"""Recorded traces from the command line and in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.run import load
from tandem.cli.__main__ import main
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tests.support.recorded import MS, S, mooncake
from traces.serving.request import Request
from traces.store import read_trace, write_trace


def test_the_command_line_imports_and_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(0, 1024, 5, [7, 8]), (20_000, 600, 5, [7, 9]), (21_000, 0, 5, [1])]
    source, out = mooncake(tmp_path / "a.jsonl", *rows), tmp_path / "out.parquet"
    words = ["trace", "import", str(source), "--kind", "mooncake", "--out", str(out)]
    assert main([*words, "--time-unit", "s", "--rate", "0.5"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:] == [
        "rows read 3 = kept 2 + dropped 1",
        "        1 prompt under 1 tokens (first at 3)",
    ]
    assert [r.arrival_ns for r in read_trace(out)] == [0, 2 * S]
    assert main(["trace", "export", str(out), "--out", str(tmp_path / "b.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert lines == [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
    ]
    assert main(["trace", "import", str(source), "--kind", "nokind", "--out", str(out)]) == 2


def test_a_recorded_trace_is_run_at_its_own_times(tmp_path: Path) -> None:
    rows = [(i * 500, 33 + i, 5, [0, 1, i + 2]) for i in range(10)]
    source = mooncake(tmp_path / "a.jsonl", *rows)
    chosen = ["trace=recorded", f"trace.path={source}", "backend=sim"]
    cache = f"cache={tmp_path / 'cache'}"
    run_experiment(composed([*chosen, "trace.rate=4", cache]), tmp_path / "run")
    requests = load(tmp_path / "run").requests
    assert requests["arrival_ns"].tolist() == [i * 250 * MS for i in range(10)]
    assert requests["prompt_tokens"].tolist() == list(range(33, 43))
    given = [*chosen, cache, "arrival=all_at_once"]
    run_experiment(composed(given), tmp_path / "other")
    assert set(load(tmp_path / "other").requests["arrival_ns"]) == {0}
    with pytest.raises(ValueError, match=r"trace.rate=4: the trace's times are replaced"):
        run_experiment(composed([*given, "trace.rate=4"]), tmp_path / "third")
    with pytest.raises(
        ValueError, match=r"arrival\.rate: no setting of the arrival that is chosen"
    ):
        composed([*chosen, "arrival.rate=4"])


def test_times_that_the_default_arrival_replaces_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_trace(tmp_path / "t.parquet", [Request(i, i * S, 9, 3) for i in range(4)], {})
    chosen = ["trace=file", f"trace.path={tmp_path}/t.parquet"]
    for name, word in (("keep", "arrival=trace"), ("ask", "arrival.rate=2")):
        run_experiment(composed([*chosen, word]), tmp_path / name)
    assert not caplog.messages, "the user asked for it"
    run_experiment(composed(chosen), tmp_path / "unasked")
    [told] = caplog.messages
    assert "arrival times are replaced by the default arrival=poisson; arrival=trace keeps" in told
