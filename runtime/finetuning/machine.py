"""The machine that serves and finetunes: launches of either kind, or of both at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from engine.contract.adapter_check import is_publication
from engine.contract.executor import Launch, Piece
from engine.contract.plan import Compute, Copy, Op, Slice
from engine.contract.regions import Kind, Place, Pool, Region, Tier, Work
from engine.contract.training_progress import Record
from runtime.executors.machine import Machine, Tokens
from runtime.finetuning.adapters import AdaptedRows, ServedAdapters
from runtime.finetuning.finetuner import Finetuner, SampleWindow
from runtime.finetuning.products import INPUT
from runtime.finetuning.recording import FusedWindow, Fusing
from runtime.serving.machine import LaunchPart, Prepared, ServingMachine
from runtime.serving.packing import Packed, Transcript
from runtime.training.store import RegionStore
from traces.serving.request import Sample


class JobWindow(NamedTuple):
    """A window forward: rows from `first` on of a packed launch."""

    job_id: int
    window: SampleWindow
    first: int


class RecordedRows(NamedTuple):
    """A slice of a prompt that is recorded: rows from `first` on of a packed launch."""

    request: int
    learner: int  # the job that may learn from it
    version: Region  # of its adapter
    start: int  # its first token in the prompt
    tokens: int
    first: int


class PreparedWindows(NamedTuple):
    """A launch that finetunes, or a copy of what a job holds.

    Attributes:
        launch: As the engine has issued it.
        fused: Packed rows of requests, behind those of the windows that run with them.
        joined: These windows.
        alone: Windows that run by themselves, each packed.
        others: Slices that go back or update, with the pages of the former.
        through: Rows of requests that run through adapters; None where none has one.
        recorded: Slices of prompts that are recorded, behind the windows of `joined`.
    """

    launch: Launch
    fused: Packed | None
    joined: tuple[JobWindow, ...]
    alone: tuple[tuple[JobWindow, Packed], ...]
    others: tuple[tuple[Slice, SampleWindow | None], ...]
    through: AdaptedRows | None = None
    recorded: tuple[RecordedRows, ...] = ()


class FinetuningMachine(Machine[Prepared | PreparedWindows]):
    """A ServingMachine and the jobs that finetune beside it, on its pages and over its weights.

    In a launch that serves, windows are prefill slices of it: each product is computed once for all
    rows, and adapters add to rows of their own job. A window without requests beside it, or of a
    job with weights of its own, runs by its own modules.
    """

    def __init__(
        self,
        serving: ServingMachine,
        finetuners: Mapping[int, Finetuner],
        store: RegionStore,
        places: Mapping[Place, int],
        adapters: ServedAdapters | None = None,
    ) -> None:
        """
        Args:
            serving: What serves on the device.
            finetuners: By job.
            store: The memory of all of them, but for KV.
            places: Bytes at each place before the first step.
            adapters: Those that requests run through; None: none do.
        """
        self.serving, self._finetuners, self.store = serving, finetuners, store
        self._adapters = adapters
        if adapters is not None:
            serving.through = adapters.through
        self.arenas, self.graph_bytes = serving.arenas, serving.graph_bytes
        for place, nbytes in places.items():
            if place.region.owner in finetuners or place.region.kind is Kind.ADAPTER:
                store.grow(place, nbytes)
        for finetuner in finetuners.values():
            finetuner.begin()

    @property
    def parts(self) -> tuple[ServingMachine]:
        """See Machine: what serves."""
        return (self.serving,)

    # ---- before
    def prepare(self, launch: Launch) -> Prepared | PreparedWindows:
        """See Machine. NotImplementedError where a window is not of all units."""
        op = launch.op
        if isinstance(op, Copy) and op.src.region.kind is not Kind.KV:
            return PreparedWindows(launch, None, (), (), ())
        slices = op.slices if isinstance(op, Compute) else ()
        if all(piece.job.training is None and not piece.record for piece in slices):
            return self.serving.prepare(launch)
        served, joined = list[Piece](), list[tuple[Slice, Piece]]()
        recorded = list[tuple[Slice, Piece]]()
        alone, others = list[tuple[Slice, Piece]](), list[tuple[Slice, SampleWindow | None]]()
        serves = any(piece.job.training is None for piece in slices)
        for own, piece in zip(slices, launch.pieces, strict=True):
            if own.job.training is None:
                if own.layers is not None:
                    raise NotImplementedError("a launch with a window serves all layers at once")
                if own.record:
                    recorded.append((own, piece))
                else:
                    served.append(piece)
            elif own.work is not Work.FORWARD:
                others.append((own, None if own.work is Work.UPDATE else self._window(own, piece)))
            else:
                self._begin(own, piece)
                shares = self._finetuners[own.job.job_id].trainee.shares
                (joined if serves and shares else alone).append((own, piece))
        windows = [piece for _, piece in (*joined, *recorded)]
        fused = self._pack(windows, served) if serves else None
        packs = [(self._pack([piece]), own, piece) for own, piece in alone]
        return PreparedWindows(
            launch,
            fused,
            tuple(self._rows(joined, fused)) if fused else (),
            tuple([(next(self._rows([(o, p)], packed)), packed) for packed, o, p in packs]),
            tuple(others),
            None if fused is None or self._adapters is None else self._through(op, fused),
            self._recorded(recorded, len(joined), fused) if fused else (),
        )

    def _recorded(
        self, recorded: Sequence[tuple[Slice, Piece]], behind: int, packed: Packed
    ) -> tuple[RecordedRows, ...]:
        """The rows of slices that are recorded, which lie behind so many windows."""
        found = list[RecordedRows]()
        for (own, piece), rows in zip(recorded, packed.rows.prefills[behind:], strict=False):
            version = own.job.adapter
            assert version is not None, "a recorded request runs through an adapter"
            (learner,) = [i for i, f in self._finetuners.items() if f.job.publish == version.name]
            bounds = (piece.context_tokens, piece.tokens, rows.start)
            found.append(RecordedRows(piece.job_id, learner, version.place().region, *bounds))
        return tuple(found)

    def _through(self, op: Op, fused: Packed) -> AdaptedRows | None:
        assert self._adapters is not None and isinstance(op, Compute), "a launch with adapters"
        return self._adapters.rows(op.slices, fused)

    def _begin(self, own: Slice, piece: Piece) -> None:
        """With the first window of a sample its ids become those of the job."""
        finetuner = self._finetuners[own.job.job_id]
        if own.layers != range(finetuner.trainee.num_units):
            raise NotImplementedError(f"a window goes through all units at once, not {own.layers}")
        if own.record or not piece.context_tokens:
            ids = finetuner.ids(own.microbatch, _sample_of(own))[0].tolist()
            self.serving.packer.transcripts[own.job.job_id] = Transcript(ids)

    def _pack(self, windows: Sequence[Piece], served: Sequence[Piece] = ()) -> Packed:
        return self.serving.packer.pack((*windows, *served), windows=len(windows))

    def _rows(self, windows: Sequence[tuple[Slice, Piece]], packed: Packed) -> Iterator[JobWindow]:
        """The windows as they lie in packed rows; they come first."""
        for (own, piece), rows in zip(windows, packed.rows.prefills, strict=False):
            bounds = (piece.context_tokens, piece.tokens)
            given = (*bounds, rows.table, _record_of(own))
            window = SampleWindow(own.microbatch, _sample_of(own), *given)
            yield JobWindow(own.job.job_id, window, rows.start)

    def _window(self, own: Slice, piece: Piece) -> SampleWindow:
        """A window back, on the pages that its forward has filled; the plan may free them."""
        start, tokens, packer = piece.context_tokens, piece.tokens, self.serving.packer
        count = -(-(start + tokens) // packer.page_tokens)
        pages = packer.transcripts[own.job.job_id].pages[:count]  # a copy, which stays
        on_host = torch.frombuffer(pages, dtype=torch.int64)
        table = on_host.to(self.serving.device, non_blocking=True)
        given = (start, tokens, table, _record_of(own))
        return SampleWindow(own.microbatch, _sample_of(own), *given)

    # ---- the work
    def execute(self, prepared: Prepared | PreparedWindows) -> tuple[int, ...]:
        """See Machine."""
        return self.collect(prepared, self.start(prepared))

    @torch.no_grad()
    def start(self, prepared: Prepared | PreparedWindows) -> Tokens:
        """See Machine."""
        if isinstance(prepared, Prepared):
            return self.serving.start(prepared)
        op = prepared.launch.op
        if isinstance(op, Copy):
            if is_publication(op):
                assert self._adapters is not None, "a version of an adapter that is served"
                self._adapters.publish(op)
            else:
                self.store.copy(op.src, op.dst)
            return ()
        tokens: Tokens = ()
        if prepared.fused is not None:
            tokens = (self._fused(prepared, prepared.fused),)
        for (job_id, window, _), packed in prepared.alone:
            finetuner = self._finetuners[job_id]
            with finetuner.weights_of(window):
                finetuner.forward(window, packed.rows.slots)
        for own, back in prepared.others:
            self._other(own, back)
        return tokens

    def _fused(self, prepared: PreparedWindows, packed: Packed) -> Tensor | None:
        """One forward of requests and windows; the sampled tokens of the former."""
        decoder, own = self.serving.decoder, list[tuple[Finetuner, SampleWindow, FusedWindow]]()
        keeps = list[tuple[Callable[[int, Mapping[str, Tensor]], None], FusedWindow]]()
        for job_id, window, first in prepared.joined:
            finetuner = self._finetuners[job_id]
            own.append((finetuner, window, finetuner.fused(window, first)))
            keeps.append((partial(finetuner.keep, window), own[-1][2]))
        for request, learner, version, start, tokens, first in prepared.recorded:
            assert self._adapters is not None, "a recorded request runs through an adapter"
            finetuner = self._finetuners[learner]
            products = self._adapters.products(version, finetuner.trainee.by_address)
            kept = FusedWindow(products, first, tokens)
            keeps.append((partial(finetuner.keep_record, request, start), kept))
        hidden = self.serving.embed(packed)
        angles = decoder.angles(hidden, packed.positions)
        adapted = () if prepared.through is None else (prepared.through.added(),)
        fusing = Fusing([fused for _, fused in keeps], adapted)
        with ExitStack() as weights:
            for finetuner, window, _ in own:
                weights.enter_context(finetuner.weights_of(window))
            for layer in range(len(decoder.layers)):
                inputs = [fused.began(hidden) for _, fused in keeps]
                with fusing:
                    hidden = decoder.layer(layer, hidden, angles, packed.rows)
                for (keep, fused), rows in zip(keeps, inputs, strict=True):
                    keep(layer, {INPUT: rows, **fused.kept})
                    fused.kept = {}
        packed.rows.scratch.clear()
        for finetuner, window, fused in own:
            finetuner.finish(window, hidden[:, fused.rows])
        return self.serving.sample(packed, hidden)

    def _other(self, own: Slice, window: SampleWindow | None) -> None:
        finetuner, units = self._finetuners[own.job.job_id], own.layers
        assert units is not None, "a finetuning launch names its units or chunks"
        if window is None:
            finetuner.update(own.microbatch // finetuner.job.microbatches, units)
        else:
            with finetuner.weights_of(window):
                finetuner.backward(window, units)

    # ---- after
    def collect(self, prepared: Prepared | PreparedWindows, tokens: Tokens) -> tuple[int, ...]:
        """See Machine."""
        if isinstance(prepared, Prepared):
            return self.serving.collect(prepared, tokens)
        if prepared.fused is None:
            return ()
        layers = range(len(self.serving.decoder.layers))
        part = LaunchPart(layers, prepared.fused)
        return self.serving.collect(Prepared(prepared.launch, (part,)), tokens)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Machine."""
        self.serving.release(pool, pages)

    def outputs(self, job_id: int) -> list[int]:
        """See Machine."""
        return [] if job_id in self._finetuners else self.serving.outputs(job_id)

    def held(self, tier: Tier) -> Iterator[UntypedStorage]:
        """See Machine."""
        for stay in self.store.stays(tier):
            yield from stay.storages_held()

    def loss(self, job_id: int, microbatch: int) -> float:
        """See Machine."""
        return self._finetuners[job_id].loss(microbatch)

    def weights(self, job_id: int) -> Mapping[str, Tensor]:
        """The newest weights that a job trains, by the model's names."""
        return self._finetuners[job_id].state_dict()


def _sample_of(own: Slice) -> Sample:
    """The sample that a window is of, at its issue."""
    assert own.job.training is not None, "a slice of a job that finetunes"
    return own.job.training.spec.sample(own.microbatch)


def _record_of(own: Slice) -> Record | None:
    """What the sample of a window uses of a record, at its issue."""
    assert own.job.training is not None, "a slice of a job that finetunes"
    return own.job.training.adopted(own.microbatch)
