"""Tables that are made column by column hold the rows that are defined one by one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.results import recorder as recording
from engine.results import schema
from engine.results.plan_log import PlanTexts
from engine.results.recorder import Recorder
from engine.results.schema import TABLES, files_of, read_table, write_tables
from engine.results.tables import ROW_ORDER, memory_row, step_row, table_of
from models.spec import ModelSpec
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of
from tests.models.test_workspace import SPECS
from tests.support.jumps import Shaped, simulated
from tests.support.strategies import cases, room, sessions, traces
from traces.serving.request import Request

POLICIES = {
    "chunked": Composed(ChunkedPrefill(64, 8), PagedRestart()),
    "swap": Composed(ChunkedPrefill(48, 8), PagedSwap()),
    "continuous": Composed(ContinuousBatching(8), PagedRestart()),
}
TRAINING = ("training=random", "training.sequence_tokens=16", "training.num_steps=2")


def by_rows(recorder: Recorder) -> dict[str, Any]:
    """Tables as they are defined: row by row, in order."""
    runs = recorder._facts.runs
    memory = [*recorder._facts.memory, *(row for run in runs for row in run.memory_rows())]
    memory.sort(key=lambda row: (row[0], ROW_ORDER.index(row[1]), row[2]))
    plans = [
        (s, d, at, list(back), *PlanTexts().plan(plan)) for s, d, at, back, plan in recorder.plans
    ]
    return {
        "steps": table_of("steps", [step_row(*row) for row in recorder.steps]),
        "memory": table_of("memory", [memory_row(row, f) for row in memory for f in row[3]]),
        "plans": table_of("plans", plans),
    }


def check(recorder: Recorder) -> None:
    tables = recorder.tables()
    for name, table in by_rows(recorder).items():
        assert tables[name].equals(table), name
    for outcome, row in zip(
        [o for _, o in sorted(recorder.outcomes.items())],
        tables["requests"].to_pylist(),
        strict=True,
    ):
        assert row["token_ns"] == outcome.token_ns
        assert row["first_token_ns"] == outcome.first_token_ns
        assert row["output_tokens"] == outcome.tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fast_forward", [True, False])
@given(
    requests=st.one_of(traces(12, 60), sessions()),
    host_ns=st.sampled_from([0, 900]),
    **room(200),
)
@cases(20)
def test_columns_hold_the_rows_that_are_defined(
    policy: str, fast_forward: bool, requests: list[Request], host_ns: int, **setting: Any
) -> None:
    run = simulated(POLICIES[policy], requests, fast_forward, Shaped(host_ns), **setting)
    check(run.recorder)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fast_forward", [True, False])
@given(
    requests=st.one_of(traces(12, 60), sessions()),
    host_ns=st.sampled_from([0, 900]),
    steps=st.integers(0, 20),
    **room(200),
)
@cases(20)
def test_rows_that_are_written_while_a_run_goes_on_are_those_of_its_end(
    policy: str,
    fast_forward: bool,
    requests: list[Request],
    host_ns: int,
    steps: int,
    **setting: Any,
) -> None:
    """In whichever groups: the files are equal to the byte, and a request keeps its tokens."""
    words = (POLICIES[policy], requests, fast_forward, Shaped(host_ns))
    whole = simulated(*words, **setting).recorder
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "STEPS", steps)
        patch.setattr(recording, "REQUESTS", 1 + steps % 3)
        patch.setattr(schema, "GROUP", dict.fromkeys(TABLES, 1 + 2 * steps))
        found, at = Recorder(), Path(folder)
        with files_of(at, found.schemas) as files:
            found.stream(files, [request.request_id for request in requests])
            simulated(*words, **setting, recorder=found)
            found.finish()
        tokens = {i: outcome.tokens for i, outcome in whole.outcomes.items()}
        assert {i: outcome.tokens for i, outcome in found.outcomes.items()} == tokens
        (at / "whole").mkdir()
        for name, table in whole.tables().items():
            written = read_table(at / f"{name}.parquet")
            assert written.to_pylist() == table.to_pylist(), name
            write_tables(at / "whole", {name: table})
            files = [path / f"{name}.parquet" for path in (at, at / "whole")]
            assert files[0].read_bytes() == files[1].read_bytes()


def test_a_recorder_of_requests_keeps_no_steps(tmp_path: Path) -> None:
    requests = [Request(i, i * 9_000_000, 30 + i, 20) for i in range(6)]
    words = (POLICIES["chunked"], requests, True, Shaped(0), 90, 0, 2)
    whole, few = simulated(*words).recorder, Recorder(keeps_steps=False)
    simulated(*words, recorder=few)
    assert few.tables().keys() == {"requests", "training"}
    assert few.tables()["requests"].equals(whole.tables()["requests"])
    few.write(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == [
        "requests.parquet",
        "training.parquet",
    ]


@pytest.mark.parametrize("has_served_peaks", [True, False])
def test_workspace_is_measured_or_predicted_or_unknown(has_served_peaks: bool) -> None:
    requests = [Request(i, i * 9_000_000, 30 + i, 20) for i in range(6)]
    recorder = simulated(POLICIES["chunked"], requests, True, Shaped(0), 90, 0, 2).recorder
    if not has_served_peaks:
        recorder.predicted_peaks = None
    check(recorder)
    step, issue_ns, host_ns, span, launch = recorder._facts.steps[0]
    recorder._facts.steps[0] = (step, issue_ns, host_ns, span._replace(peak_bytes=123), launch)
    check(recorder)
    assert 123 in recorder.tables()["steps"]["peak_bytes"].to_pylist()
    recorder.predicted_bytes = recorder.predicted_peaks = None
    check(recorder)
    assert (
        recorder.tables()["steps"]["peak_bytes"].null_count
        == recorder.tables()["steps"].num_rows - 1
    )


@pytest.mark.parametrize(
    "words",
    [
        (*TRAINING, "policy=time_shared", "limit=3"),
        (*TRAINING, "policy=zero3_offload", "trace=none"),
        ("replicas=2", "router=round_robin", "limit=20"),
    ],
    ids=["time_shared", "zero3_offload", "replicas"],
)
def test_copies_training_and_replicas_keep_their_places(words: tuple[str, ...]) -> None:
    spec = run_spec_of(composed(["model=micro_llama", *words]))
    with backend_of(spec, composed(["backend=sim"]).config["backend"]) as backend:
        engine = engine_of(spec, backend)
        engine.replay(spec.work)
    check(engine.recorder)


def test_a_run_of_nothing_has_tables() -> None:
    recorder = Recorder()
    assert {name: table.num_rows for name, table in recorder.tables().items()} == dict.fromkeys(
        ("requests", "steps", "memory", "plans", "training"), 0
    )


@pytest.mark.parametrize("name", SPECS)
@given(st.data())
@cases(60)
def test_the_workspace_of_many_launches_is_that_of_each(name: str, data: st.DataObject) -> None:
    spec: ModelSpec = SPECS[name]
    slices = st.tuples(
        st.one_of(st.just(1), st.integers(1, 600)), st.one_of(st.just(0), st.integers(0, 5_000))
    )
    shapes = data.draw(st.lists(st.lists(slices, min_size=1, max_size=40), max_size=8))
    page_tokens = data.draw(st.sampled_from([1, 16, 128]))
    samples = [data.draw(st.integers(0, len(shape))) for shape in shapes]
    starts = np.cumsum([0, *map(len, shapes)])
    tokens, contexts = (
        np.array([s[i] for shape in shapes for s in shape], np.int64) for i in range(2)
    )
    found = spec.workspaces_bytes(tokens, contexts, starts, np.array(samples), page_tokens)
    each = [
        spec.workspace_bytes(tokens[a:b].tolist(), contexts[a:b].tolist(), count, page_tokens)
        for (a, b), count in zip(pairwise(starts), samples, strict=True)
    ]
    assert found.tolist() == each


def test_a_recorder_of_requests_writes_them_while_the_run_goes_on(tmp_path: Path) -> None:
    requests = [Request(i, i * 9_000_000, 30 + i, 20) for i in range(30)]
    words = (POLICIES["chunked"], requests, True, Shaped(0), 90, 0, 2)
    whole, found = simulated(*words).recorder, Recorder(keeps_steps=False)
    with pytest.MonkeyPatch.context() as patch, files_of(tmp_path, found.schemas) as files:
        patch.setattr(recording, "STEPS", 10)
        patch.setattr(recording, "REQUESTS", 1)
        found.stream(files, [request.request_id for request in requests])
        simulated(*words, recorder=found)
        assert sum(not outcome.stretches for outcome in found.outcomes.values()) > 10, "written"
        found.finish()
    assert read_table(tmp_path / "requests.parquet").equals(whole.tables()["requests"])


def test_an_error_of_the_run_is_not_one_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError) as told, files_of(tmp_path, Recorder().schemas):
        raise BrokenPipeError(32, "Broken pipe")
    assert told.value.filename is None and not list(tmp_path.iterdir())


def test_lists_that_are_too_long_for_arrow_are_told() -> None:
    with pytest.raises(pa.ArrowInvalid, match="hold more than 2"):
        schema.lists(np.array([0, 1 << 31]), np.empty(0, np.int64), pa.list_(pa.int64()))
