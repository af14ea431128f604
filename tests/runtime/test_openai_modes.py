"""A server that lies, breaks off or never ends loses the requests concerned, and no other ones."""

from __future__ import annotations

import pytest

from runtime.client.openai import Server, replay
from runtime.client.sse import StreamLimits
from tests.support.servers.fake_server import FakeServer
from tests.support.servers.server_modes import FINISHED, MODES, REFUSED
from traces.serving.request import Request, prompt_of

pytestmark = pytest.mark.ci

MS = 1_000_000
EACH = 2  # requests of a mode
TIMEOUT_S = 3.0
LIMITS = StreamLimits(line_bytes=250_000, answer_bytes=400_000, depth=20)
SAID = {  # part of the error that some modes end with
    "status_422": "(left out by +backend.extra.ignore_eos=null)",
    "status_301": "HTTP 301: to http://127.0.0.1:9/v1",
    "refused_and_silent": "HTTP 429, and no end within 3 s",
    "cut_in_chunk": "the answer broke off",
    "not_http": "the answer is not HTTP/1.1",
    "compressed": "compressed (gzip)",
    "endless_head": "its head has more than 65536 bytes",
    "endless_head_line": "its head has more than 65536 bytes",
    "endless_head_of_continues": "its head has more than 65536 bytes",
    "endless_line": "a line of more than 250000 bytes (limits.line_bytes)",
    "endless_chunk": "an answer of more than 400000 bytes (limits.answer_bytes)",
    "endless_tokens": "an answer of more than 400000 bytes (limits.answer_bytes)",
    "trickle": "no end within 3 s",
    "a_page": "the answer (text/html) holds no events",
    "an_answer_in_one": "the answer (application/json) holds no events",
    "not_json": "not JSON",
    "deep_lists": "nested deeper than 20 levels (limits.depth)",
    "deep_objects": "nested deeper than 20 levels (limits.depth)",
    "usage_negative": "usage counts -1 tokens",
    "usage_zero": "the answer holds no token",
}


def test_finished_refused_and_unfinished_are_what_the_server_counted() -> None:
    """All modes at once, and behind each of their requests a plain one."""
    told = [name for name in MODES for _ in range(EACH)]
    faults = {2 * i: name for i, name in enumerate(told)}
    requests = [Request(i, i * 3 * MS, 5 + i % 7, 4 + i % 3) for i in range(2 * len(told))]
    fake, ends = FakeServer(faults=faults, first_s=0.01, gap_s=0.002), []
    with fake.running():
        server = Server(url=fake.url, model="m", timeout_s=TIMEOUT_S, limits=LIMITS)
        found = replay(server, requests, lambda r: prompt_of(r, 100, 0), lambda: ends.append(1))
    assert len(MODES) >= 40 and len(ends) == len(requests) == len(fake.counted)
    measured, counted = {}, {}
    for request, answer in zip(requests, found.answers, strict=True):
        outcome = REFUSED if answer.is_refused else "unfinished" if answer.error else FINISHED
        tokens = len(answer.token_ns) if outcome == FINISHED else 0
        key = (request.request_id, faults.get(request.request_id, "plain"))
        measured[key], counted[key] = (outcome, tokens), fake.counted[request.request_id]
        assert answer.error.isprintable() and len(answer.error) < 3000
        assert SAID.get(key[1], "") in answer.error
    assert measured == counted
    assert all(measured[number, name][0] == MODES[name].outcome for number, name in faults.items())
    plain = [number for number in range(len(requests)) if number not in faults]
    assert all(measured[n, "plain"] == (FINISHED, requests[n].output_tokens) for n in plain)
    assert SAID.keys() <= MODES.keys()


def test_tokens_without_an_end_are_left_long_before_gigabytes() -> None:
    """By the limits of every run."""
    fake = FakeServer(faults={0: "endless_tokens"})
    with fake.running():
        requests = [Request(i, 0, 5, 4) for i in range(2)]
        server = Server(url=fake.url, model="m", timeout_s=20.0)
        endless, plain = replay(server, requests, lambda r: prompt_of(r, 100, 0)).answers
    assert endless.error == "10000 chunks more than the 4 tokens asked for"
    assert len(plain.token_ns) == 4 and not plain.error
