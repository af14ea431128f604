"""Replays against a fake OpenAI-compatible server: times, faults, sessions and the run folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.metrics import per_request, summary
from analysis.run import load
from analysis.vllm_json import vllm_result
from runtime.client.answer import Answer, Spoilt, tokens_of
from runtime.client.gauges import read_gauges
from runtime.client.openai import Replay, Server, model_served, replay
from runtime.client.sse import Address
from tandem.cli.compare import compare_folders
from tandem.cli.errors import RunFailed
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tests.support.servers.fake_server import METRICS, FakeServer
from traces.serving.request import Request, prompt_of

pytestmark = pytest.mark.ci

MS = 1_000_000


def replayed(fake: FakeServer, requests: list[Request], **options: Any) -> Replay:
    with fake.running():
        server = Server(url=fake.url, model="fake-model", **{"timeout_s": 20.0, **options})
        return replay(server, requests, lambda request: prompt_of(request, 100, 0))


def every(gap_ms: int, count: int, output: int = 6) -> list[Request]:
    return [Request(i, i * gap_ms * MS, 5 + i, output) for i in range(count)]


# ---- tokens out of chunks
@pytest.mark.parametrize(
    ("times", "empty", "count", "expected"),
    [
        ([1, 2, 3], [False] * 3, 3, [1, 2, 3]),
        ([1, 2, 3], [False] * 3, None, [1, 2, 3]),
        ([1, 2, 3], [False, False, True], 2, [1, 2]),  # a last chunk with a reason, no token
        ([1, 2, 3], [False, False, True], None, [1, 2]),
        ([1, 2, 3], [False, True, False], 3, [1, 2, 3]),  # half a character
        ([1, 2], [False, False], 4, [1, 1, 2, 2]),
        ([1, 2], [False, False], 3, [1, 1, 2]),
        ([1], [True], None, []),
        ([], [], 3, []),
        ([1], [False], 0, []),
    ],
)
def test_tokens_out_of_chunks(
    times: list[int], empty: list[bool], count: int | None, expected: list[int]
) -> None:
    assert tokens_of(times, empty, count) == expected


@given(
    chunks=st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=20),
    count=st.integers(1, 60),
)
def test_as_many_tokens_as_the_server_says(chunks: list[tuple[int, bool]], count: int) -> None:
    times = sorted(time for time, _ in chunks)
    tokens = tokens_of(times, [empty for _, empty in chunks], count)
    assert len(tokens) == count and tokens == sorted(tokens) and set(tokens) <= set(times)


def test_lines_that_say_nothing_and_lines_that_spoil() -> None:
    answer = Answer(0, 0)
    for line in ("", ": keep-alive", "event: x", 'data: {"choices": [{"text": "a"}]}'):
        answer.take(line, 7)
    assert answer.chunk_ns == [7] and not answer.has_ended
    spoilt = ['{"error": "full"}', '{"choices": [3]}', '{"choices": 3}', '{"usage": 3}']
    spoilt += ['{"usage": {"completion_tokens": "7"}}', '{"usage": {"completion_tokens": 1e99}}']
    for line in ("data: {", "data: [1]", *(f"data: {event}" for event in spoilt)):
        with pytest.raises(Spoilt):
            answer.take(line, 8)


# ---- against the server
def test_times_are_those_of_the_server() -> None:
    fake = FakeServer(first_s=0.03, gap_s=0.004)
    requests = every(10, 20)
    found = replayed(fake, requests)
    assert [a.request_id for a in found.answers] == list(range(20))
    for request, answer in zip(requests, found.answers, strict=True):
        assert answer.error == "" and answer.due_ns == request.arrival_ns
        assert answer.sent_ns is not None and answer.sent_ns >= answer.due_ns  # never early
        tokens = answer.token_ns
        assert len(tokens) == 6 and answer.prompt_tokens == request.prompt_tokens
        # no machine makes a sleep shorter; a busy one makes it longer
        assert tokens[0] - answer.sent_ns >= 30 * MS
        assert tokens[-1] - answer.sent_ns >= (30 + 5 * 4) * MS
        assert answer.finish_ns == tokens[-1]
    sent = [answer.sent_ns for answer in found.answers]
    assert sent == sorted(sent)
    # the answers overlap: one after another they would take 20 x 50 ms
    assert found.answers[-1].finish_ns < 20 * 50 * MS


def test_the_body_of_a_request() -> None:
    fake = FakeServer()
    request = Request(4, 0, 3, 2, prompt_ids=(7, 8, 9))
    replayed(fake, [request], extra={"temperature": 0.5}, headers={"Authorization": "Bearer x"})
    seen = fake.seen[4]
    assert seen["body"] == {
        "model": "fake-model",
        "prompt": [7, 8, 9],
        "max_tokens": 2,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert seen["headers"]["x-request-id"] == "tandem-4"
    assert seen["headers"]["authorization"] == "Bearer x"


def test_a_key_that_a_server_does_not_know_can_be_left_out() -> None:
    fake = FakeServer(refuses=("ignore_eos", "stream_options"), says_usage=False)
    [refused] = replayed(fake, every(0, 1)).answers
    assert refused.is_refused and "ignore_eos" in refused.error
    [answer] = replayed(
        fake, every(0, 1), extra={"ignore_eos": None, "stream_options": None}
    ).answers
    assert answer.error == "" and len(answer.token_ns) == 6
    assert {"ignore_eos", "stream_options"}.isdisjoint(fake.seen[0]["body"])


@pytest.mark.parametrize("says_usage", [True, False])
def test_a_chat(says_usage: bool) -> None:
    """The first chunk names the role: no token comes with it, however early it is."""
    fake = FakeServer(first_s=0.05, knows_chat_only=True, says_usage=says_usage)
    with fake.running():
        made = Server(url=fake.url, model="fake-model", timeout_s=20.0, endpoint="chat")
        [answer] = replay(made, every(0, 1), lambda request: "one two three").answers
    assert answer.error == "" and len(answer.token_ns) == 6
    assert answer.sent_ns is not None and answer.token_ns[0] - answer.sent_ns >= 50 * MS
    body = fake.seen[0]["body"]
    assert body["messages"] == [{"role": "user", "content": "one two three"}]
    assert "prompt" not in body and body["max_tokens"] == 6
    assert answer.prompt_tokens == (3 if says_usage else None)


def test_thoughts_of_a_reasoning_model_are_tokens() -> None:
    answer = Answer(0, 0)
    for delta in ({"role": "assistant"}, {"reasoning_content": "a"}, {"content": "b"}, {}):
        answer.take("data: " + json.dumps({"choices": [{"delta": delta}]}), 7)
    assert answer.is_empty == [False, False, True]


@pytest.mark.parametrize("says_usage", [True, False])
def test_chunks_of_several_tokens(says_usage: bool) -> None:
    answer = replayed(FakeServer(per_chunk=3, says_usage=says_usage), every(0, 1)).answers[0]
    assert len(answer.chunk_ns) == 2
    # without usage the tokens of a chunk are unknown
    assert len(answer.token_ns) == (6 if says_usage else 2)


def test_every_fault_is_one_requests_own() -> None:
    faults: dict[int, int | str] = {1: 500, 2: 400, 3: "stall", 4: "silence", 5: "cut"}
    faults |= {6: "garbage", 7: "error", 8: "empty", 9: "short"}
    before = time.monotonic()
    found = replayed(FakeServer(faults=faults), every(1, 11), timeout_s=0.6)
    assert time.monotonic() - before < 10  # nothing waits without a limit
    errors = {a.request_id: a.error for a in found.answers}
    assert [i for i, error in errors.items() if not error] == [0, 9, 10]
    assert errors[1] == 'HTTP 500: {"error": "as told"}' and errors[2].startswith("HTTP 400")
    assert errors[3] == errors[4] == "no end within 0.6 s"
    assert errors[5] == "the answer broke off"
    assert "not JSON" in errors[6] and "out of memory" in errors[7]
    assert errors[8] == "the answer holds no token"
    assert [a.request_id for a in found.answers if a.is_refused] == [2]
    assert len(found.answers[9].token_ns) == 3  # a short answer is an answer


def test_a_port_without_a_server_is_an_error_of_each_request() -> None:
    server = Server(url="http://127.0.0.1:9", model="m")
    found = replay(server, every(0, 3), lambda request: "text")
    assert all("Connect" in a.error and a.sent_ns is None for a in found.answers)
    with pytest.raises(ValueError, match=r"no OpenAI-compatible server answers at http://127") as e:
        model_served(server.url, {})
    assert "\n" not in str(e.value)


def test_turns_wait_for_the_answer_before_them_and_for_the_user() -> None:
    turns = [Request(i, 0, 5, 4, session=3, turn=i, think_ns=50 * MS if i else 0) for i in range(3)]
    shuffled = [
        turns[2],
        turns[0],
        Request(9, 0, 5, 4),
        turns[1],
    ]  # a file may hold turns in any order
    answers = replayed(FakeServer(faults={1: 500}), shuffled).answers
    found = sorted(answers, key=lambda answer: answer.request_id)
    for earlier, later in ((found[0], found[1]), (found[1], found[2])):
        assert later.due_ns - earlier.finish_ns == 50 * MS  # after a failure too
        assert later.sent_ns >= later.due_ns
    assert found[3].due_ns == 0


def test_gauges_are_scraped_while_the_replay_runs() -> None:
    found = replayed(FakeServer(), every(20, 10), scrape_s=0.05)
    assert len(found.gauges) >= 2
    gauges = found.gauges[0]
    assert (gauges.kv_usage, gauges.running, gauges.waiting) == (0.25, 3, 2)
    assert (gauges.preemptions, gauges.kv_blocks, gauges.block_tokens) == (7, 80, 16)
    assert replayed(FakeServer(has_metrics=False), every(0, 2), scrape_s=0.05).gauges == []


def test_gauges_of_several_engines_and_makers() -> None:
    more = METRICS + 'vllm:kv_cache_usage_perc{engine="1"} 0.75\nvllm:num_requests_running 4\n'
    found = read_gauges(more, 5)
    assert (found.at_ns, found.kv_usage, found.running) == (5, 0.5, 7)
    other = read_gauges("sglang:token_usage 0.5\nsglang:num_queue_reqs 2.0\n", 0)
    assert (other.kv_usage, other.waiting, other.running) == (0.5, 2, None)
    assert read_gauges("nonsense\n# TYPE x\n", 0).kv_usage is None


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a:8000", ("a", 8000, "", False)),
        ("http://a:8000/v1/", ("a", 8000, "", False)),
        ("https://a/api/v1", ("a", 443, "/api", True)),
    ],
)
def test_addresses(url: str, address: tuple[Any, ...]) -> None:
    assert Address.of(url) == Address(*address)


@pytest.mark.parametrize("url", ["a:8000", "ftp://a", "http://", "http://a:port"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL"):
        Address.of(url)


# ---- prompts
def test_equal_blocks_have_equal_tokens() -> None:
    a = Request(0, 0, 20, 1, prefix_ids=(5, 6), prefix_block_tokens=16)
    b = Request(1, 0, 40, 1, prefix_ids=(5, 6, 7), prefix_block_tokens=16)
    c = Request(2, 0, 20, 1)
    ids = [list(prompt_of(r, 1000, 0)) for r in (a, b, c)]
    assert [len(i) for i in ids] == [20, 40, 20]
    assert ids[0] == ids[1][:20] and ids[2] != ids[0]
    assert list(prompt_of(Request(9, 0, 2, 1, prompt_ids=(4, 14)), 10, 0)) == [4, 4]
    assert list(prompt_of(Request(9, 0, 2, 1, prompt_ids=(4, 14)), 20, 0)) == [4, 14]
    assert list(prompt_of(a, 1000, 1)) != ids[0]


# ---- the run folder
CHOSEN = ["limit=12", "arrival.rate=40", "seed=3"]


def measured(tmp_path: Path, fake: FakeServer, *more: str) -> Path:
    with fake.running():
        chosen = ["backend=openai", f"backend.url={fake.url}", "backend.timeout_s=20", *more]
        run_experiment(composed([*CHOSEN, *chosen]), tmp_path / "measured")
    return tmp_path / "measured"


def test_a_server_is_the_measured_side_of_a_comparison(tmp_path: Path, unrendered: None) -> None:
    fake = FakeServer(gap_s=0.0005, first_s=0.005)
    folder = measured(tmp_path, fake, "backend.scrape_s=0.05")
    run = load(folder)
    assert run.is_measured and run.backend == "openai"
    assert run.provenance["server_model"] == "fake-model"
    assert run.provenance["lateness_ms"]["p50"] >= 0 and run.provenance["errors"] == {}
    assert summary(run)["num_finished"] == 12
    assert run.memory["kv_pages"].iloc[0] == 20 and summary(run)["peak_kv_usage"] == 0.25
    run_experiment(composed([*CHOSEN, "backend=sim"]), tmp_path / "sim")
    prediction = load(tmp_path / "sim")
    assert prediction.provenance["trace_hash"] == run.provenance["trace_hash"]
    wanted = prediction.requests.set_index("request_id")["output_tokens"]
    assert run.requests.set_index("request_id")["output_tokens"].equals(wanted)
    arrivals = [r.requests["arrival_ns"].tolist() for r in (prediction, run)]
    assert arrivals[0] == arrivals[1]
    found, page = compare_folders(tmp_path / "sim", folder)
    assert len(found.requests) == 12 and np.isfinite(found.errors["error"]).all()
    assert page.is_file() and found.replay is None
    assert vllm_result(run)["completed"] == 12


def test_failures_are_in_the_folder_by_request(tmp_path: Path) -> None:
    folder = measured(tmp_path, FakeServer(faults={2: 400, 5: "cut"}, gap_s=0.0005))
    run = load(folder)
    status = run.requests.set_index("request_id")["status"]
    assert (status[2], status[5]) == ("refused", "unfinished")
    assert status.value_counts()["finished"] == 10
    assert per_request(run)["ttft_s"].notna().sum() == 10
    assert sum(run.provenance["errors"].values()) == 2
    client = pq.read_table(folder / "client.parquet").to_pandas().set_index("request_id")
    assert client["error"][2].startswith("HTTP 400") and client["error"][0] == ""
    assert (client["lateness_ns"] >= 0).all()
    assert pq.read_table(folder / "server.parquet").num_rows >= 1


def test_a_run_without_an_answer_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no request finished at http"):
        measured(tmp_path, FakeServer(faults=dict.fromkeys(range(12), 503)))
    told = json.loads((tmp_path / "measured" / "status.json").read_text())
    assert told["status"] == "failed" and "HTTP 503" in told["error"]


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ([], "backend.url is not set"),
        (["backend.url=nowhere"], "nowhere is no URL"),
        (["backend.url=http://127.0.0.1:9"], "no OpenAI-compatible server answers"),
        (["backend.url=http://h", "backend.model=m", "backend.timeout_s=0"], "timeout_s is 0"),
        (["backend.url=http://h", "backend.model=m", "backend.prompt=x"], "it is ids or text"),
        (["backend.url=http://h", "backend.model=m", "backend.prompt=text"], "backend.tokenizer"),
        (
            ["backend.url=http://h", "backend.model=m", "backend.endpoint=x"],
            "endpoint is x; it must",
        ),
        (
            ["backend.url=http://h", "backend.model=m", "backend.endpoint=chat"],
            "set backend.prompt=",
        ),
        (["training=sample", "policy=time_shared"], "a server trains nothing"),
        (["training=sample", "policy=train_on_device", "trace=none"], "a server trains nothing"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, overrides: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        run_experiment(composed([*CHOSEN, "backend=openai", *overrides]), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_chat_server_is_measured_whatever_the_memory_of_this_machine(tmp_path: Path) -> None:
    fake = FakeServer(gap_s=0.0005, first_s=0.005, knows_chat_only=True)
    tokenizer = Path(__file__).parents[2] / "traces" / "samples" / "tokenizer"
    text = ["backend.prompt=text", f"backend.tokenizer={tokenizer}", "backend.endpoint=chat"]
    extra = ["+backend.extra.ignore_eos=null", "+backend.extra.seed=1"]
    folder = measured(tmp_path, fake, *text, *extra, "model=llama3_8b")  # on a CPU of 256 MiB
    run = load(folder)
    assert summary(run)["num_finished"] == 12
    assert run.provenance["kv_pages"] is None and run.provenance["memory_plan"] is None
    bodies = [seen["body"] for seen in fake.seen.values()]
    assert all("ignore_eos" not in body and body["seed"] == 1 for body in bodies)


def test_prompts_as_text(tmp_path: Path) -> None:
    fake = FakeServer(gap_s=0.0005)
    tokenizer = Path(__file__).parents[2] / "traces" / "samples" / "tokenizer"
    measured(tmp_path, fake, "backend.prompt=text", f"backend.tokenizer={tokenizer}")
    assert all(isinstance(seen["body"]["prompt"], str) for seen in fake.seen.values())
