"""A small OpenAI-compatible server that answers, stalls and breaks as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.servers.server_modes import FINISHED, MODES, UNFINISHED, Talk

METRICS = """# HELP vllm:kv_cache_usage_perc share of KV blocks in use
vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.25
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_preemptions_total{engine="0"} 7.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="80",cache_dtype="auto"} 1.0
process_start_time_seconds 1.7e+09
"""


@dataclass
class FakeServer:
    """`first_s` before the first token, `gap_s` between two; `per_chunk` tokens in a chunk.

    `faults` maps a request's number (of x-request-id) to what goes wrong with it: an HTTP status,
    "stall" (after the first token), "silence" (no answer at all), "cut", "garbage", "error",
    "empty", "short" (half the tokens), or a mode of tests/support/servers/server_modes.py. `seen`
    holds bodies, headers and times by number, `counted` what the server has made of a request
    (finished, refused, unfinished), and how many tokens it counts. `knows_chat_only` has no
    /v1/completions; `refuses` names keys of a body that are an error.
    """

    first_s: float = 0.02
    gap_s: float = 0.005
    per_chunk: int = 1
    says_usage: bool = True
    has_metrics: bool = True
    knows_chat_only: bool = False
    refuses: tuple[str, ...] = ()
    models: str = json.dumps({"data": [{"id": "fake-model"}]})
    metrics: str = METRICS
    faults: Mapping[int, int | str] = field(default_factory=dict)
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    counted: dict[int, tuple[str, int]] = field(default_factory=dict)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        """Serves on a free port of this machine, in a thread."""
        loop, ready = asyncio.new_event_loop(), threading.Event()
        stop: list[asyncio.Event] = []

        async def serve() -> None:
            stop.append(asyncio.Event())
            server = await asyncio.start_server(self._guarded, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await stop[0].wait()
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop[0].set)
            thread.join(10)
            loop.close()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/v1/models":
            await _answer(writer, 200, self.models)
        elif path == "/metrics":
            await _answer(writer, 200 if self.has_metrics else 404, self.metrics)
        elif path == "/v1/completions" and self.knows_chat_only:
            await _answer(writer, 404, json.dumps({"error": "Not Found"}))
        else:
            is_chat = path == "/v1/chat/completions"
            await self._complete(writer, json.loads(body), headers, is_chat)

    async def _complete(
        self,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        headers: dict[str, str],
        is_chat: bool,
    ) -> None:
        number = int(headers["x-request-id"].rsplit("-", 1)[1])
        self.seen[number] = {"body": body, "headers": headers}
        self.counted[number] = (UNFINISHED, 0)
        fault = self.faults.get(number)
        if fault in MODES:
            outcome, wanted = MODES[fault].outcome, body["max_tokens"]

            def settle(tokens: int) -> None:
                self.counted[number] = (outcome, tokens)

            await MODES[fault].answer(Talk(writer, wanted, len(body["prompt"]), settle))
            return
        if fault == "silence":
            await asyncio.sleep(3600)
        if isinstance(fault, int):
            await _answer(writer, fault, json.dumps({"error": "as told"}))
            return
        if wrong := [key for key in self.refuses if key in body]:
            await _answer(writer, 400, json.dumps({"error": f"extra inputs: {wrong}"}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        wanted = body["max_tokens"] // (2 if fault == "short" else 1)
        tokens = 0 if fault == "empty" else wanted
        if is_chat:
            role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            _event(writer, {"choices": [role]})
            await writer.drain()
        for done in range(0, tokens, self.per_chunk):
            await asyncio.sleep(self.gap_s if done else self.first_s)
            size = min(self.per_chunk, tokens - done)
            reason = "length" if done + size == tokens else None
            text = {"delta": {"content": "ab" * size}} if is_chat else {"text": "ab" * size}
            _event(writer, {"choices": [{**text, "finish_reason": reason}]})
            await writer.drain()
            if fault == "stall":
                await asyncio.sleep(3600)
            if fault == "cut":
                return
            if fault == "garbage":
                _piece(writer, b"data: {not json\n\n")
            if fault == "error":
                _event(writer, {"error": {"message": "out of memory"}})
        if self.says_usage:
            asked = body["messages"][0]["content"].split() if is_chat else body["prompt"]
            usage = {"prompt_tokens": len(asked), "completion_tokens": tokens}
            _event(writer, {"choices": [], "usage": usage})
        _piece(writer, b": a comment\n\ndata: [DO")
        _piece(writer, b"NE]\n\n")  # lines come in pieces too
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.counted[number] = (FINISHED, tokens)


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _piece(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _piece(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


async def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    head = f"HTTP/1.1 {status} Told\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    await writer.drain()
