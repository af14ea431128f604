"""Ways in which a server answers one request, odd or hostile, and what it counts the request as."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

FINISHED, REFUSED, UNFINISHED = "finished", "refused", "unfinished"
FOREVER_S = 3600.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = HEAD + b"\r\n"
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass
class Talk:
    """A connection with a request read from it. `settle` tells the server's books that the request
    is now what its mode says, with so many tokens; before that it is unfinished."""

    writer: asyncio.StreamWriter
    wanted: int
    prompt: int
    settle: Callable[[int], None]

    async def say(self, *pieces: bytes) -> None:
        """Each piece on its own way."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def flood(self, piece: bytes) -> None:
        """Until the client has gone."""
        while True:
            await self.say(piece)

    def reset(self) -> None:
        """Ends the connection with RST."""
        told = self.writer.get_extra_info("socket")
        told.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def usage(self, tokens: Any = None, **more: Any) -> bytes:
        """The server's counts, as an event."""
        tokens = self.wanted if tokens is None else tokens
        counts = {"prompt_tokens": self.prompt, "completion_tokens": tokens, **more}
        return event({"choices": [], "usage": counts})

    def stream(self, tokens: int | None = None, usage: bytes | None = None) -> bytes:
        """A whole answer of so many tokens."""
        tokens = self.wanted if tokens is None else tokens
        return texts(tokens) + (self.usage(tokens) if usage is None else usage) + DONE


