"""Prefix caching: what full pages hold, so that a job may start on pages that are there already."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import filterfalse
from typing import Any

from engine.contract.job import Job
from traces.serving.request import Request


class Chain:
    """The keys of a request's full pages: each stands for the tokens in it and all before them.

    A chain of hashes as in vLLM. A token is known by its id where the trace has ids, by its named
    block and its offset there where it has those (Mooncake), else by its request and position: so
    are generated tokens, whatever a session's next turn says they were.
    """

    def __init__(self, request: Request, page_tokens: int) -> None:
        self._request, self._page_tokens = request, page_tokens
        self._keys: list[int] = []

    def keys(self, start: int, stop: int) -> list[int]:
        """The keys of pages of the request, counted from its first; made as far as asked for."""
        keys = self._keys
        key = keys[-1] if keys else 0
        for index in range(len(keys), stop):
            key = hash((key, self._content(index)))
            keys.append(key)
        return keys[start:stop]

    def of_prompt(self) -> tuple[int, ...]:
        """The keys of the prompt's full pages."""
        return tuple(self.keys(0, self._request.prompt_tokens // self._page_tokens))

    def _content(self, index: int) -> tuple[Any, ...]:
        request, start = self._request, index * self._page_tokens
        stop = start + self._page_tokens
        if request.prompt_ids is not None:
            named, content = request.prompt_tokens, request.prompt_ids[start:stop]
        else:
            blocks, size = request.prefix_ids or (), request.prefix_block_tokens
            named = min(len(blocks) * size, request.prompt_tokens)
            content = _cut(blocks, size, start, min(stop, named))
        return content if stop <= named else (content, request.request_id, start)


def _cut(blocks: Sequence[int], size: int, start: int, stop: int) -> tuple[Any, ...]:
    """The parts of named blocks between two positions: name, and from where to where in it."""
    return tuple(
        (blocks[i], max(start - i * size, 0), min(stop - i * size, size))
        for i in (range(start // size, -(-stop // size)) if start < stop else ())
    )


class PrefixCache:
    """Which pages of a pool hold what. A page keeps its key until it is taken for something else.

    Several pages may hold the same, as when two jobs began alike at once; the oldest is found.
    """

    def __init__(self, chains: dict[int, Chain], page_tokens: int) -> None:
        self._chains, self._page_tokens = chains, page_tokens
        self._keys: dict[int, int] = {}  # by page
        self._pages: dict[int, dict[int, None]] = {}  # by key, oldest first

    def unknown(self, pages: Iterable[int]) -> list[int]:
        """Those of the pages that hold nothing to be found."""
        return list(filterfalse(self._keys.__contains__, pages))

    def keep(self, job: Job, context_tokens: int, table: Sequence[int]) -> None:
        """A launch has filled pages of a job that held `context_tokens` before it."""
        size, chain = self._page_tokens, self._chains[job.job_id]
        full = min(job.computed_tokens // size, len(table))  # none of one that is freed already
        first = context_tokens // size
        for key, page in zip(chain.keys(first, full), table[first:full], strict=True):
            self._keys[page] = key
            self._pages.setdefault(key, {})[page] = None

    def forget(self, pages: Iterable[int]) -> None:
        """These pages are taken for something else."""
        for page in self._keys.keys() & pages:
            key = self._keys.pop(page)
            alike = self._pages[key]
            del alike[page]
            if not alike:
                del self._pages[key]

    def find(self, job: Job, gone: Container[int] = ()) -> list[int]:
        """Pages with the longest beginning of a job that is known, without those that are gone.

        Ends before the last known token: that one must be computed to yield the next.
        """
        found: list[int] = []
        of_key, chain = self._pages, self._chains[job.job_id]
        for key in chain.keys(0, (job.known_tokens - 1) // self._page_tokens):
            if key not in of_key:
                break
            for page in of_key[key]:
                if page not in gone:
                    found.append(page)
                    break
            else:
                break
        return found

    def wrong(self, job: Job, pages: Sequence[int]) -> list[int]:
        """Those of the pages that do not hold their part of a job's beginning."""
        keys = self._chains[job.job_id].keys(0, len(pages))
        return [p for p, key in zip(pages, keys, strict=True) if self._keys.get(p) != key]
