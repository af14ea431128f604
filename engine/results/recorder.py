"""Collects the facts of a run and writes them as the tables of engine/results/schema.py."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa

from engine.contract.executor import Launch, Meter, Piece, Pieces, Span
from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Plan
from engine.contract.regions import Kind, Tier, Work
from engine.results.outcomes import Outcome, SampleOutcome, Stretches, requests_table
from engine.results.schema import (
    ADAPTER,
    ADAPTER_BYTES,
    OPTIONAL,
    RECORDED,
    RELEASED,
    REQUEST_ID,
    TABLES,
    TENANT,
    VERSION,
    Figures,
    TableFile,
    column,
    files_of,
    marked,
    values_of,
)
from engine.results.tables import (
    ORDER,
    Facts,
    LossOf,
    ManySteps,
    Outputs,
    PlanRow,
    Predict,
    PredictServed,
    StepRow,
    Times,
    TrainedRow,
    in_order,
    predicted,
    table_of,
    training_row,
)
from traces.serving.request import Request


class Deliveries:
    """Times at which a device delivered tokens; requests are looked at only when they change."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._times: Times = array("q")
        self._ids: Sequence[int] = ()
        self._now: set[int] = set()  # of these ids
        self._open: dict[int, Stretches] = {}  # by request

    def add(self, ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        """Each of these requests got a token at each of these times."""
        if ids != self._ids:
            self._change(ids)
        self._times.extend(times_ns)

    def _change(self, ids: tuple[int, ...]) -> None:
        before, now, going_on = self._now, set(ids), self._open
        at = len(self._times)
        for i in before ^ now:
            if i in before:
                own = going_on.pop(i)
            else:
                own = going_on[i] = self._stretches(self._outcomes[i].stretches)
            own.bounds.append(at)
        self._ids, self._now = ids, now

    def _stretches(self, known: list[Stretches]) -> Stretches:
        """Those of a request on this device, which go on where it got its last token here."""
        if not known or known[-1].device_ns is not self._times:
            known.append(Stretches(self._times))
        return known[-1]


STEPS = 1 << 14  # are recorded before their rows are written
FLUSHES = 8  # after which memory that tables took goes back to the system
REQUESTS = 1 << 10  # of which a run has more are written before its end


class Recorder:
    """Facts only; every figure is derived later, in analysis/.

    Rows go into files while the run goes on where `stream` was called; the recorder then forgets
    what it has written.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        keeps_steps: bool = True,
        finetunes: bool = False,
        names_tenants: bool = False,
        names_adapters: bool = False,
        learns: bool = False,
    ) -> None:
        """A recorder without facts.

        Args:
            meter: reads a machine's memory at every settle.
            keeps_steps: whether steps, memory and plans are kept; else requests and training alone.
            finetunes: whether samples are kept.
            names_tenants: whether requests are kept with their tenants.
            names_adapters: whether requests are kept with their adapters, and memory with theirs.
            learns: whether samples are kept with the requests that they are feedback on.
        """
        self.outcomes: dict[int, Outcome] = {}
        self._facts = Facts([], [], [], [])
        self._keeps_steps = keeps_steps
        self._trained: list[TrainedRow] = []
        self._finetunes, self._names_tenants = finetunes, names_tenants
        self._names_adapters, self._learns = names_adapters, learns
        self.keeps_service = False  # by tenant; the engine says so
        self.service: Sequence[tuple[int, Sequence[object]]] = ()  # per device, in the end
        self.records: Sequence[Sequence[object]] = ()  # rows of RECORDS, in the end
        self._units: dict[int, int] = {}  # by finetuning job: units that a sample goes back over
        self._samples: dict[tuple[int, int], SampleOutcome] = {}  # by job and microbatch
        self._released: dict[int, list[int]] = {}  # by job that learns, when its samples came
        self._begun: dict[tuple[int, int], int] = {}  # training job and step -> first issue
        self._deliveries: dict[int, Deliveries] = {}  # by device
        self._returned: dict[int, list[int]] = defaultdict(list)  # by device
        self._unseen: set[int] = set()  # devices whose memory has come back; no row says so yet
        self._meter = meter
        self.predicted_bytes: Predict | None = None  # workspace, where a span says none
        self.predicted_peaks: PredictServed | None = None  # and of many launches that serve
        self.ended_requests = 0
        self._stream: RowStream | None = None
        self._unwritten = 0  # steps, while rows are written

    @property
    def _records(self) -> bool:
        """Whether there may be records of requests."""
        return self._learns and self._names_adapters

    @property
    def is_metered(self) -> bool:
        """Whether a machine is read at every settle."""
        return self._meter is not None

    @property
    def trained_steps(self) -> int:
        """Training steps that have ended."""
        return len(self._trained)

    def steps_of(self, job_id: int) -> int:
        """Steps of a training job that have ended."""
        return sum([row[0] == job_id for row in self._trained])

    @property
    def plans(self) -> list[PlanRow]:
        """All plans in issue order: step, device, time, jobs whose memory came back, plan."""
        facts = self._facts
        rows = chain(facts.plans, *(run.plan_rows() for run in facts.runs))
        return sorted(rows, key=lambda row: row[0])

    @property
    def steps(self) -> list[StepRow]:
        """All operations by end and step: step, issue, host time, span, launch."""
        facts = self._facts
        rows = [*facts.steps, *chain(*(run.step_rows() for run in facts.runs))]
        found = [predicted(row, self.predicted_bytes) for row in rows]
        return sorted(found, key=lambda row: (row[3].end_ns, row[0]))

    @property
    def spans(self) -> list[Span]:
        """All spans by end and step."""
        return [row[3] for row in self.steps]

    # ---- requests
    def first_token_ns(self, job: Job) -> int | None:
        """When the first token of a job was delivered; None before that."""
        outcome = self.outcomes.get(job.job_id)
        return None if outcome is None else outcome.first_token_ns

    def arrived(self, request: Request, now_ns: int, device: int | None = 0) -> None:
        self.outcomes[request.request_id] = Outcome(request, now_ns, device)

    def returned(self, job_id: int, device: int, is_ahead: bool = False) -> None:
        """The memory that a finished job held on a device has come back.

        `is_ahead`: behind the steps of a run that are issued; `came_back` tells when they are over.
        """
        self._returned[device].append(job_id)
        if not is_ahead:
            self._unseen.add(device)

    def came_back(self, device: int) -> None:
        """Memory that was given back ahead can be seen now."""
        self._unseen.add(device)

    @property
    def lacks_return(self) -> bool:
        """Whether memory has come back and no row says so."""
        return bool(self._unseen)

    def rested(self, now_ns: int, step: int, figures: Sequence[Figures]) -> None:
        """Memory came back and no plan follows: adds a row behind the newest plan."""
        self._note(now_ns, "return", step, figures)

    # ---- plans and operations
    def issued(
        self, step: int, device: int, now_ns: int, plan: Plan, figures: Sequence[Figures]
    ) -> None:
        returned = self.take_returned(device)
        if self._keeps_steps:
            self._facts.plans.append((step, device, now_ns, returned, plan))
        self._count(1, now_ns)
        for job in plan.restart:
            if job.job_id in self.outcomes:
                self.outcomes[job.job_id].restarts += 1
            elif job.training is not None and job.training.sample is not None:
                self._begin_anew(job.job_id, job.training.sample, step)
        for op in plan.ops:
            if isinstance(op, Copy) and op.src.tier is Tier.GPU and op.dst.tier is Tier.HOST:
                self._count_swap(op)
        self._note(now_ns, "issue", step, figures)

    def take_returned(self, device: int) -> tuple[int, ...]:
        """The jobs whose memory has come back after the last plan of a device."""
        return tuple(self._returned.pop(device, ()))

    def ran(self, run: ManySteps, now_ns: int) -> None:
        """Steps were issued at once."""
        self._count(len(run.issue_ns), now_ns)
        if self._keeps_steps:
            self._facts.runs.append(run)
        self._unseen.discard(run.device)

    def run_settled(self, run: ManySteps, until: int) -> None:
        """The steps of a run up to this one have ended."""
        for job_ids, times in run.tokens(until):
            self._delivered(run.device, job_ids, times)

    def scheduled(self, job_id: int, now_ns: int) -> None:
        """The first slice of a request was issued."""
        outcome = self.outcomes[job_id]
        if outcome.scheduled_ns is None:
            outcome.scheduled_ns = now_ns

    def adapted(self, job_id: int, version: int) -> None:
        """A request was admitted with a version of its adapter."""
        self.outcomes[job_id].adapter_version = version

    def released(self, job_id: int, now_ns: int) -> None:
        """Feedback has come, as the next sample of a job that learns."""
        self._released.setdefault(job_id, []).append(now_ns)

    def begun(self, job_id: int, step: int, now_ns: int) -> None:
        """A launch of a training job's step was issued."""
        self._begun.setdefault((job_id, step), now_ns)

    def trained(self, job: Job, step: int, now_ns: int) -> None:
        """A step of a training job has ended."""
        assert job.training is not None
        spec, start_ns = job.training.spec, self._begun.pop((job.job_id, step))
        microbatches = range(step * spec.microbatches, (step + 1) * spec.microbatches)
        tokens = sum(map(spec.tokens_of, microbatches)) * spec.ranks
        self._trained.append((job.job_id, step, start_ns, now_ns, microbatches, tokens))

    def _begin_anew(self, job_id: int, microbatch: int, step: int) -> None:
        """A sample gives its memory back: what it has computed before this plan is lost."""
        if (sample := self._samples.get((job_id, microbatch))) is not None:
            left, restarts = sample.tokens * self._units[job_id], sample.restarts + 1
            fresh = replace(sample, left=left, forward_tokens=0, recorded_tokens=0)
            self._samples[job_id, microbatch] = replace(fresh, restarts=restarts, since=step)

    def _finetuned(self, step: int, span: Span) -> None:
        """A launch with a window of a finetuning job has ended."""
        op = span.op
        for piece in op.slices if isinstance(op, Compute) else ():
            training = piece.job.training
            if training is None or not training.spec.finetunes or piece.work is Work.UPDATE:
                continue
            job_id, spec = piece.job.job_id, training.spec
            key, own = (job_id, piece.microbatch), spec.sample(piece.microbatch)
            units = self._units.setdefault(job_id, spec.num_units - 1 - training.first)
            if (sample := self._samples.get(key)) is None:
                left, on = own.tokens * units, own.request
                sample = SampleOutcome(own.tokens, span.start_ns, left, request_id=on)
                self._samples[key] = sample
            if step >= sample.since:
                sample.settle(piece, span.end_ns)

    def cached(self, job_id: int, tokens: int) -> None:
        """A request starts, or starts again, behind tokens that were found computed."""
        self.outcomes[job_id].cached_tokens += tokens

    def settled(
        self,
        step: int,
        issue_ns: int,
        host_ns: int,
        span: Span,
        launch: Launch,
        figures: Sequence[Figures],
    ) -> None:
        if self._finetunes:
            self._finetuned(step, span)
        if self._keeps_steps:
            self._facts.steps.append((step, issue_ns, host_ns, span, launch))
        self._note(span.end_ns, "settle", step, figures)

    def delivered(self, device: int, pieces: Sequence[Piece], at_ns: int) -> None:
        """Output tokens of a launch reached their clients."""
        assert isinstance(pieces, Pieces) or not pieces, "the engine launches pieces by column"
        if isinstance(pieces, Pieces):
            self._delivered(device, pieces.sampled_ids, (at_ns,))

    def _delivered(self, device: int, job_ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        if not job_ids:
            return
        if device not in self._deliveries:
            self._deliveries[device] = Deliveries(self.outcomes)
        self._deliveries[device].add(job_ids, times_ns)

    def ended(self, job_id: int, now_ns: int, status: str) -> None:
        """A request left, `finished` or `refused`."""
        outcome = self.outcomes[job_id]
        outcome.finish_ns, outcome.status = now_ns, status
        self.ended_requests += 1

    def _note(self, at_ns: int, cause: str, step: int, figures: Sequence[Figures]) -> None:
        if self._keeps_steps:
            readings = self._meter.read() if self._meter and cause != "issue" else None
            self._facts.memory.append((at_ns, cause, step, figures, readings))
        if self._unseen:
            self._unseen.difference_update([device for (_, device), *_ in figures])

    def _count_swap(self, op: Copy) -> None:
        outcome = self.outcomes.get(op.src.region.owner)
        if op.src.region.kind is Kind.KV and outcome is not None and outcome.finish_ns is None:
            outcome.swaps += 1  # else it is what a record keeps of a request that is over

    # ---- tables
    @property
    def _predictions(self) -> tuple[Predict | None, PredictServed | None]:
        return self.predicted_bytes, self.predicted_peaks

    def tables(
        self, outputs: Outputs | None = None, loss_of: LossOf | None = None
    ) -> dict[str, pa.Table]:
        """All tables by name, their rows in a fixed order.

        Args:
            outputs: the generated ids of a request, by its number.
            loss_of: the loss of a training job's microbatch, by both numbers.
        """
        facts = self._facts.tables(*self._predictions, self._names_adapters)
        outcomes = [outcome for _, outcome in sorted(self.outcomes.items())]
        found = {"requests": self._requests(outcomes, outputs)}
        found |= facts if self._keeps_steps else {}
        return found | self._last(loss_of)

    def _requests(self, outcomes: Sequence[Outcome], outputs: Outputs | None) -> pa.Table:
        table = requests_table(outcomes, outputs)
        if self._names_tenants:
            tenants = [outcome.request.tenant for outcome in outcomes]
            table = table.append_column(TENANT, column(tenants, TENANT.type))
        if self._names_adapters:
            names = [outcome.request.adapter for outcome in outcomes]
            versions = [outcome.adapter_version for outcome in outcomes]
            table = table.append_column(ADAPTER, column(names, ADAPTER.type))
            table = table.append_column(VERSION, column(versions, VERSION.type))
        return table

    def _last(self, loss_of: LossOf | None) -> dict[str, pa.Table]:
        """The tables that are written at the end."""
        found = {"training": self._training(loss_of)}
        found |= {"samples": self._sample_table(loss_of)} if self._finetunes else {}
        if self.keeps_service:
            found["service"] = table_of("service", [(at, *row) for at, row in self.service])
        return found | ({"records": table_of("records", self.records)} if self._records else {})

    def _sample_table(self, loss_of: LossOf | None) -> pa.Table:
        rows = list[tuple[object, ...]]()
        for (job_id, microbatch), sample in sorted(self._samples.items()):
            is_through = sample.forward_tokens + sample.recorded_tokens == sample.tokens
            is_whole = is_through and not sample.left
            loss = loss_of(job_id, microbatch) if loss_of is not None and is_whole else None
            status = "finished" if is_whole else "unfinished"
            times = sample.start_ns, sample.last_ns
            facts = sample.tokens, sample.forward_tokens, *times, status, sample.restarts, loss
            rows.append((job_id, microbatch, *facts))
        table = table_of("samples", rows)
        if not self._learns:
            return table
        keys = sorted(self._samples)
        on = [self._samples[key].request_id for key in keys]
        came = [self._released[i][k] if i in self._released else None for i, k in keys]
        recorded = [self._samples[key].recorded_tokens for key in keys]
        table = table.append_column(REQUEST_ID, column(on, REQUEST_ID.type))
        table = table.append_column(RELEASED, column(came, RELEASED.type))
        return table.append_column(RECORDED, column(recorded, RECORDED.type))

    def _training(self, loss_of: LossOf | None) -> pa.Table:
        return table_of("training", [training_row(row, loss_of) for row in self._trained])

    def write(
        self, folder: Path, outputs: Outputs | None = None, loss_of: LossOf | None = None
    ) -> None:
        """Writes the tables into a folder, see `files_of`; arguments as in `tables`."""
        with files_of(folder, self.schemas) as files:
            self.stream(files, ())
            self.finish(outputs, loss_of)

    @property
    def schemas(self) -> dict[str, pa.Schema]:
        """Of the tables that are kept, by name."""
        kept = {"samples": self._finetunes, "service": self.keeps_service}
        kept["records"] = self._records
        names = [name for name in TABLES if self._keeps_steps or name not in ORDER]
        names = [name for name in names if name not in OPTIONAL or kept[name]]
        found = {name: marked(TABLES[name]) for name in names}
        if self._names_tenants:
            found["requests"] = found["requests"].append(TENANT)
        if self._names_adapters:
            found["requests"] = found["requests"].append(ADAPTER).append(VERSION)
            if self._keeps_steps:
                found["memory"] = found["memory"].append(ADAPTER_BYTES)
        if self._learns:
            samples = found["samples"].append(REQUEST_ID).append(RELEASED)
            found["samples"] = samples.append(RECORDED)
        return found

    # ---- files
    def stream(self, files: Mapping[str, TableFile], request_ids: Iterable[int]) -> None:
        """Rows are written into these files from now on, and the rest of them by `finish`.

        Args:
            files: of all `schemas`.
            request_ids: the requests that will come; those that are not told here are written last.
        """
        self._stream = RowStream(files, sorted(request_ids), self._requests)

    def _count(self, steps: int, now_ns: int) -> None:
        """So many more steps are issued, all facts before which are known."""
        self._unwritten += steps
        if self._stream is not None and self._unwritten > STEPS:
            self._unwritten = 0
            if self._keeps_steps:
                runs = self._facts.runs
                going_on = [run for run in runs if _last_ns(run) >= now_ns]
                ended = [run for run in runs if _last_ns(run) < now_ns]
                self._write_facts(ended, going_on, now_ns)
            self._stream.write_requests(self.outcomes)

    def _write_facts(self, ended: list[ManySteps], going_on: list[ManySteps], now_ns: int) -> None:
        """Writes the facts of runs that have ended and of steps that were issued alone.

        Rows behind the begin of a run that goes on, or behind now, wait for those before them.
        """
        assert self._stream is not None
        plans, steps, memory, _ = self._facts
        told = Facts(plans, steps, memory, ended)
        self._facts = Facts([], [], [], going_on)
        bound_ns = min([now_ns, *(run.issue_ns[0] for run in going_on)])
        first = min([run.step for run in going_on], default=NEVER)
        tables = told.tables(*self._predictions, self._names_adapters)
        self._stream.write(tables, {"steps": bound_ns, "memory": bound_ns, "plans": first})

    def finish(self, outputs: Outputs | None = None, loss_of: LossOf | None = None) -> None:
        """The run is over: all rows that are left are written. Arguments as in `tables`."""
        assert self._stream is not None, "rows have files to go to"
        if self._keeps_steps:
            self._write_facts(self._facts.runs, [], NEVER)
        self._stream.finish(self.outcomes, outputs, self._last(loss_of))


NEVER = (1 << 63) - 1


def _last_ns(run: ManySteps) -> int:
    """The last moment of a run of which there is a row."""
    return max(run.issue_ns[-1], run.end_ns[run.settled - 1] if run.settled else 0)


class RowStream:
    """Rows on their way into the files of a run, each once no row before it can come."""

    def __init__(
        self,
        files: Mapping[str, TableFile],
        request_ids: list[int],
        requests: Callable[[Sequence[Outcome], Outputs | None], pa.Table],
    ) -> None:
        """`requests` makes a table of requests."""
        self._files, self._ids, self._requests = files, request_ids, requests
        self._written = 0  # of these requests
        self._flushes = 0
        self._waiting: dict[str, pa.Table] = {}

    def write(self, tables: Mapping[str, pa.Table], bounds: Mapping[str, int]) -> None:
        """Writes rows below the bound of their table, by its first order; the others wait."""
        for name, table in tables.items():
            rest = self._waiting.get(name)
            if rest is not None and rest.num_rows:
                table = in_order(name, pa.concat_tables([rest, table]))
            keys, _ = values_of(table[ORDER[name][0]])
            count = int(keys.searchsorted(bounds[name]))
            self._files[name].add(table.slice(0, count))
            self._waiting[name] = table.slice(count)
        self._flushes += 1
        if self._flushes % FLUSHES == 0:
            pa.default_memory_pool().release_unused()

    def write_requests(self, outcomes: Mapping[int, Outcome]) -> None:
        """Writes the requests that have ended, up to the first that has not, in a simulation."""
        done, ids = list[Outcome](), self._ids
        while (at := self._written + len(done)) < len(ids):
            outcome = outcomes.get(ids[at])
            if outcome is None or outcome.finish_ns is None:
                break
            done.append(outcome)
        if len(done) >= REQUESTS:
            self._add_requests(done, None)
            self._written += len(done)

    def finish(
        self, outcomes: Mapping[int, Outcome], outputs: Outputs | None, last: Mapping[str, pa.Table]
    ) -> None:
        """Writes the requests that are left, and tables that are written last."""
        written = {*self._ids[: self._written]}
        rest = [outcome for i, outcome in sorted(outcomes.items()) if i not in written]
        self._add_requests(rest, outputs)
        for name, table in last.items():
            self._files[name].add(table)
        if self._flushes > FLUSHES:  # else a small run is over before that pays
            pa.default_memory_pool().release_unused()

    def _add_requests(self, outcomes: list[Outcome], outputs: Outputs | None) -> None:
        for begin in range(0, len(outcomes), REQUESTS):
            part = outcomes[begin : begin + REQUESTS]
            table = self._requests(part, outputs)
            self._files["requests"].add(table)
            for outcome, tokens in zip(part, table["output_tokens"].to_pylist(), strict=True):
                outcome.written_tokens, outcome.stretches = tokens, []
