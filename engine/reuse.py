"""The engine's part of prefix caching: jobs start behind what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.job import Job
from engine.ledger import Ledger
from engine.plan import Compute, Plan, Share, Tier, kv_place
from engine.prefix import Chain
from engine.progress import start_behind
from engine.recorder import Recorder
from engine.trial import Trial
from traces.request import Request


class Reuse:
    """Told of every request, issue and launch where the policy has `prefix_caching`."""

    def __init__(self, chains: dict[int, Chain], ledger: Ledger, recorder: Recorder) -> None:
        self._chains, self._ledger, self._recorder = chains, ledger, recorder

    def trial(self, device: int) -> Callable[[], Trial]:
        """Makes dry runs on a device's pages."""
        return self._ledger.sharing[Tier.GPU, device].trial

    def arrived(self, request: Request) -> None:
        """A request may look its beginning up from now on."""
        self._chains[request.request_id] = Chain(request, self._ledger.page.tokens)

    def left(self, job: Job) -> None:
        """It is served; the pages that it filled stay."""
        del self._chains[job.job_id]

    def start(self, plan: Plan) -> None:
        """A plan is issued: jobs start behind what they share."""
        shares = [op for op in plan.ops if isinstance(op, Share)]
        launches = [op for op in plan.ops if isinstance(op, Compute)] if shares else []
        jobs = {piece.job.job_id: piece.job for op in launches for piece in op.slices}
        for op in shares:
            job, tokens = jobs[op.place.region.owner], len(op.pages) * self._ledger.page.tokens
            start_behind(job, tokens)
            self._recorder.cached(job.job_id, tokens)

    def keep(self, device: int, moved: Iterable[tuple[Job, int]]) -> None:
        """Pages that jobs have filled since they held so many tokens can be found from the next
        plan on."""
        cache, tables = self._ledger.sharing[Tier.GPU, device].cache, self._ledger.pages
        size = self._ledger.page.tokens
        for job, context in moved:
            if job.computed_tokens // size > context // size:  # a page is full
                cache.keep(job, context, tables.get(kv_place(job.job_id, Tier.GPU, device), ()))
