"""vLLM v1's loop written down a second time, without our engine: what VllmV1 is held against.

Read in vLLM 0.19's scheduler and KV cache manager: running first, in order; the tail of running is
preempted; a step that preempted admits no request; a whole prompt must find room; full pages
keep their hash after they are freed and are taken again oldest first, the end of a job before its
beginning. With `depth` 2 a step is decided while the one before runs (asynchronous scheduling).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from traces.serving.request import Request

StepNs = Callable[[Sequence[int], Sequence[int], int], int]  # tokens, contexts, samples


@dataclass(eq=False)
class Served:
    """A request and how far it is."""

    request: Request
    known: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    is_done: bool = False


class Pages:
    """Pages with reference counts; free ones in the order in which they will be taken."""

    def __init__(self, count: int, tokens: int, keeps: bool) -> None:
        self.tokens, self._keeps = tokens, keeps
        self.free = OrderedDict.fromkeys(range(count))
        self._holders = [0] * count
        self._hash: dict[int, int] = {}
        self._pages: dict[int, dict[int, None]] = {}  # of equal ones the oldest is found

    def take(self, served: Served, tokens: int) -> None:
        """Pages for so many tokens of a job; the oldest free ones lose what they kept."""
        while len(served.pages) * self.tokens < tokens:
            page, _ = self.free.popitem(last=False)
            kept = self._hash.pop(page, None)
            if kept is not None:
                del self._pages[kept][page]
            self._holders[page] = 1
            served.pages.append(page)

    def give(self, served: Served) -> None:
        for page in reversed(served.pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self.free[page] = None
        served.pages = []

    def keep(self, served: Served) -> None:
        """Full pages can be found by what is in them."""
        for i in range(served.computed // self.tokens if self._keeps else 0):
            if served.pages[i] not in self._hash:
                key = self._key(served, i)
                self._hash[served.pages[i]] = key
                self._pages.setdefault(key, {})[served.pages[i]] = None

    def hits(self, served: Served) -> list[int]:
        """The longest known beginning in pages; the last token is always computed."""
        found: list[int] = []
        for i in range((served.known - 1) // self.tokens if self._keeps else 0):
            pages = self._pages.get(self._key(served, i))
            if not pages:
                break
            found.append(next(iter(pages)))
        return found

    def share(self, served: Served, pages: list[int]) -> None:
        for page in pages:
            self.free.pop(page, None)
            self._holders[page] += 1
        served.pages, served.computed = list(pages), len(pages) * self.tokens

    def _key(self, served: Served, i: int) -> int:
        while len(served.hashes) <= i:
            start = len(served.hashes) * self.tokens
            ids, request = served.request.prompt_ids or (), served.request
            content = tuple(
                ids[at] if at < len(ids) else (request.request_id, at)
                for at in range(start, start + self.tokens)
            )
            before = served.hashes[-1] if served.hashes else None
            served.hashes.append(hash((before, content)))
        return served.hashes[i]


class Vllm:
    """One engine; `run` returns the token times of every request, by its id."""

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        step_ns: StepNs,
        token_budget: int,
        max_jobs: int,
        depth: int = 1,
        prefix_caching: bool = False,
    ) -> None:
        self.pages = Pages(pages, page_tokens, prefix_caching)
        self._step_ns, self._budget, self._seats = step_ns, token_budget, max_jobs
        self._depth = depth
        self.running: list[Served] = []
        self.waiting: list[Served] = []
        self.steps = self.restarts = self.reused_tokens = 0
        self.took_from_done = 0  # preemptions of jobs whose last token was on its way

    def run(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        coming = [Served(r, r.prompt_tokens) for r in sorted(requests, key=lambda r: r.arrival_ns)]
        all_served, flights = list(coming), list[tuple[int, list[Served]]]()
        now_ns = lane_ns = 0
        while any(len(s.token_ns) < s.request.output_tokens for s in all_served):
            while coming and coming[0].request.arrival_ns <= now_ns:
                self.waiting.append(coming.pop(0))
            before = self.restarts
            batch = self._schedule() if len(flights) < self._depth else []
            if batch:
                lane_ns = max(lane_ns, now_ns) + self._launch(batch, flights)
                flights[-1] = (lane_ns, flights[-1][1])
                continue
            self.steps += self.restarts > before  # one that only preempts
            events = [flights[0][0]] if flights else []
            events += [coming[0].request.arrival_ns] if coming else []
            now_ns = max(now_ns, min(events))
            while flights and flights[0][0] <= now_ns:
                self._settle(*flights.pop(0))
        return {s.request.request_id: s.token_ns for s in all_served}

    def _schedule(self) -> list[tuple[Served, int]]:
        budget, batch, preempted = self._budget, list[tuple[Served, int]](), self.restarts
        for served in tuple(self.running):
            if not budget or served not in self.running or served.is_done:
                continue
            tokens = min(served.known - served.computed, budget)
            if not self._make_room(served, served.computed + tokens):
                break
            self.pages.take(served, served.computed + tokens)
            batch.append((served, tokens))
            budget -= tokens
        if self.restarts == preempted:
            self._admit(batch, budget)
        return batch

    def _make_room(self, served: Served, tokens: int) -> bool:
        while -(-tokens // self.pages.tokens) - len(served.pages) > len(self.pages.free):
            victim = self.running.pop()
            self.restarts += 1
            self.took_from_done += victim.is_done
            self.pages.give(victim)
            victim.computed = 0
            self.waiting.insert(0, victim)
            if victim is served:
                return False
        return True

    def _admit(self, batch: list[tuple[Served, int]], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self._seats:
            served = self.waiting[0]
            hits = self.pages.hits(served)
            taken = -(-served.known // self.pages.tokens) - len(hits)
            if taken + sum(page in self.pages.free for page in hits) > len(self.pages.free):
                return
            self.running.append(self.waiting.pop(0))
            self.pages.share(served, hits)
            self.reused_tokens += served.computed
            tokens = min(served.known - served.computed, budget)
            self.pages.take(served, served.computed + tokens)
            batch.append((served, tokens))
            budget -= tokens

    def _launch(
        self, batch: list[tuple[Served, int]], flights: list[tuple[int, list[Served]]]
    ) -> int:
        contexts, sampling = [served.computed for served, _ in batch], []
        for served, tokens in batch:
            served.computed += tokens
            self.pages.keep(served)
            if served.computed == served.known:
                served.known += 1
                sampling.append(served)
                request = served.request
                served.is_done = served.known >= request.prompt_tokens + request.output_tokens
        self.steps += 1
        flights.append((0, sampling))
        return self._step_ns([tokens for _, tokens in batch], contexts, len(sampling))

    def _settle(self, end_ns: int, sampled: list[Served]) -> None:
        for served in sampled:
            served.token_ns.append(end_ns)
            if len(served.token_ns) == served.request.output_tokens:
                (self.running if served in self.running else self.waiting).remove(served)
                self.pages.give(served)
