"""Replays a trace against an OpenAI-compatible server: a black box as the measured side."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from runtime.client.answer import Answer, Spoilt, read_json
from runtime.client.gauges import Gauges, read_gauges
from runtime.client.sse import Address, Broken, HttpExchange, Refused, StreamLimits, fetch
from traces.serving.request import Request

Prompt = Sequence[int] | str
CONNECT_AHEAD_S = 0.1  # so that making a connection delays no request
LEAD_S = 0.2  # from the start of the replay to its time 0
CHECK_S = 10.0  # for an answer of /v1/models and /metrics
OPTIONAL = ("temperature", "ignore_eos", "stream_options")  # of a body: a server can do without
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server and how to ask it.

    `timeout_s` limits a request from its sending on, `limits` its answer. `extra` goes into every
    body and replaces keys of it (None leaves a key out), `headers` go into every request. The
    endpoint `chat` takes prompts as text: one message of the user.
    """

    url: str
    model: str
    timeout_s: float = 600.0
    scrape_s: float | None = None  # between two looks at /metrics; None: never
    endpoint: str = "completions"  # or chat
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    limits: StreamLimits = field(default_factory=StreamLimits)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive")
        if self.scrape_s is not None and not self.scrape_s > 0:
            raise ValueError(f"scrape_s is {self.scrape_s}; it must be positive, or null for never")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(
                f"endpoint is {self.endpoint}; it must be one of {', '.join(ENDPOINTS)}"
            )


@dataclass(frozen=True)
class Replay:
    """One answer per request, in the order of the trace, and the gauges of /metrics meanwhile."""

    answers: list[Answer]
    gauges: list[Gauges]


