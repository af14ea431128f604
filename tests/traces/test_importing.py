"""`tandem trace import`: options, the requests of an import, and the account in the sidecar."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.__main__ import main
from traces.importing import import_trace, inspect_trace
from traces.serving.rules import RULES
from traces.serving.sharegpt import read_sharegpt
from traces.store import read_trace, sha256_of
from traces.tokenizer import LoadedTokenizer, load_tokenizer

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
SAMPLE = SAMPLES / "sharegpt_sample.json"
TOKENIZER = SAMPLES / "tokenizer"
encode, read_once = LoadedTokenizer.encode, cache(read_sharegpt)


load_once = cache(load_tokenizer)
ids_once: dict[tuple[str, str], list[int]] = {}  # by tokenizer and text


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the sample once for all tests here; test_sharegpt.py and test_sample.py read it."""
    monkeypatch.setattr("traces.importing.read_sharegpt", read_once)
    monkeypatch.setattr("traces.tokenizer.load_tokenizer", load_once)
    monkeypatch.setattr(LoadedTokenizer, "encode", encoded_once)


def encoded_once(self: LoadedTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes each text once for all tests here."""
    new = list(dict.fromkeys(text for text in texts if (self.sha256, text) not in ids_once))
    for text, ids in zip(new, encode(self, new), strict=True):
        ids_once[self.sha256, text] = ids
    return [[*ids_once[self.sha256, text]] for text in texts]


def imported(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    out = tmp_path / "out.parquet"
    sidecar = import_trace(SAMPLE, out, **{"tokenizer": TOKENIZER, **options})
    return sidecar, read_trace(out)


def test_the_sidecar_says_where_the_trace_came_from(tmp_path: Path) -> None:
    sidecar, requests = imported(tmp_path)
    assert sidecar["source_sha256"] == sha256_of(SAMPLE)
    assert sidecar["tokenizer"]["sha256"] == sha256_of(TOKENIZER / "tokenizer.json")
    assert sidecar["rule"]["name"] == "vllm_filter_plus_role_check"
    assert sidecar["rows_read"] == 300 == sidecar["rows_kept"] + total(sidecar["rows_dropped"])
    assert sidecar["pairs_read"] == len(requests) + total(sidecar["pairs_dropped"])


def total(counts: dict[str, int]) -> int:
    return sum(counts.values())


def test_ids_are_those_of_the_prompt(tmp_path: Path) -> None:
    _, requests = imported(tmp_path, rule="nanoflow_human_gpt_no_length_filter")
    tokenizer = load_tokenizer(TOKENIZER)
    told = [c["conversations"] for c in json.loads(SAMPLE.read_text(encoding="utf-8"))]
    pairs = [m for m in told if [x["from"] for x in m[:2]] == ["human", "gpt"]]
    expected = [tokenizer.encode([m[0]["value"], m[1]["value"]]) for m in pairs]
    kept = [(tuple(p), len(o)) for p, o in expected if p and o]
    assert [(r.prompt_ids, r.output_tokens) for r in requests] == kept
    _, without = imported(tmp_path, rule="nanoflow_human_gpt_no_length_filter", keep_ids=False)
    assert [r.prompt_tokens for r in without] == [r.prompt_tokens for r in requests]
    assert all(r.prompt_ids is None for r in without)


def test_order_is_that_of_vllm(tmp_path: Path) -> None:
    rule = "vllm_first_two_msgs_4_1024_2048"
    told = [c["conversations"] for c in json.loads(SAMPLE.read_text(encoding="utf-8"))]
    order = [m for m in told if len(m) >= 2]
    random.seed(0)  # the generator of the module, as in vLLM
    random.shuffle(order)
    tokenizer = load_tokenizer(TOKENIZER)
    lengths = [
        (len(tokenizer.encode([m[0]["value"]])[0]), len(tokenizer.encode([m[1]["value"]])[0]))
        for m in order
    ]
    kept = [(p, o) for p, o in lengths if min(p, o) >= 4 and p <= 1024 and p + o <= 2048]
    _, requests = imported(tmp_path, rule=rule, limit=100)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == kept[:100]


def test_a_limit_stops_and_is_accounted(tmp_path: Path) -> None:
    sidecar, requests = imported(tmp_path, limit=10)
    assert len(requests) == 10
    assert sidecar["rows_read"] == sidecar["rows_kept"] + total(sidecar["rows_dropped"])
    assert sidecar["rows_dropped"]["beyond the limit of 10 requests"] > 200


def test_too_few_requests_stay_too_few_unless_asked_to_repeat(tmp_path: Path) -> None:
    sidecar, requests = imported(tmp_path, limit=1000)
    assert len(requests) == 254 and sidecar["oversampled"] == 0
    sidecar, more = imported(tmp_path, limit=300, oversample=True)
    assert len(more) == 300 and sidecar["oversampled"] == 46
    assert [r.request_id for r in more] == list(range(300))
    assert {r.prompt_ids for r in more} == {r.prompt_ids for r in requests}


@pytest.mark.parametrize("limit", [150, 57])
def test_closed_loop_sessions_grow_turn_by_turn(tmp_path: Path, limit: int) -> None:
    _, turns = imported(tmp_path, rule="multiturn_closed_loop", think_s=1.5, limit=limit)
    _, independent = imported(tmp_path, rule="multiturn_cumulative", limit=limit)
    assert [(r.prompt_ids, r.output_tokens) for r in turns] == [
        (r.prompt_ids, r.output_tokens) for r in independent
    ]
    assert all(r.session is None and r.turn == 0 for r in independent)
    last: dict[int, Any] = {}
    for request in turns:
        before = last.get(request.session)
        assert request.turn == (0 if before is None else before.turn + 1)
        assert request.think_ns == (0 if before is None else 1_500_000_000)
        if before is not None:
            assert request.prompt_ids[: before.prompt_tokens] == before.prompt_ids
            assert request.prompt_tokens > before.prompt_tokens + before.output_tokens
        last[request.session] = request
    assert any(r.turn >= 3 for r in turns)


def test_exponential_think_times_are_seeded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rule": "multiturn_closed_loop", "think_s": 2.0, "limit": 200}
    options["shuffle"] = False
    first, again, other = (
        imported(tmp_path, think_exponential=True, seed=seed, **options)[1] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len({r.think_ns for r in first if r.turn}) > 100


def test_options_override_the_lengths_of_a_rule(tmp_path: Path) -> None:
    sidecar, requests = imported(
        tmp_path, rule="sglang_min2_no_context_len", max_total_tokens=200, min_tokens=30
    )
    assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 200
    assert min(min(r.prompt_tokens, r.output_tokens) for r in requests) >= 30
    assert sidecar["rule"]["max_total_tokens"] == 200


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tokenizer": None}, r"name a tokenizer.*trace\.tokenizer=PATH.*samples/tokenizer\)"),
        ({"tokenizer": "/no/such"}, "no such tokenizer"),
        ({"tokenizer": SAMPLE}, "not a tokenizer.json"),
        ({"rule": "mine"}, "choose one of"),
        ({"kind": "prose"}, "kind is 'prose'"),
        ({"limit": 0}, "limit is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"oversample": True}, "oversample needs a limit"),
        ({"oversample": True, "limit": 9, "rule": "multiturn_closed_loop"}, "oversampled"),
        ({"think_s": -1.0}, "think time is -1.0"),
        ({"bos_token": "<nope>"}, "not in its vocabulary"),
        ({"max_total_tokens": 8}, "no request left of 300 rows"),
        ({"max_message_chars": 1}, "message longer than 1 characters"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        imported(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_source_and_target_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        import_trace(tmp_path / "absent.json", tmp_path / "a.parquet", tokenizer=TOKENIZER)
    for out in (tmp_path / "a.json", SAMPLES / "sharegpt_sample.parquet"):
        with pytest.raises(ValueError, match=r"another \.parquet"):
            import_trace(SAMPLES / "sharegpt_sample.parquet", out)


def test_json_lines_of_counts_and_of_text_are_distinguished(tmp_path: Path) -> None:
    counts, text = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    counts.write_text('{"timestamp": 0, "input_length": 9, "output_length": 5}\n')
    text.write_text(json.dumps({"conversations": pair("ko vu ba ko", "ko ko ko ko")}) + "\n")
    assert import_trace(counts, tmp_path / "a.parquet")["kind"] == "lengths"
    sidecar = import_trace(text, tmp_path / "b.parquet", tokenizer=TOKENIZER)
    assert sidecar["kind"] == "sharegpt" and sidecar["requests"] == 1


def pair(prompt: str, output: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": prompt}, {"from": "gpt", "value": output}]


def test_the_command_line_prints_all_drops_and_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = pair("ko vu ba ko", "ko ko ko ko")
    odd = [{"from": "narrator", "value": "ko"}, *whole]
    talks = [[*whole, *pair("ko vu ba ko", "")], odd, [{"from": "gpt", "value": "ko ko ko ko"}]]
    source = tmp_path / "a.json"
    source.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    words = ["trace", "import", str(source), "--out", str(tmp_path / "out.parquet")]
    words += ["--tokenizer", str(TOKENIZER)]
    more = ["--rule", "multiturn_cumulative", "--limit", "5", "--oversample"]
    assert main([*words, *more]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rows read 3 = kept 2 + dropped 1",
        "        1 no human message followed by a gpt message (first at 3)",
        "pairs read 3 = kept 2 + dropped 1",
        "        1 empty message in the pair",
        "kept, though odd:",
        "        1 message of an unknown role",  # the empty message is part of the dropped pair
        "3 requests drawn again, to reach the limit",
    ]
    assert main(words) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if "pairs" in line]


def test_a_trace_is_shown(tmp_path: Path) -> None:
    imported(tmp_path, rule="multiturn_closed_loop")
    shown = inspect_trace(tmp_path / "out.parquet")
    assert shown["requests"] == shown["prompt_tokens"]["n"] > shown["sessions"] > 200
    assert shown["has_prompt_ids"] and shown["sidecar"]["rule"]["is_closed_loop"]
    json.dumps(shown)


@pytest.mark.slow
def test_published_tokenizers_know_their_bos(shared: Path) -> None:
    folder = shared / "data" / "tokenizers"
    loaded = {
        name: load_tokenizer(folder / name) for name in ("gpt2", "llama2-tinyllama", "llama3")
    }
    assert [t.bos_ids for t in loaded.values()] == [(), (1,), (128000,)]
    assert load_tokenizer(folder / "llama2-tinyllama", bos_token="").bos_ids == ()
    assert load_tokenizer(folder / "gpt2", bos_token="<|endoftext|>").bos_ids == (50256,)


def test_openais_messages_are_read_like_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.importing.read_sharegpt", read_sharegpt)
    rows = json.loads(SAMPLE.read_text(encoding="utf-8"))[:40]
    rows = [row for row in rows if isinstance(row, dict) and row.get("conversations")]
    names = {"human": "user", "gpt": "assistant"}
    chats = [
        [
            {"role": names.get(m["from"], m["from"]), "content": m["value"]}
            for m in row["conversations"]
        ]
        for row in rows
    ]
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.jsonl"
    ours.write_text(json.dumps(rows))
    theirs.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    found = []
    for source in (ours, theirs):
        out = tmp_path / f"{source.stem}.parquet"
        assert import_trace(source, out, tokenizer=TOKENIZER)["kind"] == "sharegpt"
        found.append(read_trace(out))
    assert found[0] == found[1] and len(found[0]) > 10


def test_a_chat_without_content_is_dropped_by_its_own_words(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    said = {"role": "assistant", "content": None}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}, said]}))
    assert read_sharegpt(path).faults == {1: "message without content"}


def test_help_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "import", "--help"])
    told = capsys.readouterr().out
    assert all(f"\n  {name}\n" in told for name in RULES)
