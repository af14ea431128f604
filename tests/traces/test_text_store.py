"""`tandem trace import --kind text`: documents become tokens, with an account in the sidecar."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tandem.cli.trace import main
from tests.support.strategies import cases
from traces.importing import import_trace, inspect_trace
from traces.serving.request import Request
from traces.serving.sample import SAMPLES
from traces.store import read_trace, sha256_of, sidecar_path, write_trace
from traces.tokenizer import load_tokenizer
from traces.training.text_store import read_documents, write_documents
from traces.training.texts import eos_of

TOKENIZER = SAMPLES / "tokenizer"
ROWS = [{"text": "ko vu ba"}, {"text": ""}, {"n": 1}, {"text": "ba ko. vu"}, {"text": "é"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def imported(source: Path, **options: Any) -> tuple[dict[str, Any], list[list[int]]]:
    out = source.with_name("out.parquet")
    sidecar = import_trace(source, out, **{"kind": "text", "tokenizer": TOKENIZER, **options})
    tokens, ends = read_documents(out)
    return sidecar, [part.tolist() for part in np.split(tokens, ends[:-1])]


def encoded(*texts: str) -> list[list[int]]:
    """Token ids by the library alone."""
    backend = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    eos = backend.token_to_id("<|endoftext|>")
    return [[*backend.encode(text).ids, eos] for text in texts]


def test_documents_are_those_of_the_tokenizer_and_each_has_its_end(source: Path) -> None:
    sidecar, documents = imported(source)
    assert documents == encoded("ko vu ba", "ba ko. vu", "é")
    assert (sidecar["documents"], sidecar["tokens"]) == (3, sum(map(len, documents)))


def test_the_sidecar_says_where_the_text_came_from(source: Path) -> None:
    sidecar, _ = imported(source)
    assert sidecar["kind"] == "text" and sidecar["source_sha256"] == sha256_of(source)
    assert sidecar["tokenizer"]["sha256"] == sha256_of(TOKENIZER / "tokenizer.json")
    assert sidecar["rule"]["eos_token"] == "<|endoftext|>"
    assert sidecar["rows_read"] == 5 == sidecar["rows_kept"] + 2
    assert sidecar["rows_dropped"] == {"empty text": 1, "no text field": 1}
    assert sidecar["first_lines_dropped"] == {"empty text": [2], "no text field": [3]}


def test_options_take_effect(source: Path) -> None:
    assert imported(source, limit=1)[1] == encoded("ko vu ba")
    begin, end = encoded("")[0][-1], load_tokenizer(TOKENIZER).backend.token_to_id("!")
    _, documents = imported(source, bos_token="<|endoftext|>", eos_token="!", limit=1)
    assert documents == [[begin, *encoded("ko vu ba")[0][:-1], end]]
    sidecar, documents = imported(source, max_message_chars=5)
    assert documents == encoded("é")
    assert sidecar["rows_dropped"]["text longer than 5 characters"] == 2


def test_plain_text_is_recognised_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ko vu\n\nba\nko\n")
    assert imported(path, kind="auto")[1] == encoded("ko vu", "ba", "ko")
    assert imported(path, sample_by="paragraph")[1] == encoded("ko vu", "ba\nko\n")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tokenizer": None}, "name a tokenizer"),
        ({"text_field": "body"}, "no field body; it has text"),
        ({"max_message_chars": 0}, "max_message_chars is 0"),
        ({"sample_by": "page"}, "sample_by is 'page'; use one of line, paragraph, document"),
        ({"eos_token": "<nope>"}, "eos_token '<nope>' is not in its vocabulary"),
        ({"oversample": True, "limit": 9}, "not oversampled"),
        ({"slo_column": "n"}, "slo_column is for lengths"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    source: Path, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        imported(source, **options)
    assert "\n" not in str(caught.value) and list(source.parent.iterdir()) == [source]


def test_a_file_without_a_document_is_refused(tmp_path: Path) -> None:
    for text in ('{"text": ""}\n', ""):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"no document left of . rows: (1 em|no r)"):
            imported(tmp_path / "a.jsonl")


def test_a_text_without_a_token_is_counted(tmp_path: Path) -> None:
    """The published GPT-2 spells everything; a tokenizer of one word does not."""
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"</s>": 0, "ko": 1}}}
    words["model"]["unk_token"] = "<unk>"  # type: ignore[index]
    tokenizer = {**words, "pre_tokenizer": {"type": "Whitespace"}, "normalizer": None}
    tokenizer |= {"added_tokens": [], "decoder": None, "post_processor": None}
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.txt").write_text("ko ko\nx\nko\n")
    sidecar, documents = imported(tmp_path / "a.txt", tokenizer=tmp_path / "tokenizer.json")
    assert documents == [[1, 1, 0], [1, 0]]
    assert sidecar["rows_dropped"] == {"no token in it": 1}
    assert sidecar["first_lines_dropped"] == {"no token in it": [2]}


def test_requests_and_text_are_not_taken_for_each_other(source: Path) -> None:
    imported(source)
    out = source.with_name("out.parquet")
    with pytest.raises(ValueError, match="text to train on, no requests"):
        read_trace(out)
    assert inspect_trace(out)["document_tokens"]["n"] == 3
    write_trace(out, [Request(0, 0, 3, 4)], {})
    with pytest.raises(ValueError, match="requests, no text to train on; make that with"):
        read_documents(out)


def test_the_command_accounts_for_every_row(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.with_name("out.parquet")
    words = ["import", str(source), "--kind", "text", "--tokenizer", str(TOKENIZER)]
    assert main([*words, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "3 documents" in told and "rows read 5 = kept 3 + dropped 2" in told
    assert main(["show", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 3


def test_a_replay_imports_no_tokenizer_no_datasets_and_no_torch(source: Path) -> None:
    imported(source)
    code = (
        "import sys; from pathlib import Path; from traces.training.job import *;"
        "training = Training(data=Text(path=sys.argv[1]), recipe=Recipe(), sequence_tokens=4);"
        "print(training.batches(training.job(0, 3), 9, Path('no')).ids(0).shape);"
        "print(*sorted({'torch', 'transformers', 'datasets', 'tokenizers'} & set(sys.modules)))"
    )
    out = str(source.with_name("out.parquet"))
    ran = subprocess.run(
        [sys.executable, "-c", code, out], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "(1, 4)\n\n"


@cases(100)
@given(documents=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6))
def test_documents_come_back_as_written(tmp_path: Path, documents: list[list[int]]) -> None:
    sidecar = write_documents(tmp_path / "a.parquet", documents, {})
    tokens, ends = read_documents(tmp_path / "a.parquet")
    assert tokens.tolist() == [token for document in documents for token in document]
    assert ends.tolist() == [sum(map(len, documents[: n + 1])) for n in range(len(documents))]
    assert (sidecar["documents"], sidecar["tokens"]) == (len(documents), len(tokens))


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array([[1], None], pa.large_list(pa.int32())), "column ids has empty cells"),
        (pa.array([[1, None]], pa.large_list(pa.int32())), "column ids has empty cells"),
        (pa.array([[1, -5]], pa.large_list(pa.int32())), "column ids holds ids below 0"),
        (pa.array([[1]], pa.list_(pa.int64())), "column ids holds list"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, column: pa.Array, what: str) -> None:
    path = tmp_path / "a.parquet"
    sidecar = write_documents(path, [[1]], {})
    pq.write_table(pa.table({"ids": column}), path)
    sidecar_path(path).write_text(json.dumps({**sidecar, "trace_sha256": sha256_of(path)}))
    with pytest.raises(ValueError, match=what) as caught:
        read_documents(path)
    assert "a.parquet" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gpt2", ("<|endoftext|>", 50256)),
        ("llama2-tinyllama", ("</s>", 2)),
        ("qwen", ("<|endoftext|>", 151643)),
        pytest.param("llama3", ("<|end_of_text|>", 128001), marks=pytest.mark.slow),
    ],
)
def test_published_tokenizers_have_an_end_of_sequence_token(
    shared: Path, name: str, end: tuple[str, int]
) -> None:
    folder = shared / "data" / "tokenizers" / name
    assert eos_of(load_tokenizer(folder)) == end
    if (folder / "tokenizer_config.json").is_file():
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert end == (theirs.eos_token, theirs.eos_token_id)


@pytest.mark.parametrize(
    ("config", "vocabulary", "found"),
    [
        ('{"eos_token": "b"}', "ab", "b"),
        ('{"eos_token": {"content": "b"}}', "ab", "b"),
        ('{"eos_token": "c"}', "ab", "'c' is not in its vocabulary"),
        ('{"eos_token": 3}', ["a", "</s>"], "</s>"),
        ("{", "ab", "tokenizer_config.json: not JSON"),
        (None, ["</s>", "<|endoftext|>"], "<|endoftext|> or </s>; name one with eos_token"),
        (None, "ab", "no end-of-sequence token that is known; name one with eos_token"),
    ],
)
def test_the_end_of_sequence_token_is_found_or_asked_for(
    tmp_path: Path, config: str | None, vocabulary: Any, found: str
) -> None:
    from tokenizers.models import WordLevel

    words = {word: at for at, word in enumerate([*vocabulary, "<unk>"])}
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = load_tokenizer(tmp_path)
    if found in words:
        assert eos_of(tokenizer) == (found, words[found])
    else:
        with pytest.raises(ValueError) as caught:
            eos_of(tokenizer)
        assert found in str(caught.value) and "\n" not in str(caught.value)
