"""Reading text to train on: every row, of any content, becomes a document or a named reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.strategies import cases
from traces.training.texts import Texts, read_texts

GOOD = {"text": "one two", "title": "x"}
AWKWARD: list[tuple[Any, str | None]] = [
    (GOOD, None),
    ({"text": " with space \n"}, None),
    ({"text": "é 中 🙂 \u2028 \x0b"}, None),
    ("a bare text", None),
    ({"text": ""}, "empty text"),
    ({"text": " \n\t"}, "empty text"),
    ({"title": "x"}, "no text field"),
    ({"text": None}, "no text field"),
    ({"text": 17}, "text is not text"),
    ({"text": ["a"]}, "text is not text"),
    ({"text": {"a": "b"}}, "text is not text"),
    ({"text": True}, "text is not text"),
    ({"text": "x" * 101}, "text longer than 100 characters"),
    ({"text": "half \ud83d pair"}, "text is not valid Unicode"),
    (17, "row is not an object"),
    (None, "row is not an object"),
    ([GOOD], "row is not an object"),
]


def written(path: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def documents(texts: Texts) -> list[str]:
    assert texts.rows_read == len(texts.documents) + texts.dropped.total()
    return [text for _, text in texts.documents]


def in_json(rows: list[Any], suffix: str) -> str:
    return "\n".join(map(json.dumps, rows)) if "jsonl" in suffix else json.dumps(rows)


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".jsonl", ".jsonl.gz"])
def test_a_file_full_of_faults_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    rows = [row for row, _ in AWKWARD]
    path = written(tmp_path / f"a{suffix}", in_json(rows, suffix))
    texts = read_texts(path, max_chars=100)
    kept = [row for row, reason in AWKWARD if reason is None]
    assert documents(texts) == [row if isinstance(row, str) else row["text"] for row in kept]
    for reason in {reason for _, reason in AWKWARD if reason}:
        numbers = [n for n, (_, why) in enumerate(AWKWARD, start=1) if why == reason]
        assert texts.dropped[reason] == len(numbers) and texts.named[reason] == numbers


@pytest.mark.parametrize(
    "rows",
    [
        [GOOD, {"text": ""}, {"title": "y"}],
        [GOOD, {"text": None}],
        [{"text": "2020-01-01"}, {"text": "2021-02-03"}],
        [{"text": "17"}, {"text": "1.50"}, {"text": "true"}],
        [{"text": 17}, {"text": 18}],
        [{"text": "a", "extra": {"a": 1}}, {"text": "b", "extra": "c"}],
        ["a text", "2020-01-01", "and another"],
        ["a text", {"text": "b"}],
        [None, {"text": "a"}],
        [{}, {"text": "a", "n": [None, None]}],
        [{"text": "a"}, None, "b"],
        [{"text": "a\r\nb\rc\u2028d\x85e\x0bf\0g"}],
        [{"text": "whole \U0001f642 pair"}],
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_datasets_changes_no_text(tmp_path: Path, rows: list[Any], suffix: str) -> None:
    path = written(tmp_path / f"a{suffix}", in_json(rows, suffix))
    texts = [row.get("text") if isinstance(row, dict) else row for row in rows]
    found = read_texts(path)
    assert documents(found) == [t for t in texts if isinstance(t, str) and t]
    assert found.rows_read == len(rows)


def test_a_good_file_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[Any]:
        raise AssertionError(f"{path} was read as plain JSON")

    monkeypatch.setattr("traces.training.texts.plain_rows", refuse)
    for name, text in (("a.json", json.dumps([GOOD])), ("b.jsonl", json.dumps(GOOD))):
        assert documents(read_texts(written(tmp_path / name, text))) == ["one two"]


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "data [v2]"
    folder.mkdir()
    for name in ("a*.jsonl", "a?.txt", "[b].parquet"):
        path = folder / name
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"text": ["one two"]}), path)
        else:
            written(path, "one two" if path.suffix == ".txt" else json.dumps(GOOD))
        assert documents(read_texts(path)) == ["one two"]


def test_a_spoilt_line_costs_only_itself(tmp_path: Path) -> None:
    lines = [json.dumps(GOOD), '{"text": "b', "", json.dumps(GOOD)]
    texts = read_texts(written(tmp_path / "a.jsonl", "\n".join(lines)))
    assert documents(texts) == ["one two"] * 2 and dict(texts.dropped) == {"line is not JSON": 1}


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    rows = [{"content": "a", "text": "b"}, {"content": 3}, {"text": "c"}]
    for suffix in (".json", ".jsonl"):
        texts = read_texts(written(tmp_path / f"a{suffix}", in_json(rows, suffix)), "content")
        assert documents(texts) == ["a"]
        assert dict(texts.dropped) == {"content is not text": 1, "no content field": 1}


def test_a_missing_field_is_named_with_the_fields_of_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"title": ["a"], "body": ["b"]}), tmp_path / "a.parquet")
    written(tmp_path / "a.jsonl", '{"title": "a", "body": "b"}')
    written(tmp_path / "a.json", '[{"title": "a", "body": "b"}]')
    for suffix in (".parquet", ".jsonl", ".json"):
        with pytest.raises(ValueError, match="no field text; it has title, body") as caught:
            read_texts(tmp_path / f"a{suffix}")
        assert "\n" not in str(caught.value) and f"a{suffix}" in str(caught.value)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_is_read_with_its_empty_cells(tmp_path: Path, kind: pa.DataType) -> None:
    cells = ["one", None, "", " two é\n", "2020-01-01"]
    table = pa.table({"n": range(5), "text": pa.array(cells, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    texts = read_texts(tmp_path / "a.parquet")
    assert documents(texts) == ["one", " two é\n", "2020-01-01"]
    assert dict(texts.dropped) == {"no text field": 1, "empty text": 1}
    assert texts.named == {"no text field": [2], "empty text": [3]}


def test_a_column_of_something_else_is_dropped_by_name(tmp_path: Path) -> None:
    for column in ([1, 2], [b"a", b"b"], [["a"], ["b"]], [1.5, None]):
        pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        texts = read_texts(tmp_path / "a.parquet")
        assert not texts.documents and texts.dropped["text is not text"] >= 1
        assert texts.dropped.total() == texts.rows_read == 2


PLAIN = "first line\n\n  second\tline\nthird é\u2028line\r\n\n\nlast"


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_plain_text_is_split_by_line_paragraph_or_document(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"a{suffix}", PLAIN)
    lines = read_texts(path)
    told = PLAIN.replace("\r\n", "\n")
    assert documents(lines) == [line for line in told.split("\n") if line]
    assert dict(lines.dropped) == {"empty text": 3} and lines.named == {"empty text": [2, 5, 6]}
    paragraphs = [p for p in told.split("\n\n") if p.strip()]
    assert documents(read_texts(path, sample_by="paragraph")) == paragraphs
    assert documents(read_texts(path, sample_by="document")) == [told]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "one"), ("a.jsonl", '{"text": "one"}')):
        path = written(tmp_path / name, b"\xef\xbb\xbf" + text.encode())
        assert documents(read_texts(path)) == ["one"]


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("latin.txt", "é".encode("latin-1"), "not a readable .txt file"),
        ("latin.json", '["é"]'.encode("latin-1"), "not UTF-8 at byte 2"),
        ("cut.json", b'[{"text": "a"},\n {"te', "not JSON at line 2"),
        ("word.json", b"hello", "not JSON at line 1"),
        ("object.jsonl", b"{\n]}", "not JSON at line 2"),
        ("no.parquet", b"no parquet", "not a readable .parquet file"),
        ("empty.parquet", b"", "not a readable .parquet file"),
        ("a.csv", b"text\na\n", "text is read from"),
        ("a.pdf", b"%PDF", "text is read from"),
    ],
)
def test_an_unreadable_file_is_one_line(tmp_path: Path, name: str, data: bytes, what: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=what) as caught:
        read_texts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.txt.gz"])
def test_a_torn_gzip_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(json.dumps([GOOD] * 1000).encode())[:60])
    with pytest.raises(ValueError) as caught:
        read_texts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a.txt.gz", "a.jsonl.gz"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert read_texts(written(tmp_path / name, b"")).rows_read == 0


def test_an_empty_table_has_no_rows_and_an_empty_row_group_stops_nothing(tmp_path: Path) -> None:
    path, table = tmp_path / "a.parquet", pa.table({"text": ["one two"]})
    for parts, kept in (([0], []), ([0, 1], ["one two"]), ([1, 0, 1], ["one two"] * 2)):
        with pq.ParquetWriter(path, table.schema) as writer:
            for rows in parts:
                writer.write_table(table.slice(0, rows))
        assert pq.read_metadata(path).num_row_groups == len(parts)
        assert documents(read_texts(path)) == kept


def test_absent_and_remote_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path, "https://huggingface.co/a.json", "wikitext"):
        why = "that is a folder; name a file in it" if path == tmp_path else "no such file"
        with pytest.raises(ValueError, match=f"{why}; give a local"):
            read_texts(path)


def test_a_limit_stops_and_is_accounted(tmp_path: Path) -> None:
    rows = [GOOD, {"text": ""}, GOOD, GOOD, {"text": ""}]
    texts = read_texts(written(tmp_path / "a.json", json.dumps(rows)), limit=2)
    assert len(documents(texts)) == 2
    assert dict(texts.dropped) == {"empty text": 2, "beyond the limit of 2 documents": 1}


characters = st.text(st.sampled_from('a 0\n\r\t"\\é中\U0001f642\u2028\x85\x0b\x1c'), max_size=9)


@cases(30)
@given(texts=st.lists(characters, max_size=6))
def test_texts_are_read_as_written(tmp_path: Path, texts: list[str]) -> None:
    """Text of any characters, by each reader, against the text that Python wrote."""
    kept = [text for text in texts if text.strip()]
    lines = written(tmp_path / "a.jsonl", in_json([{"text": text} for text in texts], "jsonl"))
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), tmp_path / "a.parquet")
    for path in (lines, tmp_path / "a.parquet"):
        assert documents(read_texts(path)) == kept
    plain = "\n".join(texts)
    rows = written(tmp_path / "a.txt", plain)
    told = plain.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # universal newlines
    assert documents(read_texts(rows)) == [line for line in told if line.strip()]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | characters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(characters, inner, max_size=3),
    max_leaves=6,
)
near_rows = st.fixed_dictionaries({}, optional={"text": characters | json_values, "n": json_values})


@cases(60)
@given(rows=st.lists(near_rows | json_values, max_size=5), is_list=st.booleans())
def test_any_json_is_kept_or_named(tmp_path: Path, rows: list[Any], is_list: bool) -> None:
    assume(is_list or not rows or not isinstance(rows[0], list))  # its first line is a whole file
    suffix = ".json" if is_list else ".jsonl"
    path = written(tmp_path / f"a{suffix}", in_json(rows, suffix))
    try:
        texts = read_texts(path)
    except ValueError as error:  # no row has a text
        assert "\n" not in str(error)
        assert not any("text" in row for row in rows if isinstance(row, dict))
        return
    found = [row.get("text") if isinstance(row, dict) else row for row in rows]
    assert documents(texts) == [text for text in found if isinstance(text, str) and text.strip()]
    assert texts.rows_read == len(rows)


def test_rows_that_are_no_objects_hide_no_others(tmp_path: Path) -> None:
    """In a list. A first line that begins with [ makes the whole file one list."""
    path = written(tmp_path / "a.json", json.dumps([[], {"text": "a"}, {"text": "b"}]))
    assert documents(read_texts(path)) == ["a", "b"]


def test_real_files_read_whole(shared: Path) -> None:
    folder = shared / "data" / "finetune"
    for name, text_field, rows in (
        ("alpaca_en_demo.json.gz", "output", 999),
        ("c4_demo.jsonl.gz", "text", 300),
        ("wiki_demo.txt.gz", "text", 30),
    ):
        texts = read_texts(folder / name, text_field)
        assert texts.rows_read == rows == len(documents(texts)) + texts.dropped.total(), name
        assert set(texts.dropped) <= {"empty text"}