def event(content: Any) -> bytes:
    """A line of data."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(text: Any = "ab", reason: str | None = None, **more: Any) -> bytes:
    """A token, as an event."""
    return event({"choices": [{"text": text, "finish_reason": reason, **more}]})


def texts(tokens: int, reason: str = "length") -> bytes:
    """So many tokens, the last with a reason."""
    return b"".join(token("ab", reason if i == tokens - 1 else None) for i in range(tokens))


def chunk(content: bytes) -> bytes:
    """Content as HTTP frames it."""
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


@dataclass(frozen=True)
class Mode:
    """How one request is answered, and what it is then."""

    outcome: str
    answer: Callable[[Talk], Awaitable[None]]


MODES: dict[str, Mode] = {}
Answers = Callable[[Talk], Awaitable[None]]


def mode(outcome: str) -> Callable[[Answers], Answers]:
    """Enters a mode under the name of its function."""

    def enter(answer: Answers) -> Answers:
        MODES[answer.__name__] = Mode(outcome, answer)
        return answer

    return enter


# ---- statuses
def status_of(code: int, text: str, *lines: str, outcome: str) -> None:
    """A mode that answers with a status."""

    async def answer(talk: Talk) -> None:
        head = [f"HTTP/1.1 {code} Told", f"Content-Length: {len(text.encode())}", *lines]
        await talk.say("\r\n".join(head).encode() + b"\r\n\r\n" + text.encode())
        talk.settle(0)

    MODES[f"status_{code}"] = Mode(outcome, answer)


for code in (400, 401, 403, 404, 413, 429):
    status_of(code, json.dumps({"error": {"message": "as told"}}), outcome=REFUSED)
for code in (301, 307):
    status_of(code, "", "Location: http://127.0.0.1:9/v1", outcome=REFUSED)
for code in (500, 502, 503):
    status_of(code, "<html>\x1b[31m no </html>", outcome=UNFINISHED)
status_of(422, '{"detail": "Unexpected fields: {\'ignore_eos\'}"}', outcome=REFUSED)
status_of(204, "", outcome=UNFINISHED)


@mode(REFUSED)
async def refused_at_length(talk: Talk) -> None:
    talk.settle(0)
    await talk.say(b"HTTP/1.1 429 Told\r\n\r\n")
    await talk.flood(b"no " * 1000)


@mode(REFUSED)
async def refused_and_silent(talk: Talk) -> None:
    talk.settle(0)
    await talk.say(b"HTTP/1.1 429 Told\r\nContent-Length: 9\r\n\r\nno")
    await asyncio.sleep(FOREVER_S)


@mode(REFUSED)
async def refused_and_cut(talk: Talk) -> None:
    await talk.say(b"HTTP/1.1 429 Told\r\nContent-Length: 9\r\n\r\nno")
    talk.settle(0)


# ---- connections that break
@mode(UNFINISHED)
async def reset_before_head(talk: Talk) -> None:
    talk.reset()


@mode(UNFINISHED)
async def closed_before_head(talk: Talk) -> None:
    pass


@mode(UNFINISHED)
async def reset_in_head(talk: Talk) -> None:
    await talk.say(HEAD)
    talk.reset()


@mode(UNFINISHED)
async def reset_behind_head(talk: Talk) -> None:
    await talk.say(CHUNKED)
    talk.reset()


@mode(UNFINISHED)
async def reset_in_stream(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(token()))
    await asyncio.sleep(0.02)
    talk.reset()


@mode(UNFINISHED)
async def cut_in_chunk(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(token()), b"500\r\ndata: {")


@mode(UNFINISHED)
async def cut_between_chunks(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(token()))


@mode(UNFINISHED)
async def cut_behind_reason(talk: Talk) -> None:
    """Usage was to come."""
    await talk.say(CHUNKED, chunk(texts(talk.wanted)))


@mode(UNFINISHED)
async def cut_in_length(talk: Talk) -> None:
    await talk.say(HEAD + b"Content-Length: 9999\r\n\r\n", token())


@mode(UNFINISHED)
async def cut_without_length(talk: Talk) -> None:
    await talk.say(b"HTTP/1.0 200 OK\r\n\r\n", token())


# ---- what is no HTTP
@mode(UNFINISHED)
async def not_http(talk: Talk) -> None:
    await talk.say(b"SSH-2.0-OpenSSH_9.6\r\n", b"\r\n")


@mode(UNFINISHED)
async def no_status(talk: Talk) -> None:
    await talk.say(b"HTTP/1.1 nine OK\r\n\r\n")


@mode(UNFINISHED)
async def chunk_without_size(talk: Talk) -> None:
    await talk.say(CHUNKED, b"zz\r\n", token())


@mode(UNFINISHED)
async def chunk_of_negative_size(talk: Talk) -> None:
    await talk.say(CHUNKED, b"-5\r\n", token())


@mode(UNFINISHED)
async def length_of_words(talk: Talk) -> None:
    await talk.say(HEAD + b"Content-Length: many\r\n\r\n", talk.stream())


@mode(UNFINISHED)
async def compressed(talk: Talk) -> None:
    content = gzip.compress(talk.stream())
    await talk.say(HEAD + b"Content-Encoding: gzip\r\n\r\n", content)


# ---- what has no end
@mode(UNFINISHED)
async def endless_head(talk: Talk) -> None:
    await talk.say(HEAD)
    await talk.flood(b"X-More: and more\r\n")


@mode(UNFINISHED)
async def endless_head_line(talk: Talk) -> None:
    await talk.flood(b"HTTP/1.1" * 500)


@mode(UNFINISHED)
async def endless_head_of_continues(talk: Talk) -> None:
    await talk.flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


@mode(UNFINISHED)
async def endless_line(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(b"data: "))
    await talk.flood(chunk(b"a" * 10_000))


@mode(UNFINISHED)
async def endless_chunk(talk: Talk) -> None:
    await talk.say(CHUNKED, b"ffffffffffff\r\n")
    await talk.flood(token() * 20)


@mode(UNFINISHED)
async def endless_tokens(talk: Talk) -> None:
    await talk.say(CHUNKED)
    await talk.flood(chunk(token() * 20))


@mode(UNFINISHED)
async def endless_comments(talk: Talk) -> None:
    await talk.say(CHUNKED)
    await talk.flood(chunk(b": still here\n\n" * 100))


@mode(UNFINISHED)
async def stalled(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(token()))
    await asyncio.sleep(FOREVER_S)


@mode(UNFINISHED)
async def silent(talk: Talk) -> None:
    await asyncio.sleep(FOREVER_S)


@mode(UNFINISHED)
async def trickle(talk: Talk) -> None:
    await talk.say(CHUNKED)
    while True:
        await talk.say(chunk(b"d"))
        await asyncio.sleep(0.05)


@mode(UNFINISHED)
async def open_behind_reason(talk: Talk) -> None:
    """Neither [DONE] nor an end: more may come."""
    await talk.say(CHUNKED, chunk(texts(talk.wanted)))
    await asyncio.sleep(FOREVER_S)


# ---- what is no completion
@mode(UNFINISHED)
async def a_page(talk: Talk) -> None:
    await talk.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>\nWelcome\n</html>\n")


@mode(UNFINISHED)
async def an_answer_in_one(talk: Talk) -> None:
    """Of a server that does not stream."""
    text = json.dumps({"choices": [{"text": "abab", "finish_reason": "length"}]})
    await talk.say(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + text.encode())


@mode(UNFINISHED)
async def nothing(talk: Talk) -> None:
    await talk.say(HEAD + b"Content-Length: 0\r\n\r\n")


def spoilt(name: str, *events: bytes) -> None:
    """A mode that says so in the midst of a good answer."""

    async def answer(talk: Talk) -> None:
        await talk.say(CHUNKED, chunk(token()), *map(chunk, events), chunk(talk.stream()), LAST)

    MODES[name] = Mode(UNFINISHED, answer)


spoilt("not_json", b"data: {not json\n\n")
spoilt("half_json", b'data: {"choices": [\n\n')
spoilt("deep_lists", b"data: " + b"[" * 100_000 + b"\n\n")
spoilt("deep_objects", b'data: {"choices": ' + b'{"a":' * 30_000 + b"1" + b"}" * 30_001 + b"\n\n")
spoilt("a_number_of_5000_digits", b"data: " + b"1" * 5000 + b"\n\n")
spoilt("a_list", b"data: [1]\n\n")
spoilt("error_in_stream", event({"error": {"message": "out of memory \x1b[2J"}}))
spoilt("text_is_an_object", token({"a": 1}))
spoilt("choices_is_text", event({"choices": "abc"}))
spoilt("choices_is_a_number", event({"choices": 3}))
spoilt("usage_negative", event({"usage": {"completion_tokens": -1}}))
spoilt("usage_string", event({"usage": {"completion_tokens": "\ud800"}}))
spoilt("usage_huge", event({"usage": {"completion_tokens": 9_000_000}}))
spoilt("usage_nan", b'data: {"usage": {"completion_tokens": NaN}}\n\n')
spoilt("usage_infinite", b'data: {"usage": {"completion_tokens": Infinity}}\n\n')
spoilt("usage_of_a_list", event({"usage": [1, 2]}))


@mode(UNFINISHED)
async def usage_zero(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(talk.stream(usage=talk.usage(0))), LAST)


@mode(UNFINISHED)
async def empty_choices(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(event({"choices": []}) * 5 + DONE), LAST)


@mode(UNFINISHED)
async def no_reason_and_no_done(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(token() * talk.wanted), LAST)


# ---- odd, and whole
def whole(name: str, *pieces: Callable[[Talk], bytes], tokens: int | None = None) -> None:
    """A mode that answers whole, in these pieces."""

    async def answer(talk: Talk) -> None:
        await talk.say(*(piece(talk) for piece in pieces))
        talk.settle(talk.wanted if tokens is None else tokens)

    MODES[name] = Mode(FINISHED, answer)


def said(content: bytes) -> Callable[[Talk], bytes]:
    """A piece that is the same for all."""
    return lambda talk: content


def streamed(change: Callable[[bytes], bytes] = lambda stream: stream) -> Callable[[Talk], bytes]:
    """A whole answer in a chunk, changed."""
    return lambda talk: chunk(change(talk.stream()))


begin, last = said(CHUNKED), said(LAST)
whole("no_done", begin, lambda t: chunk(texts(t.wanted) + t.usage()), last)
whole("double_done", begin, streamed(lambda stream: stream + DONE), last)
whole("junk_behind_done", begin, streamed(lambda stream: stream + b"data: {junk\n\n"), last)
whole("usage_missing", begin, lambda t: chunk(texts(t.wanted) + DONE), last)
whole("usage_null", begin, lambda t: chunk(t.stream(usage=event({"usage": None}))), last)
whole("usage_too_low", begin, lambda t: chunk(t.stream(usage=t.usage(2))), last, tokens=2)
whole("usage_with_each", begin, lambda t: chunk((token() + t.usage(1)) + t.stream()), last)
whole("other_prompt", begin, lambda t: chunk(t.stream(usage=t.usage(prompt_tokens=1))), last)
whole("finishes_early", begin, lambda t: chunk(t.stream(2)), last, tokens=2)
whole("too_many", begin, lambda t: chunk(t.stream(40)), last, tokens=40)
whole("null_text", begin, lambda t: chunk(token(None) + t.stream()), last)
whole("null_delta", begin, lambda t: chunk(token(delta=None) + t.stream()), last)
whole("no_number", begin, lambda t: chunk(token(logprobs=float("nan")) + t.stream()), last)
whole("duplicates", begin, lambda t: chunk(token() * t.wanted + t.stream()), last)
whole("all_in_one", begin, lambda t: chunk(token("ab" * 9, "length") + t.usage() + DONE), last)
whole("crlf", begin, streamed(lambda stream: stream.replace(b"\n", b"\r\n")), last)
whole("cr", begin, streamed(lambda stream: stream.replace(b"\n", b"\r")), last)
whole("bom", begin, streamed(lambda stream: b"\xef\xbb\xbf" + stream), last)
whole("pings", begin, streamed(lambda stream: stream.replace(b"\n\n", b"\n\n: ping\n\n")), last)
whole("events", begin, streamed(lambda s: b"retry: 5\n" + s.replace(b"data", b"id: 1\ndata")), last)
whole("no_blank", begin, streamed(lambda stream: stream.replace(b"data: ", b"data:")), last)
whole("not_unicode", begin, streamed(lambda stream: stream.replace(b"ab", b"\xff\xfe")), last)
whole("http_1_0", said(b"HTTP/1.0 200 OK\r\n\r\n"), lambda t: t.stream())
whole("no_length", said(UNTIL_CLOSED), lambda t: t.stream())
whole("continued", said(b"HTTP/1.1 100 Continue\r\n\r\n"), begin, streamed(), last)
whole("no_content_type", said(b"HTTP/1.1 200 OK\r\n\r\n"), lambda t: t.stream())
whole("wrong_type", said(b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\n"), lambda t: t.stream())
whole("trailers", begin, streamed(), said(b"0\r\nX-Sum: 5\r\n\r\n"))
whole("no_last_chunk", begin, streamed())


@mode(FINISHED)
async def with_length(talk: Talk) -> None:
    content = talk.stream()
    await talk.say(HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    talk.settle(talk.wanted)


@mode(FINISHED)
async def named_chunks(talk: Talk) -> None:
    content = talk.stream()
    await talk.say(CHUNKED, f"{len(content):X};name=value\r\n".encode() + content + b"\r\n", LAST)
    talk.settle(talk.wanted)


@mode(FINISHED)
async def split_characters(talk: Talk) -> None:
    """Bytes of a character in different chunks."""
    content = talk.stream().replace(b"ab", "ü€".encode())
    await talk.say(CHUNKED, *(chunk(content[i : i + 1]) for i in range(len(content))), LAST)
    talk.settle(talk.wanted)


@mode(FINISHED)
async def slow_head(talk: Talk) -> None:
    for sign in CHUNKED:
        await talk.say(bytes([sign]))
        await asyncio.sleep(0.002)
    await talk.say(chunk(talk.stream()), LAST)
    talk.settle(talk.wanted)


@mode(FINISHED)
async def open_behind_done(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(talk.stream()))
    talk.settle(talk.wanted)
    await asyncio.sleep(FOREVER_S)


@mode(FINISHED)
async def endless_behind_done(talk: Talk) -> None:
    await talk.say(CHUNKED, chunk(talk.stream()))
    talk.settle(talk.wanted)
    await talk.flood(chunk(token() * 20))
