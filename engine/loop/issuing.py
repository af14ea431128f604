"""Makes launches of booked operations; jobs move on at that moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from engine.contract.adapters import AdapterVersion
from engine.contract.executor import Launch, Pieces, Span
from engine.contract.job import Job
from engine.contract.plan import Compute, Free, Grow, Op, Plan, Share, Slice
from engine.contract.progress import (
    advance_serving,
    advance_training,
    context_of,
    start_behind,
)
from engine.contract.regions import Kind, Tier, kv_place
from engine.loop.completions import Completions
from engine.loop.state import EngineState
from engine.memory.ledger import NOTHING, Beside, Booking, Ledger
from engine.memory.pool import Chain, PageDryRun
from engine.results.recorder import Recorder
from traces.serving.request import Request

Moved = Callable[[Compute, Sequence[Slice]], Pieces]  # moves jobs on slice by slice


class Moves(ABC):
    """Moves on the jobs of a launch of which fast-forward knows more than its slices."""

    num_held: int  # places at the head of the launch's writes that are known to be held

    @abstractmethod
    def pieces(self, op: Compute, moved: Moved) -> Pieces:
        """Moves the jobs on, some of them by `moved`; returns the pieces of the launch."""


class PrefixReuse:
    """Keeps the page keys of requests and pages where the policy has `prefix_caching`."""

    def __init__(self, chains: dict[int, Chain], ledger: Ledger, recorder: Recorder) -> None:
        self._chains, self._ledger, self._recorder = chains, ledger, recorder

    def dry_run(self, device: int) -> Callable[[], PageDryRun]:
        """Begins dry runs on a device's pages."""
        return self._ledger.sharing[Tier.GPU, device].dry_run

    def arrived(self, request: Request, adapter: AdapterVersion | None) -> None:
        """A request has arrived: its beginning can be looked up from now on."""
        self._chains[request.request_id] = Chain(request, self._ledger.page.tokens, adapter)

    def renew(self, job: Job) -> None:
        """A job that waits runs through another version of its adapter: its keys are others."""
        assert job.adapter is not None, f"job {job.job_id} has no adapter"
        self._chains[job.job_id] = self._chains[job.job_id].through(job.adapter)

    def left(self, job: Job) -> None:
        """A request is served; the pages that it filled stay."""
        del self._chains[job.job_id]

    def start(self, plan: Plan) -> None:
        """A plan is issued: its jobs start behind the tokens of the pages that they share."""
        shares = [op for op in plan.ops if isinstance(op, Share)]
        launches = [op for op in plan.ops if isinstance(op, Compute)] if shares else []
        jobs = {piece.job.job_id: piece.job for op in launches for piece in op.slices}
        for op in shares:
            job, tokens = jobs[op.place.region.owner], len(op.pages) * self._ledger.page.tokens
            start_behind(job, tokens)
            self._recorder.cached(job.job_id, tokens)

    def keep(self, device: int, moved: Iterable[tuple[Job, int]]) -> None:
        """Pages that jobs have filled can be found from the next plan on.

        `moved`: jobs, each with the tokens that it held before.
        """
        cache, tables = self._ledger.sharing[Tier.GPU, device].cache, self._ledger.pages
        size = self._ledger.page.tokens
        for job, context in moved:
            if job.computed_tokens // size > context // size:  # a page is full
                cache.keep(job, context, tables.get(kv_place(job.job_id, Tier.GPU, device), ()))


