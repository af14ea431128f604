"""Reading ShareGPT files: every row, of any content, becomes a conversation or a named reason."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import cases
from traces.plain_json import HALF_SURROGATE, plain_rows
from traces.serving.sharegpt import checked_rows, read_rows, read_sharegpt

GOOD = {
    "id": "a",
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
}


def talk(*messages: Any) -> dict[str, Any]:
    return {"id": "x", "conversations": list(messages)}


def said(role: Any = "human", value: Any = "text") -> dict[str, Any]:
    return {"from": role, "value": value}


AWKWARD: list[tuple[Any, str | None]] = [
    (GOOD, None),
    (talk(), None),
    (talk(said("gpt"), said("human")), None),
    (talk(said(value="")), None),
    (talk(said("alien")), None),
    ({"conversations": [said()]}, None),
    (17, "row is not an object"),
    (None, "row is not an object"),
    ("text", "row is not an object"),
    ({"id": "b"}, "no conversations field"),
    ({"id": "b", "conversations": None}, "no conversations field"),
    ({"id": "b", "conversations": "hello"}, "conversations is not a list"),
    (talk(said(), 5), "message is not an object"),
    (talk({"value": "x"}), "message without from"),
    (talk({"from": "human"}), "message without value"),
    (talk(said(value=None)), "message without value"),
    (talk(said(role=3)), "message from is not text"),
    (talk(said(value={"parts": []})), "message value is not text"),
    (talk(said(value=12)), "message value is not text"),
    (talk(said(value="x" * 101)), "message longer than 100 characters"),
    (talk(said(value="half \ud83d pair")), "message value is not valid Unicode"),
]


@pytest.mark.parametrize(("row", "reason"), AWKWARD)
def test_each_fault_has_its_name(row: Any, reason: str | None) -> None:
    held = checked_rows([row, GOOD], max_message_chars=100)
    assert held.rows_read == 2
    assert dict(held.dropped) == ({reason: 1} if reason else {})


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".jsonl", ".jsonl.gz"])
def test_a_file_full_of_faults_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    rows = [row for row, _ in AWKWARD]
    text = "\n".join(map(json.dumps, rows)) if "jsonl" in suffix else json.dumps(rows)
    held = read_sharegpt(written(tmp_path / f"a{suffix}", text), max_message_chars=100)
    assert held.rows_read == len(rows) == len(held.conversations) + held.dropped.total()
    assert len(held.conversations) == sum(reason is None for _, reason in AWKWARD)
    assert held.faults == {i: reason for i, (_, reason) in enumerate(AWKWARD, 1) if reason}


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(
    "rows",
    [
        [GOOD, talk(said(), said("gpt", "é 中 🙂")), talk()],
        [GOOD, talk(said(value=None)), talk({"from": "human"})],
        [talk(said(value="2020-01-01")), talk(said(value="2021-02-03"))],
        [talk(said(value="17")), talk(said(value="1.50"))],
        [{**GOOD, "extra": {"a": 1}}, {**GOOD, "extra": "text"}, {**GOOD, "extra": [1, "b"]}],
        [talk(said(value="half \ud83d pair")), GOOD],
        [talk(said(value="whole \U0001f642 pair"))],
        [{"id": 1, "conversations": []}],
    ],
)
def test_datasets_changes_no_text(tmp_path: Path, rows: list[Any]) -> None:
    path = written(tmp_path / "a.json", json.dumps(rows))
    through, plain = checked_rows(read_rows(path)), checked_rows(plain_rows(path))
    assert [(c.roles, c.texts) for c in through.conversations] == [
        (c.roles, c.texts) for c in plain.conversations
    ]
    assert through.dropped == plain.dropped


def test_a_good_file_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[Any]:
        raise AssertionError(f"{path} was read as plain JSON")

    monkeypatch.setattr("traces.serving.sharegpt.plain_rows", refuse)
    for name, text in (("a.json", json.dumps([GOOD])), ("b.jsonl", json.dumps(GOOD))):
        assert read_sharegpt(written(tmp_path / name, text)).rows_read == 1


@given(text=st.text(st.sampled_from("a\ud83d\udd42\\\U0001f642é"), max_size=8))
def test_half_surrogates_are_never_overlooked(text: str) -> None:
    whole = json.loads(json.dumps(text))
    try:
        whole.encode()
    except UnicodeEncodeError:
        assert HALF_SURROGATE.search(json.dumps(text).encode())
    else:
        # an escaped backslash before "u" may raise a false alarm: that file is read as plain JSON
        assert "\\" in whole or not HALF_SURROGATE.search(json.dumps(text).encode())


@pytest.mark.parametrize(
    ("name", "text", "said_where"),
    [
        ("cut.json", '[{"id": "a",\n "conver', "line 2, column"),
        ("word.json", "hello", "line 1, column 1"),
        ("object.json", "{\n]}", "line 2, column 1"),
        ("none.json", "[]", "no conversation"),
        ("empty.json", "", "no conversation"),
        ("deep.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_an_unreadable_file_is_one_line(
    tmp_path: Path, name: str, text: str, said_where: str
) -> None:
    path = written(tmp_path / name, text)
    with pytest.raises(ValueError, match=said_where) as caught:
        read_sharegpt(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_undecodable_and_incomplete_files_are_one_line(tmp_path: Path) -> None:
    latin, cut = tmp_path / "latin.json", tmp_path / "cut.json.gz"
    latin.write_bytes('["é"]'.encode("latin-1"))
    cut.write_bytes(gzip.compress(json.dumps([GOOD] * 100).encode())[:40])
    for path, what in ((latin, "not UTF-8 at byte 2"), (cut, "gzip")):
        with pytest.raises(ValueError, match=what):
            read_sharegpt(path)
    with pytest.raises(ValueError, match="no such file"):
        read_sharegpt(tmp_path / "absent.json")


def test_a_spoilt_line_costs_only_itself(tmp_path: Path) -> None:
    lines = [json.dumps(GOOD), '{"id": "b", "conversat', "", json.dumps(GOOD)]
    held = read_sharegpt(written(tmp_path / "a.jsonl", "\n".join(lines)))
    assert held.rows_read == 3 and dict(held.dropped) == {"line is not JSON": 1}


@pytest.mark.parametrize("rows", [[None, GOOD], [None], [GOOD, None], [None, None, GOOD]])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_row_that_is_null_stops_nothing(tmp_path: Path, rows: list[Any], mark: str) -> None:
    """A null row that comes first crashes pyarrow 26, and the process with it."""
    for name, text in (
        ("a.json", json.dumps(rows)),
        ("b.json", json.dumps(rows, indent=1)),
        ("c.jsonl", "\n".join(map(json.dumps, rows))),
        ("d.jsonl", "\r\n".join(f" {json.dumps(row)}" for row in rows)),
    ):
        held = read_sharegpt(written(tmp_path / name, mark + text))
        assert held.rows_read == len(rows)
        assert dict(held.dropped) == {"row is not an object": rows.count(None)}


def test_an_integer_that_python_does_not_read_costs_only_its_row(tmp_path: Path) -> None:
    """Beyond 4,300 digits; by lines and in a list, as a value of no use and in place of a text."""
    digits = "9" * 5000
    odd = json.dumps(GOOD).replace('"a"', digits)
    bad = json.dumps(GOOD).replace('"hi"', digits)
    for name, text in (("a.jsonl", f"{odd}\n{bad}\n"), ("b.json", f"[{odd}, {bad}]")):
        held = read_sharegpt(written(tmp_path / name, text))
        assert held.rows_read == 2 and dict(held.dropped) == {"message value is not text": 1}


texts = st.text(st.sampled_from('a 0\n\0"{}\\\ud83d\udd42\U0001f642é中'), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
near_messages = st.fixed_dictionaries(
    {},
    optional={"from": st.sampled_from(["human", "gpt", "x"]) | json_values, "value": json_values},
)
near_rows = st.fixed_dictionaries(
    {}, optional={"id": json_values, "conversations": st.lists(near_messages | json_values)}
)


@cases(200)
@given(rows=st.lists(near_rows | json_values, max_size=6))
def test_any_json_is_kept_or_named(rows: list[Any]) -> None:
    held = checked_rows(rows)
    assert held.rows_read == len(rows) == len(held.conversations) + held.dropped.total()
    for conversation in held.conversations:
        assert len(conversation.roles) == len(conversation.texts)


@pytest.mark.slow
def test_reading_leaves_nothing_in_the_home(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", json.dumps([GOOD]))
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    code = (
        "import sys; from traces.serving.sharegpt import *; "
        "print(read_sharegpt(sys.argv[1]).rows_read)"
    )
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**unset, "HOME": str(home), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "1\n" and ran.stderr == ""
    assert list(home.rglob("*")) == [] and list(temporary.rglob("*")) == []


def test_shared_files_read_whole(shared: Path) -> None:
    folder = shared / "data" / "sharegpt"
    for name, rows in (
        ("sharegpt_v3_sample_dev.json.gz", 798),
        ("sharegpt_v3_tiny.json", 12),
        ("sharegpt_v3_longprompt50.json.gz", 50),
    ):
        held = read_sharegpt(folder / name)
        assert held.rows_read == len(held.conversations) == rows, name
