"""From booked operations to launches: the moment at which jobs move on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from engine.contract.executor import Launch, Pieces
from engine.contract.job import Job
from engine.contract.plan import Compute, Free, Grow, Op, Plan, Share, Slice
from engine.contract.progress import advance_serving, advance_training, start_behind
from engine.contract.regions import Kind, Tier, kv_place
from engine.fast_forward.repeated_plan import RepeatedPlan
from engine.fast_forward.segments import RepeatedSteps
from engine.memory.dry_run import PageDryRun
from engine.memory.ledger import NOTHING, Beside, Booking, Ledger
from engine.memory.prefix import Chain
from engine.results.recorder import Recorder
from traces.serving.request import Request

if TYPE_CHECKING:
    from engine.loop.engine import Engine


class Reuse:
    """Told of every request, issue and launch where the policy has `prefix_caching`."""

    def __init__(self, chains: dict[int, Chain], ledger: Ledger, recorder: Recorder) -> None:
        self._chains, self._ledger, self._recorder = chains, ledger, recorder

    def trial(self, device: int) -> Callable[[], PageDryRun]:
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


class Issuing:
    """Says what an executor must know of an operation, with all jobs as they are at issue."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._roster, self._ends, self._ledger = engine.roster, engine.ends, engine.ledger
        self._recorded: dict[int, int] = {}  # tokens whose activations are kept, per request

    def recorded_tokens(self, request_id: int | None) -> int:
        """Tokens that serving has recorded of a request, for whoever trains on it."""
        return 0 if request_id is None else self._recorded.get(request_id, 0)

    def launch(
        self, op: Op, booking: Booking, device: int, repeat: RepeatedPlan | None = None
    ) -> Launch:
        """The launch of a booked operation, maybe a step of a repeated plan. Its jobs move on."""
        if not isinstance(op, Compute):
            return Launch(op, booking.waits, (), *booking.copied)
        assert op.device == device, f"a plan for device {device} computes on {op.device}"
        if repeat is not None:
            return Launch(op, booking.waits, self._step(op, repeat))
        if len(op.slices) == 1 and (piece := op.slices[0]).job.training is not None:
            return Launch(op, booking.waits, self._trained(op, piece, booking.beside))
        return Launch(op, booking.waits, self._moved(op, op.slices, booking.beside))

    def start(self, plan: Plan, launches: Sequence[Launch]) -> None:
        """Starts a plan's launches; tells between them what is taken and given back but KV."""
        engine, store, following = self._engine, self._engine.store, iter(launches)
        if store is None:
            for launch in launches:
                engine.executor.run(launch, engine.settle)
            return
        run, settle, kv = engine.executor.run, engine.settle, Kind.KV
        for op in plan.ops:
            if isinstance(op, Grow):
                if op.place.region.kind is not kv:
                    store.grow(op.place, op.nbytes)
            elif isinstance(op, Free):
                if op.place.region.kind is not kv:
                    store.free(op.place)
            elif not isinstance(op, Share):
                run(next(following), settle)

    def _trained(self, op: Compute, piece: Slice, beside: Beside) -> Pieces:
        """The slice of a launch that trains one job alone: it has no KV, and samples nothing."""
        self._advance(op, piece, beside)
        return _alone(piece.job.job_id, piece.tokens)

    def _moved(self, op: Compute, slices: Sequence[Slice], beside: Beside = NOTHING) -> Pieces:
        """Slices of a launch whose jobs move on one by one."""
        jobs = [piece.job for piece in slices]
        assert not op.again or all(job.training for job in jobs), "who is served restarts instead"
        ids = tuple([job.job_id for job in jobs])
        contexts = tuple([job.computed_tokens for job in jobs])
        tables = [self._ledger.pages.get(kv_place(i, Tier.GPU, op.device), ()) for i in ids]
        samples = tuple([self._advance(op, piece, beside) for piece in slices])
        if self._engine.reuse is not None:
            self._engine.reuse.keep(op.device, zip(jobs, contexts, strict=True))
        tokens = tuple([piece.tokens for piece in slices])
        return Pieces(ids, tokens, contexts, samples, tables)

    def _step(self, op: Compute, repeat: RepeatedPlan) -> Pieces:
        """A launch of a cohort, which moves on by its clock, and of whoever is behind it."""
        cohort, lead = repeat.cohort, len(repeat.cohort.jobs)
        ids, tables, slices = cohort.ids, cohort.tables, op.slices[lead:]
        contexts = cohort.ahead(0, [piece.job.computed_tokens for piece in slices])
        repeat.advance(1)
        if self._engine.reuse is not None:
            self._engine.reuse.keep(op.device, cohort.filled(1))
        if self._engine.forced and (done := cohort.complete()):
            self._ends.end_with(op, done)
        rest = self._moved(op, slices)
        tokens, samples = (*((1,) * lead), *rest.tokens), (*((True,) * lead), *rest.samples)
        return Pieces((*ids, *rest.job_ids), tokens, contexts, samples, (*tables, *rest.tables))

    def repeat(self, run: RepeatedSteps, plan: RepeatedPlan) -> None:
        """The jobs of a run move on by all its steps; whoever comes in is in the tail."""
        cohort, tail, lead = plan.cohort, plan.tail, len(plan.cohort.jobs)
        reuse = self._engine.reuse
        behind = [] if reuse is None else [(job, job.computed_tokens) for job in tail]
        plan.advance(run.count)
        done = cohort.complete()
        for i, job in enumerate(tail, lead):
            if not self._roster.has_started(job):
                self._start(job)
            for leg in run.legs:
                job._advance(leg.steps * leg.pieces.tokens[i], leg.steps * leg.pieces.samples[i])
            if self._ends.tokens_left(job) <= 0:
                done.append(job)
        if reuse is not None:
            reuse.keep(run.device, chain(cohort.filled(run.count), behind))
        if done:
            self._ends.end_with(run.op, done)
        if plan.tail:
            plan.gather(self._ledger.pages, self._ends.tokens_left)

    def _advance(self, op: Compute, piece: Slice, beside: Beside) -> bool:
        """Moves a slice's job on; returns whether it yields a token."""
        job = piece.job
        if not self._roster.has_started(job):
            self._start(job)
        if job.training is not None:
            self._train(op, piece, beside)
            return False
        samples = advance_serving(piece)
        if piece.record:
            self._recorded[job.job_id] = job.recorded_tokens
        if samples and self._engine.forced and self._ends.tokens_left(job) <= 0:
            self._ends.end_with(op, [job])
        return samples

    def _start(self, job: Job) -> None:
        self._roster.start(job)
        if job.training is None:
            self._engine.recorder.scheduled(job.job_id, int(self._engine.env.now))

    def _train(self, op: Compute, piece: Slice, beside: Beside) -> None:
        job, training = piece.job, piece.job.training
        assert training is not None
        self._engine.profile.issued(op, job.job_id, beside)
        self._engine.recorder.begun(job.job_id, training.step, int(self._engine.env.now))
        if not op.again and advance_training(piece):
            self._engine.profile.completed_step(job.job_id)
            self._ends.step_with(op, job, training.step - 1)


@lru_cache(maxsize=1 << 12)
def _alone(job_id: int, tokens: int) -> Pieces:
    """The same ones at every step, and of every engine: nobody writes to them."""
    return Pieces((job_id,), (tokens,), (0,), (False,), ((),))