class Issuing:
    """Makes the launches of a plan, with all jobs as they are at issue, and starts them."""

    def __init__(
        self, state: EngineState, completions: Completions, prefix: PrefixReuse | None
    ) -> None:
        self._state, self._completions, self.prefix = state, completions, prefix

    def launch(self, op: Op, booking: Booking, device: int, moves: Moves | None = None) -> Launch:
        """The launch of a booked operation, whose jobs move on."""
        if not isinstance(op, Compute):
            return Launch(op, booking.waits, (), *booking.copied)
        assert op.device == device, f"a plan for device {device} computes on {op.device}"
        if moves is not None:
            return Launch(op, booking.waits, moves.pieces(op, self._moved))
        own = op.slices[0].job.training if len(op.slices) == 1 else None
        if own is not None and not own.spec.finetunes:
            return Launch(op, booking.waits, self._trained(op, op.slices[0], booking.beside))
        return Launch(op, booking.waits, self._moved(op, op.slices, booking.beside))

    def start(self, plan: Plan, launches: Sequence[Launch], settle: Callable[[Span], None]) -> None:
        """Starts a plan's launches in order.

        The store is told between them of memory that is taken and freed, but for KV.
        """
        store, following = self._state.store, iter(launches)
        run, kv = self._state.executor.run, Kind.KV
        if store is None:
            for launch in launches:
                run(launch, settle)
            return
        for op in plan.ops:
            if isinstance(op, Grow):
                if op.place.region.kind is not kv:
                    store.grow(op.place, op.nbytes)
            elif isinstance(op, Free):
                if op.place.region.kind is not kv:
                    store.free(op.place)
            elif not isinstance(op, Share):
                run(next(following), settle)

    def begin(self, job: Job) -> None:
        """Admits a job that waits; no other changes."""
        jobs = self._state.jobs
        if jobs.has_started(job):
            return
        jobs.start(job)
        if job.training is None:
            self._state.recorder.scheduled(job.job_id, self._state.now_ns)
        if job.adapter is not None and self._state.adapters is not None:
            self._state.adapters.admit(job)
            self._state.recorder.adapted(job.job_id, job.adapter.version)

    def _trained(self, op: Compute, piece: Slice, beside: Beside) -> Pieces:
        """Moves on the only job of a launch that trains whole microbatches: it has no KV."""
        self._advance(op, piece, beside)
        return _alone(piece.job.job_id, piece.tokens)

    def _moved(self, op: Compute, slices: Sequence[Slice], beside: Beside = NOTHING) -> Pieces:
        """Moves the jobs of slices on one by one; returns the pieces of the slices."""
        jobs = [piece.job for piece in slices]
        assert not op.again or all(job.training for job in jobs), "a served job restarts instead"
        ids = tuple([job.job_id for job in jobs])
        if self._state.profile.trains:
            contexts = tuple([context_of(piece) for piece in slices])
        else:
            contexts = tuple([job.computed_tokens for job in jobs])
        pages = self._state.ledger.pages
        tables = [pages.get(kv_place(i, Tier.GPU, op.device), ()) for i in ids]
        samples = tuple([self._advance(op, piece, beside) for piece in slices])
        if self.prefix is not None:
            self.prefix.keep(op.device, zip(jobs, contexts, strict=True))
        tokens = tuple([piece.tokens for piece in slices])
        return Pieces(ids, tokens, contexts, samples, tables)

    def _advance(self, op: Compute, piece: Slice, beside: Beside) -> bool:
        """Moves a slice's job on; returns whether it yields a token."""
        job = piece.job
        self.begin(job)
        if job.training is not None:
            self._train(op, piece, beside)
            return False
        samples, state = advance_serving(piece), self._state
        if piece.record:
            jobs = state.jobs.jobs.values()
            state.records.extend(job, piece.tokens, jobs, state.now_ns)
        if samples and self._state.forced and self._completions.tokens_left(job) <= 0:
            self._completions.end_with(op, [job])
        return samples

    def _train(self, op: Compute, piece: Slice, beside: Beside) -> None:
        job, training, state = piece.job, piece.job.training, self._state
        assert training is not None
        state.profile.issued(op, job.job_id, beside)
        state.recorder.begun(job.job_id, training.step, state.now_ns)
        if state.jobs.service is not None and not op.again:
            state.jobs.service.of(job).trains(piece)
        used = training.adoptable(piece.microbatch) if piece.record else None
        behind = 0 if used is None else training.updates_behind(used.adapter)
        if not op.again and advance_training(piece):
            state.profile.completed_step(job.job_id)
            self._completions.step_with(op, job, training.step - 1)
        if used is not None:
            state.records.adopt(used, piece.microbatch, behind, state.now_ns)


@lru_cache(maxsize=1 << 12)
def _alone(job_id: int, tokens: int) -> Pieces:
    """The piece of a launch that trains one job; never written to, so all launches share it."""
    return Pieces((job_id,), (tokens,), (0,), (False,), ((),))
