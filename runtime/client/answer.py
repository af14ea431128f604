"""What came back for one request: times of tokens out of the chunks of a streamed completion."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

THOUGHT = "reasoning_content"
MAX_TOKENS = 10_000_000  # of a prompt; more is no count
MAX_EXTRA = 10_000  # chunks beyond a token each; a server that sends more will not end
DEPTH = 64  # of nested JSON, where nothing else is said
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # no text takes it long


class Spoilt(Exception):
    """A stream that does not say what a completion says."""


@dataclass
class Answer:
    """Times in ns from the start of the replay; `error` is empty if the answer came whole."""

    request_id: int
    due_ns: int
    wanted_tokens: int = 0  # as many as were asked for
    depth: int = DEPTH  # of JSON that is still read
    sent_ns: int | None = None
    finish_ns: int | None = None
    error: str = ""
    is_refused: bool = False  # the server's fault-free no: HTTP 3xx or 4xx
    has_ended: bool = False  # a finish reason, or [DONE]
    is_done: bool = False  # [DONE]: nothing else follows
    received_chars: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    is_empty: list[bool] = field(default_factory=list)  # per chunk: no text in it
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None

    def take(self, line: str, now_ns: int) -> None:
        """One line of the event stream. Spoilt where it is an error or no JSON."""
        line = line.removeprefix("\ufeff")  # of a whole stream; no event begins so
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
            # A token that was not asked for is a character of the stream at least.
            most = max(self.wanted_tokens, self.received_chars)
            self.output_tokens = _count(usage.get("completion_tokens"), most)
        for choice in event.get("choices") or ():
            self.has_ended = self.has_ended or choice.get("finish_reason") is not None
            delta = choice.get("delta")  # of a chat, which thinks aloud where the model reasons
            text = (
                choice.get("text") if delta is None else delta.get("content") or delta.get(THOUGHT)
            )
            if not isinstance(text, str | None):
                raise TypeError("a text that is none")
            if delta is not None and not text and not self.chunk_ns:
                continue  # says who speaks, and holds no token
            if len(self.chunk_ns) >= self.wanted_tokens + MAX_EXTRA:
                raise Spoilt(
                    f"{MAX_EXTRA} chunks more than the {self.wanted_tokens} tokens asked for"
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
    """What a text of JSON says. ValueError, told in one line, where it is none, or nested deeper:
    Python's own parser would give up at a depth that depends on who calls it."""
    if text.count("[") + text.count("{") > depth and _depth(text) > depth:
        raise ValueError(f"nested deeper than {depth} levels (limits.depth)")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error


def _depth(text: str) -> int:
    """How deep brackets are nested, those in strings left out."""
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
    chunks count from the front as far as there are tokens for them. Where tokens are more than
    chunks, the chunks hold equal shares, the later ones the larger: its tokens come together.
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
