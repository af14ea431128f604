"""What came back for one request: times of tokens out of the chunks of a streamed completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

THOUGHT = "reasoning_content"
MAX_TOKENS = 10_000_000  # of one request; more is no count


class Spoilt(Exception):
    """A stream that does not say what a completion says."""


@dataclass
class Answer:
    """Times in ns from the start of the replay; `error` is empty if the answer came whole."""

    request_id: int
    due_ns: int
    sent_ns: int | None = None
    finish_ns: int | None = None
    error: str = ""
    is_refused: bool = False  # the server's fault-free no: HTTP 4xx
    has_ended: bool = False  # a finish reason, or [DONE]
    chunk_ns: list[int] = field(default_factory=list)
    is_empty: list[bool] = field(default_factory=list)  # per chunk: no text in it
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None

    def take(self, line: str, now_ns: int) -> None:
        """One line of the event stream. Spoilt where it is an error or no JSON."""
        if not line.startswith("data:"):
            return  # blank lines, comments (keep-alives), names of events
        content = line[len("data:") :].strip()
        if content == "[DONE]":
            self.has_ended = True
            return
        try:
            event = json.loads(content)
        except json.JSONDecodeError as error:
            raise Spoilt("the stream holds a line that is not JSON") from error
        if not isinstance(event, dict) or event.get("error"):
            raise Spoilt(f"error in the stream: {str(event)[:200]}")
        try:
            self._take_event(event, now_ns)
        except (AttributeError, TypeError) as error:
            raise Spoilt(f"no event of a completion: {content[:200]}") from error

    def _take_event(self, event: dict[str, Any], now_ns: int) -> None:
        if usage := event.get("usage"):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.output_tokens = _count(usage.get("completion_tokens"))
        for choice in event.get("choices") or ():
            self.has_ended = self.has_ended or choice.get("finish_reason") is not None
            delta = choice.get("delta")  # of a chat, which thinks aloud where the model reasons
            text = (
                choice.get("text") if delta is None else delta.get("content") or delta.get(THOUGHT)
            )
            if delta is not None and not text and not self.chunk_ns:
                continue  # says who speaks, and holds no token
            self.chunk_ns.append(now_ns)
            self.is_empty.append(not text)

    @property
    def token_ns(self) -> list[int]:
        """When each output token came."""
        return tokens_of(self.chunk_ns, self.is_empty, self.output_tokens)


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_TOKENS):
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
