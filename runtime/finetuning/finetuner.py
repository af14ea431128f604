"""The real work of one finetuning job: its windows forward and back, and its updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import pad

from engine.contract import regions
from engine.contract.layout import Mode, TrainingLayout
from engine.contract.regions import Region, Tier
from engine.contract.training_progress import Record
from runtime.finetuning.backward import Known
from runtime.finetuning.model import NO_LABEL, FinetunedModel
from runtime.finetuning.products import (
    INPUT,
    Field,
    kept_rows,
    own,
    storages_of,
    wide,
    window_bounds,
)
from runtime.finetuning.recording import FusedWindow, Recording, WindowKV
from runtime.serving.kv import Arena
from runtime.training.model_states import ModelStates
from runtime.training.optimizer import Optimizer
from runtime.training.store import RegionStore, present, typed
from traces.serving.request import Sample, TrainingJob
from traces.training.batches import Batches

DRAWN = 32  # samples whose ids are drawn at once


class SampleWindow(NamedTuple):
    """Tokens [start, start + tokens) of the sample of a microbatch, and the pages of their job."""

    microbatch: int
    sample: Sample
    start: int
    tokens: int
    table: Tensor  # page ids as far as the window's last token, on the device
    record: Record | None = None  # what the sample uses of one

    @property
    def begins(self) -> bool:
        """Whether it is the first window forward of its sample."""
        record = self.record
        return self.start == (0 if record is None or record.start else record.stop)

    @property
    def stop(self) -> int:
        """The token behind the last one."""
        return self.start + self.tokens

    @property
    def positions(self) -> Tensor:
        """[1, tokens], on the device."""
        return torch.arange(self.start, self.stop, device=self.table.device)[None]


class Finetuner:
    """Computes the windows of a job where a plan has made room; decides and moves nothing.

    All that lasts from launch to launch is plain tensors in the store: what layers keep, gradients,
    weights and optimizer states. No graph of autograd outlives a launch. A window at the first
    token of a sample begins it anew, whatever became of it before.
    """

    def __init__(
        self,
        job: TrainingJob,
        trainee: FinetunedModel,
        layout: TrainingLayout,
        batches: Batches,
        store: RegionStore,
        arena: Arena,
    ) -> None:
        """
        Args:
            job: A job that finetunes on samples.
            trainee: Its model.
            layout: Its chunks, of what trains.
            batches: Token ids of each sample.
            store: Where its places have memory.
            arena: The KV pages of the device.
        """
        self.job, self.trainee, self._batches = job, trainee, batches
        self._store, self._arena = store, arena
        self._optimizer = Optimizer(job.recipe, job.num_steps)
        chunks = [chunk.parameters for chunk in layout.chunks]
        self._states = ModelStates(
            job.job_id, trainee.model, chunks, store, trainee.dtype,
            self._optimizer.num_sections, in_windows=True,
        )  # fmt: skip
        self._again = {u for u, unit in enumerate(layout.units) if unit.mode is Mode.RECOMPUTE}
        self._away = {u for u, unit in enumerate(layout.units) if unit.mode is Mode.OFFLOAD}
        self._firsts = list[int]()  # first tokens of the windows of the sample under way
        self._at = {p: i for chunk in self._states.chunks for i, p in enumerate(chunk)}
        self._device = store.device
        count = job.num_steps * job.microbatches
        self._losses = torch.full((count,), torch.nan, device=self._device)
        self._so_far = torch.zeros((), device=self._device)  # loss of the sample under way
        self._ids: Mapping[int, Tensor] = {}  # by microbatch
        rows = enumerate(job.samples)
        self._number = {s.request: i for i, s in rows if s.request is not None}  # of feedback

    def begin(self) -> None:
        """Takes the memory that is the job's from the start: the sums of steps of many samples."""
        if self.job.microbatches > 1:
            for chunk, trains in enumerate(self._states.trains):
                if trains:
                    self._sum(self._states.gradient(chunk), chunk)

    # ---- windows forward
    def ids(self, microbatch: int, sample: Sample) -> Tensor:
        """Token ids of a sample on the host, [1, tokens]. Safe to call from several threads.

        Those of the next samples are drawn with them: code that was not run for long runs slowly.
        """
        known = self._ids  # read once: the engine's thread may be at the next sample already
        if (found := known.get(microbatch)) is not None:
            return found
        ahead = {k: k for k in range(microbatch, microbatch + DRAWN)}
        if sample.request is not None:  # which samples follow is not known yet
            ahead = {microbatch: self._number[sample.request]}
        drawn = {k: torch.from_numpy(self._batches.ids(number)) for k, number in ahead.items()}
        recent = {k: ids for k, ids in known.items() if k >= microbatch - 1}
        self._ids = recent | drawn
        return drawn[microbatch]

    @torch.no_grad()
    def forward(self, window: SampleWindow, slots: Tensor) -> None:
        """Runs a window through all units by the modules; `slots` are for its keys and values."""
        self._begin(window)
        trainee, positions = self.trainee, window.positions
        hidden, turns = self._embedded(window), trainee.turns(positions)
        for index, roles in enumerate(trainee.roles):
            recording = Recording(roles, self._kv(window), slots)
            with recording:
                out = trainee.layer(index, hidden, turns, recording)
            self.keep(window, index, {INPUT: hidden[0], **recording.kept})
            hidden = out
        self.finish(window, hidden)

    @contextmanager
    def weights_of(self, window: SampleWindow) -> Iterator[None]:
        """Has a window run through the weights of its sample: those of the job, or of a record.

        Gradients are added to the sums of the job in both cases.
        """
        stash = None if window.record is None else window.record.stash
        if stash is None:
            yield
            return
        storage = self._store.storage(stash.place().region, Tier.GPU, "a window behind a record")
        (chunk,) = range(len(self._states.chunks))  # what is published is one
        own = [self._states.parameters[p] for p in self._states.chunks[chunk]]
        newest = [parameter.data for parameter in own]
        parts = self._states.numbers(chunk, storage)
        for parameter, part in zip(own, parts, strict=True):
            parameter.data = part.view(parameter.shape)
        try:
            yield
        finally:
            for parameter, data in zip(own, newest, strict=True):
                parameter.data = data

    def fused(self, window: SampleWindow, first: int) -> FusedWindow:
        """The window as rows from `first` on of a launch that serves."""
        self._begin(window)
        return FusedWindow(self.trainee.by_address, first, window.tokens)

    def _begin(self, window: SampleWindow) -> None:
        """A window goes forward; the first one of a sample begins it anew."""
        if window.begins:
            self._firsts = []
        self._firsts.append(window.start)

    def keep(self, window: SampleWindow, layer: int, kept: Mapping[str, Tensor]) -> None:
        """Keeps what a layer has recorded of a window; nothing below the first unit that trains."""
        if layer + 1 >= self.trainee.first:
            storages = storages_of(kept, self._fields(layer))
            self._append(window, self._kept(layer + 1, window.start), storages)

    def keep_record(self, request: int, first: int, layer: int, kept: Mapping[str, Tensor]) -> None:
        """Keeps what a layer has recorded of a window of a prompt that is served."""
        if layer + 1 >= self.trainee.first:
            region = regions.kept(request, layer + 1, first=first).region
            self._store.put(region, storages_of(kept, self._fields(layer)))

    @torch.no_grad()
    def finish(self, window: SampleWindow, hidden: Tensor) -> None:
        """The head of a window: its part of the loss, and the gradient of its hidden states.

        The label of a token is the next one of the sample, also beyond the window. A loss is the
        mean over all labels of the sample, and a step's the mean over its samples.
        """
        trainee, microbatch, sample = self.trainee, window.microbatch, window.sample
        gradient = torch.zeros_like(hidden[0])
        loss = torch.zeros((), device=self._device)
        if rows_count := sample.loss_rows(window.start, window.stop):
            low, count = window.stop - rows_count, sample.labels(0, sample.tokens)
            labels = self.ids(microbatch, sample)[0, low + 1 : window.stop + 1]
            if window.stop == sample.tokens:
                labels = pad(labels, (0, 1), value=NO_LABEL)
            labels = _masked(labels, sample, low + 1)
            parameters, trained = self._trained(trainee.num_units - 1)
            with torch.enable_grad():
                rows = hidden[:, low - window.start :].detach().requires_grad_()
                found = trainee.loss(rows, self._sent(labels)) / count
                root = found / self.job.microbatches
            to_rows, *to_parameters = torch.autograd.grad(root, [rows, *parameters])
            gradient[low - window.start :] = to_rows[0]
            self._add(trained, to_parameters)
            loss = found.detach()
        parts, record = [own(gradient).untyped_storage()], window.record
        if record is not None and window.start == record.stop:  # the prompt carries no loss
            none = gradient.new_zeros((record.tokens, gradient.shape[-1]))
            parts.insert(0, none.untyped_storage())
        self._append(window, self._passed, parts)
        self._so_far = loss if window.begins else self._so_far + loss
        if window.stop == sample.tokens:
            self._losses[microbatch] = self._so_far

    # ---- windows back
    @torch.no_grad()
    def backward(self, window: SampleWindow, units: range) -> None:
        """Takes a window down through units: adds gradients, and passes that of the input on."""
        launch, total = self._named("B", window, units), window.sample.tokens
        passed, is_whole = self._passing(total, launch), window.tokens == total
        turns = self.trainee.turns(window.positions)
        rows = passed[window.start : window.stop]
        for unit in reversed(units):
            if not unit:
                self._embedding(window, rows)
                continue
            sums = None if is_whole else self._kv_sums(unit, window, total)
            rows = self._layer(unit - 1, window, rows, turns, sums, launch)
        if units.start > self.trainee.first:
            if is_whole:
                self._store.put(self._passed, [own(rows).untyped_storage()])
            else:
                passed[window.start : window.stop] = rows
        if not window.start and units.start == self.trainee.first:
            self._end_sample(window.microbatch)

    def _layer(
        self,
        layer: int,
        window: SampleWindow,
        given: Tensor,
        turns: dict[str, Any],
        sums: Tensor | None,
        launch: str,
    ) -> Tensor:
        """Adds a layer's gradients; returns that of its input, [tokens, hidden], if one is due."""
        trainee, unit = self.trainee, layer + 1
        storages, firsts = self._stored(unit, window, launch)
        if unit in self._again:
            kept = self._repeated(layer, window, storages, firsts)
        else:
            fields = trainee.fields[layer]
            kept = kept_rows(storages, fields, firsts, window.start, window.stop)
        parameters, trained = self._trained(unit)
        passes = unit > trainee.first
        with torch.enable_grad():
            hidden = kept.pop(INPUT)[None].detach().requires_grad_(passes)
            known = Known(trainee.roles[layer], kept, self._kv(window), sums)
            with known:
                out = trainee.layer(layer, hidden, turns, known)
        edge = get_gradient_edge(out)
        del kept, known, out
        inputs = [*parameters, hidden] if passes else parameters
        gradients = torch.autograd.grad([edge], inputs, [given[None]])
        self._add(trained, gradients[: len(parameters)])
        return gradients[-1][0] if passes else given

    def _stored(
        self, unit: int, window: SampleWindow, launch: str
    ) -> tuple[list[UntypedStorage | None], list[int]]:
        """What a unit has kept of the sample under way, window behind window; first tokens."""
        record, width = window.record, len(self._fields(unit - 1))
        found = list[tuple[int, Sequence[UntypedStorage | None]]]()
        if unit in self._away:
            for first in self._firsts:
                stay = self._store.find(self._kept(unit, first), Tier.GPU, launch)
                found.append((first, stay.storages))
        else:
            storages = self._store.find(self._kept(unit, 0), Tier.GPU, launch).storages
            parts = [storages[at : at + width] for at in range(0, len(storages), width)]
            found += zip(self._firsts, parts, strict=True)
        for first in () if record is None else record.firsts:
            assert record is not None
            region = regions.kept(record.request, unit, first=first).region
            found.append((first, self._store.find(region, Tier.GPU, launch).storages))
        found.sort(key=lambda pair: pair[0])
        return [s for _, part in found for s in part], [first for first, _ in found]

    def _fields(self, layer: int) -> Sequence[Field]:
        """What a layer keeps from its forward on: its input alone, if it runs again."""
        fields = self.trainee.fields[layer]
        return fields[:1] if layer + 1 in self._again else fields

    def _repeated(
        self,
        layer: int,
        window: SampleWindow,
        storages: Sequence[UntypedStorage | None],
        firsts: Sequence[int],
    ) -> dict[str, Tensor]:
        """What a layer would have kept of a window, from its input: by the forward's windows."""
        trainee, fields, found = self.trainee, self._fields(layer), dict[str, Tensor]()
        for low, high in window_bounds(storages, fields, firsts):
            first, last = max(low, window.start), min(high, window.stop)
            if first >= last:
                continue
            part = window._replace(start=first, tokens=last - first)
            hidden = kept_rows(storages, fields, firsts, first, last)[INPUT]
            recording = Recording(trainee.roles[layer], self._kv(part), None)
            turns = trainee.turns(part.positions)
            with recording:
                trainee.layer(layer, hidden[None], turns, recording)
            kept = {INPUT: hidden, **recording.kept}
            if part.tokens == window.tokens:
                return kept
            if not found:  # parts are copied one by one: all of them at once would lie there twice
                shapes = {name: (window.tokens, *rows.shape[1:]) for name, rows in kept.items()}
                found = {name: kept[name].new_empty(shape) for name, shape in shapes.items()}
            for name, rows in kept.items():
                found[name][first - window.start : last - window.start] = rows
        return found

    def _embedding(self, window: SampleWindow, given: Tensor) -> None:
        parameters, trained = self._trained(0)
        with torch.enable_grad():
            out = self._embedded(window)
        self._add(trained, torch.autograd.grad(out, parameters, given[None]))

    def _embedded(self, window: SampleWindow) -> Tensor:
        """The rows of a window below the first layer, [1, tokens, hidden]."""
        ids = self.ids(window.microbatch, window.sample)[:, window.start : window.stop]
        return self.trainee.embed(self._sent(ids), window.positions)

    def _sent(self, numbers: Tensor) -> Tensor:
        """Ids or labels on the device, in the order of its stream.

        Pinned: a copy from other memory waits until all before it on the stream is done.
        """
        if self._device.type == "cuda":
            numbers = numbers.pin_memory()
        return numbers.to(self._device, non_blocking=True)

    def _passing(self, total: int, launch: str) -> Tensor:
        """The gradient of the sample's hidden states, [tokens, hidden], as one tensor."""
        dtype, width = self.trainee.dtype, self.trainee.hidden_size
        storages = self._store.find(self._passed, Tier.GPU, launch).storages
        if len(storages) > 1:
            parts = [typed(present(s), torch.uint8, (present(s).nbytes(),)) for s in storages]
            storages = [torch.cat(parts).untyped_storage()]
            self._store.put(self._passed, storages)
        return typed(present(storages[0]), dtype, (total, width))

    def _kv_sums(self, unit: int, window: SampleWindow, total: int) -> Tensor:
        """Gradients of the unit's keys and values, [tokens, 2, kv_heads, D]; zeros at first."""
        region = regions.kv_gradient(self.job.job_id, unit).region
        dtype = wide(self.trainee.dtype)
        shape = (total, *self._arena.pages.shape[3:])
        stay = self._store.find(region, Tier.GPU, "a window back", as_new=False)
        if not stay.storages:
            zeros = torch.zeros(shape, dtype=dtype, device=self._device)
            self._store.put(region, [zeros.untyped_storage()])
        sums = typed(present(stay.storages[0]), dtype, shape)
        return sums.zero_() if window.stop == total else sums

    def _end_sample(self, microbatch: int) -> None:
        """Adds the gradients of a sample to those of the step, which begin with its first one."""
        if self.job.microbatches == 1:
            return
        is_first = microbatch % self.job.microbatches == 0
        for chunk, trains in enumerate(self._states.trains):
            if trains:
                sample = self._sum(self._of_sample(chunk), chunk)
                sums = self._sum(self._states.gradient(chunk), chunk)
                sums.copy_(sample) if is_first else sums.add_(sample)

    # ---- updates
    @torch.no_grad()
    def update(self, step: int, chunks: Sequence[int]) -> None:
        """Updates weights and optimizer states of all chunks with the gradients of the step."""
        states, read, launch = self._states, self._store.storage, f"U of job {self.job.job_id}"
        sums = {chunk: self._parts(states.gradient(chunk), chunk) for chunk in chunks}
        scale = self._scale(sums)
        for chunk, gradients in sums.items():
            weights = states.numbers(chunk, read(states.weight(chunk), Tier.GPU, launch))
            sections: Sequence[Sequence[Tensor]] = ()
            if self._optimizer.num_sections:
                storage = read(states.optimizer(chunk), Tier.GPU, launch)
                sections = states.sections(chunk, storage)
            self._optimizer.update(step, weights, gradients, sections, scale)
        states.has_ended = step + 1 == self.job.num_steps

    def _scale(self, sums: Mapping[int, Sequence[Tensor]]) -> Tensor | None:
        """The factor by which gradients are clipped, as torch computes it; None: they are not."""
        bound = self.job.recipe.clip_norm
        if bound is None:
            return None
        by_parameter = {
            p: part
            for chunk, parts in sums.items()
            for p, part in zip(self._states.chunks[chunk], parts, strict=True)
        }
        norms = [torch.linalg.vector_norm(by_parameter[p]) for p in sorted(by_parameter)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return torch.clamp(bound / (norm + 1e-6), max=1.0)

    # ---- results
    def loss(self, microbatch: int) -> float:
        """The mean loss over the labels of a sample; NaN until it has been through."""
        return float(self._losses[microbatch])

    def state_dict(self) -> Mapping[str, Tensor]:
        """Copies of the newest weights that train, by the model's names."""
        return self._states.state_dict()

    # ---- gradients
    def _trained(self, unit: int) -> tuple[list[Tensor], tuple[int, ...]]:
        """The parameters of a unit that train, and their numbers."""
        numbers = self.trainee.trained_of[unit]
        return [self._states.parameters[p] for p in numbers], numbers

    def _add(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Adds gradients of parameters to the sums of the sample under way."""
        sums = dict[int, Sequence[Tensor]]()
        for p, gradient in zip(parameters, gradients, strict=True):
            chunk = self._states.chunk_of[p]
            if chunk not in sums:
                sums[chunk] = self._parts(self._of_sample(chunk), chunk)
            sums[chunk][self._at[p]].add_(gradient.reshape(-1))

    def _of_sample(self, chunk: int) -> Region:
        """Where gradients of the sample under way are: the step's, if it has no other sample."""
        if self.job.microbatches == 1:
            return self._states.gradient(chunk)
        return regions.sample_gradient(self.job.job_id, chunk).region

    def _parts(self, region: Region, chunk: int) -> Sequence[Tensor]:
        """The sums in a region, flat, one per parameter of the chunk."""
        return torch.split_with_sizes(self._sum(region, chunk), self._states.sizes[chunk])

    def _sum(self, region: Region, chunk: int) -> Tensor:
        """The sums in a region as one flat tensor; zeros where the plan has made room just now."""
        stay = self._store.find(region, Tier.GPU, f"job {self.job.job_id}", as_new=False)
        count, dtype = sum(self._states.sizes[chunk]), wide(self.trainee.dtype)
        if not stay.storages:
            zeros = torch.zeros(count, dtype=dtype, device=self._device)
            self._store.put(region, [zeros.untyped_storage()])
        return typed(present(stay.storages[0]), dtype, (count,))

    # ---- places
    @property
    def _passed(self) -> Region:
        return regions.hidden_gradient(self.job.job_id).region

    def _kept(self, unit: int, first: int) -> Region:
        at = first if unit in self._away else 0
        return regions.kept(self.job.job_id, unit, first=at).region

    def _append(
        self, window: SampleWindow, region: Region, storages: Sequence[UntypedStorage]
    ) -> None:
        """Adds a window to what a region has of the sample; that of the sample before it goes."""
        stay = self._store.find(region, Tier.GPU, "a window forward", as_new=False)
        before = () if window.begins else stay.storages
        self._store.put(region, [*before, *storages])

    def _kv(self, window: SampleWindow) -> WindowKV:
        return WindowKV(self._arena, window.table, window.start, window.tokens)

    def _named(self, what: str, window: SampleWindow, units: range) -> str:
        return f"{what}({units}, {window.microbatch}) of job {self.job.job_id}"


def _masked(labels: Tensor, sample: Sample, first: int) -> Tensor:
    """Labels from token `first` on, without those that the sample only reads."""
    if not sample.read:
        return labels
    masked = labels.clone()
    for start, stop in sample.read:
        masked[max(0, start - first) : max(0, stop - first)] = NO_LABEL
    return masked