def replay(
    server: Server,
    requests: Sequence[Request],
    prompt_of: Callable[[Request], Prompt],
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """Sends every request at its absolute time and waits for all answers.

    Time and memory are limited: a request ends within `timeout_s` of its time and within the
    `limits`, whatever the server does. A session's next turn follows its end.

    Args:
        server: The server and how to ask it.
        requests: The trace.
        prompt_of: Gives the prompt of a request, as text or token ids.
        progress: Called at the end of each request.

    Returns:
        The answers and gauges. A failed request is an answer with an error.
    """
    return asyncio.run(_Client(server, prompt_of, progress).replay(requests))


def model_served(url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server names. ValueError in one line where there is none."""
    address = Address.of(url)
    try:
        listed = read_json(asyncio.run(fetch(address, "/v1/models", headers, CHECK_S)))
        name = listed["data"][0]["id"]
        if not isinstance(name, str):
            raise TypeError("a name that is no string")
        return name
    except (OSError, TimeoutError, EOFError, Refused, Broken) as error:
        reason = printable(str(error)) or type(error).__name__
        raise ValueError(f"no OpenAI-compatible server answers at {url} ({reason})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{url}/v1/models names no model; set backend.model") from error


class _Client:
    def __init__(
        self, server: Server, prompt_of: Callable[[Request], Prompt], progress: Callable[[], None]
    ) -> None:
        self._server, self._prompt_of, self._progress = server, prompt_of, progress
        self._address = Address.of(server.url)
        self._zero_ns = 0

    async def replay(self, requests: Sequence[Request]) -> Replay:
        chains: dict[tuple[str, int], list[Request]] = {}
        for request in sorted(requests, key=lambda r: r.turn):  # as in the engine, in any file
            own = ("request", request.request_id)
            key = own if request.session is None else ("session", request.session)
            chains.setdefault(key, []).append(request)
        gauges: list[Gauges] = []
        self._zero_ns = time.monotonic_ns() + round(LEAD_S * 1e9)
        watch = asyncio.create_task(self._watch(gauges))
        try:
            parts = await asyncio.gather(*(self._chain(chain) for chain in chains.values()))
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        answers = {answer.request_id: answer for part in parts for answer in part}
        return Replay([answers[r.request_id] for r in requests], gauges)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    async def _until(self, at_ns: float) -> None:
        # the loop's timers may fire early by their resolution
        while (left_s := (at_ns - self._now_ns()) / 1e9) > 0:
            await asyncio.sleep(left_s)

    async def _chain(self, requests: Sequence[Request]) -> list[Answer]:
        """Asks the turns of a session one after another; any other request is its own chain."""
        answers: list[Answer] = []
        for request in requests:
            due_ns = request.arrival_ns
            if answers:
                due_ns = max(due_ns, (answers[-1].finish_ns or 0) + request.think_ns)
            depth = self._server.limits.depth
            answer = Answer(request.request_id, due_ns, request.output_tokens, depth)
            await self._until(due_ns - CONNECT_AHEAD_S * 1e9)
            await self._attempt(request, answer)
            answer.finish_ns = self._now_ns() if answer.finish_ns is None else answer.finish_ns
            answers.append(answer)
            self._progress()
        return answers

    async def _attempt(self, request: Request, answer: Answer) -> None:
        """Fills the answer; every failure becomes its error."""
        headers = {"x-request-id": f"tandem-{request.request_id}", **self._server.headers}
        exchange = HttpExchange(self._address, headers, self._server.limits)
        try:
            async with asyncio.timeout(self._server.timeout_s + CONNECT_AHEAD_S):
                await self._converse(exchange, request, answer)
        except TimeoutError:
            begun = f"HTTP {exchange.status}, and " if exchange.status not in (None, 200) else ""
            answer.error = f"{begun}no end within {self._server.timeout_s:g} s"
        except Refused as refusal:
            answer.error = f"{refusal}{remedy(self._server, str(refusal))}"
        except (Spoilt, Broken) as error:
            answer.error = str(error)
        except (OSError, EOFError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            await exchange.close()
        answer.error = printable(answer.error)
        answer.is_refused = exchange.status is not None and 300 <= exchange.status < 500

    async def _converse(self, exchange: HttpExchange, request: Request, answer: Answer) -> None:
        body = self._body(request)
        await exchange.open()
        await self._until(answer.due_ns)
        answer.sent_ns = self._now_ns()
        await exchange.ask(ENDPOINTS[self._server.endpoint], body)
        async with aclosing(exchange.lines()) as lines:
            async for line in lines:
                answer.take(line, self._now_ns())
                if answer.is_done:
                    break
        if not answer.received_chars:
            raise Spoilt(f"the answer ({exchange.content_type or 'of no type'}) holds no events")
        if not answer.has_ended:
            raise Spoilt("the stream broke off")
        if not answer.token_ns:
            raise Spoilt("the answer holds no token")
        answer.finish_ns = answer.chunk_ns[-1]

    def _body(self, request: Request) -> dict[str, Any]:
        body = {
            "model": self._server.model,
            **self._asked(self._prompt_of(request)),
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,  # vLLM and SGLang: the trace says how long an answer is
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._server.extra,
        }
        return {key: value for key, value in body.items() if value is not None}

    def _asked(self, prompt: Prompt) -> dict[str, Any]:
        if self._server.endpoint == "completions":
            return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        assert isinstance(prompt, str), "a chat takes text"
        return {"messages": [{"role": "user", "content": prompt}]}

    async def _watch(self, gauges: list[Gauges]) -> None:
        """Reads /metrics until cancelled; a missing page or a slow answer is no error."""
        headers = self._server.headers
        while self._server.scrape_s is not None:
            try:
                text = await fetch(self._address, "/metrics", headers, CHECK_S)
                gauges.append(read_gauges(text, self._now_ns()))
            except (OSError, TimeoutError, Refused, Broken, EOFError, ValueError):
                pass
            await asyncio.sleep(self._server.scrape_s)


def remedy(server: Server, refusal: str) -> str:
    """The settings that leave out the keys of a body that a refusal names, to follow its text.

    Empty where it names no key: a whole quoted body, `"key": value`, names none.
    """
    extra = {**dict.fromkeys(OPTIONAL, True), **server.extra}
    sent = [key for key, value in extra.items() if value is not None]
    named = [key for key in sent if re.search(rf"\b{re.escape(key)}\b(?![\"']\s*:)", refusal)]
    settings = [f"+backend.extra.{key}=null" for key in named]
    return f" (left out by {' '.join(settings)})" if settings else ""


def printable(text: str) -> str:
    """A server's text in one line of printable characters."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
