"""The trace on disk: it comes back as written, other files are refused, and files have hashes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces.serving.request import Request
from traces.store import (
    COLUMNS,
    content_hash,
    read_sidecar,
    read_trace,
    sha256_of,
    sidecar_path,
    write_trace,
)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    made = []
    for request_id in range(draw(st.integers(0, 5))):
        ids = draw(st.none() | st.lists(st.integers(0, 200_000), min_size=1, max_size=4))
        blocks = draw(st.none() | st.lists(st.integers(0, 2**60), max_size=1))
        made.append(
            Request(
                request_id=request_id,
                arrival_ns=draw(st.integers(0, 2**62)),
                prompt_tokens=len(ids) if ids else draw(st.integers(1, 2**31 - 1)),
                output_tokens=draw(st.integers(1, 2**31 - 1)),
                session=draw(st.none() | st.integers(0, 2**40)),
                turn=draw(st.integers(0, 1000)),
                think_ns=draw(st.integers(0, 2**62)),
                slo=draw(st.text(st.sampled_from('a 0\n\0"\\\U0001f642é中'), max_size=5)),
                prompt_ids=tuple(ids) if ids else None,
                prefix_ids=None if blocks is None else tuple(blocks),
                prefix_block_tokens=0 if blocks is None else draw(st.integers(1, 2**20)),
                tenant=draw(st.sampled_from(["", "a b", "é\n"])),
                adapter=draw(st.sampled_from(["", "one"])),
            )
        )
    return made


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=requests())
def test_a_trace_comes_back_as_written(tmp_path: Path, made: list[Request]) -> None:
    path = tmp_path / "a.parquet"
    sidecar = write_trace(path, made, {"rule": "none"})
    assert read_trace(path) == made
    assert read_sidecar(path) == sidecar and sidecar["requests"] == len(made)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "a.parquet.json"]


def test_equal_requests_give_equal_bytes(tmp_path: Path) -> None:
    made = [Request(i, i, 3, 4, prompt_ids=(1, 2, 3)) for i in range(50)]
    for name in ("a", "b"):
        write_trace(tmp_path / f"{name}.parquet", made, {})
    assert sha256_of(tmp_path / "a.parquet") == sha256_of(tmp_path / "b.parquet")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    write_trace(path, [Request(0, 0, 3, 4), Request(1, 5, 3, 4)], {})
    return path


def rewritten(trace: Path, table: pa.Table) -> None:
    """Another table under the name of the trace, with a sidecar of its bytes."""
    pq.write_table(table, trace)
    sidecar = json.loads(sidecar_path(trace).read_text())
    sidecar_path(trace).write_text(json.dumps({**sidecar, "trace_sha256": sha256_of(trace)}))


def expect(trace: Path, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        read_trace(trace)
    assert "trace.parquet" in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_trace_is_refused(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes() + b" ")
    expect(trace, "its bytes are not those")


def test_a_trace_of_the_schema_before_prefixes_is_refused_in_one_line(trace: Path) -> None:
    sidecar = json.loads(sidecar_path(trace).read_text())
    sidecar_path(trace).write_text(json.dumps({**sidecar, "schema_version": 1}))
    expect(trace, "schema version 1, this Tandem reads 3; import again")


def test_a_trace_of_the_schema_before_tenants_is_read_without_them(trace: Path) -> None:
    before = read_trace(trace)
    rewritten(trace, pq.read_table(trace).drop_columns(["tenant", "adapter"]))
    expect(trace, "no column tenant, adapter")
    sidecar = json.loads(sidecar_path(trace).read_text())
    sidecar_path(trace).write_text(json.dumps({**sidecar, "schema_version": 2}))
    assert read_trace(trace) == before
    rewritten(trace, pq.read_table(trace).drop_columns(["slo"]))
    expect(trace, "no column slo")


def test_prefix_blocks_fit_the_prompt() -> None:
    whole = Request(0, 0, 1024, 1, prefix_ids=(4, 5), prefix_block_tokens=512)
    assert whole.prefix_ids == (4, 5)
    assert Request(0, 0, 1025, 1, prefix_ids=(4, 5, 6), prefix_block_tokens=512).prefix_ids
    with pytest.raises(ValueError, match="3 prefix blocks of 512 tokens are more than its 1024"):
        Request(0, 0, 1024, 1, prefix_ids=(4, 5, 6), prefix_block_tokens=512)


def test_an_absent_trace_or_sidecar_is_refused(trace: Path) -> None:
    sidecar_path(trace).unlink()
    expect(trace, "sidecar trace.parquet.json is missing")
    trace.unlink()
    expect(trace, "no such trace")


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', "{}"])
def test_a_strange_sidecar_is_refused(trace: Path, text: str) -> None:
    sidecar_path(trace).write_text(text)
    expect(trace, "not JSON" if text == "{" else "schema version")


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_named(trace: Path, column: str) -> None:
    rewritten(trace, pq.read_table(trace).drop_columns([column]))
    expect(trace, f"no column {column}")


@pytest.mark.parametrize(
    ("column", "values", "what"),
    [
        ("prompt_tokens", [3, -1], "request 1: prompt_tokens must be at least 1"),
        ("output_tokens", [0, 4], "request 0: output_tokens must be at least 1"),
        ("arrival_ns", [0, -5], "request 1: arrival_ns must be at least 0"),
        ("request_id", [0, 0], "request_id 0 occurs twice, in rows 1 and 2;"),
        ("request_id", [0, -1], "request -1: request_id must be at least 0"),
        ("turn", [0, None], "column turn has empty cells"),
        ("prompt_tokens", ["a", "b"], "column prompt_tokens holds"),
        ("prompt_ids", [[1], None], "request 0: 1 prompt ids, but prompt_tokens is 3"),
        ("prefix_ids", [None, [7]], "request 1: prefix_ids need prefix_block_tokens"),
    ],
)
def test_a_wrong_value_is_named(trace: Path, column: str, values: list[object], what: str) -> None:
    table = pq.read_table(trace)
    at = table.column_names.index(column)
    own_type = table.schema.field(column).type
    column_type = pa.string() if values == ["a", "b"] else own_type
    rewritten(trace, table.set_column(at, column, pa.array(values, column_type)))
    expect(trace, what)


def test_a_file_that_is_no_parquet_is_named(trace: Path) -> None:
    trace.write_bytes(b"not parquet")
    sidecar = json.loads(sidecar_path(trace).read_text())
    sidecar_path(trace).write_text(json.dumps({**sidecar, "trace_sha256": sha256_of(trace)}))
    expect(trace, "not a readable .parquet")


def test_a_failed_write_leaves_the_old_trace(trace: Path) -> None:
    before = read_trace(trace)
    with pytest.raises(TypeError):
        write_trace(trace, before, {"not JSON": object()})
    assert read_trace(trace) == before
    assert sorted(p.name for p in trace.parent.iterdir()) == ["trace.parquet", "trace.parquet.json"]


def test_replay_imports_no_tokenizer_and_no_torch(trace: Path) -> None:
    code = (
        "import sys; from traces.store import read_trace; from traces.serving.arrivals import *;"
        "assign(read_trace(sys.argv[1]), Poisson(rate=2).times_ns(2));"
        "print(*sorted({'torch', 'transformers', 'datasets', 'tokenizers'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(trace)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "\n"


def test_a_files_hash_is_that_of_its_bytes_also_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for text in (b"one", b"three"):
        path.write_bytes(text)
        assert content_hash(path) == hashlib.sha256(text).hexdigest()


def test_a_change_of_equal_length_shows_by_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    before = content_hash(path)
    path.write_text("two")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert content_hash(path) != before


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("one")
    before = content_hash(tmp_path)
    monkeypatch.setattr("traces.store.sha256_of", lambda path: pytest.fail(f"{path} read again"))
    assert content_hash(tmp_path) == before


def test_a_folder_changes_with_its_files_their_names_and_their_number(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("one")
    seen = [content_hash(folder)]
    (folder / "b").write_text("two")
    seen.append(content_hash(folder))
    (folder / "b").rename(folder / "c")
    seen.append(content_hash(folder))
    assert len(set(seen)) == 3
    assert content_hash(tmp_path / "nothing") == "missing"
