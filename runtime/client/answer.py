"""The answer to one request: times of tokens from the chunks of a streamed completion."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

THOUGHT = "reasoning_content"
MAX_TOKENS = 10_000_000  # of a prompt; more is no count
MAX_EXTRA = 10_000  # chunks beyond a token each; a server that sends more will not end
DEPTH = 64  # of nested JSON, by default
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # linear in any text


class Spoilt(Exception):
    """A stream that is no completion."""


@dataclass
class Answer:
    """Times in ns from the start of the replay; `error` is empty if the answer came whole."""

    request_id: int
    due_ns: int
    asked_tokens: int = 0
    depth: int = DEPTH  # of the most nested JSON that is read
    sent_ns: int | None = None
    finish_ns: int | None = None
    error: str = ""
    is_refused: bool = False  # HTTP 3xx or 4xx: no fault of the server
    has_ended: bool = False  # a finish reason, or [DONE]
    is_done: bool = False  # [DONE]: the stream's last event
    received_chars: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    is_empty: list[bool] = field(default_factory=list)  # per chunk: it holds no text
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None

    def take(self, line: str, now_ns: int) -> None:
        """Reads one line of the event stream. Spoilt where it is an error or no JSON."""
        line = line.removeprefix("\ufeff")  # a stream may begin with it; no event does
        if not line.startswith("data:"):
            return  # blank lines, comments (keep-alives), names of events
        self.received_chars += len(line)
        content = line[len("data:") :].strip()
        if content == "[DONE]":
            self.has_ended = self.is_done = True
            return
        try:
            event = read_json(content, self.depth)
        except ValueError as error:
            raise Spoilt(f"the stream holds a line that is not JSON: {error}") from error
        if not isinstance(event, dict) or event.get("error"):
            raise Spoilt(f"error in the stream: {str(event)[:200]}")
        try:
            self._take_event(event, now_ns)
        except (AttributeError, TypeError) as error:
            raise Spoilt(f"no event of a completion: {content[:200]}") from error

    def _take_event(self, event: dict[str, Any], now_ns: int) -> None:
        if usage := event.get("usage"):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), MAX_TOKENS)
            # A token beyond those asked for takes at least one character of the stream.
            most = max(self.asked_tokens, self.received_chars)
            self.output_tokens = _count(usage.get("completion_tokens"), most)
        for choice in event.get("choices") or ():
            self.has_ended = self.has_ended or choice.get("finish_reason") is not None
            delta = choice.get("delta")  # of a chat; its thoughts come before its content
            text = (
                choice.get("text") if delta is None else delta.get("content") or delta.get(THOUGHT)
            )
            if not isinstance(text, str | None):
                raise TypeError("a text that is no string")
            if delta is not None and not text and not self.chunk_ns:
                continue  # names the role, and holds no token
            if len(self.chunk_ns) >= self.asked_tokens + MAX_EXTRA:
                raise Spoilt(
                    f"{MAX_EXTRA} chunks more than the {self.asked_tokens} tokens asked for"
                )
            self.chunk_ns.append(now_ns)
            self.is_empty.append(not text)

    @property
    def counts_too_few(self) -> bool:
        """Whether the server counts fewer tokens than it sent chunks with text."""
        return self.output_tokens is not None and self.is_empty.count(False) > self.output_tokens

    @property
    def token_ns(self) -> list[int]:
        """When each output token came."""
        return tokens_of(self.chunk_ns, self.is_empty, self.output_tokens)


def read_json(text: str, depth: int = DEPTH) -> Any:
    """The value of a JSON text. ValueError, in one line, where it is no JSON or nested deeper.

    Python's own parser would fail at a depth that depends on its caller's stack.
    """
    if text.count("[") + text.count("{") > depth and _depth(text) > depth:
        raise ValueError(f"nested deeper than {depth} levels (limits.depth)")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error


def _depth(text: str) -> int:
    """The depth of nested brackets, those in strings left out."""
    now = most = 0
    for sign in re.findall(r"[\[\]{}]", STRING.sub("", text)):
        now += 1 if sign in "[{" else -1
        most = max(most, now)
    return most


def _count(value: Any, most: int) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise Spoilt(f"usage counts {str(value)[:50]} tokens")
    return value


def tokens_of(times: Sequence[int], is_empty: Sequence[bool], count: int | None) -> list[int]:
    """Times of `count` tokens (None: one per chunk that has text) out of the times of chunks.

    A token may have no text yet (half a character), and a last chunk may have no token: empty
    chunks count from the front as long as there are tokens for them. Where there are more tokens
    than chunks, each chunk holds about equally many, which come together.
    """
    if not times or count == 0:
        return []
    if count is None:
        count = sum(not empty for empty in is_empty)
    kept = list(times)
    for at in reversed(range(len(times))):
        if len(kept) > count and is_empty[at]:
            del kept[at]
    kept = kept[:count]
    if not kept:
        return []
    # token i of n lies in chunk floor(i * chunks / n)
    return [kept[i * len(kept) // count] for i in range(count)]
